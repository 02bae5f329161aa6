"""What records of a job add up to: acceptance, VSR and TER, from the counts of each completion."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .errors import FAILURE, CommandError
from .records import COUNTS, Record


@dataclass
class Summary:
    """
    Sums over the records of a job. Names are those of [`TetrisStats`] and [`RequestOutput`].

    Attributes:
        finish_reasons (`Counter`): Records by `finish_reason`: `"stop"`, `"length"`, `"error"`.
        prompt_tokens (`int`): Tokens of the prompts that were served.
        completion_tokens (`int`): Tokens of their completions.
        verified (`int`): Draft tokens verified.
        accepted (`int`): Draft tokens that became text.
        steps (`int`): Steps of all rows.
        gained (`int`): Tokens that rows gained in their steps: accepted drafts and a bonus of the target in each step,
            but where a completion ends before it.
    """

    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    verified: int = 0
    accepted: int = 0
    steps: int = 0
    gained: int = 0

    @classmethod
    def of(cls, records: Iterable[Record]) -> Summary:
        """The sums of some records."""
        summary = cls()
        for record in records:
            summary.add(record)
        return summary

    def add(self, record: Record) -> None:
        """
        Add one record.

        Raises:
            `CommandError`: If it lacks a count.
        """
        self.finish_reasons[record["finish_reason"]] += 1
        if record["finish_reason"] == "error":
            return
        if missing := [name for name in COUNTS if not isinstance(record.get(name), int)]:
            raise CommandError(
                f"the record of {record['id']!r} has no `{missing[0]}`: another version wrote it. Sum it up with that "
                "one.",
                FAILURE,
            )
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + record[name])
        # The first token of a prompt that was computed before the first step comes from no step.
        self.gained += min(record["accepted"] + record["steps"], record["completion_tokens"])

    @property
    def records(self) -> int:
        """Records in all."""
        return sum(self.finish_reasons.values())

    @property
    def vsr(self) -> float | None:
        """Accepted / verified (TETRIS paper, `eq:VSR`); `None` if nothing was verified."""
        return _ratio(self.accepted, self.verified)

    @property
    def ter(self) -> float | None:
        """(Accepted + bonus) / (verified + steps of all rows) (TETRIS paper, `eq:TER`)."""
        return _ratio(self.gained, self.verified + self.steps)

    @property
    def mean_accepted(self) -> float | None:
        """Tokens that a row gained per step, bonus included; 1 without speculation."""
        return _ratio(self.gained, self.steps)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "records": self.records,
            "finish_reasons": dict(self.finish_reasons),
            **{name: getattr(self, name) for name in COUNTS},
            "vsr": self.vsr,
            "ter": self.ter,
            "mean_accepted": self.mean_accepted,
        }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
