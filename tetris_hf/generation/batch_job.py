"""Any number of prompts through one batch: a row that ends makes room for the next prompt at once.

Knows requests and which row serves which. Does not know how a step goes: that is `Speculation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import logging

from .decoding import TetrisDecoding
from .ended_rows import EndedRows
from .packed_model import input_device
from .request import Request, RequestOutput
from .slot_pool import SlotPool
from .speculation import Speculation
from .stopping import RowStopping
from .tensor_parallel import Lead


logger = logging.get_logger(__name__)

# Prompt tokens of one prefill while nothing else runs: more would need more memory.
PREFILL_TOKENS = 8192
# Prompt tokens that a step takes in beside what it verifies: of few sizes, each of which is captured. A step costs
# what its size costs, however full it is, and a token costs least in small feeds, which a step has room for: a large
# one only when so much waits. Where prompts are long, rows must not stand idle for them: 1,024 is faster than 512
# (docs/performance.md).
FEEDS = (0, 64, 1024)
# Rows are refilled together, this share of the batch at a time: an admission costs the host some time.
REFILL_SHARE = 16
# Processors that count from the end of the prompt, which is another column for every request.
_COUNT_FROM_PROMPT = frozenset(
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor ForcedBOSTokenLogitsProcessor "
    "ForcedEOSTokenLogitsProcessor SuppressTokensAtBeginLogitsProcessor ExponentialDecayLengthPenalty "
    "EncoderRepetitionPenaltyLogitsProcessor PrefixConstrainedLogitsProcessor".split()
)


def feed_for(unfed: int, padded: bool) -> int:
    """
    Prompt tokens that the next step takes in.

    Args:
        unfed (`int`): Those that wait.
        padded (`bool`): Whether a step computes as many as it may take in, however many there are.
    """
    if unfed == 0:
        return 0
    if not padded:
        return FEEDS[-1]
    return max((size for size in FEEDS[1:] if size <= unfed), default=FEEDS[1])


class BatchJob:
    """
    Serves prompts with a [`TetrisDecoding`], `batch_size` at a time.

    Args:
        decoding ([`TetrisDecoding`]): How a batch is decoded.
        model (`PreTrainedModel`): The target.
        batch_size (`int`): N, rows that run at the same time.
        processors (`LogitsProcessorList`): As plain `generate` prepared them.
        criteria (`StoppingCriteriaList`): As plain `generate` prepared them.
        generation_config (`GenerationConfig`): As plain `generate` prepared it.

    Raises:
        `ValueError`: If a processor counts from the end of the prompt, or a criterion may look at the whole batch.
    """

    def __init__(
        self,
        decoding: TetrisDecoding,
        model: PreTrainedModel,
        batch_size: int,
        processors: LogitsProcessorList,
        criteria: Any,
        generation_config: GenerationConfig,
    ):
        for processor in processors:
            if type(processor).__name__ in _COUNT_FROM_PROMPT:
                raise ValueError(
                    f"{type(processor).__name__} is not supported by `generate_batch`: it counts from the end of a "
                    "prompt, and rows have prompts of unequal length. Leave out the setting it comes from."
                )
        other = RowStopping(criteria, torch.device("cpu")).whole
        if other:
            raise ValueError(
                f"`stopping_criteria` has {type(other[0]).__name__}, which may look at the whole batch, and rows of "
                "`generate_batch` begin at different times. Leave it out; end tokens, lengths and stop strings work."
            )
        self.decoding = decoding
        self.model = model
        self.batch_size = batch_size
        self.prepared = processors, criteria, generation_config
        self._lead = Lead(model)
        self._pending: deque[Request] = deque()
        self._running: dict[int, Request] = {}
        self._ended = EndedRows()
        self._pool: SlotPool | None = None
        self._slots: dict[int, int] = {}  # first slot of each running row

    def run(self, requests: Iterable[Request]) -> Iterator[tuple[Request, RequestOutput]]:
        """
        Serve all requests.

        Returns:
            `Iterator[tuple[Request, RequestOutput]]`: Each request when it ends, whatever the order.
        """
        source = iter(requests)
        while True:
            self._pending.extend(islice(source, max(0, self.batch_size - len(self._pending))))
            if not self._pending:
                return
            first = islice(self._pending, self.batch_size)  # no wider than what runs first
            width = -(-max(request.max_length for request in first) // 128) * 128
            message = None
            try:
                yield from self._serve(source, width)
            except torch.OutOfMemoryError as error:
                if self._lead.group is not None:  # the other ranks go on
                    raise
                # Nothing is lost: what ran begins again, in front.
                self._pending.extendleft(reversed(self._running.values()))
                message = str(error).splitlines()[0]
            finally:
                self._running = {}
            yield from self._ended.outputs(rest=True)
            if message is not None and self.batch_size == 1:
                request = self._pending.popleft()
                refused = RequestOutput(request.request_id, request.prompt_ids, error=f"out of memory: {message}")
                yield request, refused
            elif message is not None:
                self.batch_size //= 2
                logger.warning(f"Out of memory: going on with `batch_size={self.batch_size}`.")

    def _serve(self, source: Iterator[Request], width: int) -> Iterator[tuple[Request, RequestOutput]]:
        """Serve requests for as long as they fit rows of `width` columns."""
        processors, criteria, generation_config = self.prepared
        device = input_device(self.model)
        prompts = torch.zeros(self.batch_size, 1, dtype=torch.long, device=device)
        padding = torch.zeros(self.batch_size, dtype=torch.long, device=device)
        arguments = self.model, prompts, padding, width, processors, criteria, generation_config
        fresh = self.decoding.speculation(*arguments, pools=True)
        fresh.feeds = FEEDS
        with self.decoding.prepared(fresh, generation_config) as speculation:
            speculation.restart(fresh, prompts, padding, width)
            speculation.rows.finished.fill_(True)
            speculation.begin()
            self._ended = ended = EndedRows(speculation)
            self._pool = SlotPool(speculation.target.cache.pool_size) if speculation.target.cache.pool_size else None
            free = list(range(self.batch_size))
            unfed = 0  # prompt tokens that admitted rows wait for
            while True:
                # No further than there are places: somebody else may draw from the same source.
                self._pending.extend(islice(source, max(0, len(free) - len(self._pending))))
                fits = bool(self._pending) and self._pending[0].max_length <= speculation.rows.width
                if fits and not self._running:
                    self._admit(speculation, free)
                elif not self._running:
                    return
                else:
                    if fits and len(free) * REFILL_SHARE >= self.batch_size:
                        unfed += self._admit(speculation, free)
                    feed = feed_for(unfed, padded=speculation.rows.fixed_shapes)
                    speculation.advance(feed)
                    unfed = max(0, unfed - feed)
                    speculation.stepped(feed)
                for row, request in ended.look(self._running):
                    free.append(row)
                    if self._pool is not None:
                        self._pool.give(self._slots.pop(row), request.max_length)
                yield from ended.outputs()

    def _admit(self, speculation: Speculation, free: list[int]) -> int:
        """
        Put pending requests that fit into free rows: in a prefill if nothing else runs, else to be fed by and by.

        Returns:
            `int`: Prompt tokens that they wait for.
        """
        rows, tokens, alone = speculation.rows, 0, not self._running
        chosen: list[tuple[int, Request]] = []
        while free and self._pending and self._pending[0].max_length <= rows.width:
            tokens += len(self._pending[0].prompt_ids)
            if chosen and tokens > PREFILL_TOKENS:
                break
            if self._pool is not None:
                first = self._pool.take(self._pending[0].max_length)
                if first is None:  # until others end
                    break
                self._slots[free[0]] = first
            self._running[free[0]] = self._pending[0]
            chosen.append((free.pop(0), self._pending.popleft()))
        if not chosen:
            return 0
        chosen.sort(key=lambda pair: pair[0])
        self._ended.admitted([row for row, _ in chosen])
        prompts = torch.zeros(len(chosen), max(len(request.prompt_ids) for _, request in chosen), dtype=torch.long)
        for index, (_, request) in enumerate(chosen):
            prompts[index, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
        fields = [(row, len(request.prompt_ids), request.max_length, request.seed or 0) for row, request in chosen]
        live, lengths, limits, seeds = torch.tensor(fields).to(rows.length.device, non_blocking=True).unbind(1)  # (R,)
        prompts = prompts.to(live.device, non_blocking=True)
        self._lead.check_same(prompts, "prompts")
        if self._pool is not None:
            slots = [(self._slots[row], self._pool.size(request.max_length)) for row, request in chosen]
            speculation.target.cache.assign(live, *torch.tensor(slots).to(live.device).unbind(1))
        speculation.admit(live, prompts, lengths, limits, seeds, at_once=alone)
        return 0 if alone else sum(length - 1 for _, length, _, _ in fields)
