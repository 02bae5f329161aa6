"""What is asked of a call and cannot be done exactly, refused before the first forward: argument, value, fix.

Knows the arguments of `generate`. Changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import Cache
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import logging


logger = logging.get_logger(__name__)

_KNOWN_MODEL_KWARGS = frozenset(
    "attention_mask position_ids cache past_key_values cache_position logits_to_keep use_cache output_attentions "
    "output_hidden_states".split()
)

# Setting, the values that leave it off, and what to do instead.
_UNSUPPORTED_SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "use `num_beams=1`, or plain `generate` without `tetris_capacity`"),
    "num_beam_groups": ((None, 1), "use plain `generate` without `tetris_capacity`"),
    "penalty_alpha": ((None,), "use plain `generate` without `tetris_capacity`"),
    "dola_layers": ((None,), "use plain `generate` without `tetris_capacity`"),
    "constraints": ((None,), "use plain `generate` without `tetris_capacity`"),
    "force_words_ids": ((None,), "use plain `generate` without `tetris_capacity`"),
    "guidance_scale": ((None, 1, 1.0), "leave it out: the unconditional branch has a cache of its own"),
    "output_attentions": ((None, False), "leave it out: attention weights are not computed"),
    "prompt_lookup_num_tokens": ((None,), "pass `PromptLookupDrafter()` as the assistant"),
    "assistant_early_exit": ((None,), "pass an assistant instead"),
    "use_mtp": ((None, False), "use plain `generate` without `tetris_capacity`"),
    "assistant_ensemble_weight": ((None,), "leave it out: it changes the distribution, and this library does not"),
}

_UNSUPPORTED_CACHES = ("quantized", "offloaded", "offloaded_static", "paged")

_STATEFUL_PROCESSORS = (
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "ClassifierFreeGuidanceLogitsProcessor",
    "HammingDiversityLogitsProcessor",
)


def check_capacity(capacity: Any, name: str = "tetris_capacity") -> int | str:
    """
    Args:
        capacity (`int` or `"auto"`): C.
        name (`str`, *optional*): What the user calls it.

    Raises:
        `ValueError`: If it is neither `"auto"` nor an integer, or negative.
    """
    if capacity == "auto":
        return "auto"
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 0:
        raise ValueError(
            f"`{name}` must be an integer of at least 0, the draft tokens verified per step over the whole batch, got "
            f'{capacity!r}. 0 decodes without drafts, "auto" chooses; None is plain `generate`.'
        )
    return capacity


def check_count(count: Any, name: str) -> int:
    """
    Args:
        count (`int`): How many of something.
        name (`str`): What the user calls it.

    Raises:
        `ValueError`: If it is no integer, or less than 1.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"`{name}` must be an integer of at least 1, got {count!r}.")
    return count


def check_depth(depth: Any, name: str = "num_assistant_tokens") -> int | None:
    """
    Args:
        depth (`int`, *optional*): K.
        name (`str`, *optional*): What the user calls it.

    Raises:
        `ValueError`: If it is neither `None` nor an integer of at least 1.
    """
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise ValueError(
            f"`{name}` must be an integer of at least 1, the draft tokens proposed per row and step, got {depth!r}. "
            "To verify no drafts, use `tetris_capacity=0`."
        )
    return depth


