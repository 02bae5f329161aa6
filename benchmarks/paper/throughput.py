#!/usr/bin/env python3
"""fig:throughput-all, tab:latency-all, tab:ablation-medusa, timed: SD, DSD and TETRIS in a batch that is held full.

    python benchmarks/paper/throughput.py --target 7b --prompts spec_bench.jsonl --out results.jsonl --device cuda

The real engine (`generate_batch`), requests taking the place of those that end, as in the paper's setting of a
constant load. Of each trial the middle is timed: from the N-th answer to the N-th last but one, in which the batch is
full and requests come and go, prefills included. Latency is the mean time from the row of an answer to its end; p50
and p95 are over all trials. Every trial has its own shuffle of the prompts, the same for all settings; given
are the median of the trials and all of them. What matters most comes first, and nothing new is begun after
`--time-limit`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import transformers  # noqa: E402
from demo import as_chat  # noqa: E402
from measurement import first_line  # noqa: E402
from records import report  # noqa: E402
from throughput import describe, load_drafters, load_target  # noqa: E402
from throughput import parse as parse_shared  # noqa: E402

import tetris_hf  # noqa: E402
from paper.costs import StepCosts  # noqa: E402
from paper.methods import USUAL_COSTS, Method, methods  # noqa: E402
from paper.prompt_sets import MIXES, prompt_sets  # noqa: E402


def mixed_prompts(chosen: dict[str, list[str]], mix: str, tokenizer: Any) -> list[list[int]]:
    """Token ids of the prompts `chosen` for each set, of those sets that a mix has, or of one."""
    texts = [text for name in MIXES.get(mix, (mix,)) for text in chosen[name]]
    return tokenizer(as_chat(tokenizer, texts), add_special_tokens=False)["input_ids"]


def served_order(prompts: list[list[int]], count: int, seed: int) -> list[list[int]]:
    """`count` prompts, shuffled, over and over; a longest one first, since it decides how wide the rows are."""
    order = random.Random(seed)
    found: list[list[int]] = []
    while len(found) < count:
        found += order.sample(prompts, len(prompts))
    return [max(prompts, key=len), *found[: count - 1]]


def timed_middle(answers: Iterator[tuple[int, Any]], num_rows: int, total: int) -> tuple[list[Any], float, float]:
    """
    The middle of a run, from the end of the N-th answer to that of the N-th last but one.

    An answer that is only partly in it counts with that part of its tokens, as if they came at a steady pace. Counting
    whole answers by their ends would say more of which ends fall inside than of the speed.

    Args:
        answers (`Iterator[tuple[int, Any]]`): What `iterate_batch` gives, in the order of the ends.
        num_rows (`int`): N.
        total (`int`): Answers of the run.

    Returns:
        `tuple[list[Any], float, float]`: Answers that end in the middle, tokens of the middle, its seconds.
    """
    served = [answer for _, answer in answers]
    for answer in served:
        if answer.error is not None:
            raise RuntimeError(answer.error)
    begun, ended = served[num_rows - 1].lifespan[1], served[total - num_rows - 1].lifespan[1]
    tokens = 0.0
    for answer in served:
        start, end = answer.lifespan
        inside = min(end, ended) - max(start, begun)
        if inside > 0:
            tokens += len(answer.generated_tokens) * inside / (end - start)
    return served[num_rows : total - num_rows], tokens, ended - begun


def measure(
    target: Any,
    drafter: Any,
    method: Method,
    num_rows: int,
    prompts: list[list[int]],
    per_row: int,
    trials: int,
    max_new_tokens: int,
    costs: dict[str, float] | None,
) -> dict[str, Any]:
    """
    Time one setting.

    Args:
        target (`PreTrainedModel`): The target.
        drafter (`Any`): What `assistant_model` takes.
        method ([`Method`]): The setting.
        num_rows (`int`): N.
        prompts (`list[list[int]]`): Token ids.
        per_row (`int`): Requests of a trial for every row.
        trials (`int`): How many.
        max_new_tokens (`int`): Of each answer.
        costs (`dict[str, float]`): Arguments of the dynamic window.
    """
    settings: dict[str, Any] = {"tetris_capacity": method.capacity(num_rows), "batch_size": num_rows}
    if method.window:
        settings |= {
            "assistant_model": drafter,
            "num_assistant_tokens": method.depth,
            "tetris_selector": method.selector(costs),
        }
    settings |= {"do_sample": False, "progress_bar": False, "max_new_tokens": max_new_tokens}
    # Rows as wide as in the trials, and enough comings and goings that all that is captured is captured now.
    short = [
        {"input_ids": ids, "max_new_tokens": 4 + place % 13}
        for place, ids in enumerate(served_order(prompts, 3 * num_rows, 0))
    ]
    short[0]["max_new_tokens"] = max_new_tokens
    start = time.perf_counter()
    tetris_hf.generate_batch(target, short, **settings)
    warm_up = time.perf_counter() - start
    speeds, latencies, waits, counts = [], [], [], torch.zeros(4, dtype=torch.long)
    for trial in range(trials):
        requests = served_order(prompts, num_rows * per_row, trial)
        answers = tetris_hf.iterate_batch(target, requests, **settings)
        middle, tokens, seconds = timed_middle(answers, num_rows, len(requests))
        speeds.append(tokens / seconds)
        lasted = [answer.lifespan[1] - answer.lifespan[0] for answer in middle]
        latencies.append(statistics.fmean(lasted))
        waits += lasted
        for answer in middle:
            # The prompt's own forward gives the first token.
            counts += torch.tensor([len(answer.generated_tokens) - 1, answer.steps, answer.verified, answer.accepted])
    generated, steps, verified, accepted = counts.tolist()
    return {
        "tokens_per_second": statistics.median(speeds),
        "latency": statistics.median(latencies),
        "latency_p50": statistics.median(waits),
        "latency_p95": statistics.quantiles(waits, n=20, method="inclusive")[-1],
        "speeds": speeds,
        "latencies": latencies,
        "tokens_per_step": generated / steps,
        "vsr": accepted / verified if verified else None,
        "ter": generated / (verified + steps),
        "warm_up": warm_up,
    }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 32, 16], help="N")
    parser.add_argument("--mixes", nargs="+", default=["spec-bench"], help=f"prompts: {', '.join(MIXES)} or a set")
    parser.add_argument("--pairs", nargs="+", default=["shallow"], help="drafters; several mixed are joined by +")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="windows: C = N * k")
    parser.add_argument("--extras", type=int, nargs="*", default=[1, 2, 3], help="draft tokens of TETRIS beyond k")
    parser.add_argument("--methods", nargs="+", default=["none", "sd", "dsd", "tetris"])
    parser.add_argument("--per-row", type=int, default=4, help="requests of a trial for every row, at least 3")
    parser.add_argument("--costs", type=Path, help="costs of the dynamic window, from costs.py")
    args, rest = parser.parse_known_args(argv)
    shared = parse_shared(rest)
    if shared.prompts is None:
        parser.error("--prompts names Spec-Bench's file")
    transformers.utils.logging.set_verbosity_error()
    start = time.perf_counter()
    shared.drafters = sorted({name for pair in args.pairs for name in pair.split("+")})
    target, small, tokenizer = load_target(shared)
    drafters = load_drafters(shared, target, small)
    described = describe(shared, target)
    print(json.dumps(described), flush=True)
    chosen = prompt_sets(shared.prompts, 80, shared.max_characters)
    costs = StepCosts.load(args.costs) if args.costs else None
    if shared.device.startswith("cuda"):
        torch._dynamo.config.recompile_limit = 64
    tetris_hf.enable()
    records, left_out = [], 0
    for num_rows in args.rows:
        for mix in args.mixes:
            prompts = mixed_prompts(chosen, mix, tokenizer)
            for pair in args.pairs:
                names = pair.split("+")
                drafter = [drafters[name] for name in names] if len(names) > 1 else drafters[pair]
                heads = [getattr(getattr(drafters[name], "config", None), "medusa_num_heads", None) for name in names]
                deepest = heads[0] if len(names) == 1 else None
                for method in methods(args.k, args.extras, deepest):
                    if method.name not in args.methods or (method.name == "none" and pair != args.pairs[0]):
                        continue
                    if time.perf_counter() - start > shared.time_limit:
                        left_out += 1
                        continue
                    slopes = USUAL_COSTS
                    if costs is not None and method.window:
                        slopes = costs.slopes(num_rows, names, method.depth, method.capacity(num_rows))
                    record: dict[str, Any] = {"run": described, "rows": num_rows, "mix": mix, "drafter": pair}
                    record |= {"method": method.name, "k": method.window, "extra": method.extra}
                    try:
                        record |= measure(
                            target, drafter, method, num_rows, prompts, args.per_row, shared.repeats,
                            shared.max_new_tokens, slopes,
                        )  # fmt: skip
                    except Exception as error:  # what fails is a result, and the others can still be timed
                        record["error"] = first_line(error)
                    records.append(record)
                    report(record, shared.out)
    print(f"{len(records)} settings timed, {left_out} left out, {time.perf_counter() - start:.0f} s")
    return records


if __name__ == "__main__":
    main()
