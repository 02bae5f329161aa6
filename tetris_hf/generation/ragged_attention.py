"""Attention of packed tokens over a [`RaggedCache`], behind transformers' own attention and mask interfaces.

Knows queries, keys, values and the model's own rule of what sees what. Does not know models: the rule reaches it as
the `mask_function` that transformers builds for every kind of layer (causal, sliding, chunked, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from .packing import Packing


# The name that a model's config carries during a call. It is this module's own, so that an installed package and a
# copy of this folder loaded from the Hub can serve side by side in one process.
ATTENTION_NAME = f"tetris_ragged:{__name__}"


@dataclass
class PackedForward:
    """
    One forward over packed tokens, as the attention layers see it.

    Attributes:
        packing (`Packing`): Rows and positions of the tokens.
        masks (`list[RaggedMask]`): Mask rules that the model asked for.
        num_attended (`int`): Attention layers that came here.
    """

    packing: Packing
    masks: list[RaggedMask] = field(default_factory=list)
    num_attended: int = 0


_forward: ContextVar[PackedForward] = ContextVar("packed_forward")

# What models hand to an attention function without any effect on its result here: what it says is in the mask already
# (`sliding_window`, `is_causal`), in the packing (`position_ids`) or is about what to return. Everything else is
# refused.
_HARMLESS = frozenset(
    "sliding_window is_causal position_ids cache_position use_cache output_attentions output_hidden_states "
    "output_router_logits return_dict logits_to_keep num_items_in_batch training cu_seq_lens_q cu_seq_lens_k "
    "max_length_q max_length_k".split()
)


@contextmanager
def packed_as(packing: Packing) -> Iterator[PackedForward]:
    """Within this context, the tokens that a model sees are packed in this way."""
    forward = PackedForward(packing)
    token = _forward.set(forward)
    try:
        yield forward
    finally:
        _forward.reset(token)


class RaggedMask:
    """
    A model's mask rule together with the packing it is asked about; stands where a mask tensor would.

    It is no tensor on purpose: a model that computes with the mask itself, and would read packed indices as positions,
    fails here at once and never gives a wrong answer.

    Args:
        packing (`Packing`): Rows and positions of the packed tokens.
        mask_function (`Callable`):
            transformers' rule `(batch_idx, head_idx, q_idx, kv_idx) -> bool`. In a cache without gaps a slot's index
            in its row is a position, so the rule is right on (query positions, slots) for every kind of layer.
        local_size (`int`, *optional*): The window or chunk size, if the rule has one.
    """

    def __init__(self, packing: Packing, mask_function: Callable, local_size: int | None = None):
        self.packing = packing
        self.mask_function = mask_function
        self.local_size = local_size
        self._allowed: dict[torch.device, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._is_no_tensor()

    def _is_no_tensor(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("The model computes with masks of its own, which packed rows cannot serve.")

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._is_no_tensor(None)  # type: ignore[arg-type]

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __invert__ = _is_no_tensor
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = __getitem__ = __setitem__ = _is_no_tensor

    def allowed(self, device: torch.device) -> torch.Tensor:
        """
        What each token may see, with the queries of a row padded to `max_count`.

        Returns:
            `torch.BoolTensor` of shape `(N, 1, max_count, max_length)`. A padding query sees what the last token of
            its row sees, so that no softmax runs over nothing.
        """
        if device not in self._allowed:
            packing = self.packing
            positions = packing.pad(packing.positions)[:, None, :, None].clamp(min=0)  # (N, 1, max_count, 1)
            slots = torch.arange(packing.max_length, device=positions.device)[None, None, None]
            zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=positions.device)
            rule = self.mask_function(zero, zero, positions, slots)  # (N, 1, max_count, max_length)
            # Slots past the row's newest token hold what an earlier step wrote and lost.
            written = slots <= positions.amax(2, keepdim=True)
            # A row that takes no part has no position; slot 0 keeps its (unread) result finite.
            absent = packing.counts.eq(0)[:, None, None, None] & slots.eq(0)
            self._allowed[device] = ((rule & written) | absent).to(device)
        return self._allowed[device]


def ragged_mask(mask_function: Callable = causal_mask_function, **kwargs: Any) -> RaggedMask:
    """The mask interface: transformers asks once per kind of layer and hands the result to the attention function."""
    attention_mask = kwargs.get("attention_mask")
    # None was passed. Some models then make one of ones, which says nothing; any other would go unheard.
    if attention_mask is not None and not attention_mask.all():
        raise NotImplementedError("The model masks tokens by a rule of its own, which packed rows cannot follow.")
    if mask_function is bidirectional_mask_function:
        raise NotImplementedError("The model attends to later tokens, so drafts cannot be verified at once.")
    forward = _forward.get()
    forward.masks.append(RaggedMask(forward.packing, mask_function, kwargs.get("local_size")))
    return forward.masks[-1]


def ragged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RaggedMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    The attention interface: each packed token attends within its own row of the cache.

    Only the queries are padded to a rectangle; keys and values are read where they lie.

    Args:
        module (`nn.Module`): The attention layer.
        query (`torch.Tensor` of shape `(1, heads, T, width)`): Queries of the packed tokens.
        key (`torch.Tensor` of shape `(1, kv_heads, N * L, width)`): All slots of the cache.
        value (`torch.Tensor` of shape `(1, kv_heads, N * L, v_width)`): All slots of the cache.
        attention_mask (`RaggedMask`, *optional*): What [`ragged_mask`] made for this kind of layer.
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
    forward = _forward.get()
    forward.num_attended += 1
    if attention_mask is None:
        attention_mask = RaggedMask(forward.packing, causal_mask_function)
    packing = attention_mask.packing
    padded_query = packing.pad(query[0].transpose(0, 1)).transpose(1, 2)  # (N, heads, max_count, width)
    keys, values = (  # (N, kv_heads, max_length, width), views
        states[0].unflatten(1, (packing.num_rows, -1))[:, :, : packing.max_length].transpose(0, 1)
        for states in (key, value)
    )
    allowed = attention_mask.allowed(query.device)  # (N, 1, max_count, max_length)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if softcap is None and s_aux is None:
        attended = _sdpa(padded_query, keys, values, allowed, scaling)
    else:
        attended = _with_sinks(padded_query, keys, values, allowed, scaling, softcap, s_aux)
    return packing.unpad(attended.transpose(1, 2)).unsqueeze(0), None  # (1, T, heads, v_width)


def _sdpa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, allowed: torch.Tensor, scaling: float
) -> torch.Tensor:
    """torch's fused attention. Grouped heads are stacked along the queries instead of repeating keys and values."""
    groups = query.shape[1] // keys.shape[1]
    stacked = query.unflatten(1, (keys.shape[1], groups)).flatten(2, 3)  # (N, kv_heads, groups * max_count, width)
    if groups > 1:
        allowed = allowed.repeat(1, 1, groups, 1)  # (N, 1, groups * max_count, max_length)
    attended = nn.functional.scaled_dot_product_attention(stacked, keys, values, attn_mask=allowed, scale=scaling)
    return attended.unflatten(2, (groups, -1)).flatten(1, 2)  # (N, heads, max_count, v_width)


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


AttentionInterface.register(ATTENTION_NAME, ragged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, ragged_mask)
