#!/usr/bin/env python3
"""Tables and figure of what `throughput.py` timed: SD, DSD and TETRIS against the draft length, with the paper's
gains.

python benchmarks/paper/report.py benchmarks/results/paper-throughput.jsonl --figure docs/reproduction/timed.png
"""

from __future__ import annotations

import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import argparse  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
from typing import Any  # noqa: E402

from paper.comparison import gains  # noqa: E402
from paper.drawing import axes_for, save  # noqa: E402
from paper.methods import Method  # noqa: E402


def spread(values: list[float]) -> tuple[float, float]:
    """Median of the trials and half the distance between the least and the most."""
    return statistics.median(values), (max(values) - min(values)) / 2


def grouped(records: list[dict[str, Any]]) -> dict[tuple, list[dict[str, Any]]]:
    """Records without errors by prompts, drafter and N; those without drafts serve every drafter."""
    good = [record for record in records if "error" not in record]
    for record in good:
        record["tokens_per_second"], record["latency"] = spread(record["speeds"]), spread(record["latencies"])
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for record in good:
        if record["method"] != "none":
            groups.setdefault((record["mix"], record["drafter"], record["rows"]), []).append(record)
    for (mix, _, rows), some in groups.items():
        some += [r for r in good if r["method"] == "none" and (r["mix"], r["rows"]) == (mix, rows)]
    return groups


def colours(groups: dict[tuple, list[dict[str, Any]]]) -> dict[tuple[str, int], str]:
    """One colour for each rule in all drawings, whatever was timed in them: the legend stands in the first alone."""
    drawn = {(r["method"], r["extra"]) for records in groups.values() for r in records} - {("none", 0)}
    return {one: f"C{number}" for number, one in enumerate(sorted(drawn))}


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help="JSON lines of throughput.py")
    parser.add_argument("--figure", type=Path, help="PNG (matplotlib)")
    args = parser.parse_args(argv)
    lines = [line for path in args.records for line in path.read_text(encoding="utf-8").splitlines()]
    groups = grouped([json.loads(line) for line in lines if line.strip()])
    found = {}
    for (mix, drafter, rows), records in groups.items():
        print(f"\n{mix}, {drafter}, N = {rows}, {records[0]['run']['card']}")
        print("| method | k | K | tokens/s | latency, s | VSR | TER | tokens |\n" + "| --- " * 8 + "|")
        for record in sorted(records, key=lambda r: (r["method"], r["extra"], r["k"])):
            method = Method(record["method"], record["k"], record["extra"])
            (speed, off), (latency, _) = record["tokens_per_second"], record["latency"]
            vsr = "" if record["vsr"] is None else f"{record['vsr']:.3f}"
            print(
                f"| {method} | {method.window} | {method.depth} | {speed:,.0f} ± {off:,.0f} | {latency:.3f} | {vsr} | "
                f"{record['ter']:.3f} | {record['tokens_per_step']:.3f} |"
            )
        for value in ("tokens_per_second", "latency"):
            if shown := gains(records, value):
                found[mix, drafter, rows, value] = shown
                print(f"{value}: " + ", ".join(f"{name} {gain:+.2f} %" for name, gain in shown.items()))
    if args.figure:
        figure, axes = axes_for([f"{mix}, {drafter}, N = {rows}" for mix, drafter, rows in groups])
        chosen = colours(groups)
        for place, records in zip(axes, groups.values(), strict=False):
            for name, extra in sorted({(r["method"], r["extra"]) for r in records} - {("none", 0)}):
                some = sorted((r for r in records if (r["method"], r["extra"]) == (name, extra)), key=lambda r: r["k"])
                means, offs = zip(*(record["tokens_per_second"] for record in some), strict=True)
                label, colour = str(Method(name, 1, extra)), chosen[name, extra]
                place.errorbar([r["k"] for r in some], means, offs, marker=".", color=colour, label=label)
            for record in records:
                if record["method"] == "none":
                    place.axhline(record["tokens_per_second"][0], color="0.5", linestyle=":", label="no drafts")
            place.set(xlabel="k, draft tokens verified per row", ylabel="tokens per second")
            place.set_xticks(sorted({record["k"] for record in records} - {0}))
        axes[0].legend(fontsize=7)
        save(figure, args.figure)
    return found


if __name__ == "__main__":
    main()
