#!/usr/bin/env python3
"""fig:batch-size-TER-appendix: VSR and TER of SD and TETRIS at N = 16, 32 and 64.

python benchmarks/paper/batch_sizes.py --trace out/traces/smollm2.safetensors --figure batch-sizes.png
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
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 8, 16, 32, 64, 128], help="N")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--extra", type=int, default=3)
    parser.add_argument("--mix", default="all")
    args = parser.parse_args(argv)
    trace, records = Trace.load(args.trace), []
    print(f"{args.mix}, {'+'.join(args.drafter)}: VSR and TER of SD and of TETRIS, and the gain in percent")
    for num_rows in args.rows:
        # As many requests at every N, so that the deviations can be compared.
        per_row = max(3, args.per_row * max(args.rows) // num_rows)
        load = Load(trace, args.mix, tuple(args.drafter), num_rows, per_row, args.trials)
        for k in args.k:
            pair = [load.measured(method) for method in (Method("sd", k), Method("tetris", k, args.extra))]
            records += pair
            shown = []
            for value in ("vsr", "ter"):
                (sd, sd_off), (ours, ours_off) = (record[value] for record in pair)
                shown.append(
                    f"{value.upper()} {sd:.3f}±{sd_off:.3f} {ours:.3f}±{ours_off:.3f} {100 * (ours / sd - 1):+.1f} %"
                )
            print(f"N = {num_rows:>3}, k = {k}: " + ", ".join(shown), flush=True)
    write(args.out, trace, "fig:batch-size-TER-appendix", records)
    if args.figure:
        figure, axes = axes_for(["VSR", "TER"], columns=2)
        for place, value in zip(axes, ("vsr", "ter"), strict=True):
            for k in args.k:
                for method, style in (("sd", "--"), ("tetris", "-")):
                    some = [record for record in records if record["k"] == k and record["method"] == method]
                    means, deviations = zip(*(record[value] for record in some), strict=True)
                    label = f"{'SD' if method == 'sd' else 'TETRIS'}, k = {k}"
                    place.errorbar(
                        args.rows, means, deviations, linestyle=style, color=f"C{k}", marker=".", label=label
                    )
            place.set(xlabel="N, rows of the batch", ylabel=value.upper(), xscale="log")
            place.set_xticks(args.rows, labels=map(str, args.rows))
            place.minorticks_off()
        axes[0].legend(fontsize=7)
        save(figure, args.figure)
    return records


if __name__ == "__main__":
    main()
