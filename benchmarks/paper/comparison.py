#!/usr/bin/env python3
"""fig:VSR-all-appendix, fig:TER-figure, tab:potential, tab:ablation-mix, tab:ablation-medusa, and projections of
fig:throughput-all and tab:latency-all: SD, DSD and TETRIS against the draft length, by set.

    python benchmarks/paper/comparison.py --trace out/traces/smollm2.safetensors --costs costs.jsonl --figure vsr.png

Counts are exact replays. With `--costs`, seconds are projected: every step takes what a step of its size took when it
was measured. TETRIS is given by its best number of extra tokens, as in the paper; the records hold all of them.
"""

from __future__ import annotations

import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import json  # noqa: E402
from typing import Any  # noqa: E402

from paper.costs import StepCosts  # noqa: E402
from paper.drawing import arguments, axes_for, save, write  # noqa: E402
from paper.methods import Method, methods  # noqa: E402
from paper.prompt_sets import PLACES  # noqa: E402
from paper.traces import Trace  # noqa: E402
from paper.trials import Load  # noqa: E402


VALUES = {"vsr": "VSR", "ter": "TER", "tokens": "tokens", "tokens_per_second": "tok/s", "latency": "latency"}
LOWER_IS_BETTER = ("latency",)


def best(records: list[dict[str, Any]], value: str, names: tuple[str, ...], k: int | None = None) -> dict | None:
    """The record with the best mean of `value` among methods of these names, at one k or at any."""
    found = [
        record
        for record in records
        if record["method"] in names and value in record and (k is None or record["k"] == k)
    ]
    pick = min if value in LOWER_IS_BETTER else max
    return pick(found, key=lambda record: record[value][0]) if found else None


def gains(records: list[dict[str, Any]], value: str) -> dict[str, float]:
    """
    The paper's two numbers for one set, in percent: `over_best`, the best of TETRIS over the best baseline at any k,
    and `widest`, the widest gap between TETRIS and SD at the same k; and `over_fixed`, over the best SD at any k.
    """

    def gain(ours: dict, theirs: dict) -> float:
        ratio = ours[value][0] / theirs[value][0]
        return 100 * ((1 / ratio if value in LOWER_IS_BETTER else ratio) - 1)

    ours, theirs = best(records, value, ("tetris",)), best(records, value, ("sd", "dsd"))
    same = [
        gain(one, other)
        for k in sorted({record["k"] for record in records} - {0})
        if (one := best(records, value, ("tetris",), k)) and (other := best(records, value, ("sd",), k))
    ]
    fixed = best(records, value, ("sd",))
    if ours is None or theirs is None or fixed is None or not same:
        return {}
    return {"over_best": gain(ours, theirs), "over_fixed": gain(ours, fixed), "widest": max(same)}


def potential(records: list[dict[str, Any]]) -> dict[int, float]:
    """The paper's projection for a drafter whose time is hidden, by k: the gain in TER over SD, in percent."""
    found = {}
    for k in sorted({record["k"] for record in records} - {0}):
        ours, theirs = best(records, "ter", ("tetris",), k), best(records, "ter", ("sd",), k)
        if ours and theirs:
            found[k] = 100 * (ours["ter"][0] / theirs["ter"][0] - 1)
    return found


def hidden_drafting(records: list[dict[str, Any]]) -> float | None:
    """
    tab:potential: SD's throughput raised by TETRIS' gain in TER, at the best k, over the best baseline, in percent.
    """
    baseline, found = best(records, "tokens_per_second", ("sd", "dsd")), []
    for k, gain in potential(records).items():
        if at_k := best(records, "tokens_per_second", ("sd",), k):
            found.append(at_k["tokens_per_second"][0] * (1 + gain / 100))
    return 100 * (max(found) / baseline["tokens_per_second"][0] - 1) if found and baseline else None


