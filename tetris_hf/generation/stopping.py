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
    StopStringCriteria,
)

from .fusing import fused
from .rows import Rows


# Look at the end of each row by itself, and remember nothing.
_ROW_WISE = (StopStringCriteria,)


class RowStopping:
    """
    Asks every stopping criterion at every column, in order, and cuts each row at the first column at which one is
    true, as plain `generate` does.

    EOS is answered for all new columns at once, the length limit by the rows themselves, stop strings column by column
    for the rows that reach it. Any other criterion may look at the whole batch or remember what it saw: it is asked
    about a column when every live row has reached it (`settle`), and rows that ran ahead are cut back.

    Args:
        criteria (`StoppingCriteriaList`): What plain `generate` would ask.
        device (`torch.device`): Where rows live.
    """

    def __init__(self, criteria: StoppingCriteriaList | list[StoppingCriteria], device: torch.device):
        self.eos_token_ids = torch.cat(
            [criterion.eos_token_id.flatten() for criterion in criteria if isinstance(criterion, EosTokenCriteria)]
            or [torch.empty(0, dtype=torch.long)]
        ).to(device)
        others = [c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]
        self.row_wise = [criterion for criterion in others if type(criterion) in _ROW_WISE]
        self.whole = [criterion for criterion in others if type(criterion) not in _ROW_WISE]
        self.settled: int | None = None

    def fingerprint(self) -> Hashable:
        """Equal for criteria that do the same; `None` if some of them look at more than new tokens."""
        return None if self.row_wise or self.whole else tuple(self.eos_token_ids.tolist())

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
        if not self.row_wise:
            return _cut_at_end_tokens(block, counts, self.eos_token_ids)
        counts, stops = self._ask_by_row(rows, live, counts, _end_tokens(block, counts, self.eos_token_ids))
        return _cut(stops, counts)

    def _ask_by_row(
        self, rows: Rows, live: torch.Tensor, counts: torch.Tensor, stops: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ask the criteria that look at a row's text, column by column; a row that has stopped is not asked again."""
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
            for criterion in self.row_wise:
                answer |= torch.as_tensor(criterion(shown, None), device=length.device)
            stopped = asked & answer[live]
            stops[stopped, place[stopped]] = True
            going &= ~(asked & stops.gather(1, place.clamp(0, stops.shape[1] - 1)[:, None])[:, 0])
        return counts, stops

    def settle(self, rows: Rows) -> None:
        """
        Ask the criteria that may look at the whole batch about every column that all live rows have reached by now,
        and cut back the rows for which one is true. Called after every commit.
        """
        if not self.whole:
            return
        if self.settled is None:
            self.settled = rows.prompt_width
        while True:
            going = ~rows.finished
            reached = int(rows.length[going].min()) if bool(going.any()) else int(rows.length.max())
            if self.settled >= reached:
                return
            self.settled += 1
            # Committed tokens only; a row that has ended is padded behind its end, as plain `generate` shows it.
            shown = rows.shown(self.settled, rows.everyone[:0])  # (N, settled)
            answer = torch.zeros_like(rows.finished)
            for criterion in self.whole:
                answer |= torch.as_tensor(criterion(shown, None), device=answer.device)
            rows.cut(answer & (rows.length >= self.settled), self.settled)


def _end_tokens(block: torch.Tensor, counts: torch.Tensor, eos_token_ids: torch.Tensor) -> torch.Tensor:
    """Which of the new tokens `(R, J)` are end tokens."""
    places = torch.arange(block.shape[1], device=block.device)
    return (block[:, :, None] == eos_token_ids).any(2) & (places < counts[:, None])


def _cut(stops: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens up to the first stop, and whether there is one, `(R,)` each."""
    places = torch.arange(stops.shape[1], device=stops.device)
    first = torch.where(stops, places + 1, stops.shape[1] + 1).amin(1)  # (R,)
    return torch.minimum(counts, first), first <= counts


@fused
def _cut_at_end_tokens(
    block: torch.Tensor, counts: torch.Tensor, eos_token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return _cut(_end_tokens(block, counts, eos_token_ids), counts)
