"""Attention of packed tokens over a [`RaggedCache`] as one Triton kernel, for steps in which each row has few tokens.

Knows tensors and positions. Does not know models or why a row has the tokens it has.

Why not torch's flash kernel: its tiles are 128 queries high, a step has 1 to 10 of a row, and it reads a key head once
for every query head that shares it. Here the tokens of a row and the query heads that share a key head lie side by
side in one small tile, so that keys and values are read once. Windows, soft caps and sinks are served as well.
"""

from __future__ import annotations

import torch


try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch for the CPU
    triton = None

# Rows of a tile at most: tokens of a row times query heads to a key head.
MAX_TILE = 64
# Tokens of a row at most that are tiled where flash serves too: more were not measured. A feed of 256 beside 64 rows
# costs no more than as many drafts do (docs/performance.md).
MAX_TILED = 257


def kernel_serves(query: torch.Tensor, value: torch.Tensor, window: int | None) -> bool:
    """Whether the kernel can compute this layer's attention."""
    return (
        triton is not None
        and query.device.type == "cuda"
        and query.dtype in (torch.float16, torch.bfloat16)
        and max(query.shape[-1], value.shape[-1]) <= 256
        and window is not None
    )


def fits_tiles(num_tokens: int, max_count: int, num_rows: int, group: int) -> bool:
    """
    Whether rows have so few tokens that the kernel is the faster one. Where prompts are fed beside a step, one row may
    have many, and the others still have few: the mean without the largest row tells.

    Args:
        num_tokens (`int`): T.
        max_count (`int`): An upper bound of the tokens of a row.
        num_rows (`int`): N.
        group (`int`): Query heads to a key head.
    """
    others = max(1, -(-(num_tokens - max_count) // num_rows))
    return min(max_count, others) * group <= MAX_TILE and max_count <= MAX_TILED


def attend_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    num_rows: int,
    max_count: int,
    window: int,
    scaling: float,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Each row's last tokens attend to its slots: token j of c sees what lies at most c - 1 - j before the row's end.

    Args:
        query (`torch.Tensor` of shape `(1, heads, T, width)`): Queries of the packed tokens.
        key (`torch.Tensor` of shape `(1, key_heads, slots, width)`): All slots of the cache.
        value (`torch.Tensor` of shape `(1, key_heads, slots, v_width)`): All slots of the cache.
        starts (`torch.IntTensor` of shape `(N + 1,)` or longer):
            Packed index of each row's first token, then of the first one that is filler.
        slots (`torch.IntTensor` of shape `(N,)` or longer): First slot of each row.
        lengths (`torch.IntTensor` of shape `(N,)` or longer): Slots of each row in use.
        num_rows (`int`): N.
        max_count (`int`): An upper bound of the tokens of a row.
        window (`int`): -1, or how many slots a token sees, its own included.
        scaling (`float`): Factor on the products.
        softcap (`float`, *optional*): Cap `c * tanh(x / c)` on the products.
        s_aux (`torch.Tensor` of shape `(heads,)`, *optional*): Sinks, one more logit per head.

    Returns:
        `torch.Tensor` of shape `(1, T, heads, v_width)`: 0 for filler.
    """
    _, heads, num_tokens, width = query.shape
    key_heads, v_width = key.shape[1], value.shape[3]
    group = heads // key_heads
    attended = query.new_empty(1, num_tokens, heads, v_width)
    tile = max(16, min(MAX_TILE, triton.next_power_of_2(max_count * group)))
    grid = (num_rows + 1, key_heads, triton.cdiv(max_count * group, tile))
    _attend_rows[grid](
        query, key, value, attended, starts, slots, lengths, s_aux if s_aux is not None else query,
        query.stride(1), query.stride(2), key.stride(1), key.stride(2), value.stride(1), value.stride(2),
        num_tokens, num_rows, window, scaling, softcap or 0.0,
        GROUP=group, GROUP_2=triton.next_power_of_2(group), HEADS=heads, WIDTH=width, V_WIDTH=v_width,
        HAS_SINKS=s_aux is not None, HAS_SOFTCAP=softcap is not None, HAS_WINDOW=window != -1,
        TILE=tile, KEYS=64 if width <= 128 else 32,
        WIDTH_2=triton.next_power_of_2(width), V_WIDTH_2=triton.next_power_of_2(v_width), num_warps=4,
    )  # fmt: skip
    return attended


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _attend_rows(  # type: ignore[no-untyped-def]
        query, key, value, attended, starts, first_slots, lengths, sinks,
        query_head_stride, query_token_stride, key_head_stride, key_slot_stride, value_head_stride, value_slot_stride,
        num_tokens, num_rows, window, scaling, softcap,
        GROUP: tl.constexpr, GROUP_2: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
        HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
        TILE: tl.constexpr, KEYS: tl.constexpr, WIDTH_2: tl.constexpr, V_WIDTH_2: tl.constexpr,
    ):  # fmt: skip
        """One program for each row, key head and tile of (token, query head) pairs; the last row is filler."""
        row, key_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        features, v_features = tl.arange(0, WIDTH_2), tl.arange(0, V_WIDTH_2)
        pairs = tile * TILE + tl.arange(0, TILE)
        tokens, heads = pairs // GROUP, key_head * GROUP + pairs % GROUP
        first = tl.load(starts + row)
        if row == num_rows:
            if tile == 0:
                zeros = tl.zeros((GROUP_2, V_WIDTH_2), dtype=attended.dtype.element_ty)
                own = tl.arange(0, GROUP_2)
                for token in range(first, num_tokens):
                    at = (token * HEADS + key_head * GROUP + own)[:, None] * V_WIDTH + v_features[None]
                    tl.store(attended + at, zeros, mask=(own < GROUP)[:, None] & (v_features < V_WIDTH)[None])
            return
        count = tl.load(starts + row + 1) - first
        if tile * TILE >= count * GROUP:
            return
        length = tl.load(lengths + row)
        positions = length - count + tokens
        real = tokens < count

        query_at = (heads * query_head_stride + (first + tokens) * query_token_stride)[:, None] + features[None]
        q = tl.load(query + query_at, mask=real[:, None] & (features < WIDTH)[None], other=0.0)  # (TILE, WIDTH)
        if HAS_SINKS:  # a logit that takes its part of the softmax and has no value
            highest = tl.load(sinks + heads, mask=real, other=0.0).to(tl.float32)
            total = tl.full((TILE,), 1.0, dtype=tl.float32)
        else:
            highest = tl.full((TILE,), -1e30, dtype=tl.float32)
            total = tl.zeros((TILE,), dtype=tl.float32)
        result = tl.zeros((TILE, V_WIDTH_2), dtype=tl.float32)
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(length - count + tile * TILE // GROUP - window + 1, 0) // KEYS * KEYS
        base = tl.load(first_slots + row).to(tl.int64)
        for block in range(begin, length, KEYS):
            slots = block + tl.arange(0, KEYS)
            kept = slots < length
            key_at = (base + slots)[:, None] * key_slot_stride + features[None]
            k = tl.load(
                key + key_head.to(tl.int64) * key_head_stride + key_at, mask=kept[:, None] & (features < WIDTH)[None],
                other=0.0,
            )  # (KEYS, WIDTH)  # fmt: skip
            logits = tl.dot(q, tl.trans(k)) * scaling  # (TILE, KEYS)
            if HAS_SOFTCAP:
                capped = logits / softcap
                capped = 1.0 - 2.0 / (tl.exp(2.0 * capped) + 1.0)  # tanh
                logits = capped * softcap
            seen = kept[None] & (slots[None] <= positions[:, None])
            if HAS_WINDOW:
                seen = seen & (slots[None] > positions[:, None] - window)
            logits = tl.where(seen, logits, -1e30)
            higher = tl.maximum(highest, tl.max(logits, 1))
            weights = tl.where(seen, tl.exp(logits - higher[:, None]), 0.0)
            shrunk = tl.exp(highest - higher)
            total = total * shrunk + tl.sum(weights, 1)
            highest = higher
            value_at = (base + slots)[:, None] * value_slot_stride + v_features[None]
            v = tl.load(
                value + key_head.to(tl.int64) * value_head_stride + value_at,
                mask=kept[:, None] & (v_features < V_WIDTH)[None], other=0.0,
            )  # (KEYS, V_WIDTH)  # fmt: skip
            result = result * shrunk[:, None] + tl.dot(weights.to(v.dtype), v)
        result = result / total[:, None]
        at = ((first + tokens) * HEADS + heads)[:, None] * V_WIDTH + v_features[None]
        tl.store(
            attended + at, result.to(attended.dtype.element_ty), mask=real[:, None] & (v_features < V_WIDTH)[None]
        )
