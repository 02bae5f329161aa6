"""How tokens of unequal rows lie side by side in one sequence without padding.

Knows rows, positions and the order of packed tokens. Does not know which tokens they are or where their keys are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from .fusing import fused


@dataclass(frozen=True)
class Packing:
    """
    T tokens of N rows in one sequence of shape `(1, T)`: those of row 0 first, in order, then those of row 1.

    T may be larger than the sum of `counts`; the tokens left over at the end are filler (`rows` is -1, `positions` is
    -1), so that the shape of a step need not follow what the rows want.

    Attributes:
        counts (`torch.LongTensor` of shape `(N,)`): Tokens of each row; 0 for a row that takes no part.
        lengths (`torch.LongTensor` of shape `(N,)`): Each row's last position + 1; 0 for a row that takes no part.
        starts (`torch.LongTensor` of shape `(N,)`): Index of each row's first token in the packed sequence.
        rows (`torch.LongTensor` of shape `(T,)`): Row of each packed token.
        offsets (`torch.LongTensor` of shape `(T,)`): Index of each token within its row's share.
        positions (`torch.LongTensor` of shape `(T,)`): Position of each token in its row's text, from 0.
        position_ids (`torch.LongTensor` of shape `(T,)`): The same as a model takes them: filler is at 0.
        last (`torch.LongTensor` of shape `(N,)`):
            Index of each row's last packed token; of its predecessor's, where the row has none.
        max_count (`int`): An upper bound of `counts`.
        max_length (`int`): An upper bound of `positions + 1`.
    """

    counts: torch.Tensor
    lengths: torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor
    position_ids: torch.Tensor
    last: torch.Tensor
    max_count: int
    max_length: int

    @classmethod
    def of(
        cls, counts: torch.Tensor, first_positions: torch.Tensor, num_tokens: int, max_count: int, max_length: int
    ) -> Packing:
        """
        Lay out `counts[i]` tokens for every row i, at positions `first_positions[i]`, `first_positions[i] + 1`, ...

        Makes no host synchronisation: the caller, who knows `num_tokens`, decides the shape.

        Args:
            counts (`torch.LongTensor` of shape `(N,)`): Tokens of each row.
            first_positions (`torch.LongTensor` of shape `(N,)`): Position of each row's first packed token.
            num_tokens (`int`): T, at least `counts.sum()`.
            max_count (`int`): An upper bound of `counts`.
            max_length (`int`): An upper bound of all positions + 1.
        """
        lengths, starts, rows, offsets, positions, position_ids, last = _lay_out(counts, first_positions, num_tokens)
        return cls(counts, lengths, starts, rows, offsets, positions, position_ids, last, max_count, max_length)

    @classmethod
    def fitting(cls, counts: torch.Tensor, first_positions: torch.Tensor) -> Packing:
        """
        As [`Packing.of`], with the tightest sizes, read off the device: no slack, and no filler unless there is
        nothing else. One host wait.
        """
        lengths = (first_positions + counts) * (counts > 0)
        num_tokens, max_count, max_length = torch.stack([counts.sum(), counts.max(), lengths.max()]).tolist()
        return cls.of(counts, first_positions, max(1, num_tokens), max(1, max_count), max(1, max_length))

    @property
    def num_rows(self) -> int:
        return self.counts.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0]

    @cached_property
    def padded_index(self) -> torch.Tensor:
        """Packed index of token j of row i, clamped to what exists, shape `(N, max_count)`."""
        columns = torch.arange(self.max_count, device=self.counts.device)
        columns = torch.minimum(columns, (self.counts - 1).clamp(min=0)[:, None])  # (N, max_count)
        return (self.starts[:, None] + columns).clamp(max=self.num_tokens - 1)

    @cached_property
    def packed_index(self) -> torch.Tensor:
        """
        Where each packed token stands in the flattened `(N, max_count)` of `padded_index`; filler reads 0. Shape
        `(T,)`.
        """
        return self.rows.clamp(min=0) * self.max_count + self.offsets

    def pad(self, packed: torch.Tensor) -> torch.Tensor:
        """`(T, ...)` to `(N, max_count, ...)`; places past a row's count repeat its last token."""
        return packed[self.padded_index]

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """`(N, max_count, ...)` back to `(T, ...)`."""
        return padded.flatten(0, 1)[self.packed_index]


@fused
def _lay_out(counts: torch.Tensor, first_positions: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
    """What [`Packing.of`] finds out, from `lengths` to `last`."""
    ends = counts.cumsum(0)
    starts = ends - counts
    index = torch.arange(num_tokens, device=counts.device)
    row = torch.searchsorted(ends, index, right=True)  # (T,) number of rows that end at or before the token
    filler = row >= counts.shape[0]
    row = row.clamp(max=counts.shape[0] - 1)
    offsets = index - starts[row]
    positions = first_positions[row] + offsets
    return (
        (first_positions + counts) * (counts > 0),
        starts,
        row.masked_fill(filler, -1),
        offsets.masked_fill(filler, 0),
        positions.masked_fill(filler, -1),
        positions.masked_fill(filler, 0),
        (ends - 1).clamp(min=0),
    )
