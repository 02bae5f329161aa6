#!/usr/bin/env python3
"""Which estimate tells best whether a draft token will stand: AUC and calibration error, from real drafts.

    python benchmarks/estimators.py --prompts spec_bench.jsonl --drafter shallow --plot reliability.png
    python benchmarks/estimators.py --prompts spec_bench.jsonl --drafter shallow --sample

Every verified draft token whose predecessors stood is one observation. The estimates are those that a selector may see
before it decides: the largest probability (the paper's score when drafts are greedy), the margin of the largest two,
the expectation of q over itself (the sum of its squares: what the paper's score will be on average when drafts are
sampled), the entropy bound of AdaEDL, and `AcceptanceCalibration`, which learns while it is measured: each of its
estimates was made before its outcome was known. With `--sample`, drafts and text are drawn at temperature 1, and the
paper's own score is there too, the probability of the token that was drawn: a selector may not go by it. The AUC is
the chance that a token that stood was rated higher than one that did not; it does not change under a monotone map, so
a calibration can hardly raise it within one place. The calibration error is the mean distance between estimate and
share that stood, over ten equal parts of the estimates.
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
from tetris_hf.generation.draft import judged  # noqa: E402


ESTIMATES = ("largest probability", "margin of the top two", "expectation over q", "entropy bound", "calibrated")
DRAWN = "probability of the token drawn"


class Distributions:
    """
    Shows the drafter's distributions, of which a greedy draft holds the largest probability only.

    Args:
        drafter (`Drafter`): An [`AssistantDrafter`] or a [`MedusaDrafter`]. It goes on as it was, watched.
    """

    def __init__(self, drafter: tetris_hf.Drafter):
        self.seen: list[torch.Tensor] = []  # of the current step, (R, V) or (R, K, V) each
        if isinstance(drafter, tetris_hf.MedusaDrafter):
            drafter.heads.register_forward_hook(lambda heads, args, logits: self._note(logits.float().softmax(-1)))
            return
        begin = drafter.begin
        drafter.begin = lambda target, rows, vocab_size, processing: begin(
            target, rows, vocab_size, _Shown(processing, self._note)
        )

    def _note(self, distributions: torch.Tensor) -> None:
        self.seen.append(distributions)

    def take(self) -> torch.Tensor:
        """Those of the step, `(R, K, V)`."""
        seen, self.seen = self.seen, []
        return seen[0] if seen[0].dim() == 3 else torch.stack(seen, 1)


class _Shown:
    """Logits processing that shows the distributions it makes, and is in all else what it stands for."""

    def __init__(self, processing, note):
        self._processing = processing
        self._show = note

    def __call__(self, logits, rows, columns):
        scores = self._processing(logits, rows, columns)
        self._show(scores.softmax(-1))
        return scores

    def __getattr__(self, name):
        return getattr(self._processing, name)


def margin(distributions: torch.Tensor) -> torch.Tensor:
    """How much the largest probability is above the second, `(..., V)` to `(...)`."""
    largest = distributions.topk(2, dim=-1).values
    return largest[..., 0] - largest[..., 1]


class Recorder(tetris_hf.DraftSelector):
    """
    Verifies everything that the capacity allows and notes what each estimate said and what came of it.

    Args:
        distributions ([`Distributions`]): Those of the drafter.
        scale (`float`, *optional*, defaults to 0.2): Factor on the entropy in the bound.
    """

    needs_entropies = True

    def __init__(self, distributions: Distributions, scale: float = 0.2):
        self.distributions = distributions
        self.scale = scale
        self.calibration = tetris_hf.AcceptanceCalibration()
        self.rows: list[torch.Tensor] = []  # (n, 8): place, the estimates, the probability drawn, whether it stood

    def __call__(self, draft, lengths, capacity):
        return lengths

    def observe(self, verification):
        draft = verification.draft
        if draft.depth == 0:
            return
        q = self.distributions.take()  # (R, K, V)
        reached, stood = judged(verification.lengths, verification.num_accepted, draft.depth)  # (R, K) each
        columns = (
            torch.arange(draft.depth).expand_as(reached).float(),
            draft.expectations,
            margin(q),
            q.square().sum(-1),
            1 - (self.scale * draft.entropies).sqrt(),
            self.calibration(draft.expectations),
            draft.probabilities,
            stood.float(),
        )
        self.rows.append(torch.stack([column[reached].float() for column in columns], dim=1))
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
    parser.add_argument("--sample", action="store_true", help="temperature 1 instead of greedy")
    parser.add_argument("--plot", type=Path, help="write a reliability diagram (matplotlib)")
    args = parser.parse_args(arguments)
    transformers.utils.logging.set_verbosity_error()

    model, tokenizer = load(args.model, "cpu", torch.float32)
    drafter = shipped_drafter(args.drafter, model)
    drafter = drafter.as_drafter() if args.drafter == "medusa" else tetris_hf.AssistantDrafter(drafter)
    texts = first_turns(args.prompts, every=args.every) if args.prompts else PROMPTS
    batches = padded_batches(tokenizer, as_chat(tokenizer, texts), args.rows, args.batches, "cpu")
    recorder = Recorder(Distributions(drafter))
    tetris_hf.enable()
    settings = {"do_sample": False}
    if args.sample:
        torch.manual_seed(0)
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    for batch in batches:
        model.generate(
            **batch, **settings, max_new_tokens=args.max_new_tokens, assistant_model=drafter,
            tetris_capacity=args.rows * args.depth, num_assistant_tokens=args.depth, tetris_selector=recorder,
        )  # fmt: skip

    seen = torch.cat(recorder.rows)
    place, stood = seen[:, 0], seen[:, -1]
    names = (*ESTIMATES, DRAWN) if args.sample else ESTIMATES
    mode = "sampling" if args.sample else "greedy"
    print(f"{args.drafter}, {mode}: {len(seen)} tokens judged, {float(stood.mean()):.3f} stood")
    print(f"{'estimate':>30}    AUC  error  AUC by place")
    results = {}
    for column, name in enumerate(names, start=1):
        estimates = seen[:, column]
        by_place = [auc(estimates[place == k], stood[place == k]) for k in range(args.depth)]
        results[name] = {"auc": auc(estimates, stood), "error": calibration_error(estimates, stood)}
        print(
            f"{name:>30} {results[name]['auc']:>6.3f} {results[name]['error']:>6.3f}  "
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
        axes.set(xlabel="estimate", ylabel="share that stood", title=f"{args.drafter}, {mode}, {len(seen)} tokens")
        axes.legend()
        figure.savefig(args.plot, dpi=120, bbox_inches="tight")
    print(json.dumps({"drafter": args.drafter, "mode": mode, "tokens": len(seen), "results": results}))
    return results


if __name__ == "__main__":
    main()
