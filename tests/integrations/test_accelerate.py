"""accelerate: `device_map="auto"`, modules with hooks, weights offloaded to memory and disk."""

import accelerate
import kit
import pytest
import torch
from transformers import AutoModelForCausalLM

import tetris_hf


SETTINGS = {"max_new_tokens": 16, "do_sample": False}
ON_CPU = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def same_text(target, assistant, encoded):
    expected = target.generate(**encoded, **SETTINGS)
    with kit.counted_tokens(target) as tokens:
        out = target.generate(**encoded, **SETTINGS, assistant_model=assistant, tetris_capacity=12)
    assert max(tokens[1:]) == 8 + 12
    return torch.equal(out, expected)


def test_device_map_auto(folder, draft, encoded, enabled):
    assert same_text(AutoModelForCausalLM.from_pretrained(folder, device_map="auto"), draft, encoded)


@pytest.mark.parametrize("which", ["target", "assistant"])
def test_a_hook_on_every_module(folder, model, draft, encoded, enabled, which):
    # What `device_map` makes of a model on several devices.
    hooked = accelerate.dispatch_model(AutoModelForCausalLM.from_pretrained(folder), {"": "cpu"}, force_hooks=True)
    assert hasattr(hooked, "_hf_hook")
    assert same_text(hooked, draft, encoded) if which == "target" else same_text(model, hooked, encoded)


@pytest.mark.parametrize("offloaded", ["a layer", "all"])
def test_weights_on_disk(folder, draft, encoded, enabled, tmp_path, offloaded):
    device_map = {**ON_CPU, "model.layers.1": "disk"}
    if offloaded == "all":
        device_map = {name: "cpu" if name == "model.rotary_emb" else "disk" for name in device_map}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, offload_folder=tmp_path / "offload")
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    assert same_text(model, draft, encoded)


def test_heads_that_read_embeddings_which_are_on_disk(folder, model, encoded, enabled, tmp_path):
    everything = {name: "cpu" if name == "model.rotary_emb" else "disk" for name in (*ON_CPU, "model.layers.1")}
    offloaded = AutoModelForCausalLM.from_pretrained(
        folder, device_map=everything, offload_folder=tmp_path / "offload"
    )
    assert offloaded.get_input_embeddings().weight.is_meta
    sizes = {"hidden_size": model.config.hidden_size, "vocab_size": model.config.vocab_size, "medusa_num_heads": 3}
    heads = tetris_hf.MedusaHeads(tetris_hf.MedusaConfig(**sizes, medusa_reads_next_token=True)).eval()
    assert same_text(offloaded, heads, encoded)


def test_weights_kept_in_memory_until_they_are_needed(folder, draft, encoded, enabled):
    model = AutoModelForCausalLM.from_pretrained(folder)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert same_text(model, draft, encoded)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device beside the CPU")
@pytest.mark.parametrize(("target_device", "assistant_device"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_an_assistant_on_another_device(model, draft, encoded, enabled, target_device, assistant_device):
    model, draft = model.to(target_device), draft.to(assistant_device)
    encoded = {name: tensor.to(target_device) for name, tensor in encoded.items()}
    expected = model.generate(**encoded, **SETTINGS)
    out = model.generate(
        **encoded, **SETTINGS, assistant_model=draft, tetris_capacity=12, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected) and out.tetris_stats.accepted.sum() > 0
