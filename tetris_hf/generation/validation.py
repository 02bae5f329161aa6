"""What this library cannot do exactly, refused before the first forward: argument, value, fix.

Knows the limits of the engine. Changes nothing and computes nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.utils import is_deepspeed_zero3_enabled, is_fsdp_managed_module
from transformers.utils import logging

from .packed_model import cache_argument


logger = logging.get_logger(__name__)

# Layers whose states are keys and values, one per token: what a ragged cache can hold.
_KEY_VALUE_LAYERS = frozenset(("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"))

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


def check_capacity(capacity: Any, name: str = "tetris_capacity") -> int:
    """
    Args:
        capacity (`int`): C.
        name (`str`, *optional*): What the user calls it.

    Raises:
        `ValueError`: If it is no integer, or negative.
    """
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 0:
        raise ValueError(
            f"`{name}` must be an integer of at least 0, the draft tokens verified per step over the whole batch, got "
            f"{capacity!r}. 0 decodes without drafts; None is plain `generate`."
        )
    return capacity


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


def check_model(model: PreTrainedModel, role: str) -> None:
    """
    Args:
        model (`PreTrainedModel`): Target or assistant.
        role (`str`): `"model"` or `"assistant_model"`, for the message.

    Raises:
        `ValueError`: If the engine cannot run the model exactly.
    """
    name = f"`{role}` ({type(model).__name__})"
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder. `tetris_capacity` serves decoder-only models; leave it out.")
    if getattr(model, "_is_stateful", False) or not cache_argument(model):
        raise ValueError(
            f"{name} keeps a state that cannot be cut back per row (recurrent layers or no key/value cache). Leave "
            "out `tetris_capacity`, or use a model with attention layers only."
        )
    kinds = {type(layer).__name__ for layer in DynamicCache(config=config).layers} - _KEY_VALUE_LAYERS
    if kinds:
        raise ValueError(
            f"{name} has layers with a cache of kind {', '.join(sorted(kinds))}, which cannot be cut back per row. "
            "Leave out `tetris_capacity`, or use a model with attention layers only."
        )
    for setting in ("is_causal", "is_decoder"):
        if not getattr(config, setting, True):
            raise ValueError(
                f"{name} has `config.{setting}=False`: it attends to later tokens, so drafts cannot be verified at "
                f"once. Load it with `{setting}=True`, or leave out `tetris_capacity`."
            )
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    if not takes_positions or not type(model)._can_set_attn_implementation():
        raise ValueError(
            f"{name} computes attention or positions by itself and not through transformers' attention interface, so "
            "its rows cannot be packed. Leave out `tetris_capacity`, or use a model class that supports the interface."
        )
    # Each layer's own flag: the name of the model's property changes between releases.
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise ValueError(
            f"{name} is in training mode with gradient checkpointing, which turns its cache off. Call `model.eval()` "
            "or `model.gradient_checkpointing_disable()` first."
        )


def rope_limit(model: PreTrainedModel) -> int | None:
    """
    Length from which the rotary frequencies of *all* rows change because one row has reached it ("longrope",
    "dynamic"). Rows of a packed batch reach it at other steps than those of plain `generate`. `None` if they never
    change.
    """
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [part for part in (rope, *rope.values()) if isinstance(part, dict)]
    limits = [part.get("original_max_position_embeddings") for part in kinds if part.get("rope_type") == "longrope"]
    limits += [config.max_position_embeddings for part in kinds if part.get("rope_type") == "dynamic"]
    return min((limit for limit in limits if limit is not None), default=None)


def check_length(model: PreTrainedModel, max_text_length: int) -> None:
    """
    Args:
        model (`PreTrainedModel`): The target.
        max_text_length (`int`): Tokens that a row can have at most, without padding.

    Raises:
        `ValueError`: If rows could cross a length at which they change each other's positions.
    """
    limit = rope_limit(model)
    if limit is not None and max_text_length > limit:
        raise ValueError(
            f"`model` ({type(model).__name__}) switches its rotary embeddings for all rows when one is longer than "
            f"{limit} tokens, and with prompts and `max_new_tokens` a row could have {max_text_length}. Keep them "
            f"within "
            "the limit, or leave out `tetris_capacity`."
        )


def check_synced_gpus(synced_gpus: bool | None, model: PreTrainedModel) -> None:
    """
    Args:
        synced_gpus (`bool`, *optional*): The argument of `generate`; `None` asks for it where sharding needs it.
        model (`PreTrainedModel`): The target.

    Raises:
        `ValueError`: If ranks would have to make the same number of forwards, which acceptance decides here.
    """
    if synced_gpus is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
        synced_gpus = sharded and torch.distributed.get_world_size() > 1
    if synced_gpus:
        raise ValueError(
            "`synced_gpus` is not supported with `tetris_capacity`: with drafts, ranks differ in their number of "
            "forwards and sharded weights (DeepSpeed ZeRO-3, FSDP) would deadlock. Gather the model, or leave out "
            "`tetris_capacity`."
        )


def check_vocabularies(model: PreTrainedModel, assistant: PreTrainedModel) -> None:
    """
    Two models of one tokenizer may pad their vocabularies to different widths; models of different tokenizers may not
    be mixed, and without the tokenizers at hand the widths and special tokens must tell.

    Raises:
        `ValueError`: If the assistant's token ids cannot be the target's.
    """
    ours, theirs = (m.config.get_text_config(decoder=True).vocab_size for m in (model, assistant))
    if min(ours, theirs) * 5 < max(ours, theirs) * 4:
        raise ValueError(
            f"`assistant_model` ({type(assistant).__name__}) has a vocabulary of {theirs} tokens, the model one of "
            f"{ours}: they cannot share a tokenizer. Pass an assistant trained with the model's tokenizer."
        )
    if ours == theirs:
        return
    for special in ("bos_token_id", "eos_token_id"):
        mine, its = (_ids(getattr(m.generation_config, special, None)) for m in (model, assistant))
        if mine and its and not mine & its:
            raise ValueError(
                f"`assistant_model` ({type(assistant).__name__}) has a vocabulary of {theirs} tokens and `{special}` "
                f"{sorted(its)}, the model {ours} tokens and {sorted(mine)}: they do not share a tokenizer. Pass an "
                "assistant trained with the model's tokenizer."
            )


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(token) for token in torch.as_tensor(value).flatten()}


def check_request(
    input_ids: torch.Tensor, generation_config: GenerationConfig, processors: LogitsProcessorList, model_kwargs: dict
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
    if attention_mask is None:
        starts_padded = input_ids[:, 0] == (-1 if pad_token_id is None else pad_token_id)  # (N,)
        if starts_padded.any() and not starts_padded.all():
            logger.warning(
                "Some rows of `input_ids` begin with the padding token and no `attention_mask` marks it as padding: "
                "it is read as text, as plain `generate` reads it. Pass the tokenizer's `attention_mask`."
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
