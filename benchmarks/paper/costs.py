#!/usr/bin/env python3
"""Seconds of a step by rows, drafter, depth and verified tokens, measured once: what projections are made of.

    python benchmarks/paper/costs.py --target 7b --out benchmarks/results/paper-costs.jsonl --device cuda

Each record is one captured step of the real engine, timed on the device (`TetrisStats.step_seconds`). The stages
`verify` and `commit` depend on rows and verified tokens, `propose` on rows, drafter and depth.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import numpy  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402


STAGES = ("propose", "select", "verify", "commit")


@dataclass(frozen=True)
class StepCosts:
    """
    Seconds of a step, straight lines between what was measured.

    Attributes:
        records (`list[dict]`): What `main` wrote: `rows`, `drafter`, `K`, `C` and the seconds of the stages.
        free_drafts (`bool`): Whether drafting is taken to cost nothing, as if it were hidden behind the target.
    """

    records: list[dict[str, Any]]
    free_drafts: bool = False

    @classmethod
    def load(cls, path: Path, free_drafts: bool = False) -> StepCosts:
        """Read the JSON lines of one or several runs; of `throughput.py`, those that tell the stages of a step."""
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        records = [record | (record.get("step_seconds") or {}) for record in records]
        return cls([record for record in records if all(stage in record for stage in STAGES)], free_drafts)

    def target(self, num_rows: int, verified: float) -> float:
        """Seconds of verifying `verified` drafts of N rows and committing, selection included."""
        points: dict[int, list[float]] = {}
        for record in self._of(num_rows):
            points.setdefault(record["C"], []).append(sum(record[stage] for stage in STAGES[1:]))
        return _between({size: min(seconds) for size, seconds in points.items()}, verified)

    def draft(self, num_rows: int, drafters: Sequence[str], depth: float) -> float:
        """Seconds of drafting `depth` places with every one of the drafters."""
        total = 0.0
        for drafter in () if self.free_drafts else drafters:
            points = {record["K"]: record["propose"] for record in self._of(num_rows) if record["drafter"] == drafter}
            if not points:
                raise ValueError(f"The costs have no drafter {drafter!r} at N = {num_rows}: measure it.")
            total += _between({0: 0.0, **points}, depth)
        return total

    def slopes(self, num_rows: int, drafters: Sequence[str], depth: int, capacity: int) -> dict[str, float]:
        """The arguments of [`DynamicWindowSelector`] that fit these costs up to K and C."""
        base = self.target(num_rows, 0)
        token = (self.target(num_rows, capacity) - base) / capacity
        return {
            "token_cost": max(0.0, token),
            "base_cost": max(0.0, base - token * num_rows),
            "draft_cost": self.draft(num_rows, drafters, depth) / depth,
        }

    def _of(self, num_rows: int) -> list[dict[str, Any]]:
        found = [record for record in self.records if record["rows"] == num_rows]
        if not found:
            sizes = sorted({record["rows"] for record in self.records})
            raise ValueError(f"The costs have no N = {num_rows}, only {sizes}: measure it, or choose one of these.")
        return found


def _between(points: dict[int, float], at: float) -> float:
    """On the straight line between the two nearest points, or beyond the last ones."""
    sizes = sorted(points)
    if at > sizes[-1] and len(sizes) > 1:
        last, before = sizes[-1], sizes[-2]
        return points[last] + (at - last) * (points[last] - points[before]) / (last - before)
    return float(numpy.interp(at, sizes, [points[size] for size in sizes]))


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    from demo import PROMPTS, as_chat
    from prompts import first_turns, padded_batches
    from records import report
    from throughput import describe, load_drafters, load_target
    from throughput import parse as parse_shared

    import tetris_hf

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 32, 16], help="N")
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3, 4, 5, 8], help="K, with C = N * K")
    parser.add_argument("--new-tokens", type=int, default=16)
    args, rest = parser.parse_known_args(argv)
    shared = parse_shared(rest)
    transformers.utils.logging.set_verbosity_error()
    target, small, tokenizer = load_target(shared)
    drafters = load_drafters(shared, target, small)
    described = describe(shared, target)
    texts = as_chat(
        tokenizer, first_turns(shared.prompts, shared.max_characters, shared.every) if shared.prompts else PROMPTS
    )
    if shared.device.startswith("cuda"):
        torch._dynamo.config.recompile_limit = 64
    tetris_hf.enable()
    records = []
    for num_rows in args.rows:
        (batch,) = padded_batches(tokenizer, list(texts), num_rows, 1, target.device)
        deepest = {name: getattr(getattr(d, "config", None), "medusa_num_heads", 99) for name, d in drafters.items()}
        wanted: list[tuple[str | None, int]] = [(None, 0)]
        wanted += [(name, depth) for name in drafters for depth in args.depths if depth <= deepest[name]]
        for name, depth in wanted:
            settings: dict[str, Any] = {"tetris_capacity": num_rows * depth}
            if name is not None:
                settings |= {"assistant_model": drafters[name], "num_assistant_tokens": depth}
            stages = []
            for _ in range(4):  # the first captures
                out = target.generate(
                    **batch, **settings, do_sample=False, max_new_tokens=args.new_tokens, return_dict_in_generate=True
                )
                stats = out.tetris_stats
                steps = max(1, stats.steps)
                stages.append(
                    stats.step_seconds or {name: stats.seconds.get(name, 0.0) / steps for name in ("propose", *STAGES)}
                )
            record = {"run": described, "rows": num_rows, "drafter": name, "K": depth, "C": num_rows * depth}
            record |= {stage: sorted(one.get(stage, 0.0) for one in stages[1:])[1] for stage in STAGES}
            records.append(record)
            report(record, shared.out)
    return records


if __name__ == "__main__":
    main()
