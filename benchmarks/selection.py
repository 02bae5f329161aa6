#!/usr/bin/env python3
"""Every rule of selection at equal capacity, on real drafts: VSR, TER, tokens per row and step.

    python benchmarks/selection.py --prompts spec_bench.jsonl --plot staircase.png

Greedy, so that all rules give the same text, which is checked. Prompts whose answer ends before `--max-new-tokens` are
left out, and only steps in which all rows are live are counted: at the end of a closed batch a rule that spends the
whole budget spends it on the few rows that are left, and equal C is not equal work any more. Counts do not depend on
the machine. What a rule costs the host is not measured here.

`C` is verified at most; a threshold verifies less, and `verified` says how much. The costs of the dynamic window are
numbers (`--token-cost`, against 1 for a step of the target), not measured ones. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers


ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from demo import PROMPTS, as_chat, load  # noqa: E402
from prompts import first_turns, padded_batches  # noqa: E402
from shipped import shipped_drafter  # noqa: E402

import tetris_hf  # noqa: E402


def rules(window: int, token_cost: float) -> dict[str, Callable[[Any], tetris_hf.DraftSelector]]:
    """A fresh selector of each rule, given a finished run; thresholds are those of the papers or near them."""
    tetris, by_confidence, by_entropy = (
        tetris_hf.TetrisSelector,
        tetris_hf.ConfidenceThresholdSelector,
        tetris_hf.EntropySelector,
    )
    return {
        "fixed window": lambda run: tetris_hf.FixedWindowSelector(window),
        "dynamic window": lambda run: tetris_hf.DynamicWindowSelector(token_cost),
        "confidence .3": lambda run: by_confidence(0.3),
        "confidence .6": lambda run: by_confidence(0.6),
        "entropy .4": lambda run: by_entropy(0.4),
        "union of .6 and .4": lambda run: tetris_hf.UnionSelector([by_confidence(0.6), by_entropy(0.4)]),
        "TETRIS": lambda run: tetris(),
        "TETRIS, calibrated": lambda run: tetris(calibration=tetris_hf.AcceptanceCalibration()),
        "oracle": lambda run: tetris_hf.OracleSelector(run),
    }


def full_steps(history: tetris_hf.StepHistory, num_rows: int) -> list[tetris_hf.Staircase]:
    """Steps in which no row had ended."""
    return [step for step in history.steps if len(step.rows) == num_rows]


def summary(steps: list[tetris_hf.Staircase]) -> dict[str, float]:
    """
    The paper's ratios over some steps, in each of which every row gains one bonus token.

    Returns:
        `dict[str, float]`: `vsr` (`nan` if nothing was verified), `ter`, `tokens` per row and step, `verified` per row
        and step, number of `steps`.
    """
    rows = sum(len(step.rows) for step in steps)
    verified = sum(sum(step.verified) for step in steps)
    accepted = sum(sum(step.accepted) for step in steps)
    return {
        "vsr": accepted / verified if verified else float("nan"),
        "ter": (accepted + rows) / (verified + rows),
        "tokens": 1 + accepted / rows,
        "verified": verified / rows,
        "steps": len(steps),
    }


def long_answers(model: Any, tokenizer: Any, texts: list[str], wanted: int, limit: int, num_rows: int) -> list[str]:
    """The first `wanted` prompts whose greedy answer does not end within `limit` tokens."""
    found: list[str] = []
    for start in range(0, len(texts), num_rows):
        part = texts[start : start + num_rows]
        batch = padded_batches(tokenizer, part, len(part), 1, model.device)[0]
        out = model.generate(
            **batch, do_sample=False, max_new_tokens=limit, tetris_capacity=0, return_dict_in_generate=True
        )
        found += [
            text for text, added in zip(part, out.tetris_stats.bonus.tolist(), strict=True) if added + 1 == limit
        ]
        if len(found) >= wanted:
            return found[:wanted]
    raise SystemExit(f"Only {len(found)} answers reach {limit} tokens: lower --rows, --batches or --max-new-tokens.")


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="Spec-Bench as JSON lines (default: the demo's prompts)")
    parser.add_argument("--every", type=int, default=5, help="take every n-th of the prompts in the file")
    parser.add_argument("--model", help="hub id or folder (default: bundled SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", choices=("shallow", "medusa"), default="shallow")
    parser.add_argument("--rows", type=int, default=16, help="N")
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--depth", type=int, default=4, help="K")
    parser.add_argument("--window", type=int, nargs="+", default=[1, 2], help="C / N")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--token-cost", type=float, default=0.01, help="of the dynamic window")
    parser.add_argument("--plot", type=Path, help="draw one step of three rules (matplotlib)")
    args = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()

    model, tokenizer = load(args.model, "cpu", torch.float32)
    drafter = shipped_drafter(args.drafter, model)
    tetris_hf.enable()
    texts = as_chat(tokenizer, first_turns(args.prompts, every=args.every) if args.prompts else list(PROMPTS))
    texts = long_answers(model, tokenizer, texts, args.rows * args.batches, args.max_new_tokens, args.rows)
    batches = padded_batches(tokenizer, texts, args.rows, args.batches, model.device)
    settings = {"do_sample": False, "max_new_tokens": args.max_new_tokens, "return_dict_in_generate": True}
    runs = [model.generate(**batch, **settings, tetris_capacity=0) for batch in batches]

    results, drawn = [], {}
    print(f"{args.drafter}, N = {args.rows}, K = {args.depth}, {len(batches)} batches")
    print(f"{'rule':>20} C/N verified    VSR    TER tok/step  steps")
    for window in args.window:
        for name, make in rules(window, args.token_cost).items():
            selector, steps = None, []
            for batch, run in zip(batches, runs, strict=True):
                # What a rule learns stays from batch to batch; the oracle knows one batch.
                if selector is None or isinstance(selector, tetris_hf.OracleSelector):
                    selector = make(run)
                history = tetris_hf.StepHistory()
                out = model.generate(
                    **batch, **settings, assistant_model=drafter, tetris_capacity=window * args.rows,
                    num_assistant_tokens=args.depth, tetris_selector=[selector, history],
                )  # fmt: skip
                if not torch.equal(out.sequences, run.sequences):
                    raise SystemExit(f"{name} changed the text: this is a bug in tetris_hf.")
                steps += full_steps(history, args.rows)
            results.append({"rule": name, "window": window, **summary(steps)})
            drawn[name] = steps
            one = results[-1]
            print(
                f"{name:>20} {window:>3} {one['verified']:>8.2f} {one['vsr']:>6.3f} {one['ter']:>6.3f} "
                f"{one['tokens']:>8.3f} {one['steps']:>6}",
                flush=True,
            )
    if args.plot is not None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        shown = ("fixed window", "TETRIS", "oracle")
        figure, axes = pyplot.subplots(1, len(shown), figsize=(4 * len(shown), 1.2 + 0.16 * args.rows))
        for place, name in zip(axes, shown, strict=True):
            step = drawn[name][min(4, len(drawn[name]) - 1)]
            step.plot(place).set_title(f"{name}, {step.title[0].lower()}{step.title[1:]}", fontsize=8)
        figure.savefig(args.plot, dpi=120, bbox_inches="tight")
    print(json.dumps({"drafter": args.drafter, "rows": args.rows, "depth": args.depth, "results": results}))
    return results


if __name__ == "__main__":
    main()
