#!/usr/bin/env python3
"""Tokens per second of stock `generate` in its ways and of this library, by batch size, in one process on one card.

    python benchmarks/throughput.py --target 7b --prompts spec_bench.jsonl --out results.jsonl
    python benchmarks/throughput.py --out results.jsonl --plot figures     # tables and PNGs of what was measured

A target of a size in `scaled_target.py` is the small model embedded in a wide one: real text, a big model's cost. Each
setting runs once to warm up, captures and compilations included, and is timed `--repeats` times; given are the median,
the least and the most. Only generated tokens count, up to and including the end token. Speeds are of whole calls, with
the prompts' forward.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import transformers  # noqa: E402
from contenders import ASSISTED_ROWS, Bench  # noqa: E402
from demo import PROMPTS, as_chat, load  # noqa: E402
from measurement import Record, first_line, measure  # noqa: E402
from prompts import first_turns, padded_batches  # noqa: E402
from records import append  # noqa: E402
from scaled_target import SIZES, scale_heads, scale_target  # noqa: E402
from settings import CONTENDERS, settings_for  # noqa: E402
from throughput_report import by_batch_size, plot, read_runs, table  # noqa: E402

import tetris_hf  # noqa: E402


DRAFTERS = ("shallow", "medusa", "lookup")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--target", default="small", help=f"{', '.join(SIZES)} (scaled), small, or a folder (default: small)")
    add("--small", help="folder of the small model (default: bundled SmolLM2-135M-Instruct)")
    add("--shallow", type=Path, default=ROOT / "assets" / "smollm2-135m-shallow", help="folder of the assistant")
    add("--medusa", type=Path, default=ROOT / "assets" / "smollm2-135m-medusa", help="folder of the heads")
    add("--prompts", type=Path, help="Spec-Bench as JSON lines (default: the demo's 16 prompts)")
    add("--every", type=int, default=5, help="take every n-th of the prompts in the file")
    add("--max-characters", type=int, default=1200, help="leave out prompts that are not shorter")
    add("--min-prompts", type=int, default=1, help="serve so many prompts per timed call, in batches of N if need be")
    add("--batch-sizes", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64, 128], help="N")
    add("--contenders", nargs="+", choices=CONTENDERS, default=[name for name in CONTENDERS if name != "batch"])
    add("--drafters", nargs="*", choices=DRAFTERS, default=list(DRAFTERS))
    add("--windows", type=int, nargs="+", default=[1, 2, 3, 4], help="fixed windows to try: K, with C = N * K")
    add("--depths", type=int, nargs="+", default=[4, 6], help="K of TETRIS to try")
    add("--ratios", type=float, nargs="+", default=[0.5, 1, 2, 3], help="C / N of TETRIS to try")
    add("--max-new-tokens", type=int, default=128)
    add("--sample", action="store_true", help="temperature 1 and top-p 0.9 instead of greedy")
    add("--repeats", type=int, default=3)
    add("--time-limit", type=float, default=math.inf, help="seconds after which no new setting is started")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16 on a GPU, else float32")
    add("--out", type=Path, help="JSON lines, one per setting, added at the end of the file")
    add("--plot", type=Path, help="measure nothing: print and draw what is in --out, PNGs into this folder")
    args = parser.parse_args(argv)
    if args.plot and not args.out:
        parser.error("--plot draws what is in a file: name it with --out")
    if args.repeats < 1 or min(args.batch_sizes) < 1:
        parser.error("--repeats and --batch-sizes must be at least 1")
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    return args


def load_target(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Target, the model that its drafters were trained for, and tokenizer."""
    name = args.small if args.target == "small" or args.target in SIZES else args.target
    small, tokenizer = load(name, args.device, getattr(torch, args.dtype))
    return (scale_target(small, **SIZES[args.target]) if args.target in SIZES else small), small, tokenizer


