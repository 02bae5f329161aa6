"""Batched speculative decoding with one verification budget: the loop.

Reads from top to bottom: prefill, then propose, select, verify, commit until every row has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from .assistant_drafter import AssistantDrafter
from .drafting import Draft, Drafter, Verification
from .packed_model import PackedModel, packed_attention
from .packing import Packing
from .processing import LogitsProcessing
from .rejection import Accepted, rejection_sample, sample
from .rows import Rows
from .selection import DraftSelector, DraftSelectorList
from .stats import TetrisStats
from .stopping import RowStopping
from .validation import (
    check_capacity,
    check_depth,
    check_model,
    check_positions,
    check_request,
    padding_of,
)


@dataclass
class TetrisDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """
    What `generate` returns with `return_dict_in_generate=True`.

    Args:
        tetris_stats ([`TetrisStats`]): Counts of this call.
    """

    tetris_stats: TetrisStats | None = None


class TetrisDecoding:
    """
    Batched speculative decoding as a decoding method: `model.generate(**inputs, custom_generate=TetrisDecoding(...))`.

    In every step each live row drafts K tokens, the `capacity` most promising of all rows are verified in one forward
    of the target, and each row keeps what was accepted plus one token of the target. Greedy text is that of plain
    `generate` (token for token in float32); sampled text has exactly the target's distribution.

    Args:
        assistant (`PreTrainedModel` or [`Drafter`], *optional*):
            Who drafts: any causal LM with the target's tokenizer, or a drafter. `None` decodes without drafts.
        capacity (`int`): C, draft tokens verified per step over the whole batch (paper, section 3.2).
        num_assistant_tokens (`int`, *optional*):
            K, draft tokens proposed per row and step. By default what the call or the assistant's generation config
            says, else `ceil(C / N) + 2`.
        selector ([`DraftSelector`] or a list of them, *optional*):
            Which drafts are verified, by default [`TetrisSelector`].

    Raises:
        `ValueError`: If an argument is out of range, or the assistant is neither a causal LM nor a [`Drafter`].

    Examples:

    ```python
    >>> decoding = TetrisDecoding(assistant, capacity=64)
    >>> model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"), custom_generate=decoding)
    ```
    """

    def __init__(
        self,
        assistant: PreTrainedModel | Drafter | None,
        capacity: int,
        num_assistant_tokens: int | None = None,
        selector: DraftSelector | Iterable[DraftSelector] | None = None,
    ):
        self.capacity = check_capacity(capacity, "capacity")
        self.num_assistant_tokens = check_depth(num_assistant_tokens)
        self.selectors = DraftSelectorList.of(selector)
        self.drafter = _as_drafter(assistant)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        num_assistant_tokens: int | None = None,
        **model_kwargs: Any,
    ) -> TetrisDecoderOnlyOutput | torch.Tensor:
        """
        The decoding method that `generate` calls with everything prepared. Not called by users.

        Args:
            model (`PreTrainedModel`): The target.
            input_ids (`torch.LongTensor` of shape `(N, prompt_width)`): Left-padded prompts.
            logits_processor (`LogitsProcessorList`): Processors of plain `generate`.
            stopping_criteria (`StoppingCriteriaList`): Criteria of plain `generate`.
            generation_config (`GenerationConfig`): Settings of plain `generate`.
            num_assistant_tokens (`int`, *optional*): K for this call.
            model_kwargs: What plain `generate` would pass to the model.

        Returns:
            [`TetrisDecoderOnlyOutput`] or `torch.LongTensor` of shape `(N, width)`: Prompts and right-padded
            continuations.

        Raises:
            `ValueError`: If something is asked that cannot be done exactly.
        """
        check_model(model, "model")
        check_request(input_ids, generation_config, logits_processor, model_kwargs)
        if self.drafter is not None:
            self.drafter.check(model)
        if generation_config.do_sample:
            for selector in self.selectors:
                selector.check_sampling()
        pad_token_id = _first(generation_config._pad_token_tensor)
        padding = padding_of(input_ids, model_kwargs.get("attention_mask"), pad_token_id)
        check_positions(model_kwargs.get("position_ids"), padding, input_ids.shape[1])

        rows = Rows(input_ids, padding, generation_config.max_length, pad_token_id if pad_token_id is not None else 0)
        depth = self._depth(rows.num_rows, check_depth(num_assistant_tokens), generation_config)
        stats = TetrisStats.zeros(rows.num_rows, depth, self.capacity, input_ids.device)
        drafter_models = self.drafter.models if self.drafter is not None else []
        needs_hidden_states = self.drafter is not None and self.drafter.needs_hidden_states
        try:
            with packed_attention(model, *drafter_models):
                self._decode(
                    PackedModel(
                        model, rows.num_rows, rows.prompt_width + depth + 1, rows.max_length, needs_hidden_states
                    ),
                    rows,
                    LogitsProcessing(logits_processor, rows, generation_config.do_sample),
                    RowStopping(stopping_criteria, input_ids.device),
                    depth,
                    stats,
                )
        finally:
            if self.drafter is not None:
                self.drafter.end()
        if generation_config.return_dict_in_generate:
            return TetrisDecoderOnlyOutput(sequences=rows.sequences(), tetris_stats=stats)
        return rows.sequences()

    def _decode(
        self,
        target: PackedModel,
        rows: Rows,
        processing: LogitsProcessing,
        stopping: RowStopping,
        depth: int,
        stats: TetrisStats,
    ) -> None:
        """Generate until every row has ended."""
        with stats.timed("prefill"):
            self._prefill(target, rows, processing, stopping)
        live = rows.live()  # (R,)
        while len(live):
            with stats.timed("propose"):
                draft = self._propose(rows, live, depth)  # tokens (R, K)
            with stats.timed("select"):
                lengths = self.selectors(draft, self.capacity)  # (R,)
            with stats.timed("verify"):
                p, hidden_states, starts = self._verify(target, rows, processing, live, draft, lengths)  # (R + C, V)
            with stats.timed("commit"):
                accepted = rejection_sample(p, draft.q, draft.tokens, lengths, starts)
                verification = Verification(live, draft, lengths, accepted.counts - 1, hidden_states, starts)
                self._commit(rows, stopping, accepted, verification, stats)
                live = rows.live()
        stats.target_forwards, stats.target_tokens = target.num_forwards, target.num_tokens
        stats.draft_forwards = self.drafter.num_forwards if self.drafter is not None else 0

    def _prefill(self, target: PackedModel, rows: Rows, processing: LogitsProcessing, stopping: RowStopping) -> None:
        """One forward over all prompts, packed; each row's first token comes from the logits of its last one."""
        live = rows.live()
        counts = rows.text_length(live)
        packing = Packing.fitting(counts, torch.zeros_like(counts))
        logits, hidden_states = target.forward(
            rows.read(packing.rows, packing.positions), packing, keep=packing.last
        )  # (N, V)
        p = _distributions(processing, logits, live, rows.length)
        token = (p if p.dim() == 1 else sample(p))[:, None]  # (N, 1)
        rows.write(live, token, torch.ones_like(live))
        rows.commit(live, *stopping(rows, live, token, torch.ones_like(live)))
        if self.drafter is not None and self.capacity > 0:
            self.drafter.begin(target.model, rows, logits.shape[1], processing.for_drafts())
            none = torch.zeros_like(live)
            self.drafter.observe(rows, Verification(live, Draft.empty(live), none, none, hidden_states, live))

    def _propose(self, rows: Rows, live: torch.Tensor, depth: int) -> Draft:
        """Drafts for the live rows, no deeper than any of them has room for."""
        depth = min(depth, int(rows.room(live).max()))
        if self.drafter is None or self.capacity == 0 or depth == 0:
            return Draft.empty(live)
        draft = self.drafter.propose(rows, live, depth)
        rows.write(live, draft.tokens, draft.lengths)
        return draft

    def _verify(
        self,
        target: PackedModel,
        rows: Rows,
        processing: LogitsProcessing,
        live: torch.Tensor,
        draft: Draft,
        lengths: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """
        One target forward over each row's last committed token and its selected drafts, nothing else.

        Returns:
            `tuple[torch.Tensor, torch.Tensor | None, torch.LongTensor]`: The distributions in packed order, `(T, V)`
            or one-hot `(T,)`; the hidden states that gave them, if the drafter needs them, `(T, hidden_size)`; and the
            packed index of each live row's first one, `(R,)`.
        """
        counts = torch.zeros_like(rows.length).index_copy_(0, live, lengths + 1)  # (N,)
        first = rows.text_length(torch.arange(rows.num_rows, device=live.device)) - 1
        packing = Packing.fitting(counts, first)
        logits, hidden_states = target.forward(rows.read(packing.rows, packing.positions), packing)  # (T, V)
        columns = rows.padding[packing.rows] + packing.positions + 1
        return _distributions(processing, logits, packing.rows, columns), hidden_states, packing.starts[live]

    def _commit(
        self,
        rows: Rows,
        stopping: RowStopping,
        accepted: Accepted,
        verification: Verification,
        stats: TetrisStats,
    ) -> None:
        """Commit what was accepted, each row cut where it ends, and let drafter and selectors see it."""
        live = verification.live
        rows.write(live, accepted.tokens, accepted.counts)
        kept, finished = stopping(rows, live, accepted.tokens, accepted.counts)
        rows.commit(live, kept, finished)
        stats.count(live, verification.draft.lengths, verification.lengths, verification.num_accepted, kept)
        if self.drafter is not None and self.capacity > 0:
            self.drafter.observe(rows, verification)
        for selector in self.selectors:
            selector.observe(verification)

    def _depth(self, num_rows: int, call: int | None, generation_config: GenerationConfig) -> int:
        """K: the call's, this object's, the assistant's, else a little deeper than an even share of the budget."""
        assistant = getattr(getattr(self.drafter, "model", None), "generation_config", None)
        in_config = generation_config.num_assistant_tokens
        if in_config == GenerationConfig()._get_default_generation_params().get("num_assistant_tokens"):
            in_config = None  # filled in by `generate`, asked for by nobody
        for depth in (call, self.num_assistant_tokens, in_config, getattr(assistant, "num_assistant_tokens", None)):
            if depth is not None:
                return int(depth)
        return -(-self.capacity // num_rows) + 2


def _distributions(
    processing: LogitsProcessing, logits: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Processed distributions: float32 `(T, V)` when sampling, else `(T,)`, the token at which each is one."""
    scores = processing(logits, rows, columns)
    return scores.softmax(-1) if processing.do_sample else scores.argmax(-1)


def _as_drafter(assistant: PreTrainedModel | Drafter | None) -> Drafter | None:
    """The drafter for what the user gave. A model may bring its own, as Medusa heads do, by a method `as_drafter`."""
    if assistant is None or isinstance(assistant, Drafter):
        return assistant
    if hasattr(assistant, "as_drafter"):
        return assistant.as_drafter()
    if not isinstance(assistant, PreTrainedModel):
        raise ValueError(
            f"`assistant_model` must be a causal LM or a `Drafter`, got {type(assistant).__name__}: load it with "
            "`AutoModelForCausalLM.from_pretrained`."
        )
    return AssistantDrafter(assistant)


def _first(token_ids: torch.Tensor | None) -> int | None:
    return None if token_ids is None else int(token_ids.flatten()[0])
