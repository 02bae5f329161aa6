"""Replays in trials: shuffles of the prompts, means and deviations, seconds projected from measured costs.

Knows traces and costs. Draws nothing.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paper.costs import StepCosts
from paper.methods import Method
from paper.prompt_sets import MIXES
from paper.replay import LOOKUP, Replayed, replay
from paper.traces import Trace


@dataclass(frozen=True)
class Load:
    """
    A constant load, as in the paper: N requests at any time, one taking the place of another.

    Args:
        trace ([`Trace`]): What was recorded.
        mix (`str`): A set of the trace, a key of `MIXES`, or `"all"`.
        drafters (`tuple[str, ...]`): Who drafts; several are mixed.
        num_rows (`int`): N.
        per_row (`int`, *optional*, defaults to 4): Requests of a trial for every row.
        trials (`int`, *optional*, defaults to 3): Shuffles.
    """

    trace: Trace
    mix: str
    drafters: tuple[str, ...]
    num_rows: int
    per_row: int = 4
    trials: int = 3

    @property
    def deepest(self) -> int | None:
        """The most that can be drafted; `None` without a limit."""
        return None if LOOKUP in self.drafters else max(self._limit(name) for name in self.drafters)

    def draft_seconds(self, costs: StepCosts, depth: int) -> float:
        """Of all drafters for `depth` places, none deeper than it can."""
        limits = [depth if name == LOOKUP else min(depth, self._limit(name)) for name in self.drafters]
        pairs = zip(self.drafters, limits, strict=True)
        return sum(costs.draft(self.num_rows, [name], limit) for name, limit in pairs)

    def _limit(self, name: str) -> int:
        return int(self.trace.drafts[name].lengths.max())

    def requests(self, trial: int) -> list[int]:
        """Prompts of the trace by index, shuffled, over and over; of a mix equally many from each of its sets."""
        order = random.Random(trial)
        names = [name for name in MIXES.get(self.mix, (self.mix,)) if name == "all" or name in self.trace.sets]
        count = self.num_rows * self.per_row
        each: list[list[int]] = []
        for name in names:
            prompts, found = self.trace.of(name), []
            while len(found) * len(names) < count:
                found += order.sample(prompts, len(prompts))
            each.append(found[: -(-count // len(names))])
        mixed = [prompt for some in each for prompt in some]
        return order.sample(mixed, count)

    def run(self, method: Method, costs: StepCosts | None = None) -> list[Replayed]:
        """One replay a trial. What a rule learns begins anew in each."""
        slopes = None
        if costs is not None and method.window:
            slopes = costs.slopes(self.num_rows, self.drafters, method.depth, method.capacity(self.num_rows))
        return [
            replay(
                self.trace, self.requests(trial), self.drafters, self.num_rows, method.capacity(self.num_rows),
                max(1, method.depth), method.selector(slopes),
            )
            for trial in range(self.trials)
        ]  # fmt: skip

    def measured(self, method: Method, costs: StepCosts | None = None) -> dict[str, Any]:
        """
        A method over all trials, over the steps with all rows live.

        Returns:
            `dict`: The setting, and for `vsr`, `ter`, `tokens`, `verified` and, with costs, projected
            `tokens_per_second` and `latency` a pair of mean and standard deviation.
        """
        found: dict[str, list[float]] = {}
        for replayed in self.run(method, costs):
            values = replayed.ratios()
            if costs is not None:
                values |= self.projected(replayed, costs, method)
            for name, value in values.items():
                found.setdefault(name, []).append(value)
        record: dict[str, Any] = {
            "mix": self.mix,
            "drafter": "+".join(self.drafters),
            "rows": self.num_rows,
            "method": method.name,
            "k": method.window,
            "extra": method.extra,
        }
        # Without drafts there is no VSR.
        return record | {
            name: mean_and_deviation(values) for name, values in found.items() if not any(map(math.isnan, values))
        }

    def projected(self, replayed: Replayed, costs: StepCosts, method: Method) -> dict[str, float]:
        """
        Tokens per second and mean latency in seconds, had every step taken what such a step was measured to take. DSD
        pays for the window that it chose, though the engine drafts all places; prefills are left out for all.
        """
        rows, verified, accepted, bonus = replayed.steps.unbind(1)
        places = replayed.windows if method.name == "dsd" else torch.full_like(verified, method.depth)
        by_count = {count: costs.target(self.num_rows, count) for count in set(verified.tolist())}
        by_depth = {depth: self.draft_seconds(costs, depth) for depth in set(places.tolist())}
        pairs = zip(verified.tolist(), places.tolist(), strict=True)
        taken = torch.tensor([by_count[count] + by_depth[depth] for count, depth in pairs])  # (S,)
        clock = torch.cat([torch.zeros(1), taken.cumsum(0)])
        full = replayed.full
        last = int(full.nonzero().max()) + 1
        whole = replayed.took[replayed.took[:, 1] <= last]  # requests that ended before the load fell
        return {
            "tokens_per_second": float((accepted + bonus)[full].sum() / taken[full].sum()),
            "latency": float((clock[whole[:, 1]] - clock[whole[:, 0]]).mean()),
        }


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over trials, 0 for one trial."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