def table(records: list[dict[str, Any]], windows: list[int]) -> str:
    """What was measured on one set: a line for each value and rule, by k, and the paper's numbers below each value."""
    lines = [f"{'':>15} " + " ".join(f"{f'k = {k}':>14}" for k in windows)]
    for value, title in VALUES.items():
        for name in ("sd", "dsd", "tetris", "oracle"):
            cells = [best(records, value, (name,), k) for k in windows]
            if any(cells):
                shown = [f"{c[value][0]:>8.3f}±{c[value][1]:<5.3f}" if c else f"{'':>14}" for c in cells]
                extras = ",".join(str(c["extra"]) for c in cells if c) if name == "tetris" else ""
                lines.append(f"{title:>8} {name:>6} " + " ".join(shown) + (f"  extra {extras}" if extras else ""))
        if found := gains(records, value):
            lines.append(
                f"{title:>8} over the best baseline {found['over_best']:+.1f} %, over the best SD "
                f"{found['over_fixed']:+.1f} %, widest over SD at the same k {found['widest']:+.1f} %"
            )
    lines.append("TER over SD by k: " + " ".join(f"{gain:+.1f} %" for gain in potential(records).values()))
    if (projection := hidden_drafting(records)) is not None:
        lines.append(f"throughput projected from TER, over the best baseline: {projection:+.1f} %")
    return "\n".join(lines)


def draw(path: Path, everything: list[dict[str, Any]], value: str) -> None:
    """One drawing for each set: `value` against k."""
    mixes = list(dict.fromkeys(record["mix"] for record in everything))
    figure, axes = axes_for(mixes)
    for place, mix in zip(axes, mixes, strict=False):
        records = [record for record in everything if record["mix"] == mix and value in record]
        for name, color in (("sd", "C0"), ("dsd", "C1"), ("tetris", "C2")):
            for extra in sorted({record["extra"] for record in records if record["method"] == name}):
                some = [record for record in records if record["method"] == name and record["extra"] == extra]
                means, deviations = zip(*(record[value] for record in some), strict=True)
                label = str(Method(name, 1, extra))
                place.errorbar(
                    [record["k"] for record in some], means, deviations, color=color, markersize=4, alpha=0.8,
                    marker=".^sv"[extra] if extra < 4 else "o", label=label,
                )  # fmt: skip
        place.set(xlabel="k, draft tokens verified per row", ylabel=VALUES[value])
        place.set_xticks(sorted({record["k"] for record in records} - {0}))
    axes[0].legend(fontsize=7)
    save(figure, path)


def main(argv: list[str] | None = None) -> list[dict]:
    parser = arguments(__doc__, needs_trace=False)
    parser.add_argument("--rows", type=int, default=64, help="N")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--extras", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--mixes", nargs="+", default=[*PLACES.values(), "sonnet", "mix", "all"])
    parser.add_argument("--costs", type=Path, help="from costs.py")
    parser.add_argument("--free-drafts", action="store_true", help="drafting costs nothing, as if it were hidden")
    parser.add_argument("--value", choices=VALUES, default="vsr", help="what --figure shows")
    parser.add_argument("--read", type=Path, help="replay nothing: show what --out wrote")
    args = parser.parse_args(argv)
    if (args.trace is None) == (args.read is None):
        parser.error("one of --trace and --read is needed")
    if args.read:
        everything = [json.loads(line) for line in args.read.read_text(encoding="utf-8").splitlines()]
    else:
        trace, costs = Trace.load(args.trace), StepCosts.load(args.costs, args.free_drafts) if args.costs else None
        everything = []
        for mix in args.mixes:
            load = Load(trace, mix, tuple(args.drafter), args.rows, args.per_row, args.trials)
            wanted = methods(args.k, args.extras, load.deepest, oracle=True)
            records = [load.measured(method, costs) for method in wanted if costs is not None or method.window]
            everything += [record | {"free_drafts": args.free_drafts} for record in records]
        write(args.out, trace, "comparison", everything)
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for record in everything:
        groups.setdefault((record["mix"], record["drafter"], record["rows"]), []).append(record)
    for (mix, drafter, rows), records in groups.items():
        windows = sorted({record["k"] for record in records} - {0})
        print(f"\n{mix}, {drafter}, N = {rows}\n{table(records, windows)}", flush=True)
    if args.figure:
        draw(args.figure, everything, args.value)
    return everything


if __name__ == "__main__":
    main()
