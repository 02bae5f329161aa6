"""The target's forward over what is to be judged, in packed order.

Knows which tokens go into it and where their answers lie. Does not know who drafted them, or what becomes of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .captured_steps import StepSize
from .fusing import fused
from .packed_model import PackedModel, PackedOutput
from .packing import Packing
from .processing import LogitsProcessing
from .rows import Rows, resting


@dataclass(frozen=True)
class Verified:
    """
    What the target said.

    Attributes:
        output (`PackedOutput`): Of the tokens that were judged, in packed order, without prompt tokens but the last.
        scores (`torch.FloatTensor` of shape `(T, V)`): Its processed scores, or `(R, V)` of new prompts.
        p (`torch.Tensor`): Its distributions, as [`rejection_sample`] takes them.
        starts (`torch.LongTensor` of shape `(R,)`): Packed index of each live row's first one.
    """

    output: PackedOutput
    scores: torch.Tensor
    p: torch.Tensor
    starts: torch.Tensor


class Verifier:
    """
    Runs the target over each row's last committed token and its selected drafts, over prompt tokens of rows that wait,
    and over new prompts ([`~Verifier.prompts`]); nothing else.

    Args:
        target (`PackedModel`): The model and its cache.
        rows (`Rows`): The batch.
        processing (`LogitsProcessing`): From the target's logits to scores.
    """

    def __init__(self, target: PackedModel, rows: Rows, processing: LogitsProcessing):
        self.target = target
        self.rows = rows
        self.processing = processing

    def __call__(self, live: torch.Tensor, lengths: torch.Tensor, size: StepSize) -> Verified:
        """
        Args:
            live (`torch.LongTensor` of shape `(R,)`): Live rows.
            lengths (`torch.LongTensor` of shape `(R,)`): Draft tokens of each to verify, written behind its text.
            size ([`StepSize`]): How many there are at most, and of the prompts.
        """
        rows = self.rows
        prompts = rows.feed(size.feed) if size.feed > 0 else None
        last, counts = _shares(rows.length, rows.padding, rows.unfed, rows.finished, live, lengths)  # (N,) each
        num_tokens = rows.num_rows + min(size.capacity, rows.num_rows * size.depth)
        judged = packing = self._packing(counts, last, num_tokens, size.depth + 1)
        keep = None
        if prompts is not None:
            first, fed = prompts  # (N,) each
            packing = self._packing(counts + fed, first, num_tokens + size.feed, max(size.depth, size.feed) + 1)
            owners = judged.rows.clamp(min=0)
            keep = ((packing.starts + fed)[owners] + judged.offsets).clamp(max=packing.num_tokens - 1)
        tokens = rows.read(packing.rows, packing.positions)
        output = self.target.forward(tokens, packing, keep=keep, recurring=rows.fixed_shapes)
        columns, starts = _judged(rows.padding, judged.rows, judged.positions, judged.starts, live)
        scores = self.processing(output.logits, judged.rows, columns)
        return Verified(output, scores, self._distributions(scores, judged.rows, columns), starts)

    def prompts(self, live: torch.Tensor) -> Verified:
        """
        One forward over the new prompts of the rows `live`, packed, of which only the last tokens are judged.

        Args:
            live (`torch.LongTensor` of shape `(R,)`): Rows with a new prompt.
        """
        rows = self.rows
        rows.unfed[live] = 0
        counts = torch.zeros_like(rows.length).index_copy_(0, live, rows.text_length(live))  # (N,)
        packing = Packing.fitting(counts, torch.zeros_like(counts))
        tokens = rows.read(packing.rows, packing.positions)
        output = self.target.forward(tokens, packing, keep=packing.last[live])
        columns = rows.length[live]
        scores = self.processing(output.logits, live, columns)  # (R, V)
        starts = torch.arange(len(live), device=live.device)
        return Verified(output, scores, self._distributions(scores, live, columns), starts)

    def _distributions(self, scores: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """float32 `(T, V)` when sampling, else `(T,)`: the token at which each is one."""
        if self.processing.do_sample:
            return scores.softmax(-1)
        return self.processing.with_noise(scores, rows, columns).argmax(-1)

    def _packing(self, counts: torch.Tensor, first: torch.Tensor, num_tokens: int, max_count: int) -> Packing:
        """`counts` tokens of each row from position `first` on, in at most `num_tokens` and `max_count`."""
        if self.rows.fixed_shapes:
            return Packing.of(counts, first, num_tokens, max_count, self.target.cache.length)
        return Packing.fitting(counts, first)


@fused
def _shares(
    length: torch.Tensor,
    padding: torch.Tensor,
    unfed: torch.Tensor,
    finished: torch.Tensor,
    live: torch.Tensor,
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position of each row's last committed token, and how many tokens to verify, that one included; `(N,)` each."""
    counts = torch.zeros_like(length)
    counts[live] = (lengths + 1).masked_fill(resting(finished, unfed, live), 0)
    return length - padding - 1, counts


@fused
def _judged(
    padding: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor, live: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns that packed tokens of shape `(T,)` predict, and where each live row's first one is, `(R,)`."""
    # A row that takes no part may start behind the last token.
    return padding[rows] + positions + 1, starts[live].clamp(max=rows.shape[0] - 1)
