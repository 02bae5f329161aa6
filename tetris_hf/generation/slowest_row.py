"""A closed batch takes as long as its slowest row: what part of the promised gain of drafts shortens it.

Knows how far rows came and may still go. Does not know drafts or seconds.
"""

from __future__ import annotations

import torch


# The share expected before anything was seen, as a power of N: .84, .71, .59, .55 at N = 4, 16, 64, 128. Over random
# batches of recorded text it was .88, .74, .63, .60 with an assistant, and .56, .40 at 16, 64 with heads.
_EXPONENT = -0.125
# Steps with drafts at a batch's start that say nothing, since rows that begin side by side fall apart and the slowest
# is mostly the unluckiest, and steps with the usual share that each batch is given beforehand.
_START, _USUAL_STEPS = 16, 8
# How much of a batch of many steps later ones keep, and how many steps are half of many.
_KEEP, _HALF = 0.9, 16
# The least promised gain, in tokens per step, from which a share can be told.
_LEAST_GAIN = 0.05


class SlowestRow:
    """
    Follows, for a batch in which rows that end are not replaced, the share of the promised gain that counts: if a
    setting promises g tokens per row and step beyond the one of C = 0, the row with the longest way to go comes
    `1 + share * g` tokens nearer to its end in every step. It begins with what was seen in earlier batches.

    Args:
        num_rows (`int`): N.

    Attributes:
        share (`float`): From 0 to 1.
    """

    def __init__(self, num_rows: int):
        self._usual = self.share = num_rows**_EXPONENT
        self._steps = 0.0
        self.begin()

    def begin(self) -> None:
        """Another batch."""
        self._usual += _KEEP * self._steps / (self._steps + _HALF) * (self.share - self._usual)
        self.share = self._usual
        self._begun = 0
        self._steps = self._promised = self._gained = 0.0

    def observe(self, tokens: torch.Tensor, steps: int, remaining: torch.Tensor, gain: float) -> None:
        """
        Learn from a window of steps with drafts.

        Args:
            tokens (`torch.Tensor` of shape `(N,)`, counts): Tokens that each row gained in it.
            steps (`int`): Steps of the window.
            remaining (`torch.Tensor` of shape `(N,)`, counts): Tokens that each row may still get, 0 if it has ended.
            gain (`float`): What was promised per row and step.
        """
        live, early = remaining > 0, self._begun < _START
        self._begun += steps
        if early or not bool(live.any()):
            return
        nearer = (remaining + tokens)[live].max() - remaining[live].max()
        self._steps += steps
        self._promised += steps * gain
        self._gained += float(nearer) - steps
        mean = self._promised / self._steps
        if mean >= _LEAST_GAIN:
            usual = _USUAL_STEPS * mean
            self.share = min(max((self._gained + self._usual * usual) / (self._promised + usual), 0.0), 1.0)
