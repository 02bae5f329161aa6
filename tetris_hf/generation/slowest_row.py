"""A closed batch takes as long as its slowest row: what part of the mean gain of drafts shortens it.

Knows how fast rows went and how far they may still go. Does not know drafts or seconds.
"""

from __future__ import annotations

import torch


# The share expected before anything was seen, as a power of N: .71, .50, .35, .30 at N = 4, 16, 64, 128. Over random
# batches of recorded text it was .67, .47, .30, .25, on the average of three drafters.
_EXPONENT = -0.25
# Steps at the usual pace that each row is given beforehand: few steps of its own say little of the rest of its text,
# and the slowest of many rows is mostly the unluckiest at first.
_USUAL_STEPS = 24
# How much of a batch of many steps later ones keep, and how many steps are half of many.
_KEEP, _HALF = 0.75, 16
# The least mean gain, in tokens per step, from which a share can be told.
_LEAST_GAIN = 0.05


class SlowestRow:
    """
    Follows, for a batch in which rows that end are not replaced, the share of the mean gain that counts: if a row
    gains g tokens per step on average beyond the one of C = 0, the rest of the batch needs `1 + share * g` times fewer
    steps. It begins with what was seen in earlier batches and turns to that of the batch's own rows.

    Args:
        num_rows (`int`): N.

    Attributes:
        share (`float`): For the rows that are left, from 0 to 1.
    """

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self._usual = self.share = num_rows**_EXPONENT
        self._tokens, self._steps = torch.zeros(2, num_rows)  # (N,) each

    def begin(self) -> None:
        """Another batch."""
        steps = float(self._steps.max())
        self._usual += _KEEP * steps / (steps + _HALF) * (self.share - self._usual)
        self.share = self._usual
        self._tokens, self._steps = torch.zeros(2, self.num_rows)

    def observe(self, tokens: torch.Tensor, steps: torch.Tensor, remaining: torch.Tensor) -> None:
        """
        Learn from a window of steps with drafts.

        Args:
            tokens (`torch.Tensor` of shape `(N,)`, counts): Tokens that each row gained in it.
            steps (`torch.Tensor` of shape `(N,)`, counts): Steps that each row took part in.
            remaining (`torch.Tensor` of shape `(N,)`, counts): Tokens that each row may still get, 0 if it has ended.
        """
        self._tokens += tokens
        self._steps += steps
        live = (remaining > 0) & (self._steps > 0)
        if not bool(live.any()):
            return
        mean = float(self._tokens.sum() / self._steps.sum())
        if mean - 1 < _LEAST_GAIN:
            return
        tokens, steps, left = self._tokens[live], self._steps[live], remaining[live].float()
        usual = 1 + self._usual * (mean - 1)  # of a batch's slowest row
        pace = (tokens + _USUAL_STEPS * usual) / (steps + _USUAL_STEPS)
        fewer = float(left.max() / (left / pace).max())  # steps of C = 0 over steps with drafts
        self.share = min(max((fewer - 1) / (mean - 1), 0.0), 1.0)
