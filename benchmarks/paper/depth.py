#!/usr/bin/env python3
"""How many places a step drafts if the whole batch stops as soon as no row can still enter the budget.

    python benchmarks/paper/depth.py --trace out/traces/smollm2.safetensors --out depth.jsonl

Eager steps stop by this rule (`DraftSelector.wants_deeper`), captured ones where it spares more than it costs. A trace
has all places, so the rule is asked afterwards, place by place, in every step of a replay.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import torch  # noqa: E402

import tetris_hf  # noqa: E402
from paper.drawing import arguments, write  # noqa: E402
from paper.replay import replay  # noqa: E402
from paper.traces import Trace  # noqa: E402
from paper.trials import Load, mean_and_deviation  # noqa: E402


class StoppingSelector(tetris_hf.TetrisSelector):
    """[`TetrisSelector`] that notes the places of every step: those at which somebody has room, and those needed."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[tuple[int, int]] = []

    def __call__(self, draft: tetris_hf.Draft, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
        possible = min(draft.depth, int(draft.lengths.max()))
        needed = next((place for place in range(1, possible) if not self._wants(draft, place, capacity)), possible)
        self.places.append((possible, needed))
        return super().__call__(draft, lengths, capacity)

    def _wants(self, draft: tetris_hf.Draft, place: int, capacity: int) -> bool:
        """What the rule says when the first `place` places are drafted."""
        shallow = replace(
            draft,
            tokens=draft.tokens[:, :place],
            probabilities=draft.probabilities[:, :place],
            expectations=draft.expectations[:, :place],
        )
        return self.wants_deeper(shallow, capacity)


def measured(load: Load, k: int, extra: int) -> dict:
    """Places of a step with and without the rule, mean and deviation over trials, and the share that it saves."""
    possible, needed = [], []
    for trial in range(load.trials):
        selector = StoppingSelector()
        replay(load.trace, load.requests(trial), load.drafters, load.num_rows, load.num_rows * k, k + extra, selector)
        places = torch.tensor(selector.places).float().mean(0)
        possible.append(float(places[0]))
        needed.append(float(places[1]))
    return {
        "drafter": "+".join(load.drafters), "rows": load.num_rows, "k": k, "extra": extra,
        "possible": mean_and_deviation(possible), "needed": mean_and_deviation(needed),
        "saved": 1 - sum(needed) / sum(possible),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> list[dict]:
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="N")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4], help="C = N * k")
    parser.add_argument("--extras", type=int, nargs="+", default=[1, 2, 3], help="K = k + extra")
    parser.add_argument("--mix", default="all")
    args = parser.parse_args(argv)
    if args.figure:
        parser.error("--figure: this is a table")
    trace, records = Trace.load(args.trace), []
    for num_rows in args.rows:
        # As many requests at every N, but three a row at least.
        per_row = max(3, args.per_row * max(args.rows) // num_rows)
        load = Load(trace, args.mix, tuple(args.drafter), num_rows, per_row, args.trials)
        for k in args.k:
            some = [measured(load, k, extra) for extra in args.extras]
            records += some
            shown = (f"{one['needed'][0]:.2f} of {one['possible'][0]:.2f} ({one['saved']:.1%})" for one in some)
            print(f"N = {num_rows:>3}, k = {k}, {args.extras} extra: " + ", ".join(shown), flush=True)
    write(args.out, trace, "depth", records)
    return records


if __name__ == "__main__":
    main()
