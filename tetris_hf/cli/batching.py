"""Batches of prompts of similar length, the same ones in every run of a job.

Knows token ids. Does not know models or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Request:
    """
    A prompt that can be served.

    Attributes:
        id (`str` or `int`): Of the prompt.
        tokens (`list[int]`): Its tokens.
    """

    id: str | int
    tokens: list[int]


def batches_of(requests: Iterable[Request], batch_size: int, window: int) -> Iterator[list[Request]]:
    """
    Sort by length within windows, so that little padding is needed and the output keeps near to the input's order.
    The longest come first: what does not fit into memory fails early.

    Args:
        requests (`Iterable[Request]`): In the order of the input.
        batch_size (`int`): N.
        window (`int`): Batches that are sorted together.

    Returns:
        `Iterator[list[Request]]`: Batches of N, the last one perhaps smaller.
    """
    waiting: list[Request] = []
    for request in requests:
        waiting.append(request)
        if len(waiting) == batch_size * window:
            yield from _sorted_batches(waiting, batch_size)
            waiting = []
    yield from _sorted_batches(waiting, batch_size)


def _sorted_batches(requests: list[Request], batch_size: int) -> Iterator[list[Request]]:
    ordered = sorted(requests, key=lambda request: -len(request.tokens))  # stable
    for start in range(0, len(ordered), batch_size):
        yield ordered[start : start + batch_size]


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
