#!/usr/bin/env python3
"""The selection rule of the paper biases sampling, the one here does not: a simulation (docs/algorithm.md).

    python benchmarks/paper/bias.py --figure docs/bias.png

Rows with one draft token each compete for a budget. Scores and rejection sampling are the library's own; the two
models are replaced by distributions over four tokens: once two rows with the same drafter, once N rows of which every
second has a surer one.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import torch  # noqa: E402

from paper.drawing import axes_for, save  # noqa: E402
from tetris_hf import Draft  # noqa: E402
from tetris_hf.generation.rejection import rejection_sample, sample  # noqa: E402


P = torch.tensor([0.3, 0.3, 0.2, 0.2])
Q = torch.tensor([0.55, 0.25, 0.15, 0.05])
# A drafter that is surer in every second row, so that a score that is blind to the token has something to choose by.
SURER = torch.tensor([0.1, 0.8, 0.05, 0.05])
RULES = {"paper": "the paper's score", "predictable": "the score here"}


def first_tokens(rule: str, drafts: list[torch.Tensor], capacity: int, batches: int) -> torch.Tensor:
    """
    How often each token comes first, over all rows of all batches.

    Args:
        rule (`str`): The score of [`TetrisSelector`], `"paper"` or `"predictable"`.
        drafts (`list[torch.FloatTensor]` of shape `(V,)` each): q of every row of a batch; these rows compete.
        capacity (`int`): C, draft tokens verified in each batch.
        batches (`int`): Independent batches.

    Returns:
        `torch.LongTensor` of shape `(V,)`.
    """
    rows, size = len(drafts), len(P)
    total = rows * batches
    q = torch.stack(drafts).repeat(batches, 1)[:, None]  # (R, 1, V)
    tokens = sample(q[:, 0])[:, None]  # (R, 1)
    draft = Draft(tokens, torch.ones(total, dtype=torch.long), q[:, 0].gather(1, tokens), q.amax(-1), q)
    scores = draft.prefix_scores(predictable=rule == "predictable").view(batches, rows)
    # The C best of every batch. Ties go to chance, which is a draw of its own.
    order = torch.rand(batches, rows).argsort(1)
    best = scores.gather(1, order).argsort(dim=1, descending=True, stable=True)[:, :capacity]
    lengths = torch.zeros(batches, rows, dtype=torch.long).scatter_(1, order.gather(1, best), 1).flatten()  # (R,)
    accepted = rejection_sample(P.expand(2 * total, size), q, tokens, lengths, 2 * torch.arange(total))
    return torch.bincount(accepted.tokens[:, 0], minlength=size)


def distance(counts: torch.Tensor) -> float:
    """Total variation between the counted law and the target's."""
    return float((counts / counts.sum() - P).abs().sum() / 2)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=2_000_000, help="first tokens of each rule")
    parser.add_argument("--rows", type=int, default=32, help="rows of a batch in the second drawing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--figure", type=Path, help="PNG (matplotlib)")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    laws = {rule: first_tokens(rule, [Q, Q], 1, args.draws // 2) for rule in RULES}
    for rule, counts in laws.items():
        shares = ", ".join(f"{share:.4f}" for share in (counts / counts.sum()).tolist())
        chi_square = float(((counts - P * counts.sum()) ** 2 / (P * counts.sum())).sum())
        print(f"two rows, C = 1, {RULES[rule]}: ({shares}), chi-square {chi_square:.1f} with 3 degrees of freedom")
    ratios = [1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1]
    batches = args.draws // args.rows
    drafts = [SURER if row % 2 else Q for row in range(args.rows)]
    distances = {
        rule: [distance(first_tokens(rule, drafts, round(ratio * args.rows), batches)) for ratio in ratios]
        for rule in RULES
    }
    for rule, values in distances.items():
        shown = " ".join(f"{value:.4f}" for value in values)
        print(f"{args.rows} rows, total variation at C / N of 1/8 to 1, {RULES[rule]}: {shown}")
    if args.figure:
        figure, (left, right) = axes_for(["first token, two rows, C = 1", f"N = {args.rows}"], columns=2)
        places = torch.arange(len(P))
        bars = {"target p": P, **{RULES[rule]: counts / counts.sum() for rule, counts in laws.items()}}
        for number, (name, law) in enumerate(bars.items()):
            left.bar(places + 0.27 * (number - 1), law, 0.25, label=name, color=("0.5", "C3", "C0")[number])
        left.set(xlabel="token", ylabel="share", xticks=places.tolist())
        left.legend(fontsize=8)
        for rule, color in (("paper", "C3"), ("predictable", "C0")):
            right.plot(ratios, distances[rule], marker="o", color=color, label=RULES[rule])
        right.set(xlabel="C / N", ylabel="total variation from p", ylim=(-0.003, None))
        right.legend(fontsize=8)
        save(figure, args.figure)
    found = {
        "laws": {rule: (counts / counts.sum()).tolist() for rule, counts in laws.items()},
        "distances": distances,
        "draws": args.draws,
    }
    print(json.dumps(found))
    return found


if __name__ == "__main__":
    main()
