#!/usr/bin/env python3
"""A target that is too large for one card, or too slow on one: split over all, with the assistant whole on each.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py --model meta-llama/Llama-3.1-8B-Instruct \\
        --assistant meta-llama/Llama-3.2-1B-Instruct prompts.txt --output answers.jsonl

transformers splits the target (`DistributedConfig(tp_size=...)`, which is what `tp_plan="auto"` became). All processes
are given the same prompts and run the same steps; the first one decides what is drafted and accepted, and writes. The
number of key heads must be divisible by the number of processes. `--check` compares with the target whole on one card:
in float32, greedy texts are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.distributed import DistributedConfig

import tetris_hf


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompts", type=Path, help="a prompt in each line")
    add("--model", required=True, help="target: a folder or a Hub id")
    add("--assistant", help="causal LM with the target's tokenizer (default: drafts are copied from the text itself)")
    add("--output", type=Path, required=True, help="JSON lines, in the order in which answers end")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--batch-size", type=int, default=32, help="N, prompts decoded at the same time")
    add("--capacity", type=int, help="C, draft tokens verified per step over all of them (default: N)")
    add("--max-new-tokens", type=int, default=128)
    add("--do-sample", action="store_true")
    add("--seed", type=int, default=0)
    add("--check", action="store_true", help="compare with the whole target on the first card")
    return parser.parse_args(argv)


def load(args: argparse.Namespace, device: torch.device) -> tuple[Any, Any, Any]:
    """
    The target's part for this process, the whole assistant, and the tokenizer.

    Raises:
        `SystemExit`: If the target cannot be split evenly.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    config = transformers.AutoConfig.from_pretrained(args.model).get_text_config(decoder=True)
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if key_heads % ranks:
        raise SystemExit(
            f"--model {args.model} has {key_heads} key heads, which {ranks} processes cannot share evenly: start "
            "another number of processes, or serve whole targets with `accelerate launch -m tetris_hf generate`."
        )
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    split = DistributedConfig(tp_size=ranks)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, distributed_config=split).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    assistant = tetris_hf.PromptLookupDrafter()
    if args.assistant:
        assistant = AutoModelForCausalLM.from_pretrained(args.assistant, dtype=model.dtype).to(device).eval()
    return model, assistant, tokenizer


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if "RANK" not in os.environ:
        raise SystemExit("Start this with `torchrun --nproc-per-node 2 examples/tensor_parallel.py ...`.")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    on_gpus = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    first = os.environ["RANK"] == "0"

    model, assistant, tokenizer = load(args, device)
    texts = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    prompts = tokenizer(texts)["input_ids"]
    settings = {
        "tetris_capacity": args.batch_size if args.capacity is None else args.capacity,
        "batch_size": args.batch_size,
        "max_new_tokens": args.max_new_tokens,
        "do_sample": args.do_sample,
        "seed": args.seed if args.do_sample else None,
        "progress_bar": first,
    }
    answers: dict[int, list[int]] = {}
    start = time.perf_counter()
    with open(args.output if first else os.devnull, "w", encoding="utf-8") as output:
        for place, answer in tetris_hf.iterate_batch(model, prompts, assistant, **settings):
            answers[place] = answer.generated_tokens
            text = tokenizer.decode(answer.generated_tokens, skip_special_tokens=True)
            record = {"id": place, "text": text, "finish_reason": answer.finish_reason, "error": answer.error}
            output.write(json.dumps(record, ensure_ascii=False) + "\n")
    seconds = time.perf_counter() - start
    tokens = sum(map(len, answers.values()))
    if first:
        print(f"{len(answers)} answers, {tokens} tokens, {tokens / seconds:.1f} a second", flush=True)
    if first and args.check:
        whole = AutoModelForCausalLM.from_pretrained(args.model, dtype=model.dtype).to(device).eval()
        alone = tetris_hf.generate_batch(whole, prompts, assistant, **settings)
        equal = sum(one.generated_tokens == answers[place] for place, one in enumerate(alone))
        print(f"{equal} of {len(alone)} equal to the whole target's", flush=True)
    tetris_hf.release_graphs()  # they hold the group's communicator
    if argv is None:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
