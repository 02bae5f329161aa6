"""Which models the engine can run exactly, asked before the first forward: argument, value, fix.

Knows what packed rows need of a model class. Changes nothing and runs nothing.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.utils import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from .packed_model import cache_argument


# Layers whose states are keys and values, one per token: what a ragged cache can hold.
_KEY_VALUE_LAYERS = frozenset(("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"))


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
    # Some causal models (GPT-NeoX) leave `is_decoder` at its default of False: their attention layers know better.
    bidirectional = any(getattr(module, "is_causal", True) is False for module in model.modules())
    for setting in ("is_causal", "is_decoder"):
        if not getattr(config, setting, True) and (setting == "is_causal" or bidirectional):
            raise ValueError(
                f"{name} has `config.{setting}=False`: it attends to later tokens, so drafts cannot be verified at "
                f"once. Load it with `{setting}=True`, or leave out `tetris_capacity`."
            )
    if "prepare_inputs_for_generation" in vars(model):
        raise ValueError(
            f"{name} has a `prepare_inputs_for_generation` of its own, put there by somebody else (PEFT's prompt and "
            "prefix tuning add virtual tokens in it), which a decoding method never meets. Leave out "
            "`tetris_capacity`, or use an adapter on weights, like LoRA."
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


def text_limit(model: PreTrainedModel) -> int | None:
    """Tokens that a prompt and its completion may have together; `None` if the model does not say."""
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    known = [limit for limit in (longest, rope_limit(model)) if limit is not None]
    return min(known, default=None)


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
            "within the limit, or leave out `tetris_capacity`."
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
