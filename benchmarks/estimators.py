#!/usr/bin/env python3
"""Which estimate tells best whether a draft token will stand: AUC and calibration error, from real drafts.

    python benchmarks/estimators.py --prompts spec_bench.jsonl --drafter shallow --plot reliability.png

Every verified draft token whose predecessors stood is one observation. The estimates are those that a selector may
see before it decides: the largest probability (the paper's score when drafts are greedy), the entropy bound of AdaEDL,
and `AcceptanceCalibration`, which learns while it is measured: each of its estimates was made before its outcome was
known. The AUC is the chance that a token that stood was rated higher than one that did not; it does not change under a
monotone map, so a calibration can hardly raise it within one place. The calibration error is the mean distance between
estimate and share that stood, over ten equal parts of the estimates.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers


ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from demo import PROMPTS, as_chat, load  # noqa: E402
from prompts import first_turns, padded_batches  # noqa: E402
from scipy.stats import rankdata  # noqa: E402
from shipped import shipped_drafter  # noqa: E402

import tetris_hf  # noqa: E402


class Recorder(tetris_hf.DraftSelector):
    """Verifies everything that the capacity allows and notes what each estimate said and what came of it."""

    needs_entropies = True

    def __init__(self, scale: float = 0.2):
        self.scale = scale
        self.calibration = tetris_hf.AcceptanceCalibration()
        self.rows: list[torch.Tensor] = []  # (n, 5): place, three estimates, whether it stood

    def __call__(self, draft, lengths, capacity):
        return lengths

    def observe(self, verification):
        draft = verification.draft
        if draft.depth == 0:
            return
        places = torch.arange(draft.depth)
        accepted = torch.minimum(verification.num_accepted, verification.lengths)[:, None]
        judged = (places < verification.lengths[:, None]) & (places <= accepted)  # (R, K)
        bound = 1 - (self.scale * draft.entropies).sqrt()
        columns = (
            places.expand_as(judged).float(),
            draft.expectations,
            bound,
            self.calibration(draft.expectations),
            (places < accepted).float(),
        )
        self.rows.append(torch.stack([column[judged].float() for column in columns], dim=1))
        self.calibration.observe(verification)


def auc(estimates: torch.Tensor, stood: torch.Tensor) -> float:
    """Chance that a positive is rated above a negative, ties counted half (Mann-Whitney)."""
    positives = int(stood.sum())
    negatives = len(stood) - positives
    ranks = torch.from_numpy(rankdata(estimates.numpy()))
    return float((ranks[stood.bool()].sum() - positives * (positives + 1) / 2) / max(1, positives * negatives))


def reliability(estimates: torch.Tensor, stood: torch.Tensor, parts: int = 10) -> list[tuple[float, float, int]]:
    """Mean estimate, share that stood and number of tokens, for equal parts of the tokens in order of the estimate."""
    order = estimates.argsort()
    return [
        (float(estimates[part].mean()), float(stood[part].mean()), len(part))
        for part in order.tensor_split(parts)
        if len(part)
    ]


def calibration_error(estimates: torch.Tensor, stood: torch.Tensor) -> float:
    """Mean distance between estimate and share, weighted by tokens."""
    parts = reliability(estimates, stood)
    return sum(abs(mean - share) * count for mean, share, count in parts) / max(1, len(stood))


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="Spec-Bench as JSON lines (default: the demo's 16 prompts)")
    parser.add_argument("--every", type=int, default=5, help="take every n-th of the prompts in the file")
    parser.add_argument("--model", help="hub id or folder (default: bundled SmolLM2-135M-Instruct)")
    parser.add_argument("--drafter", choices=("shallow", "medusa"), default="shallow")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--batches", type=int, default=2)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--plot", type=Path, help="write a reliability diagram (matplotlib)")
    args = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()

    model, tokenizer = load(args.model, "cpu", torch.float32)
    drafter = shipped_drafter(args.drafter, model)
    texts = first_turns(args.prompts, every=args.every) if args.prompts else PROMPTS
    batches = padded_batches(tokenizer, as_chat(tokenizer, texts), args.rows, args.batches, "cpu")
    recorder = Recorder()
    tetris_hf.enable()
    for batch in batches:
        model.generate(
            **batch, do_sample=False, max_new_tokens=args.max_new_tokens, assistant_model=drafter,
            tetris_capacity=args.rows * args.depth, num_assistant_tokens=args.depth, tetris_selector=recorder,
        )  # fmt: skip

    seen = torch.cat(recorder.rows)
    place, stood = seen[:, 0], seen[:, 4]
    names = ("largest probability", "entropy bound", "calibrated")
    print(f"{args.drafter}: {len(seen)} tokens judged, {float(stood.mean()):.3f} stood")
    print(f"{'estimate':>20}    AUC  error  AUC by place")
    results = {}
    for column, name in enumerate(names, start=1):
        estimates = seen[:, column]
        by_place = [auc(estimates[place == k], stood[place == k]) for k in range(args.depth)]
        results[name] = {"auc": auc(estimates, stood), "error": calibration_error(estimates, stood)}
        print(
            f"{name:>20} {results[name]['auc']:>6.3f} {results[name]['error']:>6.3f}  "
            + " ".join(f"{value:.3f}" for value in by_place)
        )
    if args.plot is not None:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(5, 5))
        axes.plot([0, 1], [0, 1], color="grey", linewidth=1)
        for column, name in enumerate(names, start=1):
            parts = reliability(seen[:, column], stood)
            axes.plot([part[0] for part in parts], [part[1] for part in parts], marker="o", label=name)
        axes.set(xlabel="estimate", ylabel="share that stood", title=f"{args.drafter}, {len(seen)} tokens")
        axes.legend()
        figure.savefig(args.plot, dpi=120, bbox_inches="tight")
    print(json.dumps({"drafter": args.drafter, "tokens": len(seen), "results": results}))
    return results


if __name__ == "__main__":
    main()