def check_request(
    input_ids: torch.Tensor,
    generation_config: GenerationConfig,
    processors: LogitsProcessorList,
    model_kwargs: dict[str, Any],
) -> None:
    """
    Args:
        input_ids (`torch.LongTensor` of shape `(N, width)`): Prompts, as plain `generate` prepared them.
        generation_config (`GenerationConfig`): As plain `generate` prepared it.
        processors (`LogitsProcessorList`): As plain `generate` prepared them.
        model_kwargs (`dict`): What else plain `generate` would pass on.

    Raises:
        `ValueError`: Naming the argument, its value and a fix.
    """
    if model_kwargs.get("inputs_embeds") is not None or input_ids.shape[1] == 0:
        raise ValueError("`inputs_embeds` is not supported with `tetris_capacity`: pass `input_ids`.")
    for name, (off, fix) in _UNSUPPORTED_SETTINGS.items():
        value = getattr(generation_config, name, None)
        if value not in off:
            raise ValueError(f"`{name}={value!r}` is not supported with `tetris_capacity`: {fix}.")
    if generation_config.cache_implementation in _UNSUPPORTED_CACHES:
        raise ValueError(
            f"`cache_implementation={generation_config.cache_implementation!r}` is not supported with "
            "`tetris_capacity`, which brings a cache of its own: leave it out."
        )
    for name, value in model_kwargs.items():
        if _says_something(value) and name not in _KNOWN_MODEL_KWARGS:
            raise ValueError(
                f"`{name}` is not supported with `tetris_capacity`: it would have to be cut per row. Leave it out, "
                "or use plain `generate`."
            )
        if isinstance(value, Cache) and value.get_seq_length() > 0:
            raise ValueError(
                f"`{name}` holds {value.get_seq_length()} tokens of an earlier call, which `tetris_capacity` cannot "
                "go on from. Leave it out and pass the whole text as `input_ids`."
            )
    stateful = tuple(found for n in _STATEFUL_PROCESSORS if (found := getattr(logits_process, n, None)) is not None)
    for processor in processors:
        if isinstance(processor, stateful):
            raise ValueError(
                f"{type(processor).__name__} keeps a state from one call to the next, and speculative decoding asks "
                "for several positions at once. Leave it out, or use plain `generate`."
            )


def _says_something(value: Any) -> bool:
    """Not for `None`, nor for the empty encoder outputs that a multimodal model gets for text alone."""
    return any(_says_something(part) for part in value.values()) if isinstance(value, dict) else value is not None


def padding_of(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, pad_token_id: int | None) -> torch.Tensor:
    """
    Padding columns at the left of each row.

    Args:
        input_ids (`torch.LongTensor` of shape `(N, width)`): Prompts.
        attention_mask (`torch.Tensor` of shape `(N, width)`, *optional*): 1 where there is text; `None` if everywhere.
        pad_token_id (`int`, *optional*): To warn about padding that no mask tells.

    Returns:
        `torch.LongTensor` of shape `(N,)`.

    Raises:
        `ValueError`: If a row is empty, padded at the right, or has holes.
    """
    if attention_mask is None or bool((attention_mask == 1).all()):
        starts_padded = input_ids[:, 0] == (-1 if pad_token_id is None else pad_token_id)  # (N,)
        if starts_padded.any() and not starts_padded.all():
            logger.warning(
                "Some rows of `input_ids` begin with the padding token, and `attention_mask` does not mark it as "
                "padding: it is read as text, as plain `generate` reads it. Pass the tokenizer's `attention_mask`."
            )
        return torch.zeros(len(input_ids), dtype=torch.long, device=input_ids.device)
    text = attention_mask.to(input_ids.device) != 0
    if text.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` has shape {tuple(text.shape)}, `input_ids` {tuple(input_ids.shape)}: they must be the "
            f"same."
        )
    padding = (~text).long().cumprod(1).sum(1)  # (N,) masked columns before the first token
    wrong = (padding + text.sum(1) != text.shape[1]) | ~text.any(1)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"`attention_mask` row {row} is {text[row].long().tolist()}: each row needs at least one token, and "
            'padding only at the left. Tokenize with `padding_side="left"`.'
        )
    return padding


def check_positions(position_ids: torch.Tensor | None, padding: torch.Tensor, width: int) -> None:
    """
    Args:
        position_ids (`torch.LongTensor` of shape `(N, width)`, *optional*): As plain `generate` prepared or got them.
        padding (`torch.LongTensor` of shape `(N,)`): Padding columns of each row.
        width (`int`): Columns.

    Raises:
        `ValueError`: If they are not those of text counted from 0 after the padding.
    """
    if position_ids is None:
        return
    columns = torch.arange(width, device=padding.device)
    expected = columns - padding[:, None]  # (N, width)
    given = position_ids.to(padding.device).expand_as(expected) if position_ids.dim() == 2 else None
    if given is None or not torch.where(expected >= 0, given == expected, True).all():
        raise ValueError(
            "`position_ids` other than those that `attention_mask` gives are not supported with `tetris_capacity`: "
            "leave them out."
        )
