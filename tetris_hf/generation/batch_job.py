"""Any number of prompts through one batch: a row that ends makes room for the next prompt at once.

Knows requests and which row serves which. Does not know how a step goes: that is `Speculation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import logging

from .decoding import TetrisDecoding
from .model_support import check_length
from .packed_model import input_device
from .speculation import Speculation
from .stopping import RowStopping


logger = logging.get_logger(__name__)

# Prompt tokens of one prefill: more would need more memory and stall the running rows for longer.
PREFILL_TOKENS = 8192
# Rows are refilled together, this share of the batch at a time: a prefill costs about as much as a step.
REFILL_SHARE = 8
# Processors that count from the end of the prompt, which is another column for every request.
_COUNT_FROM_PROMPT = frozenset(
    "MinLengthLogitsProcessor MinNewTokensLengthLogitsProcessor ForcedBOSTokenLogitsProcessor "
    "ForcedEOSTokenLogitsProcessor SuppressTokensAtBeginLogitsProcessor ExponentialDecayLengthPenalty "
    "EncoderRepetitionPenaltyLogitsProcessor PrefixConstrainedLogitsProcessor".split()
)


@dataclass
class RequestOutput:
    """
    What became of one prompt. Fields that stock `generate_batch` has bear its names.

    Attributes:
        request_id (`str`): As given, else the place of the prompt in the input, and of the answer among its answers.
        prompt_ids (`list[int]`): The prompt.
        generated_tokens (`list[int]`): The answer, its end token included.
        finish_reason (`str`): `"stop"` (an end token or a stopping criterion), `"length"` or `"error"`.
        error (`str`, *optional*): Why the prompt could not be served.
        steps (`int`): Steps that its row took part in.
        verified (`int`): Draft tokens verified.
        accepted (`int`): Draft tokens that became text.
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int] = field(default_factory=list)
    finish_reason: str = "error"
    error: str | None = None
    steps: int = 0
    verified: int = 0
    accepted: int = 0

    def is_finished(self) -> bool:
        """Always: requests are handed out when they have ended."""
        return True


@dataclass
class Request:
    """A prompt, its name, where its answer belongs, and the columns at which it ends."""

    request_id: str
    order: int
    prompt_ids: list[int]
    max_length: int


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
        self._pending: deque[Request] = deque()
        self._running: dict[int, Request] = {}

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
            width = -(-max(request.max_length for request in self._pending) // 128) * 128
            try:
                yield from self._serve(source, width)
            except torch.OutOfMemoryError:
                if self.batch_size == 1:
                    raise
                # Nothing is lost: what ran begins again, in front.
                self._pending.extendleft(reversed(self._running.values()))
                self.batch_size //= 2
                logger.warning(f"Out of memory: going on with `batch_size={self.batch_size}`.")
            finally:
                self._running = {}

    def _serve(self, source: Iterator[Request], width: int) -> Iterator[tuple[Request, RequestOutput]]:
        """Serve requests for as long as they fit rows of `width` columns."""
        processors, criteria, generation_config = self.prepared
        device = input_device(self.model)
        prompts = torch.zeros(self.batch_size, 1, dtype=torch.long, device=device)
        padding = torch.zeros(self.batch_size, dtype=torch.long, device=device)
        arguments = self.model, prompts, padding, width, processors, criteria, generation_config
        fresh = self.decoding.speculation(*arguments)
        with self.decoding.prepared(fresh, generation_config) as speculation:
            speculation.restart(fresh, prompts, padding, width)
            speculation.rows.finished.fill_(True)
            free = list(range(self.batch_size))
            while True:
                self._pending.extend(islice(source, max(0, self.batch_size - len(self._pending))))
                fits = bool(self._pending) and self._pending[0].max_length <= speculation.rows.width
                if fits and (len(free) * REFILL_SHARE >= self.batch_size or not self._running):
                    self._admit(speculation, free)
                elif self._running:
                    speculation.advance()
                else:
                    return
                for row in speculation.rows.finished.nonzero()[:, 0].tolist():
                    if row in self._running:
                        request = self._running.pop(row)
                        free.append(row)
                        yield request, _output(speculation, row, request)

    def _admit(self, speculation: Speculation, free: list[int]) -> None:
        """Put pending requests that fit into free rows, as many as one prefill may hold."""
        rows, tokens = speculation.rows, 0
        chosen: list[tuple[int, Request]] = []
        while free and self._pending and self._pending[0].max_length <= rows.width:
            tokens += len(self._pending[0].prompt_ids)
            if chosen and tokens > PREFILL_TOKENS:
                break
            self._running[free[0]] = self._pending[0]
            chosen.append((free.pop(0), self._pending.popleft()))
        chosen.sort(key=lambda pair: pair[0])
        device = rows.length.device
        live = torch.tensor([row for row, _ in chosen], device=device)  # (R,)
        lengths = torch.tensor([len(request.prompt_ids) for _, request in chosen], device=device)
        limits = torch.tensor([request.max_length for _, request in chosen], device=device)
        prompts = torch.zeros(len(chosen), int(lengths.max()), dtype=torch.long)  # (R, W)
        for index, (_, request) in enumerate(chosen):
            prompts[index, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
        rows.admit(live, prompts.to(device), lengths, limits)
        speculation.stats.forget(live)
        speculation.prefill(live)


def _output(speculation: Speculation, row: int, request: Request) -> RequestOutput:
    """What the ended row says."""
    rows, stats = speculation.rows, speculation.stats
    length = int(rows.length[row])
    tokens = rows.tokens[row, len(request.prompt_ids) : length].tolist()
    stopped = length < request.max_length or tokens[-1] in speculation.stopping.eos_token_ids.tolist()
    return RequestOutput(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        generated_tokens=tokens,
        finish_reason="stop" if stopped else "length",
        steps=int(stats.live_steps[row]),
        verified=int(stats.verified[row].sum()),
        accepted=int(stats.accepted[row].sum()),
    )


def as_request(
    given: Any, order: int, generation_config: GenerationConfig, model: PreTrainedModel, vocab_size: int
) -> Request:
    """
    Args:
        given (`list[int]`, `torch.Tensor` or `dict`): Token ids, or a mapping with `input_ids` and perhaps
            `max_new_tokens` and `request_id`. An answer ends where the model's context does.
        order (`int`): Its place in the input.
        generation_config (`GenerationConfig`): Says how long answers are where the request does not.
        model (`PreTrainedModel`): The target.
        vocab_size (`int`): Token ids must be below.

    Raises:
        `ValueError`: If it cannot be served.
    """
    fields = given if isinstance(given, dict) else {"input_ids": given}
    ids = torch.as_tensor(fields["input_ids"])
    if ids.dim() != 1 or len(ids) == 0 or ids.is_floating_point():
        raise ValueError(
            f"`input_ids` must be a list of token ids, got shape {tuple(ids.shape)}: is the prompt empty?"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(f"`input_ids` must be in [0, {vocab_size - 1}], got {int(ids.min())} to {int(ids.max())}.")
    new = fields.get("max_new_tokens", generation_config.max_new_tokens)
    max_length = len(ids) + int(new) if new is not None else int(generation_config.max_length)
    if max_length <= len(ids):
        raise ValueError(f"`max_new_tokens` must be at least 1, got {max_length - len(ids)}.")
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and len(ids) >= context:
        raise ValueError(f"The prompt has {len(ids)} tokens, and the context of the model {context}: shorten it.")
    max_length = min(max_length, context or max_length)
    check_length(model, max_length)
    return Request(str(fields.get("request_id", order)), order, ids.tolist(), max_length)
