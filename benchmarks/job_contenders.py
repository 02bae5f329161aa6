"""The job of `jobs.py`: its requests, and every way to serve them.

Knows prompts, limits and settings. Does not know the clock.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from contenders import SILENCE_SECONDS
from demo import PROMPTS, as_chat
from prompts import first_turns
from throughput import load_drafters, load_target
from torch.nn.functional import pad
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig

import tetris_hf
from tetris_hf.generation import batch_job


Answers = list[list[int]]
Record = dict[str, Any]
# K and C / N of what is tried with each drafter; TETRIS may draft deeper than it verifies on average.
KINDS = ("c0", "fixed", "tetris", "auto")
FIXED = (1, 2, 3)
TETRIS = ((2, 1.5), (3, 1.5), (3, 2.0))


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
