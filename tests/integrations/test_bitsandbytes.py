"""bitsandbytes on its CPU back end, and on a GPU where there is one: 8-bit and 4-bit, as target and as assistant."""

import logging

import kit
import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


pytest.importorskip("bitsandbytes")

SETTINGS = {"max_new_tokens": 16, "do_sample": False}
OURS = {"tetris_capacity": 12}
FOUR_BIT = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.float32}
QUANTIZED = {
    # 0: no outlier columns. With them (the default is 6) a row's numbers depend on the other rows of the batch.
    "8-bit": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
    "nf4": {**FOUR_BIT, "bnb_4bit_quant_type": "nf4"},
    "fp4, quantized twice": {**FOUR_BIT, "bnb_4bit_quant_type": "fp4", "bnb_4bit_use_double_quant": True},
}


@pytest.fixture(autouse=True)
def quiet():
    """8-bit products warn of their cast in every layer and step."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request):
    return request.param


@pytest.fixture
def model(tokenizer, device):
    """Wider than the others: the CPU kernel for 4 bits wants inputs that are a multiple of its block of 64."""
    return kit.tiny(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, hidden_size=64, intermediate_size=128
    ).to(device)


@pytest.fixture
def encoded(encoded, device):
    return {name: tensor.to(device) for name, tensor in encoded.items()}


@pytest.fixture
def draft(model):
    return kit.near(model)


@pytest.fixture
def quantized(model, tmp_path, device):
    model.save_pretrained(tmp_path)

    def load(**settings):
        config = BitsAndBytesConfig(**settings)
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path, quantization_config=config, device_map=device, dtype=torch.float32
        )
        layer = loaded.model.layers[0].self_attn.q_proj
        assert layer.weight.dtype in (torch.int8, torch.uint8), "quantized indeed"
        return loaded.eval()

    return load


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_quantized_target_and_assistant(quantized, model, draft, encoded, enabled, kind):
    small = quantized(**QUANTIZED[kind])
    for target, assistant in ((small, draft), (model, small), (small, small)):
        expected = target.generate(**encoded, **SETTINGS)
        with kit.counted_tokens(target) as tokens:
            out = target.generate(**encoded, **SETTINGS, assistant_model=assistant, **OURS)
        assert torch.equal(out, expected)
        assert max(tokens[1:]) >= 8 + 12


def test_outlier_columns_tie_the_rows_of_a_batch_together(quantized, draft, encoded, enabled):
    # Not ours: a row of stock `generate` alone differs from the same row in a batch. So identity cannot be asked for.
    model = quantized(load_in_8bit=True)
    width = encoded["input_ids"].shape[1]
    expected = model.generate(**encoded, **SETTINGS)[:, width:].tolist()
    assert kit.alone(model, encoded, **SETTINGS) != expected
    out = model.generate(**encoded, **SETTINGS, assistant_model=draft, **OURS)
    assert out.shape == (8, width + 16)
