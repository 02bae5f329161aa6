#!/usr/bin/env python3
"""A job of many prompts with answers of unequal length: rows refilled, against closed batches and stock ways.

    python benchmarks/jobs.py --target 7b --prompts spec_bench.jsonl --out jobs.jsonl

Every prompt has a limit of its own, from 16 to 512 new tokens. Contenders, in one process on one card:

- `refill`: `tetris_hf.generate_batch` with `--slots` rows;
- `closed`: the same prompts in batches of `--slots`, each a job of its own: a batch ends with its slowest row;
- `static`: stock `generate` with static cache and compilation, closed batches, padded to one width and one length so
  that one compilation serves; it decodes to the longest limit, and what is beyond a row's own limit does not count;
- `batch`: stock `generate_batch`.

Only tokens of answers count, up to a row's end token or limit. Each setting runs once to warm up, on its first prompts
or (`closed`) on all, then `--repeats` times. Latency is from the moment a prompt gets its slot. Prints one JSON line
per setting. `--feeds 64,1024 64,256,1024` runs the refilled settings once for each choice of how many prompt tokens a
step can take in beside what it verifies, by default for the one that `tetris_hf` ships with.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path


ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
import transformers  # noqa: E402
from job_contenders import KINDS, Jobs, Record  # noqa: E402
from measurement import GIB, first_line, seconds_of  # noqa: E402
from records import report  # noqa: E402
from scaled_target import SIZES  # noqa: E402
from throughput import describe  # noqa: E402

import tetris_hf  # noqa: E402
from tetris_hf.generation import batch_job  # noqa: E402


def feeds(text: str) -> tuple[int, ...]:
    """Sizes that steps come in, 0 first, from increasing ones parted by commas."""
    sizes = (0, *map(int, text.split(",")))
    if list(sizes) != sorted(set(sizes)):
        raise argparse.ArgumentTypeError(f"sizes must be positive and increase, got {text}")
    return sizes


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", default="small", help=f"{', '.join(SIZES)} (scaled), small, or a folder (default: small)")
    add("--small", help="folder of the small model (default: bundled SmolLM2-135M-Instruct)")
    add("--drafters", nargs="*", choices=("shallow", "medusa", "lookup"), default=["shallow", "lookup"])
    add("--shallow", type=Path, default=ROOT / "assets/smollm2-135m-shallow", help="folder of the shallow assistant")
    add("--medusa", type=Path, default=ROOT / "assets/smollm2-135m-medusa", help="folder of the Medusa heads")
    add("--prompts", type=Path, help="Spec-Bench as JSON lines (default: the demo's prompts)")
    add("--num-prompts", type=int, default=512)
    add("--new-tokens", type=int, nargs=2, default=[16, 512], metavar=("LEAST", "MOST"))
    add("--slots", type=int, default=64, help="N")
    add("--ways", nargs="+", choices=("refill", "closed", "static", "batch"), default=["refill", "closed", "static"])
    add("--feeds", nargs="+", type=feeds, default=[batch_job.FEEDS], help="prompt tokens of a step, as 64,1024")
    add("--max-characters", type=int, default=10**9, help="leave out prompts that are not shorter")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="which settings of ours (default: all)")
    add("--repeats", type=int, default=1)
    add("--stock-batches", type=int, default=3, help="closed batches of the stock contender")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    add("--time-limit", type=float, default=540.0, help="seconds after which nothing new is begun")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="append JSON lines here")
    args = parser.parse_args(argv)
    args.sample, args.max_new_tokens = False, args.new_tokens[1]
    return args


def measured(jobs: Jobs, way: str, setting: Record, repeats: int) -> Record:
    """One setting, warmed up and timed."""
    on_card = jobs.model.device.type == "cuda"
    requests = jobs.requests
    if way in ("static", "batch"):
        requests = requests[: jobs.args.slots * jobs.args.stock_batches]
        call = jobs.static if way == "static" else jobs.batch
        warm_up = seconds_of(lambda: call(requests[: jobs.args.slots]), jobs.model.device)[1]
        runs = [seconds_of(lambda: call(requests), jobs.model.device) for _ in range(repeats)]
        tokens = sum(map(len, jobs.useful(runs[-1][0], requests)))
        seconds = [its for _, its in runs]
        return {**_speed(tokens, seconds), "warm_up_seconds": warm_up, "requests": len(requests)}
    call = jobs.refilled if way == "refill" else jobs.closed
    # As wide as the job will need, so that what is captured now serves.
    longest = max(requests, key=lambda request: len(request["input_ids"]) + request["max_new_tokens"])
    short = [{**request, "max_new_tokens": 16} for request in requests[: jobs.args.slots]]
    # Closed batches are of several widths, each of which is captured when it first comes.
    first = [longest, *short] if way == "refill" else requests
    warm_up = seconds_of(lambda: call(first, setting), jobs.model.device)[1]
    if on_card:
        torch.cuda.reset_peak_memory_stats()
        allocated = [torch.cuda.memory_allocated() / GIB]
    runs = []
    for _ in range(repeats):
        runs.append(seconds_of(lambda: call(requests, setting), jobs.model.device))
        if on_card:
            allocated.append(torch.cuda.memory_allocated() / GIB)
    outputs = runs[-1][0]
    assert all(output.error is None for output in outputs)
    tokens = sum(len(output.generated_tokens) for output in outputs)
    steps, verified, accepted = (
        sum(getattr(output, name) for output in outputs) for name in ("steps", "verified", "accepted")
    )
    waits = sorted(output.lifespan[1] - output.lifespan[0] for output in outputs)
    record = {
        **_speed(tokens, [its for _, its in runs]),
        "requests": len(requests),
        "warm_up_seconds": warm_up,
        "vsr": accepted / verified if verified else None,
        "ter": (accepted + steps) / (verified + steps),
        "tokens_per_step": (accepted + steps) / steps,
        "latency": {
            "mean": statistics.mean(waits),
            "p50": waits[len(waits) // 2],
            "p95": waits[len(waits) * 95 // 100],
        },
    }
    if on_card:
        record |= {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "allocated_gib": allocated}
    return record


def _speed(tokens: int, seconds: list[float]) -> Record:
    middle = statistics.median(seconds)
    return {"tokens": tokens, "tokens_per_second": tokens / middle, "seconds": seconds}


def main(argv: list[str] | None = None) -> list[Record]:
    args = parse(argv)
    transformers.utils.logging.set_verbosity_error()
    start = time.perf_counter()
    jobs = Jobs(args)
    described = describe(args, jobs.model)
    print(json.dumps(described), flush=True)
    if args.device.startswith("cuda"):
        torch._dynamo.config.recompile_limit = 64
    records, shipped = [], batch_job.FEEDS
    for way, sizes_of_feeds, name, setting in jobs.contenders():
        if time.perf_counter() - start > args.time_limit:
            print(f"left out, the time limit was reached: {way}, {name}", flush=True)
            continue
        batch_job.FEEDS = sizes_of_feeds
        sizes = {"C": setting.get("tetris_capacity"), "K": setting.get("num_assistant_tokens")}
        record: Record = {"run": described, "way": way, "name": name, "slots": args.slots, **sizes}
        record |= {"feeds": sizes_of_feeds, "max_characters": args.max_characters}
        try:
            record |= measured(jobs, way, setting, args.repeats)
        except Exception as error:  # a contender that fails is a result, and the others can still be measured
            record["error"] = first_line(error)
        finally:
            batch_job.FEEDS = shipped
            tetris_hf.release_graphs()
        records.append(record)
        report(record, args.out)
    return records


if __name__ == "__main__":
    main()
