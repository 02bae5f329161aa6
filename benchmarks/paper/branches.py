#!/usr/bin/env python3
"""Captured steps that leave out places which no row can use, against the same steps that draft every place.

    python benchmarks/paper/branches.py --target 7b --prompts spec_bench.jsonl --device cuda --out branches.jsonl

Needs torch 2.13 and CUDA 12.4 (`can_branch`). Both must say the same in greedy calls and in seeded ones. Calls are
short and few, so beside their seconds stand the forwards of the assistant and the device time of one step's draft.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import transformers  # noqa: E402
from records import report  # noqa: E402
from throughput import describe, load_drafters, load_target  # noqa: E402
from throughput import parse as parse_shared  # noqa: E402

import tetris_hf  # noqa: E402
from paper.prompt_sets import prompt_sets  # noqa: E402
from paper.throughput import mixed_prompts, served_order  # noqa: E402
from tetris_hf.generation import step_cache  # noqa: E402


WAYS = ("every place", "branches")


@contextmanager
def steps_that(way: str) -> Iterator[None]:
    """Within this context, newly captured steps draft every place, or leave places out as they do by themselves."""
    before = step_cache.can_branch
    if way == "every place":
        step_cache.can_branch = lambda device: False
    try:
        yield
    finally:
        step_cache.can_branch = before


def compare(
    target: Any, drafter: Any, batches: list[dict[str, torch.Tensor]], k: int, depth: int, **given: Any
) -> dict[str, Any]:
    """
    Time calls of `generate` in both ways.

    Args:
        target (`PreTrainedModel`): The target.
        drafter (`Any`): What `assistant_model` takes.
        batches (`list[dict[str, torch.Tensor]]`): Padded prompts, a call for each of them; one more call warms up.
        k (`int`): C = N * k.
        depth (`int`): K.
        given (`Any`): Other arguments of `generate`.
    """
    texts: dict[str, list[torch.Tensor]] = {way: [] for way in WAYS}
    counts = {way: {"seconds": [], "steps": [], "draft_forwards": [], "propose_ms": []} for way in WAYS}
    for way in WAYS:
        tetris_hf.release_graphs(target)
        for number, batch in enumerate([batches[0], *batches]):
            capacity = k * len(batch["input_ids"])
            settings = {"assistant_model": drafter, "tetris_capacity": capacity, "num_assistant_tokens": depth}
            start = time.perf_counter()
            with steps_that(way):
                out = target.generate(**batch, **settings, return_dict_in_generate=True, **given)
            found = out.sequences.cpu()  # waits for the device
            if number == 0:
                continue
            stats = out.tetris_stats
            texts[way].append(found)
            counts[way]["seconds"].append(time.perf_counter() - start)
            counts[way]["steps"].append(stats.steps)
            counts[way]["draft_forwards"].append(stats.draft_forwards)
            counts[way]["propose_ms"].append(1000 * stats.step_seconds.get("propose", 0.0))
    every, branches = (counts[way]["seconds"] for way in WAYS)
    same = [torch.equal(*pair) for pair in zip(*texts.values(), strict=True)]
    return {"same": same, **counts, "speedup": statistics.median(a / b for a, b in zip(every, branches, strict=True))}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16], help="N")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2], help="C = N * k")
    parser.add_argument("--extras", type=int, nargs="+", default=[2, 3], help="K = k + extra")
    parser.add_argument("--seed", type=int, help="sample with this `tetris_seed` instead of decoding greedily")
    args, rest = parser.parse_known_args(argv)
    shared = parse_shared(rest)
    if shared.prompts is None:
        parser.error("--prompts names Spec-Bench's file")
    transformers.utils.logging.set_verbosity_error()
    shared.drafters = ["shallow"]
    target, small, tokenizer = load_target(shared)
    drafter = load_drafters(shared, target, small)["shallow"]
    described, records = describe(shared, target), []
    print(json.dumps(described), flush=True)
    prompts = mixed_prompts(prompt_sets(shared.prompts, 80, shared.max_characters), "spec-bench", tokenizer)
    tetris_hf.enable()
    given: dict[str, Any] = {"do_sample": args.seed is not None, "max_new_tokens": shared.max_new_tokens}
    if args.seed is not None:
        given["tetris_seed"] = args.seed
    for num_rows in args.rows:
        batches = []
        for trial in range(shared.repeats):
            served = served_order(prompts, num_rows + 1, trial)[1:]
            padded = tokenizer.pad({"input_ids": served}, padding_side="left", return_tensors="pt")
            batches.append(padded.to(target.device))
        for k in args.k:
            for extra in args.extras:
                record = {"run": described, "rows": num_rows, "k": k, "extra": extra, "seed": args.seed}
                record |= compare(target, drafter, batches, k, k + extra, **given)
                records.append(record)
                report(record, shared.out)
    return records


if __name__ == "__main__":
    main()
