"""Attention of packed tokens over a [`RaggedCache`], behind transformers' own attention interface.

Knows queries, keys, values and what each token may see. Does not know models: their rules reach it as a
[`RaggedMask`], or as its [`AttentionPlan`] where a layer is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import library, nn
from transformers.masking_utils import causal_mask_function

from .ragged_kernel import attend_rows, fits_tiles, kernel_serves
from .ragged_mask import AttentionPlan, RaggedMask, current_forward


# What models hand to an attention function without any effect on its result here: what it says is in the mask already
# (`sliding_window`, `is_causal`), in the packing (`position_ids`) or is about what to return. Everything else is
# refused.
_HARMLESS = frozenset(
    "sliding_window is_causal position_ids cache_position use_cache output_attentions output_hidden_states "
    "output_router_logits return_dict logits_to_keep num_items_in_batch training cu_seq_lens_q cu_seq_lens_k "
    "max_length_q max_length_k".split()
)


def ragged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RaggedMask | AttentionPlan | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    The attention interface: each packed token attends within its own row of the cache.

    Keys and values are read where they lie: in half precision on CUDA by our kernel or the flash kernel, else by
    torch's fused attention, for which the queries alone are padded to a rectangle.

    Args:
        module (`nn.Module`): The attention layer.
        query (`torch.Tensor` of shape `(1, heads, T, width)`): Queries of the packed tokens.
        key (`torch.Tensor` of shape `(1, kv_heads, N * L, width)`): All slots of the cache.
        value (`torch.Tensor` of shape `(1, kv_heads, N * L, v_width)`): All slots of the cache.
        attention_mask (`RaggedMask` or `AttentionPlan`, *optional*):
            What [`ragged_mask`] made for this kind of layer; its plan in a compiled layer.
        dropout (`float`, *optional*, defaults to 0.0): Must be 0: generation is deterministic given its draws.
        scaling (`float`, *optional*): Factor on the products, by default `width ** -0.5`.
        softcap (`float`, *optional*): Gemma 2's cap `c * tanh(x / c)` on the products.
        s_aux (`torch.Tensor` of shape `(heads,)`, *optional*): gpt-oss's sinks, one more logit per head.

    Returns:
        `tuple[torch.Tensor, None]`: The result of shape `(1, T, heads, v_width)`, and no weights.

    Raises:
        `NotImplementedError`: If the layer asks for something that this function would have to ignore.
    """
    unknown = [name for name, given in kwargs.items() if given is not None and name not in _HARMLESS]
    if unknown or dropout:
        name = unknown[0] if unknown else f"dropout={dropout}"
        raise NotImplementedError(f"{type(module).__name__} asks its attention for `{name}`, which is not served.")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(attention_mask, AttentionPlan):  # a compiled layer, which sees its own kernels only
        plan = attention_mask
        starts = plan.starts, plan.slots, plan.lengths
        general = plan.padded_index, plan.packed_index, plan.allowed, plan.key_index
        sizes = plan.num_rows, plan.max_count, plan.max_length, plan.window
        return attend(query, key, value, *starts, *general, *sizes, scaling, softcap, s_aux), None
    forward = current_forward()
    forward.num_attended += 1
    if attention_mask is None:
        attention_mask = RaggedMask(forward.packing, forward.firsts, causal_mask_function, num_slots=forward.num_slots)
    plan = attention_mask.plan(query.device)
    if _path(query, key, value, plan, softcap, s_aux) is _general:
        forward.any_rule = True
        plan = attention_mask.plan(query.device, for_any_rule=True)
    return _attend(query, key, value, plan, scaling, softcap, s_aux), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    return _path(query, key, value, plan, softcap, s_aux)(query, key, value, plan, scaling, softcap, s_aux)


