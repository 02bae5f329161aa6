#!/usr/bin/env python3
"""What several cards give: data parallel, tensor parallel and its equality to one card, in processes of their own.

    python benchmarks/parallel.py --target 7b-split --prompts spec_bench.jsonl --out results.jsonl

- `data`: one job served by 1, 2, 4, ... cards up to `--processes`, each with a whole target; ranks take prompts from a
  common counter. Given is the speed of the whole job, until the last rank has ended, and its ratio to one card.
- `tensor`: one job by a whole target on one card, then by a target split over all cards, with the drafter on each.
- `exact`: the same in float32, and how many greedy texts are equal.

The first prompts of each job are served before it, untimed. Prints JSON lines as it goes. A phase that fails
or outlasts the time that is left does not stop the others.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
import transformers  # noqa: E402
from parallel_worker import Worker  # noqa: E402
from scaled_target import SIZES  # noqa: E402


PHASES = ("data", "tensor", "exact")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    add("--processes", type=int, default=max(2, torch.cuda.device_count()), help="cards (default: all)")
    add("--target", default="small", help=f"{', '.join(SIZES)} (scaled), small, or a folder (default: small)")
    add("--small", help="folder of the small model (default: bundled SmolLM2-135M-Instruct)")
    add(
        "--shallow", type=Path, default=ROOT / "assets" / "smollm2-135m-shallow", help="shallow assistant of the small"
    )
    add("--assistant", help="folder of a causal LM that drafts, in place of the shallow assistant")
    add("--prompts", type=Path, help="Spec-Bench as JSON lines (default: the demo's 16 prompts)")
    add("--num-prompts", type=int, default=1024, help="of the job, from the start of the file again when it ends")
    add("--min-new-tokens", type=int, default=16, help="each prompt has a limit of its own, drawn from this ...")
    add("--max-new-tokens", type=int, default=512, help="... to this")
    add("--slots", type=int, default=64, help="N on each card")
    add("--tensor-slots", type=int, nargs="+", default=[64, 8], help="N of the tensor phase, one after the other")
    add("--tensor-prompts", type=int, default=256, help="prompts of its job at the first N, fewer at smaller ones")
    add("--exact-prompts", type=int, default=64, help="prompts of the exact phase, with a quarter of the new tokens")
    add("--eager", action="store_true", help="nothing is compiled or captured: slow, but it begins at once")
    add("--depth", type=int, default=3, help="K")
    add("--ratio", type=float, default=2.0, help="C / N")
    add("--time-limit", type=float, default=3600, help="seconds; what has not ended then is stopped")
    add("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    add("--folder", type=Path, help="where the target is stored to be loaded in parts (default: a temporary folder)")
    add("--out", type=Path, help="JSON lines are added at the end of this file as well")
    add("--worker", choices=PHASES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.processes < 2:
        parser.error("--processes must be at least 2")
    sizes = SIZES.get(args.target)
    if sizes and sizes["hidden_size"] % sizes["num_attention_heads"] and {"tensor", "exact"} & {*args.phases}:
        parser.error(f"--target {args.target} cannot be stored to be split: pass 7b-split, or --phases data")
    return args


def run(args: argparse.Namespace, argv: list[str]) -> bool:
    """Start each phase, one after the other. Returns whether all went well."""
    deadline = time.monotonic() + args.time_limit
    went_well = True
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        for phase in args.phases:
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.processes}"]
            worker = [str(Path(__file__)), *argv, "--worker", phase, "--folder", str(folder)]
            process = subprocess.Popen([sys.executable, *launcher, *worker], start_new_session=True)
            try:
                failed = process.wait(max(1.0, deadline - time.monotonic())) != 0
            except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
                process.terminate()  # the launcher ends its workers
                process.wait()
                if isinstance(error, KeyboardInterrupt):
                    raise
                failed = True
            if failed:
                went_well = False
                print(json.dumps({"phase": phase, "error": "failed or out of time, see above"}), flush=True)
    return went_well


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.worker:
        Worker(args).run(args.worker)
    elif not run(args, argv):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
