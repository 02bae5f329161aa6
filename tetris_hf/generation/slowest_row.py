"""A closed batch takes as long as its slowest row: what part of the mean gain of drafts shortens it.

Knows how fast rows went and how far they may still go. Does not know drafts or seconds.
"""

from __future__ import annotations

import torch


# Steps at the mean pace that every row is given beforehand: a row's own few steps say little of the rest of its text.
_STEPS_AT_MEAN = 16
# The most that one look changes, and the least mean gain from which something can be told.
_FOLLOW, _LEAST_GAIN = 0.5, 0.05


class SlowestRow:
    """
    Follows, for a batch in which rows that end are not replaced, the share of the mean gain that counts: if a row gains
    g tokens per step on average beyond the one of C = 0, the rest of the batch needs `1 + share * g` times fewer steps.

    Args:
        num_rows (`int`): N. A single row is its own slowest one: its share is 1.

    Attributes:
        share (`float`):
            For the rows that are left. A call begins with what was seen in others while half of the rows were left at
            least; the first one with .45, or more the fewer rows there are.
    """

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self._at_first = 0.45 + 0.55 / num_rows
        self.begin()

    def begin(self) -> None:
        """Other texts."""
        self.share = self._at_first
        self._tokens, self._steps = torch.zeros(2, self.num_rows)  # (N,) each

    def observe(self, tokens: torch.Tensor, steps: torch.Tensor, remaining: torch.Tensor) -> None:
        """
        Learn from a window of steps with drafts.

        Args:
            tokens (`torch.LongTensor` of shape `(N,)`): Tokens that each row gained in it.
            steps (`torch.LongTensor` of shape `(N,)`): Steps that each row took part in.
            remaining (`torch.LongTensor` of shape `(N,)`): Tokens that each row may still get, 0 if it has ended.
        """
        self._tokens += tokens
        self._steps += steps
        live = (remaining > 0) & (self._steps > 0)
        if not bool(live.any()):
            return
        tokens, steps, left = self._tokens[live], self._steps[live], remaining[live].float()
        mean = float(tokens.sum() / steps.sum())
        if mean - 1 < _LEAST_GAIN:
            return
        pace = (tokens + _STEPS_AT_MEAN * mean) / (steps + _STEPS_AT_MEAN)
        fewer = float(left.max() / (left / pace).max())  # steps of C = 0 over steps with drafts
        seen = min(max((fewer - 1) / (mean - 1), 0.0), 1.0)
        weight = _FOLLOW * float((steps / (steps + _STEPS_AT_MEAN)).mean())
        self.share += weight * (seen - self.share)
        if 2 * len(left) >= self.num_rows:
            self._at_first += weight * (seen - self._at_first)
