"""A closed batch takes as long as its slowest row: what part of the promised gain of drafts shortens it.

Knows how far rows came and may still go. Does not know drafts or seconds.
"""

from __future__ import annotations

import math

import torch


# How far rows fall apart, in gains of a step: the slowest of N random walks of T steps lags by sqrt(2 T ln N) of their
# deviations. Over random batches of recorded text of 128 tokens the share was .88, .74, .63, .60 at N = 4, 16, 64, 128
# with an assistant, where this is .79, .71, .64, .61, and .56, .40 at 16, 64 with heads.
_APART = 1.4
# Steps with drafts at a batch's start that say nothing, since rows that begin side by side fall apart and the slowest
# is mostly the unluckiest: so many, but no more than this part of the longest way that a row has to go.
_START, _START_PART = 32, 0.25
# Steps with the usual share that each batch is given beforehand.
_USUAL_STEPS = 24
# A batch is believed by the part of its steps that had drafts, half at most. Under a quarter it says nothing, and so
# much of what was learned is forgotten, so that drafts are tried again.
_MOST, _LITTLE, _FORGET = 0.5, 0.25, 0.05
# The least promised gain, in tokens per step, from which a share can be told.
_LEAST_GAIN = 0.05


class SlowestRow:
    """
    Follows, for a batch in which rows that end are not replaced, the share of the promised gain that counts: if a
    setting promises g tokens per row and step beyond the one of C = 0, the row with the longest way to go comes
    `1 + share * g` tokens nearer to its end in every step. It begins with what whole batches before have shown.

    Args:
        num_rows (`int`): N.

    Attributes:
        share (`float`): From 0 to 1.
    """

    def __init__(self, num_rows: int):
        self.num_rows, self._apart = num_rows, _APART
        self.begin(1)

    def begin(self, longest: int) -> None:
        """
        Another batch.

        Args:
            longest (`int`): Tokens that the row with the longest way to go may get.
        """
        self._expect(longest)
        self._longest = longest
        self._begun, self._way = 0, 0.0  # steps with drafts, and how far the longest row had to go before them
        self._offered = self._last = 0.0  # what all of them promised together, and the last one alone
        self._steps = self._promised = self._gained = 0.0

    def go_on(self, longest: int) -> None:
        """
        What is expected of drafts from here on, after steps without them: of a shorter batch, unless this one has
        shown it.

        Args:
            longest (`int`): Tokens that the row with the longest way to go may still get.
        """
        if self._steps == 0:
            self._expect(longest)

    def observe(self, tokens: torch.Tensor, steps: int, remaining: torch.Tensor, gain: float) -> None:
        """
        Learn from a window of steps with drafts.

        Args:
            tokens (`torch.Tensor` of shape `(N,)`, counts): Tokens that each row gained in it.
            steps (`int`): Steps of the window.
            remaining (`torch.Tensor` of shape `(N,)`, counts): Tokens that each row may still get, 0 if it has ended.
            gain (`float`): What was promised per row and step.
        """
        live = remaining > 0
        way = float((remaining + tokens)[live].max()) if bool(live.any()) else 0.0
        if self._begun == 0:
            self._way = way
        early = self._begun < min(_START, _START_PART * self._way)
        self._begun += steps
        self._offered, self._last = self._offered + steps * gain, gain
        if early or way == 0:
            return
        nearer = way - float(remaining[live].max())
        self._steps += steps
        self._promised += steps * gain
        self._gained += nearer - steps
        mean = self._promised / self._steps
        if mean >= _LEAST_GAIN:
            usual = _USUAL_STEPS * mean
            self.share = min(max((self._gained + self._usual * usual) / (self._promised + usual), 0.0), 1.0)

    def end(self, longest: int, steps: int, rest: int = 0) -> None:
        """
        Learn from a whole batch: without drafts it would have taken as many steps as its longest row has tokens.

        Args:
            longest (`int`): Tokens of the row with the most of them.
            steps (`int`): Steps of the batch.
            rest (`int`, *optional*, defaults to 0): Steps with drafts since the last window.
        """
        drafted, offered = self._begun + rest, self._offered + rest * self._last
        spread = self._spread(self._longest)
        if spread == 0 or steps == 0:
            return
        if drafted < _LITTLE * steps:
            self._apart += _FORGET * (_APART - self._apart)
        elif offered > _LEAST_GAIN * drafted:
            share = min(max((longest - steps) / offered, 0.0), 1.0)
            self._apart += min(drafted / steps, _MOST) * ((1 - share) / spread - self._apart)

    def _expect(self, longest: int) -> None:
        """The share of a way of so many tokens on which rows start side by side."""
        self.share = self._usual = min(max(1 - self._apart * self._spread(longest), 0.0), 1.0)

    def _spread(self, longest: int) -> float:
        return math.sqrt(2 * math.log(self.num_rows) / max(longest, 1))
