#!/usr/bin/env python3
"""The same job as a Ray Data actor pool: prompts from JSON lines, a target in each actor, answers to JSON lines.

    pip install ray[data]
    python examples/ray_batch.py prompts.jsonl --model Qwen/Qwen2.5-7B-Instruct \\
        --assistant Qwen/Qwen2.5-0.5B-Instruct --actors 8 --output answers.jsonl

A prompt is an object with `prompt` and perhaps `id`. An actor holds its models and takes block after block of prompts.
Rows that end are refilled within a block, not across blocks: a block should be several times the batch. Ray starts an
actor that dies again, and gives its block out again. On one host, `accelerate launch -m tetris_hf generate` does the
same without Ray, and can be resumed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

import tetris_hf


class Completer:
    """
    An actor: target, assistant and tokenizer on one card.

    Args:
        model (`str`): Target: a folder or a Hub id.
        assistant (`str`, *optional*): A causal LM with the target's tokenizer; by default drafts are copied from the
            text itself.
        dtype (`str`): `"auto"`, or a name of torch's.
        settings: As for `tetris_hf.generate_batch`.
    """

    def __init__(self, model: str, assistant: str | None, dtype: str, **settings: Any):
        transformers.utils.logging.set_verbosity_error()
        device = "cuda" if torch.cuda.is_available() else "cpu"  # Ray shows an actor its own card alone
        precision = dtype if dtype == "auto" else getattr(torch, dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=precision).to(device).eval()
        self.assistant: Any = tetris_hf.PromptLookupDrafter()
        if assistant is not None:
            drafting = AutoModelForCausalLM.from_pretrained(assistant, dtype=self.model.dtype)
            self.assistant = drafting.to(device).eval()
        self.settings = settings

    def __call__(self, block: dict[str, Any]) -> dict[str, Any]:
        """
        Args:
            block (`dict[str, np.ndarray]`): Columns: `prompt`, perhaps `seed`, and others, which are kept.

        Returns:
            `dict`: The same columns, and lists: `text`, `finish_reason`, `completion_tokens` and `error`.
        """
        prompts = self.tokenizer(list(block["prompt"]))["input_ids"]
        requests: list[dict[str, Any]] = [{"input_ids": tokens} for tokens in prompts]
        if "seed" in block:
            for request, seed in zip(requests, block["seed"], strict=True):
                request["seed"] = int(seed)
        answers = tetris_hf.generate_batch(self.model, requests, self.assistant, progress_bar=False, **self.settings)
        tokens = [answer.generated_tokens for answer in answers]
        return {
            **block,
            "text": self.tokenizer.batch_decode(tokens, skip_special_tokens=True),
            "finish_reason": [answer.finish_reason for answer in answers],
            "completion_tokens": [len(one) for one in tokens],
            "error": [answer.error or "" for answer in answers],
        }


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prompts", type=Path, help="JSON lines, objects with `prompt`")
    add("--model", required=True, help="target: a folder or a Hub id")
    add("--assistant", help="causal LM with the target's tokenizer (default: drafts are copied from the text itself)")
    add("--output", type=Path, required=True, help="JSON lines, in the order of the prompts")
    add("--actors", type=int, default=max(1, torch.cuda.device_count()), help="targets (default: one for each GPU)")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--batch-size", type=int, default=32, help="N, prompts that an actor decodes at the same time")
    add("--block-size", type=int, help="prompts that it is given at once (default: 8 N)")
    add("--capacity", type=int, help="C, draft tokens verified per step over the N (default: N)")
    add("--max-new-tokens", type=int, default=128)
    add("--do-sample", action="store_true")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    try:
        import ray.data
    except ImportError as error:
        raise SystemExit("This needs Ray Data: pip install ray[data]") from error
    lines = [line for line in args.prompts.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [{"id": place, **json.loads(line)} for place, line in enumerate(lines)]
    if args.do_sample:  # draws that follow from the prompt's place, whichever actor gets it
        rows = [{**row, "seed": (args.seed << 32) + place} for place, row in enumerate(rows)]
    settings = {
        "tetris_capacity": args.batch_size if args.capacity is None else args.capacity,
        "batch_size": args.batch_size,
        "max_new_tokens": args.max_new_tokens,
        "do_sample": args.do_sample,
        "seed": args.seed if args.do_sample else None,
    }
    block = args.block_size or 8 * args.batch_size
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    answers = ray.data.from_items(rows, override_num_blocks=-(-len(rows) // block)).map_batches(
        Completer,
        fn_constructor_args=(args.model, args.assistant, args.dtype),
        fn_constructor_kwargs=settings,
        batch_size=block,
        compute=ray.data.ActorPoolStrategy(size=args.actors),
        num_gpus=1 if torch.cuda.is_available() else 0,
    )
    with open(args.output, "w", encoding="utf-8") as output:
        for answer in answers.iter_rows():
            answer.pop("seed", None)
            output.write(json.dumps(answer, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
