"""Prompts for measurements: Spec-Bench's first turns, as padded batches that are all equally wide."""

from __future__ import annotations

import json
from itertools import cycle, islice
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase


def first_turns(path: Path, max_characters: int = 1200, every: int = 5) -> list[str]:
    """
    Every `every`-th first turn of fewer than `max_characters` characters, in the order of the file.

    Args:
        path (`Path`): JSON lines with `turns`, a list of texts.
        max_characters (`int`, *optional*, defaults to 1200): Longer prompts are left out.
        every (`int`, *optional*, defaults to 5): Distance between prompts that are taken.

    Raises:
        `ValueError`: If none is left.
    """
    turns = [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = [turn for turn in turns if len(turn) < max_characters][::every]
    if not chosen:
        raise ValueError(f"`{path}` has no first turn under {max_characters} characters: raise `--max-characters`.")
    return chosen


def padded_batches(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], num_rows: int, num_batches: int, device: torch.device | str
) -> list[dict[str, torch.Tensor]]:
    """
    Batches of `num_rows` prompts, one after the other from `texts`, from its start again when it ends.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): It pads on the left.
        texts (`list[str]`): Prompts, in the chat template already.
        num_rows (`int`): N.
        num_batches (`int`): How many.
        device (`torch.device` or `str`): Where they go.

    Returns:
        `list[dict[str, torch.Tensor]]`: `input_ids` and `attention_mask` of shape `(N, width)`, with one width for
        all, so that what is captured or compiled for the first batch serves the others.
    """
    chosen = list(islice(cycle(texts), num_rows * num_batches))
    tokens = tokenizer(chosen, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
    parts = zip(tokens["input_ids"].split(num_rows), tokens["attention_mask"].split(num_rows), strict=True)
    return [{"input_ids": ids, "attention_mask": mask} for ids, mask in parts]
