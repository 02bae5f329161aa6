"""`tetris_capacity="auto"`: which C and K would bring most tokens per second, decided between steps.

Knows what drafts promised, what stood, and what steps cost. Does not know models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from .calibration import AcceptanceCalibration
from .capacity_settings import candidates, promised
from .cost_table import CostTable
from .draft import Verification
from .expected_gains import best_sums, learn_gains, learn_rates, learn_trust
from .slowest_row import SlowestRow


# The chance of a draft token that is assumed before there is data, and the best one that is hoped for in a trial.
_EXPECTED, _HOPED = 0.5, 0.85
# Steps between two decisions, and how much better another setting must look.
_INTERVAL, _MARGIN = 16, 1.015
# Windows that a setting stays at least, least steps of C = 0 between two trials, share of that time that one may cost.
_DWELL, _WAIT, _TRIAL_SHARE = 2, 64, 0.008
# Share of a closed batch's rows that must live for its gains to be those of a next one's start.
_MOST = 0.75


class CapacityController:
    """
    Chooses C and K to maximise `(live rows + expected accepted tokens) / seconds of a step`, C = 0 included.

    Every step says what *any* setting would have gained, as in DSpark and vLLM's adaptive verification, but by
    calibrated chances: the expected number of accepted tokens of C and K is the sum of the C largest prefix scores at
    the first K places (TETRIS paper, Theorem 1). The seconds come from a [`CostTable`] that the steps themselves
    correct. A closed batch ends with its slowest row: where that goes first ([`TetrisSelector`]), rows count by their
    [`Draft.urgency`], and of the gain only a share, by N, length and how much nearer ends came so far
    ([`SlowestRow`]).

    **Sampling stays exact**: C and K are fixed before a step, by earlier steps and by clocks alone, so whether a token
    is verified never depends on that token (`docs/algorithm.md`).

    What was learned stays from call to call.

    Args:
        num_rows (`int`): N.
        table ([`CostTable`]): Seconds of a step.
        max_depth (`int`, *optional*, defaults to 6): The largest K.
        settings (`Iterable[tuple[int, int]]`, *optional*):
            (C, K) to choose from, besides C = 0; by default up to 15 with C from N / 2 to 4 N.
        device (`torch.device` or `str`, *optional*, defaults to `"cpu"`): Where steps run.

    Attributes:
        settings (`list[tuple[int, int]]`): (C, K), (0, 0) first.
        setting (`tuple[int, int]`): The one in force.
        interval (`int`): Steps to run before the next [`decide`].
        gains (`torch.FloatTensor` of shape `(S,)`):
            Expected accepted tokens per live row and step, by setting; a mean over rows weighted by their urgency.

    Raises:
        `ValueError`: If `num_rows` or `max_depth` is under 1, or a setting has K < 1, K > `max_depth` or C < 1.
    """

    def __init__(
        self,
        num_rows: int,
        table: CostTable | None,
        max_depth: int = 6,
        settings: Iterable[tuple[int, int]] | None = None,
        device: torch.device | str = "cpu",
    ):
        for name, count in (("num_rows", num_rows), ("max_depth", max_depth)):
            if count < 1:
                raise ValueError(f"`{name}` must be at least 1, got {count}.")
        wanted = [one for one in (candidates(num_rows, max_depth) if settings is None else settings) if one != (0, 0)]
        for capacity, depth in wanted:
            if capacity < 1 or not 1 <= depth <= max_depth:
                raise ValueError(
                    f"`settings` must be (C, K) with C at least 1 and K from 1 to {max_depth}, got {capacity, depth}."
                )
        self.num_rows, self.max_depth = num_rows, max_depth
        self.table: CostTable = table  # type: ignore[assignment]  # given later, before the first call
        self.settings = [(0, 0), *dict.fromkeys(wanted)]
        self._slowest = SlowestRow(num_rows)
        self._closed = False
        self.calibration = AcceptanceCalibration(max_depth)
        self.calibration.slope = self.calibration.slope.to(device)
        self.calibration.shift = self.calibration.shift.to(device)
        # An average over some 256 drafted rows.
        self._memory = 1 / min(max(256 / num_rows, 8), 32)
        self._first_window = min(max(math.ceil(64 / num_rows), 4), _INTERVAL)
        self._depths = torch.tensor([depth for _, depth in self.settings], device=device)  # (S,)
        self._capacities = torch.tensor([capacity for capacity, _ in self.settings], device=device)  # (S,)
        self.gains = torch.zeros(len(self.settings), device=device)  # (S,)
        self._steps = torch.zeros((), device=device)  # behind `gains`
        self._outcome = torch.zeros(2, device=device)  # accepted and expected tokens of what was verified
        self._rates = torch.zeros(max_depth, device=device)  # chance of a place, given the one before
        self._rated = torch.zeros(max_depth, device=device)  # steps behind each
        self.reset()

    def reset(self) -> None:
        """Forget what was learned, but for the corrections of the table."""
        self.calibration.reset()
        self._slowest = SlowestRow(self.num_rows)
        for state in (self._steps, self._outcome, self._rated):
            state.zero_()
        self._rates.fill_(_EXPECTED)
        self._expected = [promised(*one, self.num_rows, _EXPECTED) for one in self.settings]
        self._hoped = [promised(*one, self.num_rows, _HOPED) for one in self.settings]
        self.gains.copy_(torch.tensor(self._expected))
        self._early: list[float] | None = None  # `gains` while most rows of a closed batch lived
        self._knows = self._trying = self._most_live = False
        self._idle = self._windows = self._followed = 0
        self.interval, self.setting = _INTERVAL, (0, 0)

    def begin(self, closed: bool = False, longest: int = 128) -> tuple[int, int]:
        """
        Start a call: with the setting that was in force at the end of the last one. If that was C = 0, drafts are
        tried again, if trials have not cost too much lately.

        Args:
            closed (`bool`, *optional*, defaults to `False`): Whether rows that end are not replaced.
            longest (`int`, *optional*, defaults to 128): Tokens that a row may get at most.

        Returns:
            `tuple[int, int]`: C and K.
        """
        self._closed, self._windows, self._followed = closed, _DWELL, 0
        self._slowest.begin(longest)
        if not self._knows:
            self.setting = self._best(self._expected)
            self._trying = self.setting != (0, 0)
            self.interval = self._first_window if self._trying else _INTERVAL
            return self.setting
        if closed and self._early is not None:
            # A batch ends with its slowest rows alone, and mostly without drafts: that says little of the next one.
            self.gains.copy_(torch.tensor(self._early))
            self.setting, self.interval = self._clearly_best(self._early), _INTERVAL
        if self.setting == (0, 0):
            self._try()
        else:
            self._steps.clamp_(max=4)  # other texts
            self.interval = self._first_window
        return self.setting

    def observe(self, verification: Verification, going: torch.Tensor | None = None) -> None:
        """
        Learn from a step, on its device and without waiting for it. A step without drafts, or in which all rows had
        ended, teaches nothing.

        Args:
            verification ([`Verification`]): What the target said.
            going (`torch.BoolTensor` of shape `(R,)`, *optional*): Rows that had not ended before the step; by default
                all.
        """
        draft = verification.draft
        if draft.depth == 0:
            return
        if going is None:
            going = torch.ones_like(draft.lengths, dtype=torch.bool)
        scores = self.calibration.prefix_scores(draft)[:, : len(self._rates)]  # (R, K)
        self.calibration.observe(verification)
        live, memory = going.sum(), self._memory
        deep = learn_rates(scores, self._rates, self._rated, memory)  # (R, max_depth)
        trust = learn_trust(scores, verification.lengths, verification.num_accepted, live, self._outcome, memory)
        urgency = draft.urgency()  # (R,), of 1 but where slow rows go first
        best = best_sums(deep * urgency[:, None], self._depths, self._capacities)  # (S,)
        weight = (urgency * going).sum()
        learn_gains(best, trust, weight, self._capacities, self._depths, self.gains, self._steps, memory)

    def follow_rows(
        self, tokens: torch.Tensor, steps: torch.Tensor, remaining: torch.Tensor, gains: torch.Tensor | None = None
    ) -> None:
        """
        Learn how far the rows came since the last decision. Only drafts in a closed batch teach something; after steps
        without them, the rest of it counts as a shorter batch.

        Args:
            tokens (`torch.Tensor` of shape `(N,)`, counts): Tokens that each row gained.
            steps (`torch.Tensor` of shape `(N,)`, counts): Steps that each row took part in.
            remaining (`torch.Tensor` of shape `(N,)`, counts): Tokens that each row may still get, 0 if it has ended.
            gains (`torch.FloatTensor` of shape `(S,)`, *optional*): As of [`decide`].
        """
        self._most_live = bool((remaining > 0).float().mean() >= _MOST)
        self._followed += int(steps.max())
        if self._closed and self.setting == (0, 0):
            self._slowest.go_on(int(remaining.max()))
        elif self._closed:
            gain = (self.gains if gains is None else gains)[self.settings.index(self.setting)]
            self._slowest.observe(tokens, int(steps.max()), remaining, float(gain))

    def end(self, tokens: torch.Tensor, steps: torch.Tensor) -> None:
        """
        Learn from a whole call, in a closed batch.

        Args:
            tokens (`torch.Tensor` of shape `(N,)`, counts): Tokens that each row gained in steps.
            steps (`torch.Tensor` of shape `(N,)`, counts): Steps that each row took part in.
        """
        if self._closed:
            total = int(steps.max())
            rest = max(0, total - self._followed) if self.setting != (0, 0) else 0
            self._slowest.end(int(tokens.max()), total, rest)

    def decide(self, seconds_per_step: float | None = None, gains: torch.Tensor | None = None) -> tuple[int, int]:
        """
        Choose for the steps to come, after `interval` steps of [`setting`].

        Args:
            seconds_per_step (`float`, *optional*):
                Mean seconds of the steps since the last decision; none if they held something else, as a capture.
            gains (`torch.FloatTensor` of shape `(S,)`, *optional*):
                A copy of [`gains`], perhaps of a few steps ago. By default they are read now, which waits for the
                device.

        Returns:
            `tuple[int, int]`: C and K.
        """
        if seconds_per_step is not None:
            self.table.refine(*self.setting, seconds_per_step)
        if self.setting == (0, 0):
            self._idle += self.interval
            self.interval = _INTERVAL
            if self._idle >= _WAIT:
                self._try()
            return self.setting
        known = (self.gains if gains is None else gains).tolist()
        first, self._trying = self._trying, False
        self._knows, self.interval = True, _INTERVAL
        self._windows += 1
        if self._closed and self._most_live:
            self._early = known
        best = self._best(known)
        # C = 0 is the safe side, and is left again for a clear gain only.
        margin = 1.0 if best == (0, 0) else _MARGIN
        if first:
            self._change(self._clearly_best(known))
        elif self._windows >= _DWELL and self._speed(best, known) > margin * self._speed(self.setting, known):
            self._change(best)
        return self.setting

    def _change(self, setting: tuple[int, int]) -> None:
        """Put a setting in force."""
        if setting != self.setting:
            self._windows = 0
        if setting == (0, 0):
            self._idle = 0
        self.setting = setting

    def _try(self) -> None:
        """
        From C = 0, draft for a few steps with the cheapest setting that could pay, if the worst that it may cost is
        small against the time since the last trial.
        """
        base = self.table.step_seconds(0, 0)
        hopeful = [one for one in self.settings[1:] if self._speed(one, self._hoped) > _MARGIN / base]
        if not hopeful:
            return
        setting = min(hopeful, key=lambda one: self.table.step_seconds(*one))
        cost = self._first_window * (self.table.step_seconds(*setting) - base)
        if cost > _TRIAL_SHARE * self._idle * base:
            return
        # Only what the trial shows is to count.
        self._steps.zero_()
        self._outcome.zero_()
        self.setting, self.interval, self._trying = setting, self._first_window, True

    def _best(self, gains: list[float]) -> tuple[int, int]:
        return max(self.settings, key=lambda one: self._speed(one, gains))

    def _clearly_best(self, gains: list[float]) -> tuple[int, int]:
        """The best one if it is clearly better than C = 0, else that."""
        best = self._best(gains)
        return best if self._speed(best, gains) > _MARGIN * self._speed((0, 0), gains) else (0, 0)

    def _speed(self, setting: tuple[int, int], gains: list[float]) -> float:
        """Tokens per live row and second; in a closed batch, those by which its end comes nearer."""
        share = self._slowest.share if self._closed else 1.0
        return (1 + share * gains[self.settings.index(setting)]) / self.table.step_seconds(*setting)
