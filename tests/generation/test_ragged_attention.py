"""Packed attention equals a loop over tokens, for every kind of layer; what it cannot serve it refuses."""

import copy

import kit
import pytest
import torch
from torch import nn
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from tetris_hf.generation import ragged_attention as module
from tetris_hf.generation.packed_model import PackedModel, attention_configs, packed_attention
from tetris_hf.generation.packing import Packing
from tetris_hf.generation.ragged_attention import ragged_attention
from tetris_hf.generation.ragged_mask import PackedForward, RaggedMask, packed_as, ragged_mask


COUNTS, FIRST, LENGTH = (3, 0, 1, 2), (4, 0, 9, 0), 12
HEADS, KV_HEADS, WIDTH, V_WIDTH = 4, 2, 8, 6


def naive_attention(query, keys, values, row, position, rule, scaling, softcap, sinks):
    """One token of one row: softmax over the slots of its row that the rule lets it see."""
    seen = [slot for slot in range(position + 1) if rule(0, 0, torch.tensor(position), torch.tensor(slot))]
    outputs = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        slots = [row * LENGTH + slot for slot in seen]
        logits = keys[0, kv_head, slots] @ query[head] * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if sinks is not None:
            logits = torch.cat([logits, sinks[head : head + 1]])
        weights = logits.softmax(0)[: len(slots)]
        outputs.append(weights @ values[0, kv_head, slots])
    return torch.stack(outputs)


@pytest.mark.parametrize("filler", [0, 2])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("rule", [causal_mask_function, sliding_window_causal_mask_function(3)])
def test_equals_a_loop_over_tokens(filler, softcap, with_sinks, rule):
    generator = torch.Generator().manual_seed(1)
    counts, first = torch.tensor(COUNTS), torch.tensor(FIRST)
    packing = Packing.of(counts, first, sum(COUNTS) + filler, max_count=4, max_length=11)
    query = torch.randn(1, HEADS, packing.num_tokens, WIDTH, generator=generator)
    keys = torch.randn(1, KV_HEADS, len(COUNTS) * LENGTH, WIDTH, generator=generator)
    values = torch.randn(1, KV_HEADS, len(COUNTS) * LENGTH, V_WIDTH, generator=generator)
    sinks = torch.randn(HEADS, generator=generator) if with_sinks else None
    with packed_as(PackedForward(packing, torch.arange(packing.num_rows) * LENGTH)) as forward:
        mask = ragged_mask(mask_function=rule, local_size=3)
        out, weights = ragged_attention(
            nn.Identity(), query, keys, values, mask, scaling=0.3, softcap=softcap, s_aux=sinks, sliding_window=3
        )
    assert weights is None and out.shape == (1, packing.num_tokens, HEADS, V_WIDTH)
    assert forward.num_attended == 1 and forward.masks == [mask] and torch.isfinite(out).all()
    for token in range(sum(COUNTS)):
        expected = naive_attention(
            query[0, :, token], keys, values, int(packing.rows[token]), int(packing.positions[token]), rule, 0.3,
            softcap, sinks,
        )  # fmt: skip
        torch.testing.assert_close(out[0, token], expected, atol=1e-5, rtol=1e-4)


def flash_forward(queries, keys, values, starts, slots, max_queries, max_keys, *args, seqused_k, **kwargs):
    """What the flash kernel is told to do, in a loop over its sequences. Fails on a number that it would misread."""
    assert args == (0.0, True, False) and {tensor.dtype for tensor in (starts, slots, seqused_k)} == {torch.int32}
    assert len(starts) == len(slots) == len(seqused_k) + 1 and starts[-1] == len(queries)
    out = torch.full((*queries.shape[:2], values.shape[-1]), torch.nan)
    window = kwargs["window_size_left"] + 1
    assert kwargs["window_size_right"] == (0 if window else -1)
    for index, length in enumerate(seqused_k.tolist()):
        first, last = int(starts[index]), int(starts[index + 1])
        assert 0 <= last - first <= max_queries and length <= max_keys
        for query in range(first, last):
            end = length - (last - query) + 1
            own = slice(int(slots[index]) + (max(0, end - window) if window else 0), int(slots[index]) + max(end, 0))
            for head in range(queries.shape[1]):
                kv_head = head // (queries.shape[1] // keys.shape[1])
                weights = (keys[own, kv_head] @ queries[query, head] * kwargs["scale"]).softmax(0)
                out[query, head] = weights @ values[own, kv_head]
    return (out,)