def load_drafters(args: argparse.Namespace, target: Any, small: Any) -> dict[str, Any]:
    """The drafters that were asked for and fit. Why one does not is printed."""
    drafters: dict[str, Any] = {}
    for name in args.drafters:
        try:
            if name == "shallow":
                drafters[name] = tetris_hf.ShallowAssistant.from_pretrained(args.shallow, target=small)
            elif name == "medusa":
                heads = tetris_hf.MedusaHeads.from_pretrained(args.medusa, dtype=target.dtype).to(target.device)
                if target is not small:
                    heads = scale_heads(heads, target.config.hidden_size)
                heads.as_drafter().check(target)
                drafters[name] = heads
            else:
                drafters[name] = tetris_hf.PromptLookupDrafter()
        except Exception as error:  # the others can still be measured
            print(f"drafter {name} is left out: {first_line(error)}", flush=True)
    return drafters


def describe(args: argparse.Namespace, target: Any) -> dict[str, Any]:
    """Where and of what a run is."""
    described = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name(args.device) if args.device.startswith("cuda") else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tetris_hf": tetris_hf.__version__,
        "dtype": args.dtype,
        "target": args.target,
        "parameters": sum(parameter.numel() for parameter in target.parameters()),
        "mode": "sampling" if args.sample else "greedy",
        "max_new_tokens": args.max_new_tokens,
    }
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        described["commit"] = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass  # not a checkout
    return described


def run(args: argparse.Namespace) -> None:
    """Load, measure every setting at every batch size, print and store."""
    start = time.perf_counter()
    target, small, tokenizer = load_target(args)
    drafters = load_drafters(args, target, small)
    described = describe(args, target)
    print(", ".join(f"{name} {value}" for name, value in described.items()), flush=True)
    weights = 0
    if args.device.startswith("cuda"):
        weights = torch.cuda.memory_allocated(args.device)
        # There is a graph for each batch size, and beyond 8 of them code would run without compilation, silently.
        torch._dynamo.config.recompile_limit = 64
    deepest = {name: getattr(getattr(d, "config", None), "medusa_num_heads", None) for name, d in drafters.items()}
    texts = first_turns(args.prompts, args.max_characters, args.every) if args.prompts else list(PROMPTS)
    texts = as_chat(tokenizer, texts)
    left_out = []
    tetris_hf.enable()
    for num_rows in args.batch_sizes:
        batches = padded_batches(tokenizer, texts, num_rows, -(-args.min_prompts // num_rows), target.device)
        bench = Bench(target, batches, drafters, args.max_new_tokens, args.sample)
        records, reference = [], None
        # What serves row by row is as fast whatever N is, and is measured once.
        smallest = num_rows == min(args.batch_sizes)
        contenders = [name for name in args.contenders if smallest or name != "assisted"]
        for setting in settings_for(contenders, deepest, num_rows, args.windows, args.depths, args.ratios):
            if time.perf_counter() - start > args.time_limit:
                left_out.append(f"N = {num_rows}: {setting}")
                continue
            named = {"run": described, "rows": num_rows, "contender": setting.contender, "drafter": setting.drafter}
            record: Record = {**named, "K": setting.depth, "C": setting.capacity}
            try:
                measured, answers = measure(bench, setting, args.repeats, weights, reference)
                record |= measured
                if setting.contender == "dynamic" and not args.sample:
                    reference = answers
                print(f"N = {num_rows}: {setting}: {record['tokens_per_second']:.1f} tok/s", flush=True)
            except Exception as error:  # a contender that fails is a result, and the others can still be measured
                record["error"] = first_line(error)
                print(f"N = {num_rows}: {setting}: failed: {record['error']}", flush=True)
            records.append(record)
            append(record, args.out)
        if records:
            print(f"\n{table(records)}\n", flush=True)
    if "assisted" in args.contenders:
        print(
            f"Stock assisted decoding: at the smallest N, the first {ASSISTED_ROWS} rows at most, one after the other."
        )
    for setting in left_out:
        print(f"left out, the time limit was reached: {setting}")


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    transformers.utils.logging.set_verbosity_error()
    if args.plot is None:
        run(args)
        return
    for records in read_runs(args.out):
        print(", ".join(f"{name} {value}" for name, value in records[0]["run"].items()))
        for some in by_batch_size(records).values():
            print(f"\n{table(some)}")
    for path in plot(args.out, args.plot):
        print(path)


if __name__ == "__main__":
    main()
