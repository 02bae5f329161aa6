"""What records of a job add up to: acceptance, VSR and TER, from the counts of each completion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from .records import Record


@dataclass
class Summary:
    """
    Sums over the records of a job. Names are those of [`TetrisStats`].

    Attributes:
        finish_reasons (`Counter`): Records by `finish_reason`: `"stop"`, `"length"`, `"error"`.
        prompt_tokens (`int`): Tokens of the prompts that were served.
        completion_tokens (`int`): Tokens of their completions.
        drafted, verified, accepted (`list[int]`): Draft tokens by draft position.
        bonus (`int`): Tokens that the target added after the last accepted draft of a row in a step.
        steps (`int`): Steps of all rows.
    """

    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    bonus: int = 0
    steps: int = 0

    @classmethod
    def of(cls, records: Iterable[Record]) -> Summary:
        """The sums of some records."""
        summary = cls()
        for record in records:
            summary.add(record)
        return summary

    def add(self, record: Record) -> None:
        """Add one record."""
        self.finish_reasons[record["finish_reason"]] += 1
        if record["finish_reason"] == "error":
            return
        self.prompt_tokens += record["prompt_tokens"]
        self.completion_tokens += record["completion_tokens"]
        counts = record["counts"]
        for name in ("drafted", "verified", "accepted"):
            sums = [a + b for a, b in zip_longest(getattr(self, name), counts[name], fillvalue=0)]
            setattr(self, name, sums)
        self.bonus += counts["bonus"]
        self.steps += counts["steps"]

    @property
    def records(self) -> int:
        """Records in all."""
        return sum(self.finish_reasons.values())

    @property
    def vsr(self) -> float | None:
        """Accepted / verified (TETRIS paper, `eq:VSR`); `None` if nothing was verified."""
        return _ratio(sum(self.accepted), sum(self.verified))

    @property
    def ter(self) -> float | None:
        """(Accepted + bonus) / (verified + steps of all rows) (TETRIS paper, `eq:TER`)."""
        return _ratio(sum(self.accepted) + self.bonus, sum(self.verified) + self.steps)

    @property
    def mean_accepted(self) -> float | None:
        """Tokens that a row gained per step, bonus included; 1 without speculation."""
        return _ratio(sum(self.accepted) + self.bonus, self.steps)

    @property
    def acceptance(self) -> list[float | None]:
        """Share of the verified tokens that were accepted, by draft position."""
        return [_ratio(a, v) for a, v in zip(self.accepted, self.verified, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "records": self.records,
            "finish_reasons": dict(self.finish_reasons),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "steps": self.steps,
            "drafted": self.drafted,
            "verified": self.verified,
            "accepted": self.accepted,
            "bonus": self.bonus,
            "vsr": self.vsr,
            "ter": self.ter,
            "mean_accepted": self.mean_accepted,
            "acceptance": self.acceptance,
        }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
