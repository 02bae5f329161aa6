"""What a call of speculative decoding did: counts per row and draft position, forwards, seconds.

Knows counting. Does not know how tokens were chosen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .fusing import fused
from .staircase import Staircase


# The attributes that are tensors, one row for each row of the batch.
_COUNTS = ("drafted", "verified", "accepted", "bonus", "live_steps")


@dataclass
class TetrisStats:
    """
    Counts of one call of `generate`. Names follow the TETRIS paper (section 5).

    Every generated token is one of three: `N` first tokens that the prompts' own forward gives, accepted draft tokens,
    and bonus tokens, which the target adds after the last accepted draft of a row in a step.

    Attributes:
        drafted (`torch.LongTensor` of shape `(N, K)`): Tokens proposed at each draft position.
        verified (`torch.LongTensor` of shape `(N, K)`): Those of them that were selected and verified by the target.
        accepted (`torch.LongTensor` of shape `(N, K)`): Those that became text.
        bonus (`torch.LongTensor` of shape `(N,)`): Tokens added by the target.
        live_steps (`torch.LongTensor` of shape `(N,)`): Steps that each row took part in.
        capacity (`int`): C; the largest that was in force, if it was chosen as it went.
        settings (`dict[tuple[int, int], int]`): Steps by (C, K), if those were chosen as it went.
        target_forwards (`int`): Forwards of the target, the prompts' included.
        target_tokens (`int`): Tokens computed in them.
        draft_forwards (`int`): Forwards of the draft model.
        seconds (`dict[str, float]`):
            Host seconds spent in `prefill`, `propose`, `select`, `verify` and `commit`. On an asynchronous device work
            is counted where the host waits for it. Where steps are captured, in `prefill` and `replay`.
        step_seconds (`dict[str, float]`):
            Where steps are captured, device seconds of `propose`, `select`, `verify` and `commit` in one of the call's
            first steps.
    """

    drafted: torch.Tensor
    verified: torch.Tensor
    accepted: torch.Tensor
    bonus: torch.Tensor
    live_steps: torch.Tensor
    capacity: int
    target_forwards: int = 0
    target_tokens: int = 0
    draft_forwards: int = 0
    settings: dict[tuple[int, int], int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def zeros(cls, num_rows: int, depth: int, capacity: int, device: torch.device | str = "cpu") -> TetrisStats:
        """Counts of nothing yet, for `num_rows` rows drafted `depth` deep."""
        per_place = torch.zeros(3, num_rows, depth, dtype=torch.long, device=device)
        per_row = torch.zeros(2, num_rows, dtype=torch.long, device=device)
        return cls(per_place[0], per_place[1], per_place[2], per_row[0], per_row[1], capacity)

    def reset(self) -> None:
        """Back to nothing, in the same tensors."""
        for name in _COUNTS:
            getattr(self, name).zero_()
        self.seconds, self.step_seconds, self.settings = {}, {}, {}

    def forget(self, rows: torch.Tensor) -> None:
        """What was counted for `rows`, of shape `(R,)`: other texts take their place."""
        for name in _COUNTS:
            getattr(self, name)[rows] = 0

    def clone(self) -> TetrisStats:
        """The same counts in tensors of their own."""
        return replace(self, **{name: getattr(self, name).clone() for name in _COUNTS})

    def count(
        self,
        live: torch.Tensor,
        drafted: torch.Tensor,
        verified: torch.Tensor,
        accepted: torch.Tensor,
        kept: torch.Tensor,
    ) -> None:
        """
        Count one step.

        Args:
            live (`torch.LongTensor` of shape `(R,)`): Rows that took part.
            drafted (`torch.LongTensor` of shape `(R,)`): Draft tokens proposed.
            verified (`torch.LongTensor` of shape `(R,)`): Draft tokens verified.
            accepted (`torch.LongTensor` of shape `(R,)`): Draft tokens accepted.
            kept (`torch.LongTensor` of shape `(R,)`): Tokens committed, after the cut at the end of a row.
        """
        totals = self.drafted, self.verified, self.accepted, self.bonus, self.live_steps
        _count(*totals, live, drafted, verified, accepted, kept)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the host time spent within this context to `seconds[stage]`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start

    @property
    def steps(self) -> int:
        """Steps of propose, select, verify, commit, until the last row had ended."""
        return int(self.live_steps.max())

    @property
    def vsr(self) -> float:
        """Verification success rate, accepted / verified (paper, `eq:VSR`); `nan` if nothing was verified."""
        return _ratio(self.accepted.sum(), self.verified.sum())

    @property
    def ter(self) -> float:
        """Target efficiency rate, (accepted + bonus) / (verified + live rows), summed over steps (paper, `eq:TER`)."""
        return _ratio(self.accepted.sum() + self.bonus.sum(), self.verified.sum() + self.live_steps.sum())

    @property
    def mean_accepted(self) -> float:
        """Tokens that a live row gains per step, bonus included; 1 without speculation."""
        return _ratio(self.accepted.sum() + self.bonus.sum(), self.live_steps.sum())

    @property
    def acceptance(self) -> torch.Tensor:
        """Share of the verified tokens that were accepted, per draft position. `torch.FloatTensor` of shape `(K,)`."""
        return self.accepted.sum(0) / self.verified.sum(0)

    def staircase(self) -> Staircase:
        """How far each row was drafted, verified and accepted in its average step; printed, text for a terminal."""
        steps = self.live_steps.clamp(min=1)
        lengths = [(counts.sum(1) / steps).tolist() for counts in (self.drafted, self.verified, self.accepted)]
        title = f"Average step, C = {self.capacity}: VSR {self.vsr:.3f}, TER {self.ter:.3f}"
        return Staircase(title, list(range(len(steps))), *lengths)

    def plot(self, axes: Any = None) -> Any:
        """
        Draw [`staircase`] with matplotlib. [`StepHistory`] keeps single steps.

        Args:
            axes (`matplotlib.axes.Axes`, *optional*): Where; by default on a new figure.

        Returns:
            `matplotlib.axes.Axes`: What was drawn on.

        Raises:
            `ImportError`: If matplotlib is missing.
        """
        return self.staircase().plot(axes)

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in self.seconds.items())
        return (
            f"{self.steps} steps, capacity {self.capacity}: {int(self.drafted.sum())} drafted, "
            f"{int(self.verified.sum())} verified, {int(self.accepted.sum())} accepted, {int(self.bonus.sum())} "
            f"bonus; VSR {self.vsr:.3f}, TER {self.ter:.3f}, {self.mean_accepted:.2f} tokens per row and step; "
            f"{self.target_forwards} target and {self.draft_forwards} draft forwards; seconds: {stages}"
        )


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> float:
    return float(part) / float(whole) if float(whole) else float("nan")


@fused
def _count(
    all_drafted: torch.Tensor,
    all_verified: torch.Tensor,
    all_accepted: torch.Tensor,
    bonus: torch.Tensor,
    live_steps: torch.Tensor,
    live: torch.Tensor,
    drafted: torch.Tensor,
    verified: torch.Tensor,
    accepted: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    """[`TetrisStats.count`] in place: totals of shape `(N, K)` or `(N,)`, then what is counted, `(R,)` each."""
    places = torch.arange(all_drafted.shape[1], device=live.device)
    all_drafted[live] += (places < drafted[:, None]).long()  # (R, K)
    all_verified[live] += (places < verified[:, None]).long()
    all_accepted[live] += (places < torch.minimum(accepted, kept)[:, None]).long()
    bonus[live] += (kept > accepted).long()
    live_steps[live] += (kept > 0).long()
