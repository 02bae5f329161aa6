#!/usr/bin/env python3
"""fig:accepted_tokens: how many drafts of a step stand if all are verified, by set: the window that would be right.

    python benchmarks/paper/accepted_tokens.py --trace out/traces/smollm2.safetensors --figure accepted-tokens.png

Every text is walked from its start: a step verifies all K drafts at its place, and the next step begins behind what
stood and the bonus token.
"""

from __future__ import annotations

import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import torch  # noqa: E402

from paper.drawing import arguments, axes_for, save, write  # noqa: E402
from paper.traces import Trace  # noqa: E402


def walk(stands: torch.Tensor, end: int) -> list[int]:
    """
    Accepted drafts of every step of one text.

    Args:
        stands (`torch.LongTensor` of shape `(M - 1,)`): Drafts that stand at every place.
        end (`int`): Tokens of the text, the first of which belongs to no step.
    """
    accepted, done = [], 1
    while done < end:
        count = min(int(stands[done - 1]), end - done)
        accepted.append(count)
        done += count + 1
    return accepted


def distribution(trace: Trace, drafter: str, name: str) -> list[float]:
    """Share of the steps in which 0, 1, ..., K drafts stand, over the prompts of a set."""
    stands, deepest = trace.stands(drafter), int(trace.drafts[drafter].lengths.max())
    steps = [count for prompt in trace.of(name) for count in walk(stands[prompt], int(trace.ends[prompt]))]
    return (torch.bincount(torch.tensor(steps), minlength=deepest + 1) / len(steps)).tolist()


def main(argv: list[str] | None = None) -> list[dict]:
    args = arguments(__doc__).parse_args(argv)
    trace = Trace.load(args.trace)
    records = [
        {"drafter": drafter, "mix": name, "shares": distribution(trace, drafter, name)}
        for drafter in args.drafter
        for name in dict.fromkeys(trace.sets)
    ]
    for record in records:
        shares = record["shares"]
        record["mean"] = sum(count * share for count, share in enumerate(shares))
        deviation = sum(share * (count - record["mean"]) ** 2 for count, share in enumerate(shares)) ** 0.5
        record["deviation"] = deviation
        print(
            f"{record['drafter']:>10} {record['mix']:>15} mean {record['mean']:.2f}, deviation {deviation:.2f}: "
            + " ".join(f"{share:.3f}" for share in shares)
        )
    write(args.out, trace, "fig:accepted_tokens", records)
    if args.figure:
        figure, axes = axes_for(args.drafter)
        for place, drafter in zip(axes, args.drafter, strict=False):
            for record in records:
                if record["drafter"] == drafter:
                    place.plot(record["shares"], marker="o", markersize=3, label=record["mix"])
            place.set(xlabel="accepted drafts of a step", ylabel="share of the steps")
            place.legend(fontsize=7)
        save(figure, args.figure)
    return records


if __name__ == "__main__":
    main()
