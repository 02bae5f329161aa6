"""Timing ways to decode one batch, in turns.

Knows the clock, the target and a batch. Does not know what the figures mean.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any

import torch
from tqdm import tqdm

from ..generation import TetrisStats, enable
from ..generation.model_support import text_limit
from .cost import OutcomeRecorder
from .encoding import Encoder, read_template
from .errors import FAILURE, CommandError, PromptError
from .loading import load_drafter, load_target
from .options import sampling_settings
from .prompts import PromptFile


@dataclass
class Contender:
    """
    One way to decode the batch, and what was measured of it.

    Attributes:
        name (`str`): For the report.
        settings (`dict`): Arguments of `generate`.
        capacity (`int` or `"auto"`, *optional*): C; `None` is plain `generate`.
        depth (`int`, *optional*): K.
        seconds (`list[float]`): Of each timed call.
        warm_up_seconds (`float`): Of the first call, in which layers are compiled and graphs captured.
        output: Of the last call.
    """

    name: str
    settings: dict[str, Any]
    capacity: int | str | None = None
    depth: int | None = None
    seconds: list[float] = field(default_factory=list)
    warm_up_seconds: float = 0.0
    output: Any = None

    @property
    def stats(self) -> TetrisStats:
        """Counts of the last call."""
        stats: TetrisStats = self.output.tetris_stats
        return stats


class Bench:
    """
    A batch of prompts and a target.

    Args:
        args (`argparse.Namespace`): Options of the command.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        sampling = sampling_settings(args)
        template = read_template(args.chat_template)
        with PromptFile(args.prompts, args.format, args.prompt_key) as lines:
            prompts, has_chats = list(lines), lines.has_chats
        self.model, tokenizer = load_target(args)
        enable(self.model)
        self.drafter = load_drafter(args.assistant, self.model, args)
        heads = getattr(getattr(self.drafter, "config", None), "medusa_num_heads", None)
        self.depth = args.num_assistant_tokens or 4
        if heads is not None:
            self.depth = min(self.depth, heads)
        encoder = Encoder(tokenizer, args.chat, template)
        encoder.check(has_chats)
        tokens, limit = [], text_limit(self.model) or math.inf
        for prompt in prompts:
            try:
                tokens.append(encoder(prompt))
            except PromptError as error:
                print(f"prompt {prompt.id} is left out: {error}", file=sys.stderr)
        fitting = [each for each in tokens if len(each) + args.max_new_tokens <= limit]
        if not fitting:
            raise CommandError(f"none of the {len(prompts)} prompts can be served within {limit} tokens.", FAILURE)
        self.num_prompts = min(len(fitting), args.batch_size)
        rows = list(islice(cycle(fitting), args.batch_size))
        self.inputs = left_padded(rows, self.model.generation_config.pad_token_id, self.model.device)
        self.settings = {**sampling, "max_new_tokens": args.max_new_tokens, "return_dict_in_generate": True}

    def speculative(self, name: str, capacity: int | str, depth: int | None) -> Contender:
        """Decoding with drafts; a K of `None` is the engine's own."""
        settings = {"assistant_model": self.drafter, "tetris_capacity": capacity, "num_assistant_tokens": depth}
        return Contender(name, settings, capacity, depth)

    def call(self, contender: Contender, seed: int = 0, **more: Any) -> float:
        """Decode once. Returns seconds."""
        torch.manual_seed(self.args.seed + seed)
        self._synchronize()
        start = time.perf_counter()
        contender.output = self.model.generate(**self.inputs, **self.settings, **contender.settings, **more)
        self._synchronize()
        return time.perf_counter() - start

    def measure(self, contenders: list[Contender], bar: tqdm) -> None:
        """Warm up each, then time them in turns, so that a machine that slows down slows all of them down."""
        for contender in contenders:
            contender.seconds, contender.warm_up_seconds = [], self.call(contender)
            bar.update()
        for repeat in range(self.args.repeats):
            for contender in contenders:
                contender.seconds.append(self.call(contender, repeat))
                bar.update()

    def outcomes(self) -> OutcomeRecorder:
        """How every draft fared, from one run in which all are verified. Eager, since a recorder keeps lists."""
        recorder = OutcomeRecorder()
        everything = self.speculative("recorded", self.depth * self.args.batch_size, self.depth)
        everything.settings["tetris_selector"] = recorder
        self.call(everything, disable_compile=True)
        return recorder

    def lengths(self, contender: Contender) -> list[int]:
        """Tokens of each completion, its end token included."""
        ends = self.model.generation_config.eos_token_id
        ends = torch.tensor(ends if isinstance(ends, list) else [-1 if ends is None else ends])
        made = contender.output.sequences[:, self.inputs["input_ids"].shape[1] :].cpu()  # (N, T)
        ended = torch.isin(made, ends)
        return torch.where(ended.any(1), ended.long().argmax(1) + 1, made.shape[1]).tolist()

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)


def left_padded(
    prompts: list[list[int]], pad_token_id: int, device: torch.device | str = "cpu"
) -> dict[str, torch.Tensor]:
    """
    Args:
        prompts (`list[list[int]]`): Tokens of N prompts.
        pad_token_id (`int`): What stands before the shorter ones.
        device (`torch.device` or `str`, *optional*, defaults to `"cpu"`): Where the tensors go.

    Returns:
        `dict[str, torch.Tensor]`: `input_ids` and `attention_mask`, `torch.LongTensor` of shape `(N, width)`.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[pad_token_id] * (width - len(tokens)) + tokens for tokens in prompts])  # (N, width)
    mask = torch.tensor([[0] * (width - len(tokens)) + [1] * len(tokens) for tokens in prompts])
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
