"""A prompt of a job, and what became of it.

Knows what a user may hand over and gets back. Does not know which row serves it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .model_support import check_length


@dataclass
class RequestOutput:
    """
    What became of one prompt. Fields that stock `generate_batch` has bear its names.

    Attributes:
        request_id (`str`): As given, else the place of the prompt in the input, and of the answer among its answers.
        prompt_ids (`list[int]`): The prompt.
        generated_tokens (`list[int]`): The answer, its end token included.
        finish_reason (`str`): `"stop"` (an end token or a stopping criterion), `"length"` or `"error"`.
        error (`str`, *optional*): Why the prompt could not be served.
        steps (`int`): Steps that its row took part in.
        verified (`int`): Draft tokens verified.
        accepted (`int`): Draft tokens that became text.
        lifespan (`tuple[float, float]`): `time.perf_counter()` when it got its row, and when its end was seen.
    """

    request_id: str
    prompt_ids: list[int]
    generated_tokens: list[int] = field(default_factory=list)
    finish_reason: str = "error"
    error: str | None = None
    steps: int = 0
    verified: int = 0
    accepted: int = 0
    lifespan: tuple[float, float] = (-1.0, -1.0)

    def is_finished(self) -> bool:
        """Always: requests are handed out when they have ended."""
        return True


@dataclass
class Request:
    """A prompt, its name, where its answer belongs, the columns at which it ends, and the seed of its draws."""

    request_id: str
    order: int
    prompt_ids: list[int]
    max_length: int
    seed: int | None = None


def as_request(
    given: Any, order: int, generation_config: GenerationConfig, model: PreTrainedModel, vocab_size: int
) -> Request:
    """
    Args:
        given (`list[int]`, `torch.Tensor` or `dict`): Token ids, or a mapping with `input_ids` and perhaps
            `max_new_tokens`, `request_id` and `seed`. An answer ends where the model's context does.
        order (`int`): Its place in the input.
        generation_config (`GenerationConfig`): Says how long answers are where the request does not.
        model (`PreTrainedModel`): The target.
        vocab_size (`int`): Token ids must be below.

    Raises:
        `ValueError`: If it cannot be served.
    """
    fields = given if isinstance(given, dict) else {"input_ids": given}
    ids = torch.as_tensor(fields["input_ids"])
    if ids.dim() != 1 or len(ids) == 0 or ids.is_floating_point():
        raise ValueError(
            f"`input_ids` must be a list of token ids, got shape {tuple(ids.shape)}: is the prompt empty?"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(f"`input_ids` must be in [0, {vocab_size - 1}], got {int(ids.min())} to {int(ids.max())}.")
    new = fields.get("max_new_tokens", generation_config.max_new_tokens)
    max_length = len(ids) + int(new) if new is not None else int(generation_config.max_length)
    if max_length <= len(ids):
        raise ValueError(f"`max_new_tokens` must be at least 1, got {max_length - len(ids)}.")
    context = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if context is not None and len(ids) >= context:
        raise ValueError(f"The prompt has {len(ids)} tokens, and the context of the model {context}: shorten it.")
    max_length = min(max_length, context or max_length)
    check_length(model, max_length)
    own_seed = None if fields.get("seed") is None else int(fields["seed"])
    return Request(str(fields.get("request_id", order)), order, ids.tolist(), max_length, own_seed)
