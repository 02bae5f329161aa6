"""Where a row ends within a block of new tokens.

Knows EOS ids and stopping criteria. Does not know where the tokens come from.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)

from .rows import Rows


class RowStopping:
    """
    Asks every stopping criterion at every new column, in order, for the rows that reach it, and cuts each row at the
    first column at which one is true.

    EOS is answered for all columns at once and the length limit by the rows themselves; the other criteria see the
    batch once per distinct column, as plain `generate` would show it.

    Args:
        criteria (`StoppingCriteriaList`): What plain `generate` would ask.
        device (`torch.device`): Where rows live.
    """

    def __init__(self, criteria: StoppingCriteriaList | list[StoppingCriteria], device: torch.device):
        self.eos_token_ids = torch.cat(
            [criterion.eos_token_id.flatten() for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
            or [torch.empty(0, dtype=torch.long)]
        ).to(device)
        self.others = [c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]

    def fingerprint(self) -> Hashable:
        """Equal for criteria that do the same; `None` if some of them look at more than new tokens."""
        return None if self.others else tuple(self.eos_token_ids.tolist())

    def __call__(
        self, rows: Rows, live: torch.Tensor, block: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Cut a block of written, not yet committed tokens.

        Args:
            rows (`Rows`): The batch; `block` is written behind the committed columns.
            live (`torch.LongTensor` of shape `(R,)`): Rows of the block.
            block (`torch.LongTensor` of shape `(R, J)`): New tokens.
            counts (`torch.LongTensor` of shape `(R,)`): How many of each row's tokens are new.

        Returns:
            `tuple[torch.LongTensor, torch.BoolTensor]`, each of shape `(R,)`: tokens to commit, and whether the row
            ends.
        """
        places = torch.arange(block.shape[1], device=block.device)
        stops = torch.isin(block, self.eos_token_ids) & (places < counts[:, None])  # (R, J)
        if self.others:
            counts, stops = self._ask_others(rows, live, counts, stops)
        first = torch.where(stops, places + 1, block.shape[1] + 1).amin(1)  # (R,)
        return torch.minimum(counts, first), first <= counts

    def _ask_others(
        self, rows: Rows, live: torch.Tensor, counts: torch.Tensor, stops: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ask the criteria that look at text or clock, column by column; a row that has stopped is not asked again."""
        length = rows.length[live]
        going = torch.ones_like(counts, dtype=torch.bool)
        if not counts.any():
            return counts, stops
        first, last = int(length[counts > 0].min()) + 1, int((length + counts).max())
        for column in range(first, last + 1):
            place = column - 1 - length  # (R,)
            asked = going & (place >= 0) & (place < counts)
            if not asked.any():
                continue
            shown = rows.shown(column, live[asked])
            answer = torch.zeros(rows.num_rows, dtype=torch.bool, device=length.device)
            for criterion in self.others:
                answer |= torch.as_tensor(criterion(shown, None), device=length.device)
            stopped = asked & answer[live]
            stops[stopped, place[stopped]] = True
            going &= ~(asked & stops.gather(1, place.clamp(0, stops.shape[1] - 1)[:, None])[:, 0])
        return counts, stops
