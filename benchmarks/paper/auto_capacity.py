#!/usr/bin/env python3
"""`tetris_capacity="auto"` against every constant setting, replayed on recorded text at measured costs of steps.

    python benchmarks/paper/auto_capacity.py --trace T --costs benchmarks/results/h200-7b-greedy.jsonl

Texts, drafts and what is accepted are those of `record.py`; every step takes what one of its C and K took where it was
measured (`costs.py`, or `throughput.py`), prompts nothing. Each draw is several calls in a row: closed batches as in
`generate` or, with `--refill`, jobs whose rows are refilled as in `generate_batch`. In every second draw all calls are
of the same prompts. The controller begins each draw knowing nothing but costs. The best constant setting is that of
the whole draw, found afterwards, with the default selector and, in closed batches, with slow rows first as the
controller has them. Prints one JSON line per draw, and one for all draws of a drafter and N together, in which the
best constant setting is that of a sweep over all of them.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from records import report  # noqa: E402

from paper.costs import StepCosts  # noqa: E402
from paper.replay import replay  # noqa: E402
from paper.traces import Trace  # noqa: E402
from tetris_hf import TetrisSelector, Verification  # noqa: E402
from tetris_hf.generation.auto_capacity import MAX_DEPTH  # noqa: E402
from tetris_hf.generation.capacity_controller import CapacityController  # noqa: E402
from tetris_hf.generation.capacity_settings import CAPTURED, candidates  # noqa: E402
from tetris_hf.generation.cost_table import CostTable  # noqa: E402
from tetris_hf.generation.rows import Rows  # noqa: E402


NOISE = 0.01  # of a measured time, relative


class Steering:
    """
    Does in a replay what [`~tetris_hf.generation.auto_capacity.AutoCapacity`] does in the engine.

    Args:
        controller ([`CapacityController`]): Who chooses.
        prices (`dict[tuple[int, int], float]`): Seconds of a step by C and K.
        luck (`random.Random`): Of the clock.
        closed (`bool`): Whether rows that end are not replaced.
        longest (`int`): Tokens that a row may get at most.

    Attributes:
        setting (`tuple[int, int]`): C and K in force.
        seconds (`float`): Of all steps so far.
        used (`dict[tuple[int, int], int]`): Steps by C and K.
    """

    def __init__(
        self,
        controller: CapacityController,
        prices: dict[tuple[int, int], float],
        luck: random.Random,
        closed: bool,
        longest: int,
    ):
        self.controller, self.prices, self.luck = controller, prices, luck
        self.setting = controller.begin(closed, longest)
        self.seconds, self.used = 0.0, {}
        self._count = 0
        self._begun: torch.Tensor | None = None  # tokens and steps of each row at the last decision, (2, N)

    def __call__(self, rows: Rows, verification: Verification) -> tuple[int, int]:
        if self._begun is None:  # it is asked after a call's first step, in which no row has come to its end
            self._steps = torch.zeros_like(rows.length)
            self._begun = torch.stack([rows.length, self._steps])
            self._begun[0, verification.live] -= verification.num_accepted + 1
            self._rows, self._first = rows, self._begun[0]
        self._steps[verification.live] += 1
        self.controller.observe(verification)
        self.seconds += self.prices[self.setting]
        self.used[self.setting] = self.used.get(self.setting, 0) + 1
        self._count += 1
        if self._count == self.controller.interval:
            self._told = self.controller.gains.clone(), torch.stack([rows.length, self._steps]), rows.remaining
        if self._count > self.controller.interval:  # a step later, as where steps are captured
            gains, now, remaining = self._told
            self.controller.follow_rows(*(now - self._begun), remaining, gains)
            self.setting = self.controller.decide(self.prices[self.setting] * self.luck.gauss(1, NOISE), gains)
            self._count, self._begun = 0, now
        return self.setting

    def end(self) -> None:
        """After the last step of a call."""
        if self._begun is not None:
            self.controller.end(self._rows.length - self._first, self._steps)


def contest(
    trace: Trace,
    drafter: str,
    num_rows: int,
    costs: StepCosts,
    calls: int,
    seed: int,
    refill: bool = False,
    sets: Sequence[str] = ("all",),
) -> dict[str, Any]:
    """
    One draw.

    Args:
        trace ([`Trace`]): What was recorded.
        drafter (`str`): Its name there.
        num_rows (`int`): N.
        costs ([`StepCosts`]): With N and the drafter.
        calls (`int`): One after the other.
        seed (`int`): Of prompts and clock; odd ones give all calls the same prompts.
        refill (`bool`, *optional*, defaults to `False`): Whether a call is a job of 4 N prompts in N rows.
        sets (`Sequence[str]`, *optional*, defaults to `("all",)`): Sets of the trace that prompts are drawn from.

    Returns:
        `dict[str, Any]`: Speed over C = 0, over the best constant setting of the draw and over the best one with slow
        rows first, the least of any call over C = 0, these settings, what was chosen most in each call, and the
        seconds of all calls, chosen and by constant setting.
    """
    luck = random.Random(seed)
    max_depth = min(MAX_DEPTH, trace.drafts[drafter].tokens.shape[2])
    controller = CapacityController(
        num_rows, None, max_depth=max_depth, settings=candidates(num_rows, max_depth, CAPTURED)
    )
    prices = {
        (capacity, depth): costs.target(num_rows, capacity) + costs.draft(num_rows, [drafter], depth)
        for capacity, depth in controller.settings
    }
    controller.table = CostTable.measure(
        lambda *setting: prices[setting] * luck.gauss(1, NOISE), num_rows, controller.settings
    )
    controller.reset()
    total, least, chosen = 0.0, float("inf"), []
    fixed, slow_first = dict.fromkeys(prices, 0.0), dict.fromkeys(prices, 0.0)
    slow = TetrisSelector(slowest_first=True)

    def seconds(selector: TetrisSelector | None = None) -> dict[tuple[int, int], float]:
        """Of a call, by setting."""
        return {
            setting: price * len(replay(trace, prompts, drafter, num_rows, *setting, selector, refill=refill).steps)
            for setting, price in prices.items()
        }

    known, prompts, of_call, with_slow = [index for name in sets for index in trace.of(name)], [], {}, {}
    for call in range(calls):
        if call == 0 or seed % 2 == 0:
            wanted = 4 * num_rows if refill else num_rows
            prompts = (luck.sample(known, len(known)) * (1 + wanted // len(known)))[:wanted]
            of_call, with_slow = seconds(), {} if refill else seconds(slow)
        steering = Steering(controller, prices, luck, closed=not refill, longest=trace.text.shape[1] - 1)
        replay(trace, prompts, drafter, num_rows, *steering.setting, slow, refill=refill, steer=steering)
        steering.end()
        fixed = {setting: fixed[setting] + of_call[setting] for setting in fixed}
        if not refill:
            slow_first = {setting: slow_first[setting] + with_slow[setting] for setting in slow_first}
        total += steering.seconds
        least = min(least, of_call[0, 0] / steering.seconds)
        chosen.append(max(steering.used, key=lambda setting: steering.used[setting]))
    best = min(fixed, key=lambda setting: fixed[setting])
    best_slow = min(slow_first, key=lambda setting: slow_first[setting])
    return {
        "drafter": drafter,
        "rows": num_rows,
        "refill": refill,
        "seed": seed,
        "over_c0": fixed[0, 0] / total,
        "over_best": fixed[best] / total,
        "over_best_slow_first": None if refill else slow_first[best_slow] / total,
        "least_call_over_c0": least,
        "best": best,
        "best_slow_first": None if refill else best_slow,
        "chosen": chosen,
        "seconds": total,
        "constant_seconds": {f"{capacity}, {depth}": seconds for (capacity, depth), seconds in fixed.items()},
    }


def together(draws: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All draws of one drafter and N as one: against C = 0 and the constant setting that is best over all of them."""
    constants = {
        setting: sum(draw["constant_seconds"][setting] for draw in draws) for setting in draws[0]["constant_seconds"]
    }
    total, best = sum(draw["seconds"] for draw in draws), min(constants, key=lambda setting: constants[setting])
    return {
        **{name: draws[0][name] for name in ("drafter", "rows", "refill")},
        "draws": len(draws),
        "over_c0": constants["0, 0"] / total,
        "over_best": constants[best] / total,
        "best": best,
    }


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="from paper/record.py")
    parser.add_argument("--costs", type=Path, required=True, help="from throughput.py or paper/costs.py")
    parser.add_argument("--drafters", nargs="+", default=["shallow"], help="names in the trace")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 32, 64, 128], help="N")
    parser.add_argument("--sets", nargs="+", default=["all"], help="sets of prompts to draw from")
    parser.add_argument("--calls", type=int, default=6)
    parser.add_argument("--draws", type=int, default=4)
    parser.add_argument("--refill", action="store_true", help="jobs instead of closed batches")
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    args = parser.parse_args(arguments)
    trace, costs = Trace.load(args.trace), StepCosts.load(args.costs)
    records = []
    for drafter in args.drafters:
        for num_rows in args.rows:
            draws = []
            for seed in range(args.draws):
                draws.append(contest(trace, drafter, num_rows, costs, args.calls, seed, args.refill, args.sets))
                report(draws[-1], args.out)
            report(together(draws), None)
            records += draws
    return records


if __name__ == "__main__":
    main()
