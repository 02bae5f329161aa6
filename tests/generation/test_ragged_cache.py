"""The cache keeps position t of row i in slot i * L + t, grows without losing anything, and needs no rollback."""

import kit
import pytest
import torch

from tetris_hf.generation.packed_model import PackedModel, packed_attention
from tetris_hf.generation.packing import Packing
from tetris_hf.generation.ragged_cache import RaggedCache


N, HEADS, WIDTH, V_WIDTH = 3, 2, 4, 5


def write(cache, rows, positions, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(1, HEADS, len(rows), WIDTH, generator=generator).to(dtype)
    values = torch.randn(1, HEADS, len(rows), V_WIDTH, generator=generator).to(dtype)
    cache.slots = cache.slots_of(torch.tensor(rows), torch.tensor(positions))
    return keys, values, *cache.update(keys, values, layer_idx=1)


def test_tokens_lie_in_their_slots():
    cache = RaggedCache(N, length=6, max_length=6)
    rows, positions = [0, 0, 2, 1, 2], [0, 5, 3, 2, 4]
    keys, values, all_keys, all_values = write(cache, rows, positions)
    assert all_keys.shape == (1, HEADS, N * 6, WIDTH) and all_values.shape == (1, HEADS, N * 6, V_WIDTH)
    for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
        assert torch.equal(all_keys[:, :, row * 6 + position], keys[:, :, token])
        assert torch.equal(all_values[:, :, row * 6 + position], values[:, :, token])
    assert (all_keys.abs().sum((0, 1, 3)) > 0).sum() == len(rows), "nothing else was written"
    assert all_keys.data_ptr() == cache.layers[1].keys.data_ptr(), "a view, not a copy"
    assert not cache.layers[0].is_initialized, "a layer that shares another's states stays empty"
    assert cache.nbytes == (N * 6 + 1) * HEADS * (WIDTH + V_WIDTH) * 4


def test_what_lies_outside_goes_to_the_spare_slot():
    cache = RaggedCache(N, length=6, max_length=6)
    *_, all_keys, _ = write(cache, [0, 1, 2], [-1, 6, 99])
    assert not all_keys.any() and cache.layers[1].keys[-1].any()


def test_later_tokens_replace_earlier_ones():
    cache = RaggedCache(N, length=6, max_length=6)
    write(cache, [1, 1], [2, 3], seed=1)
    keys, _, all_keys, _ = write(cache, [1], [2], seed=2)
    assert torch.equal(all_keys[:, :, 8], keys[:, :, 0])


def test_growth_keeps_every_slot():
    cache = RaggedCache(N, length=3, max_length=50, block_size=4)
    assert cache.length == 4
    rows, positions = [0, 1, 1, 2], [3, 0, 2, 1]
    keys, values, *_ = write(cache, rows, positions)
    lengths = [cache.length]
    for wanted in range(5, 51):
        cache.reserve(wanted)
        assert cache.length >= wanted
        lengths.append(cache.length)
        stored = cache.layers[1].keys[:, :-1].view(HEADS, N, cache.length, WIDTH).permute(1, 2, 0, 3)
        for token, (row, position) in enumerate(zip(rows, positions, strict=True)):
            assert torch.equal(stored[row, position], keys[0, :, token])
        assert (stored.abs().sum((2, 3)) > 0).sum() == len(rows)
    assert cache.length == 50 and len(set(lengths)) < 10, "in blocks, not per token"
    with pytest.raises(ValueError, match="`length` \\(51\\).*`max_length` \\(50\\)"):
        cache.reserve(51)


@torch.no_grad()
def test_rejected_drafts_leave_no_trace(target):
    """Prefill, junk drafts, then other tokens at the same positions: the logits are those of the final text."""
    generator = torch.Generator().manual_seed(7)
    texts = [torch.randint(2, kit.VOCABULARY, (length,), generator=generator) for length in (9, 14, 6)]
    prompts = torch.tensor([5, 10, 2])
    packed = PackedModel(target, 3, length=4, max_length=40)
    packed.cache.block_size = 4

    def feed(tokens, first):
        counts = torch.tensor([len(t) for t in tokens])
        return packed.forward(torch.cat(tokens), Packing.fitting(counts, first)).logits.split(counts.tolist())

    with packed_attention(target):
        feed([text[:n] for text, n in zip(texts, prompts.tolist(), strict=True)], torch.zeros(3, dtype=torch.long))
        feed([torch.randint(2, 64, (n,), generator=generator) for n in (4, 1, 3)], prompts)
        logits = feed([text[n:] for text, n in zip(texts, prompts.tolist(), strict=True)], prompts)
    for text, n, found in zip(texts, prompts.tolist(), logits, strict=True):
        torch.testing.assert_close(found, target(text[None]).logits[0, n:], atol=1e-4, rtol=1e-4)
