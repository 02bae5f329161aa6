"""One process of a phase of `parallel.py`: it loads what the phase needs, serves jobs with the others, and times them.

Knows ranks, models and the clock. Does not know which phases there are.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from demo import PROMPTS, as_chat, load
from prompts import first_turns
from scaled_target import SIZES, scale_target
from torch import distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import tetris_hf
from tetris_hf.cli.sharding import Ranks


Request = dict[str, Any]


class Worker:
    """
    One process of a phase.

    Args:
        args (`argparse.Namespace`): The arguments of the command line.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.device = torch.device(args.device, int(os.environ["LOCAL_RANK"])) if args.device == "cuda" else "cpu"
        if args.device == "cuda":
            torch.cuda.set_device(self.device)
            torch._dynamo.config.recompile_limit = 64
        self.store, self.rank, self.size = next(rendezvous("env://"))
        backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
        distributed.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.size)
        self.jobs = 0

    def say(self, **record: Any) -> None:
        """One JSON line, from the first rank."""
        if self.rank:
            return
        card = torch.cuda.get_device_name(self.device) if self.args.device == "cuda" else "CPU"
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        line = json.dumps({**record, "target": self.args.target, "K": self.args.depth, "card": card, **versions})
        print(line, flush=True)
        if self.args.out:
            with self.args.out.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def wait_for_all(self) -> None:
        """Go on when all ranks are here. Through the store: a card that waits in a collective is busy."""
        self.jobs += 1
        if self.store.add(f"here {self.jobs}", 1) == self.size:
            self.store.set(f"all here {self.jobs}", "")
        self.store.wait([f"all here {self.jobs}"])

    def whole_target(self, dtype: torch.dtype) -> tuple[Any, Any, Any]:
        """Target, small model and tokenizer, whole, on this rank's card."""
        args = self.args
        name = args.small if args.target == "small" or args.target in SIZES else args.target
        small, tokenizer = load(name, str(self.device), dtype)
        return (scale_target(small, **SIZES[args.target]) if args.target in SIZES else small), small, tokenizer

    def drafter(self, small: Any) -> Any:
        """Who drafts, whole on every card."""
        if self.args.assistant:
            assistant = AutoModelForCausalLM.from_pretrained(self.args.assistant, dtype=small.dtype)
            return assistant.to(self.device).eval()
        return tetris_hf.ShallowAssistant.from_pretrained(self.args.shallow, target=small)

    def requests(self, tokenizer: Any, number: int, new_tokens: tuple[int, int]) -> list[Request]:
        """The job: prompts with a limit each, the longest first, so that no long one begins when the others end."""
        texts = first_turns(self.args.prompts, every=1) if self.args.prompts else list(PROMPTS)
        prompts = tokenizer(as_chat(tokenizer, texts), add_special_tokens=False)["input_ids"]
        draw = random.Random(0)
        job = [
            {"input_ids": prompts[index % len(prompts)], "max_new_tokens": draw.randint(*new_tokens)}
            for index in range(number)
        ]
        return sorted(job, key=lambda request: -request["max_new_tokens"])

    def serve(self, model: Any, requests: Iterator[Request] | list[Request], drafter: Any, slots: int) -> list[Any]:
        """Serve requests; texts with their places."""
        answers = tetris_hf.iterate_batch(
            model,
            requests,
            drafter,
            tetris_capacity=round(self.args.ratio * slots),
            batch_size=slots,
            num_assistant_tokens=self.args.depth,
            progress_bar=False,
            do_sample=False,
            max_new_tokens=self.args.max_new_tokens,  # at most; each request has its own limit
            disable_compile=self.args.eager,
        )
        outputs = [output for _, output in sorted(answers, key=lambda answer: answer[0])]
        if errors := [output.error for output in outputs if output.error]:
            raise RuntimeError(errors[0])
        return outputs

    def data(self) -> None:
        """One job by more and more cards."""
        args = self.args
        model, small, tokenizer = self.whole_target(torch.bfloat16 if args.device == "cuda" else torch.float32)
        drafter = self.drafter(small)
        job = self.requests(tokenizer, args.num_prompts, (args.min_new_tokens, args.max_new_tokens))
        self.serve(model, job[: args.slots + 8], drafter, args.slots)  # captures and compiles; the longest are in it
        alone = None
        for ranks in [count for count in (1, 2, 4, 8, 16) if count < self.size] + [self.size]:
            queue = Ranks(self.rank, ranks, PrefixStore(f"job of {ranks}", self.store))
            self.wait_for_all()
            start = time.perf_counter()
            outputs = self.serve(model, queue.take(job), drafter, args.slots) if self.rank < ranks else []
            busy = time.perf_counter() - start
            self.wait_for_all()
            seconds = time.perf_counter() - start
            everybody: list[Any] = [None] * self.size
            mine = {"tokens": sum(len(o.generated_tokens) for o in outputs), "prompts": len(outputs), "seconds": busy}
            distributed.all_gather_object(everybody, mine)
            speed = sum(one["tokens"] for one in everybody) / seconds
            alone = speed if alone is None else alone
            self.say(
                phase="data", ranks=ranks, slots=args.slots, prompts=len(job), seconds=seconds,
                by_rank=everybody[:ranks], tokens_per_second=speed, ratio=speed / alone,
            )  # fmt: skip

    def store_target(self) -> None:
        """Write the target once, so that it can be loaded in parts."""
        if self.rank == 0 and not (self.args.folder / "config.json").exists():
            target, _, _ = self.whole_target(torch.bfloat16 if self.args.device == "cuda" else torch.float32)
            target.save_pretrained(self.args.folder)
        self.wait_for_all()

    def tensor(self, dtype: torch.dtype, job: tuple[int, int, int], phase: str) -> None:
        """One job by one card, then by the target split over all of them."""
        args = self.args
        self.store_target()
        name = args.small if args.target == "small" or args.target in SIZES else args.target
        small, tokenizer = load(name, str(self.device), dtype)
        drafter = self.drafter(small)
        number, *new_tokens = job
        all_slots = args.tensor_slots if phase == "tensor" else args.tensor_slots[:1]
        jobs = {
            slots: self.requests(tokenizer, max(slots, number * slots // all_slots[0]), (new_tokens[0], new_tokens[1]))
            for slots in all_slots
        }
        texts: dict[int, list[list[int]]] = {}
        speeds: dict[int, float] = {}
        for ranks in (1, self.size):
            model = None
            if ranks == 1 and self.rank == 0:
                model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype).to(self.device)
            elif ranks > 1:
                split = DistributedConfig(tp_size=ranks)
                model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype, distributed_config=split)
            for slots, requests in jobs.items() if model is not None else ():
                model.eval()
                self.serve(model, requests[: slots + 8], drafter, slots)
                start = time.perf_counter()
                outputs = self.serve(model, requests, drafter, slots)
                seconds = time.perf_counter() - start
                answers = [output.generated_tokens for output in outputs]
                speed = sum(map(len, answers)) / seconds
                equal = sum(a == b for a, b in zip(answers, texts.get(slots, []), strict=False)) if ranks > 1 else None
                texts.setdefault(slots, answers)
                speeds.setdefault(slots, speed)
                steps = sum(output.steps for output in outputs)
                self.say(
                    phase=phase, ranks=ranks, dtype=str(dtype), slots=slots, prompts=len(requests), seconds=seconds,
                    tokens_per_second=speed, ratio=speed / speeds[slots], equal_texts=equal,
                    tokens_per_row_and_step=sum(map(len, answers)) / max(1, steps),
                )  # fmt: skip
            del model
            tetris_hf.release_graphs()
            gc.collect()
            if args.device == "cuda":
                torch.cuda.empty_cache()
            self.wait_for_all()

    def run(self, phase: str) -> None:
        """The phase that this process was started for."""
        args = self.args
        whole = (args.min_new_tokens, args.max_new_tokens)
        if phase == "data":
            self.data()
        elif phase == "tensor":
            dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
            self.tensor(dtype, (args.tensor_prompts, *whole), phase)
        else:
            self.tensor(torch.float32, (args.exact_prompts, *(max(1, limit // 4) for limit in whole)), phase)
        self.wait_for_all()
        distributed.destroy_process_group()
