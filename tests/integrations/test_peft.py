"""PEFT: adapters on target and assistant, on and off, merged; what changes the prompt is not served."""

import kit
import pytest
import torch

import tetris_hf


peft = pytest.importorskip("peft")

SETTINGS = {"max_new_tokens": 16, "do_sample": False}
OURS = {"tetris_capacity": 12}


def adapted(model, config=None):
    """The model with an adapter strong enough to change its text."""
    torch.manual_seed(7)
    config = config or peft.LoraConfig(
        r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False
    )
    config.task_type = "CAUSAL_LM"
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for weight in wrapped.parameters():
            if weight.requires_grad:
                weight.add_(0.2 * torch.randn_like(weight))
    return wrapped


def same_text(model, encoded, assistant, base):
    """Whether ours is plain `generate`'s text; the counts say that drafts were verified by the model meant."""
    expected = model.generate(**encoded, **SETTINGS)
    with kit.counted_tokens(base) as tokens:
        out = model.generate(**encoded, **SETTINGS, assistant_model=assistant, **OURS)
    assert max(tokens[1:]) == 8 + 12
    return torch.equal(out, expected)


def test_adapters_on_and_off(model, draft, encoded, enabled):
    bare = model.generate(**encoded, **SETTINGS)
    wrapped = adapted(model)
    assert not torch.equal(wrapped.generate(**encoded, **SETTINGS), bare)
    assert same_text(wrapped, encoded, draft, model)
    with wrapped.disable_adapter():
        assert same_text(wrapped, encoded, draft, model)
        assert torch.equal(wrapped.generate(**encoded, **SETTINGS, assistant_model=draft, **OURS), bare)
    assert same_text(wrapped, encoded, draft, model)
    assert not torch.equal(wrapped.generate(**encoded, **SETTINGS, assistant_model=draft, **OURS), bare)


@pytest.mark.parametrize("kind", ["ia3", "vera", "dora"])
def test_other_adapters_of_weights(model, draft, encoded, enabled, kind):
    config = {
        "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
        "vera": lambda: peft.VeraConfig(target_modules=["q_proj", "o_proj"]),
        "dora": lambda: peft.LoraConfig(use_dora=True, target_modules=["q_proj", "v_proj"]),
    }[kind]()
    assert same_text(adapted(model, config), encoded, draft, model)


def test_merged(model, draft, encoded, enabled):
    merged = adapted(model).merge_and_unload()
    assert same_text(merged, encoded, draft, merged)


def test_doors_for_one_model(model, draft, encoded):
    wrapped = adapted(model)
    tetris_hf.enable(wrapped)
    assert same_text(wrapped, encoded, draft, model)
    tetris_hf.disable(wrapped)
    expected = wrapped.generate(**encoded, **SETTINGS)
    decoding = tetris_hf.TetrisDecoding(draft, capacity=12)
    assert torch.equal(wrapped.generate(**encoded, **SETTINGS, custom_generate=decoding), expected)


def test_an_assistant_with_an_adapter(model, draft, encoded, enabled):
    assistant = adapted(draft)
    assert same_text(model, encoded, assistant.get_base_model(), model)
    # The wrapper itself is no `PreTrainedModel`.
    with pytest.raises(ValueError, match="assistant_model.*PeftModelForCausalLM"):
        model.generate(**encoded, **SETTINGS, assistant_model=assistant, **OURS)


def test_layers_of_an_adapted_target_as_its_assistant(model, encoded, enabled):
    wrapped = adapted(model)
    assert same_text(wrapped, encoded, tetris_hf.LayerSkipAssistant(wrapped.get_base_model(), [0]), model)


def test_an_adapter_for_each_row(model, draft, encoded, enabled):
    wrapped = adapted(model)
    names = ["default", "__base__"] * 4
    wrapped.generate(**encoded, **SETTINGS, adapter_names=names)
    # Rows lie packed in one sequence; PEFT's own check says so before any token.
    with kit.counted_tokens(model) as tokens, pytest.raises(ValueError, match="adapter_names"):
        wrapped.generate(**encoded, **SETTINGS, adapter_names=names, assistant_model=draft, **OURS)
    assert len(tokens) <= 1


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_are_refused(model, draft, encoded, enabled, kind):
    wrapped = adapted(model, getattr(peft, kind)(num_virtual_tokens=3))
    with pytest.raises(ValueError):
        wrapped.generate(**encoded, **SETTINGS, assistant_model=draft, **OURS)
