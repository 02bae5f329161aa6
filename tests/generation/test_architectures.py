"""Greedy, float32: token for token stock `generate` on the same padded batch, for every kind of attention."""

import copy

import kit
import pytest
import torch


@pytest.fixture(scope="module", params=sorted(kit.ZOO))
def model(request):
    return kit.tiny(request.param)


@pytest.fixture(scope="module")
def plain(model):
    text = kit.plain(model, kit.ragged(), max_new_tokens=30)
    assert len(text[:, 12:].unique()) >= 8, "a text that repeats itself proves nothing"
    return text


@pytest.mark.parametrize("who", ["near", "same", "far"])
@pytest.mark.parametrize("capacity", [1, 5, 40])
def test_text_is_that_of_stock_generate(model, plain, who, capacity):
    assistant = {
        "near": lambda: kit.near(model),
        "same": lambda: copy.deepcopy(model),
        "far": lambda: kit.tiny(seed=9),
    }
    out = kit.speculate(model, kit.ragged(), assistant[who](), capacity, max_new_tokens=30)
    assert torch.equal(out.sequences, plain)
    verified, accepted = int(out.tetris_stats.verified.sum()), int(out.tetris_stats.accepted.sum())
    assert verified > 0 and (who != "same" or accepted == verified)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_whatever_attention_the_user_chose(implementation):
    for model_type in ("llama", "mistral", "gemma3_text"):
        model = kit.tiny(model_type, attn_implementation=implementation)
        expected = kit.plain(model, kit.ragged(), max_new_tokens=30)
        out = kit.speculate(model, kit.ragged(), kit.near(model), 5, max_new_tokens=30)
        assert torch.equal(out.sequences, expected)
        assert model.config._attn_implementation == implementation