def _path(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> Callable[..., torch.Tensor]:
    """
    Who computes: our kernel where rows have few tokens, as in every step, the flash kernel where they have many, as
    in a prefill, our kernel again where flash does not serve, torch's fused attention for the rest.
    """
    width = query.shape[3]
    serves = kernel_serves(query, value, plan.window)
    if serves and fits_tiles(query.shape[2], plan.max_count, plan.num_rows, query.shape[1] // key.shape[1]):
        return _kernel
    if (
        query.device.type == "cuda"
        and torch.version.hip is None
        and query.dtype in (torch.float16, torch.bfloat16)
        and width == value.shape[3]
        and width % 8 == 0
        and width <= 256
        and plan.window is not None
        and softcap is None
        and s_aux is None
    ):
        return _flash
    return _kernel if serves else _general


def _kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    assert plan.window is not None
    sizes = plan.num_rows, plan.max_count, plan.window
    return attend_rows(query, key, value, plan.starts, plan.slots, plan.lengths, *sizes, scaling, softcap, s_aux)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
    softcap: None = None,
    s_aux: None = None,
) -> torch.Tensor:
    """
    The flash kernel over rows of unequal length (`torch.nn.attention.varlen` is the same kernel with fewer arguments
    before torch 2.13). It aligns a row's queries with the end of its keys, which is where they are. The filler is a
    row without keys, whose result is 0.
    """
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))  # (tokens, heads, width)
    window = (-1, -1) if plan.window == -1 else (plan.window - 1, 0)  # type: ignore[operator]
    attended: torch.Tensor = torch.ops.aten._flash_attention_forward(
        queries,
        keys,
        values,
        plan.starts,
        plan.slots,
        len(queries),
        plan.max_length,
        0.0,
        True,
        False,
        scale=scaling,
        window_size_left=window[0],
        window_size_right=window[1],
        seqused_k=plan.lengths,
    )[0]
    return attended.unsqueeze(0)  # (1, T, heads, v_width)


def _general(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """
    Any rule, any width, any precision, any device: queries padded to a rectangle, keys and values as views; copied
    only if rows lie anywhere in a pool.
    """
    assert plan.padded_index is not None and plan.packed_index is not None and plan.allowed is not None
    padded_query = query[0].transpose(0, 1)[plan.padded_index].transpose(1, 2)  # (N, heads, max_count, width)
    if plan.key_index is None:  # views
        rectangles = (states[0].unflatten(1, (plan.num_rows, -1))[:, :, : plan.max_length] for states in (key, value))
    else:
        rectangles = (states[0][:, plan.key_index] for states in (key, value))
    keys, values = (states.transpose(0, 1) for states in rectangles)  # (N, kv_heads, max_length, width)
    if softcap is None and s_aux is None:
        attended = _sdpa(padded_query, keys, values, plan.allowed, scaling)
    else:
        attended = _with_sinks(padded_query, keys, values, plan.allowed, scaling, softcap, s_aux)
    packed = attended.transpose(1, 2).flatten(0, 1)[plan.packed_index]  # (T, heads, v_width)
    return packed.unsqueeze(0)


def _sdpa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor, scaling: float
) -> torch.Tensor:
    """torch's fused attention. Grouped heads are stacked along the queries instead of repeating keys and values."""
    groups = query.shape[1] // keys.shape[1]
    stacked = query.unflatten(1, (keys.shape[1], groups)).flatten(2, 3)  # (N, kv_heads, groups * max_count, width)
    if groups > 1:
        allowed = allowed.repeat(1, 1, groups, 1)  # (N, 1, groups * max_count, max_length)
    attended = nn.functional.scaled_dot_product_attention(stacked, keys, values, attn_mask=allowed, scale=scaling)
    merged: torch.Tensor = attended.unflatten(2, (groups, -1)).flatten(1, 2)  # (N, heads, max_count, v_width)
    return merged


def _with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: torch.Tensor,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention written out, for the layers whose logits are capped or share their softmax with a sink."""
    groups = query.shape[1] // keys.shape[1]
    grouped = query.unflatten(1, (keys.shape[1], groups))  # (N, kv_heads, groups, max_count, width)
    logits = torch.matmul(grouped, keys.unsqueeze(2).transpose(3, 4)) * scaling  # (..., max_count, max_length)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~allowed.unsqueeze(2), torch.finfo(logits.dtype).min)
    if s_aux is not None:
        sinks = s_aux.to(logits.dtype).view(1, keys.shape[1], groups, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sinks], dim=-1)  # (..., max_count, max_length + 1)
    weights = logits.softmax(-1, dtype=torch.float32).to(values.dtype)
    if s_aux is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights, values.unsqueeze(2)).flatten(1, 2)  # (N, heads, max_count, v_width)


@library.custom_op(f"{__name__.replace('.', '_')}::attend", mutates_args=())
def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    padded_index: torch.Tensor | None,
    packed_index: torch.Tensor | None,
    allowed: torch.Tensor | None,
    key_index: torch.Tensor | None,
    num_rows: int,
    max_count: int,
    max_length: int,
    window: int | None,
    scaling: float,
    softcap: float | None,
    s_aux: torch.Tensor | None,
) -> torch.Tensor:
    """[`ragged_attention`] as one operation that a compiler does not look into; a plan's fields are arguments."""
    sizes = num_rows, max_count, max_length, window
    plan = AttentionPlan(*sizes, starts, slots, lengths, padded_index, packed_index, allowed, key_index)
    return _attend(query, key, value, plan, scaling, softcap, s_aux)


@attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
