"""Packed attention equals a loop over tokens, for every kind of layer; what it cannot serve it refuses."""

import copy

import kit
import pytest
import torch
from torch import nn
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from tetris_hf.generation import ragged_attention as module
from tetris_hf.generation.packed_model import PackedModel, attention_configs, packed_attention
from tetris_hf.generation.packing import Packing
from tetris_hf.generation.ragged_attention import ragged_attention
from tetris_hf.generation.ragged_cache import RaggedCache, RaggedLayer
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
    with packed_as(PackedForward(packing, LENGTH)) as forward:
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


def flash_forward(queries, keys, values, sequences, max_queries, plan, is_causal, scaling):
    """What the flash kernel is told to do, in a loop over its sequences. Fails on a number that it would misread."""
    out = torch.full((*queries.shape[:2], values.shape[-1]), torch.nan)
    starts, key_starts, lengths = sequences.query_starts, sequences.key_starts, sequences.lengths
    assert len(starts) == len(key_starts) == len(lengths) + 1 and starts[-1] == len(queries)
    assert {tensor.dtype for tensor in (starts, key_starts, lengths)} == {torch.int32}
    for index, length in enumerate(lengths.tolist()):
        first, last = starts[index], starts[index + 1]
        assert 0 <= last - first <= max_queries and length <= plan.max_length
        own = slice(int(key_starts[index]), int(key_starts[index]) + length)
        for query in range(first, last):
            end = length - int(last - query) + 1 if is_causal else length
            begin = max(0, end - plan.window) if plan.window != -1 else 0
            for head in range(queries.shape[1]):
                kv_head = head // (queries.shape[1] // keys.shape[1])
                seen_keys, seen_values = (states[own][begin : max(end, 0), kv_head] for states in (keys, values))
                weights = (seen_keys @ queries[query, head] * scaling).softmax(0)
                out[query, head] = weights @ seen_values
    return out


@pytest.mark.parametrize("rule", [causal_mask_function, sliding_window_causal_mask_function(3)])
@pytest.mark.parametrize("counts", [(3, 0, 3, 2), (3, 0, 1, 2), (1, 0, 1, 1)])
def test_sequences_for_the_flash_kernel(counts, rule, monkeypatch):
    monkeypatch.setattr(module, "_flash_serves", lambda *args: True)
    monkeypatch.setattr(module, "_flash_forward", flash_forward)
    generator = torch.Generator().manual_seed(1)
    packing = Packing.of(torch.tensor(counts), torch.tensor(FIRST), sum(counts) + 1, max_count=4, max_length=LENGTH)
    cache = RaggedCache(len(counts), LENGTH, LENGTH, block_size=1)
    layer = RaggedLayer(cache)
    states = torch.randn(2, 1, KV_HEADS, len(counts) * LENGTH, WIDTH, generator=generator)
    cache.slots = torch.arange(len(counts) * LENGTH)
    keys, values = layer.update(*states)
    assert keys.shape == states[0].shape and torch.equal(values, states[1])
    query = torch.randn(1, packing.num_tokens, HEADS, WIDTH, generator=generator).transpose(1, 2)
    with packed_as(PackedForward(packing, LENGTH)):
        mask = ragged_mask(mask_function=rule, local_size=3)
        out, _ = ragged_attention(nn.Identity(), query, keys, values, mask, scaling=0.3)
    plan = mask._plans[torch.device("cpu")]
    assert (plan.by_token is not None) == (
        rule is causal_mask_function and sum(counts) + 1 < len(counts) * HEADS // KV_HEADS
    )
    for token in range(sum(counts)):
        expected = naive_attention(
            query[0, :, token], keys, values, int(packing.rows[token]), int(packing.positions[token]), rule, 0.3, None,
            None,
        )  # fmt: skip
        torch.testing.assert_close(out[0, token], expected, atol=1e-5, rtol=1e-4)
    assert not out[0, sum(counts) :].any()


def test_what_it_would_have_to_ignore_is_refused():
    packing = Packing.fitting(torch.tensor([1]), torch.tensor([0]))
    states = torch.zeros(1, 1, 1, 4)
    with packed_as(PackedForward(packing, 1)):
        for more in ({"position_bias": torch.zeros(1)}, {"dropout": 0.1}, {"indices": [1]}):
            with pytest.raises(NotImplementedError, match="Identity asks its attention for"):
                ragged_attention(nn.Identity(), states, states, states, None, **more)
        with pytest.raises(NotImplementedError, match="a rule of its own"):
            ragged_mask(attention_mask=torch.tensor([[1, 0]]))
        ragged_mask(attention_mask=torch.ones(1, 2))  # a mask of ones says nothing


def test_a_mask_is_no_tensor():
    mask = RaggedMask(Packing.fitting(torch.tensor([1]), torch.tensor([0])), 1, causal_mask_function)
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
