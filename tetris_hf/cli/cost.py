"""What a step costs, what it brings, and which C and K would bring most per second.

Knows counts and seconds that were measured. Does not know models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..generation import Draft, DraftSelector, TetrisStats, Verification
from ..generation.budget import spend


# C / N that are tried; more than one draft token per row and depth leaves nothing to select.
RATIOS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)


class OutcomeRecorder(DraftSelector):
    """
    Selects everything and remembers how it went, so that any smaller C and K can be judged afterwards.

    Attributes:
        outcomes (`list[tuple[torch.Tensor, torch.Tensor]]`):
            For each step the scores that selection would go by, `(R, K)`, and the accepted tokens, `(R,)`.
    """

    def __init__(self) -> None:
        self.outcomes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, draft: Draft, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
        return lengths

    def observe(self, verification: Verification) -> None:
        draft = verification.draft
        if draft.depth:
            self.outcomes.append((draft.prefix_scores().float().cpu(), verification.num_accepted.cpu()))

    def expect(self, capacity: int, depth: int) -> tuple[float, float]:
        """
        What selection would have made of these drafts.

        Args:
            capacity (`int`): C.
            depth (`int`): K.

        Returns:
            `tuple[float, float]`: Tokens per row and step, bonus included, and draft tokens verified per step.
        """
        kept = verified = rows = 0
        for scores, accepted in self.outcomes:
            scores = scores[:, :depth]
            lengths = (scores > -torch.inf).sum(1)  # (R,)
            lengths = spend(scores, lengths, capacity)
            kept += int(torch.minimum(accepted, lengths).sum()) + len(lengths)
            verified += int(lengths.sum())
            rows += len(lengths)
        return kept / max(rows, 1), verified / max(len(self.outcomes), 1)


@dataclass(frozen=True)
class StepCost:
    """
    Seconds of a step.

    Attributes:
        total (`float`): Of the whole step.
        propose (`float`): Of drafting.
    """

    total: float
    propose: float

    @classmethod
    def of(cls, stats: TetrisStats) -> StepCost:
        """The mean step of a call; where steps are captured, drafting is taken from the one that was timed."""
        steps = max(stats.steps, 1)
        total = sum(seconds for stage, seconds in stats.seconds.items() if stage != "prefill") / steps
        propose = stats.step_seconds.get("propose", stats.seconds.get("propose", 0.0) / steps)
        return cls(total, min(propose, total))

    @property
    def draft_share(self) -> float:
        """Part of the step that drafting takes."""
        return self.propose / self.total if self.total else 0.0


@dataclass(frozen=True)
class CostModel:
    """
    A step of depth K that verifies v draft tokens takes `base + K * per_place + v * per_token` seconds. Verifying is
    taken as proportional to its tokens, which is near on a CPU and cautious on a GPU.

    Attributes:
        base (`float`): Seconds of a step without drafts.
        per_place (`float`): Seconds of drafting one place for all rows.
        per_token (`float`): Seconds that one more verified token adds.
    """

    base: float
    per_place: float
    per_token: float

    @classmethod
    def fit(cls, without: StepCost, everything: StepCost, depth: int, verified: float) -> CostModel:
        """
        Args:
            without ([`StepCost`]): Measured with C = 0.
            everything ([`StepCost`]): Measured with all drafts verified.
            depth (`int`): K there.
            verified (`float`): Draft tokens verified per step there.
        """
        rest = max(0.0, everything.total - everything.propose - without.total)
        return cls(without.total, everything.propose / depth, rest / verified if verified else 0.0)

    def seconds(self, depth: int, verified: float) -> float:
        """Of a step of this depth with as many verified draft tokens."""
        return self.base + depth * self.per_place + verified * self.per_token


@dataclass(frozen=True)
class Estimate:
    """
    What a C and a K promise.

    Attributes:
        capacity (`int`): C.
        depth (`int`): K.
        tokens_per_step (`float`): Per row, bonus included.
        gain (`float`): Speed over C = 0.
    """

    capacity: int
    depth: int
    tokens_per_step: float
    gain: float


def estimates(outcomes: OutcomeRecorder, costs: CostModel, num_rows: int, depth: int) -> list[Estimate]:
    """
    Every C and K worth trying, the most promising first.

    Args:
        outcomes ([`OutcomeRecorder`]): Of drafts `depth` deep.
        costs ([`CostModel`]): Of this machine.
        num_rows (`int`): N.
        depth (`int`): The largest K.
    """
    found = []
    for places in range(1, depth + 1):
        for capacity in sorted({max(1, round(ratio * num_rows)) for ratio in (*RATIOS, places) if ratio <= places}):
            tokens, verified = outcomes.expect(capacity, places)
            gain = tokens * costs.base / costs.seconds(places, verified) if costs.base else 0.0
            found.append(Estimate(capacity, places, tokens, gain))
    return sorted(found, key=lambda estimate: -estimate.gain)


def acceptance_for(tokens_per_step: float, verified_per_row: float) -> float | None:
    """
    The chance of each draft token, the same at all places, with which a row gains that many tokens in a step.

    Args:
        tokens_per_step (`float`): Tokens per row and step, bonus included.
        verified_per_row (`float`): Draft tokens verified per row and step.

    Returns:
        `float`, *optional*: In [0, 1]; `None` if even certain drafts would not do.
    """
    if not 1 < tokens_per_step <= 1 + verified_per_row:
        return 0.0 if tokens_per_step <= 1 else None
    whole = int(verified_per_row)
    low, high = 0.0, 1.0
    for _ in range(50):
        chance = (low + high) / 2
        gained = sum(chance**place for place in range(whole + 1)) + (verified_per_row - whole) * chance ** (whole + 1)
        low, high = (chance, high) if gained < tokens_per_step else (low, chance)
    return high