@pytest.mark.parametrize("rule", [causal_mask_function, sliding_window_causal_mask_function(3)])
@pytest.mark.parametrize("counts", [(3, 0, 1, 2), (1, 0, 1, 1)])
def test_what_the_flash_kernel_is_told(counts, rule, monkeypatch):
    monkeypatch.setattr(module, "_path", lambda *args: module._flash)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_forward)
    generator = torch.Generator().manual_seed(1)
    packing = Packing.of(torch.tensor(counts), torch.tensor(FIRST), sum(counts) + 1, max_count=4, max_length=LENGTH)
    keys, values = torch.randn(2, 1, KV_HEADS, len(counts) * LENGTH, WIDTH, generator=generator)
    query = torch.randn(1, packing.num_tokens, HEADS, WIDTH, generator=generator).transpose(1, 2)
    with packed_as(PackedForward(packing, torch.arange(packing.num_rows) * LENGTH)):
        mask = ragged_mask(mask_function=rule, local_size=3)
        out, _ = ragged_attention(nn.Identity(), query, keys, values, mask, scaling=0.3)
    for token in range(sum(counts)):
        expected = naive_attention(
            query[0, :, token], keys, values, int(packing.rows[token]), int(packing.positions[token]), rule, 0.3, None,
            None,
        )  # fmt: skip
        torch.testing.assert_close(out[0, token], expected, atol=1e-5, rtol=1e-4)
    assert not out[0, sum(counts) :].any()


@pytest.mark.parametrize("local_size", [2, 3, 8])
def test_a_window_is_told_from_a_chunk(local_size):
    packing = Packing.fitting(torch.tensor([1]), torch.tensor([0]))
    sliding = sliding_window_causal_mask_function(local_size)
    chunked = chunked_causal_mask_function(local_size, torch.tensor([0]))
    assert RaggedMask(packing, torch.zeros(1), causal_mask_function).window == -1
    assert RaggedMask(packing, torch.zeros(1), sliding, local_size).window == local_size
    assert RaggedMask(packing, torch.zeros(1), chunked, local_size).window is None
    assert RaggedMask(packing, torch.zeros(1), sliding).window is None


def test_what_it_would_have_to_ignore_is_refused():
    packing = Packing.fitting(torch.tensor([1]), torch.tensor([0]))
    states = torch.zeros(1, 1, 1, 4)
    with packed_as(PackedForward(packing, torch.zeros(packing.num_rows, dtype=torch.long))):
        for more in ({"position_bias": torch.zeros(1)}, {"dropout": 0.1}, {"indices": [1]}):
            with pytest.raises(NotImplementedError, match="Identity asks its attention for"):
                ragged_attention(nn.Identity(), states, states, states, None, **more)
        with pytest.raises(NotImplementedError, match="a rule of its own"):
            ragged_mask(attention_mask=torch.tensor([[1, 0]]))
        ragged_mask(attention_mask=torch.ones(1, 2))  # a mask of ones says nothing


def test_a_mask_is_no_tensor():
    mask = RaggedMask(Packing.fitting(torch.tensor([1]), torch.tensor([0])), torch.zeros(1), causal_mask_function)
    uses = (
        lambda: mask.shape, lambda: mask[:, 0], lambda: mask + 1.0, lambda: torch.ones(1) + mask,
        lambda: torch.where(mask, 1.0, 0.0), lambda: mask.to(torch.float16), lambda: mask * 2,
        lambda: 1.0 - mask, lambda: ~mask, lambda: bool(mask),
    )  # fmt: skip
    for use in uses:
        with pytest.raises(NotImplementedError, match="masks of its own"):
            use()


def test_configs_are_put_back(target):
    assistant = copy.deepcopy(target)
    assistant.config = target.config
    before = [config._attn_implementation for config in attention_configs(target)]
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), packed_attention(target, assistant):
            assert target.config._attn_implementation != before[0]
            raise error
        assert [config._attn_implementation for config in attention_configs(target)] == before


@torch.no_grad()
def test_a_window_moves_with_every_token_of_a_block():
    """Window 4, six tokens verified at once: the logits are those of one token at a time."""
    model = kit.tiny("mistral", sliding_window=4)
    text = torch.randint(2, 64, (16,), generator=torch.Generator().manual_seed(2))
    packed = PackedModel(model, 1, length=16, max_length=16)
    with packed_attention(model):
        packed.forward(text[:10], Packing.fitting(torch.tensor([10]), torch.tensor([0])))
        block = packed.forward(text[10:], Packing.fitting(torch.tensor([6]), torch.tensor([10]))).logits
    for place in range(6):
        torch.testing.assert_close(block[place], model(text[None, : 11 + place]).logits[0, -1], atol=1e-4, rtol=1e-4)
