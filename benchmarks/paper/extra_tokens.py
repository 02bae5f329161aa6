#!/usr/bin/env python3
"""fig:extra_params, fig:extra_params_additional_k123: VSR against extra draft tokens at a constant budget.

    python benchmarks/paper/extra_tokens.py --trace out/traces/smollm2.safetensors --figure extra-tokens.png

C = N * k stays; TETRIS drafts k + extra tokens and verifies the C best. Without extra tokens every drafted token is
verified, which is SD.
"""

from __future__ import annotations

import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

from paper.drawing import arguments, axes_for, save, write  # noqa: E402
from paper.methods import Method  # noqa: E402
from paper.traces import Trace  # noqa: E402
from paper.trials import Load  # noqa: E402


def main(argv: list[str] | None = None) -> list[dict]:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=64, help="N")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--most", type=int, default=9, help="extra tokens, as far as the trace goes")
    parser.add_argument("--mixes", nargs="+", default=["conversation", "math_reasoning", "qa", "sonnet", "mix"])
    args = parser.parse_args(argv)
    trace = Trace.load(args.trace)
    records = []
    for mix in args.mixes:
        load = Load(trace, mix, tuple(args.drafter), args.rows, args.per_row, args.trials)
        for window in args.k:
            line = []
            for extra in range(min(args.most, (load.deepest or 99) - window) + 1):
                records.append(load.measured(Method("tetris", window, extra)))
                line.append("{:.3f}±{:.3f}".format(*records[-1]["vsr"]))
            print(f"{mix:>15}, k = {window}: {' '.join(line)}", flush=True)
    write(args.out, trace, "fig:extra_params", records)
    if args.figure:
        figure, axes = axes_for([f"k = {window}" for window in args.k], columns=2)
        for place, window in zip(axes, args.k, strict=False):
            for mix in args.mixes:
                some = [record for record in records if record["mix"] == mix and record["k"] == window]
                means, deviations = zip(*(record["vsr"] for record in some), strict=True)
                place.errorbar(
                    [record["extra"] for record in some], means, deviations, marker="o", markersize=3, label=mix
                )
            place.set(xlabel="extra draft tokens", ylabel="VSR")
        axes[0].legend(fontsize=7)
        save(figure, args.figure)
    return records


if __name__ == "__main__":
    main()
