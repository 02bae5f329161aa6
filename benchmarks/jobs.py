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
import random
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any


ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
import transformers  # noqa: E402
from contenders import SILENCE_SECONDS  # noqa: E402
from demo import PROMPTS, as_chat  # noqa: E402
from measurement import GIB, first_line, seconds_of  # noqa: E402
from prompts import first_turns  # noqa: E402
from scaled_target import SIZES  # noqa: E402
from throughput import describe, load_drafters, load_target  # noqa: E402
from torch.nn.functional import pad  # noqa: E402
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig  # noqa: E402

import tetris_hf  # noqa: E402
from tetris_hf.generation import batch_job  # noqa: E402


Answers = list[list[int]]
Record = dict[str, Any]
# K and C / N of what is tried with each drafter; TETRIS may draft deeper than it verifies on average.
KINDS = ("c0", "fixed", "tetris", "auto")
FIXED = (1, 2, 3)
TETRIS = ((2, 1.5), (3, 1.5), (3, 2.0))


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


class Jobs:
    """
    The job, ready to be served in any way.

    Args:
        args (`argparse.Namespace`): The command line's.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.model, small, self.tokenizer = load_target(args)
        self.drafters = load_drafters(args, self.model, small)
        texts = (
            first_turns(args.prompts, max_characters=args.max_characters, every=1) if args.prompts else list(PROMPTS)
        )
        draw = random.Random(args.seed)
        draw.shuffle(texts)
        texts = as_chat(self.tokenizer, list(islice(cycle(texts), args.num_prompts)))
        ids = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        self.requests = [{"input_ids": one, "max_new_tokens": draw.randint(*args.new_tokens)} for one in ids]

    def contenders(self) -> Iterator[tuple[str, tuple[int, ...], str, Record]]:
        """What to run: the way, the sizes of feeds, a name and arguments of `generate_batch`."""
        for way in self.args.ways:
            for sizes in self.args.feeds if way == "refill" else [batch_job.FEEDS]:
                for name, setting in [("stock", {})] if way in ("static", "batch") else self.settings(way):
                    yield way, sizes, name, setting

    def settings(self, way: str) -> list[tuple[str, Record]]:
        """What to run in one way: a name and arguments of `generate_batch`."""
        slots, kinds = self.args.slots, self.args.kinds
        found: list[tuple[str, Record]] = [("C = 0", {"tetris_capacity": 0})] if "c0" in kinds else []
        for name, drafter in self.drafters.items():
            for window in FIXED if "fixed" in kinds else ():
                selector = tetris_hf.FixedWindowSelector(window)
                found.append((f"fixed, {name}", self._drafted(drafter, window * slots, window, selector)))
            for depth, ratio in TETRIS if "tetris" in kinds else ():
                found.append((f"TETRIS, {name}", self._drafted(drafter, round(ratio * slots), depth, None)))
            if "auto" in kinds:
                found.append((f"auto, {name}", {"assistant_model": drafter, "tetris_capacity": "auto"}))
        if way == "closed":  # one of each kind
            found = [one for one in found if one[1].get("num_assistant_tokens", 2) in (2, 3)][:3]
        return found

    @staticmethod
    def _drafted(drafter: Any, capacity: int, depth: int, selector: Any) -> Record:
        drafted = {"assistant_model": drafter, "tetris_capacity": capacity, "num_assistant_tokens": depth}
        return drafted if selector is None else {**drafted, "tetris_selector": selector}

    def refilled(self, requests: list[Record], setting: Record) -> list[Any]:
        """All requests through one batch."""
        return tetris_hf.generate_batch(
            self.model, requests, batch_size=self.args.slots, progress_bar=False, do_sample=False, **setting
        )

    def closed(self, requests: list[Record], setting: Record) -> list[Any]:
        """Batch after batch."""
        slots = self.args.slots
        parts = (requests[start : start + slots] for start in range(0, len(requests), slots))
        return [output for part in parts for output in self.refilled(part, setting)]

    def static(self, requests: list[Record]) -> Answers:
        """Stock `generate`, every batch padded to one width and decoded to one length."""
        width = max(len(request["input_ids"]) for request in self.requests)
        answers: Answers = []
        for start in range(0, len(requests), self.args.slots):
            part = requests[start : start + self.args.slots]
            ids = torch.stack([_left(request["input_ids"], width, self.tokenizer.pad_token_id) for request in part])
            mask = torch.stack([_left([1] * len(request["input_ids"]), width, 0) for request in part])
            kwargs: Record = {"cache_implementation": "static"}
            if self.model.device.type == "cuda":
                kwargs["compile_config"] = CompileConfig(dynamic=False)
            out = self.model.generate(
                input_ids=ids.to(self.model.device), attention_mask=mask.to(self.model.device), do_sample=False,
                max_new_tokens=self.args.new_tokens[1], **kwargs,
            )  # fmt: skip
            answers += out[:, width:].tolist()
        return answers

    def batch(self, requests: list[Record]) -> Answers:
        """Stock `generate_batch`, by its manager, which takes a limit per request."""
        settings = {"do_sample": False, "max_new_tokens": self.args.new_tokens[1]}
        config = GenerationConfig.from_dict({**self.model.generation_config.to_dict(), **settings})
        attention = self.model.config._attn_implementation
        manager = self.model.continuous_batching_context_manager(
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False),
            timeout=SILENCE_SECONDS,
        )
        answers: dict[str, list[int]] = {}
        try:
            with manager as running:
                names = [
                    running.add_request(request["input_ids"], max_new_tokens=request["max_new_tokens"])
                    for request in requests
                ]
                while len(answers) < len(names):
                    result = running.get_result(timeout=SILENCE_SECONDS)
                    if result is None:
                        raise TimeoutError(f"no result within {SILENCE_SECONDS} s")
                    if result.is_finished():
                        answers[result.request_id] = result.generated_tokens
        finally:
            self.model.set_attn_implementation(attention)
        return [answers[name] for name in names]

    def useful(self, answers: Answers, requests: list[Record]) -> Answers:
        """Answers up to their end token or limit."""
        ends = self.model.generation_config.eos_token_id
        ends = set(ends if isinstance(ends, list) else [ends])
        found = []
        for answer, request in zip(answers, requests, strict=True):
            answer = answer[: request["max_new_tokens"]]
            end = next((place for place, token in enumerate(answer) if token in ends), len(answer))
            found.append(answer[: end + 1])
        return found


def _left(values: list[int], width: int, filler: int) -> torch.Tensor:
    return pad(torch.tensor(values), (width - len(values), 0), value=filler)


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
        record["feeds"] = sizes_of_feeds
        try:
            record |= measured(jobs, way, setting, args.repeats)
        except Exception as error:  # a contender that fails is a result, and the others can still be measured
            record["error"] = first_line(error)
        finally:
            batch_job.FEEDS = shipped
            tetris_hf.release_graphs()
        records.append(record)
        print(json.dumps({key: value for key, value in record.items() if key != "run"}), flush=True)
        if args.out:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    return records


if __name__ == "__main__":
    main()
