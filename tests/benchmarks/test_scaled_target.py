"""A scaled target computes what the small one computes, and its heads propose what the small heads propose."""

import importlib.util
from pathlib import Path

import kit
import pytest
import torch
from transformers import LlamaForCausalLM

import tetris_hf


FILE = Path(__file__).parents[2] / "benchmarks" / "scaled_target.py"
spec = importlib.util.spec_from_file_location("scaled_target", FILE)
scaled_target = importlib.util.module_from_spec(spec)
spec.loader.exec_module(scaled_target)

# The tiny Llama has width 32, MLP 48, 2 layers, 4 heads of 8 over 2 key heads.
SIZES = {
    "hidden_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "intermediate_size": 112,
}


def rms_norms(model):
    return [m for m in model.modules() if type(m).__name__ == "LlamaRMSNorm"]


@pytest.mark.parametrize(
    "config",
    [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}],
    ids=["untied", "tied", "biases"],
)
def test_logits_and_text_are_those_of_the_small_model(config):
    small = kit.tiny(**config)
    with torch.no_grad():
        for norm in rms_norms(small):  # initialised to ones, which would hide a forgotten factor
            norm.weight.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(3))
            norm.variance_epsilon = small.config.rms_norm_eps = 0.1
        for name, parameter in small.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(4))
    wide = scaled_target.scale_target(small, **SIZES)
    assert {name: getattr(wide.config, name) for name in SIZES} == SIZES
    assert wide.model.layers[-1].mlp.gate_proj.weight.shape == (112, 80) and len(wide.model.layers) == 5
    batch = kit.ragged()
    with torch.no_grad():
        ours, theirs = wide(**batch).logits, small(**batch).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert torch.equal(kit.plain(wide, batch), kit.plain(small, batch))


def test_the_residual_stream_is_zero_outside_and_everything_else_is_not():
    small = kit.tiny()
    wide = scaled_target.scale_target(small, **SIZES)
    with torch.no_grad():
        states = wide(**kit.ragged(), output_hidden_states=True).hidden_states
    for layer in states:
        assert not layer[..., 32:].any() and layer[..., :32].any()
    for layer in wide.model.layers:
        for module in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            assert (module.weight != 0).all()
        assert (layer.mlp.gate_proj.weight != 0).all() and (layer.mlp.up_proj.weight != 0).all()
        assert not layer.mlp.down_proj.weight[32:].any() and not layer.self_attn.o_proj.weight[32:].any()
    assert all(not layer.mlp.down_proj.weight.any() for layer in wide.model.layers[2:])


def test_tied_embeddings_are_one_tensor_and_untied_ones_two():
    for tied in (True, False):
        wide = scaled_target.scale_target(kit.tiny(tie_word_embeddings=tied), **SIZES)
        assert (wide.lm_head.weight.data_ptr() == wide.model.embed_tokens.weight.data_ptr()) == tied


def test_the_seed_decides_the_random_weights_alone():
    small = kit.tiny()
    one, same, other = (scaled_target.scale_target(small, **SIZES, seed=seed) for seed in (1, 1, 2))
    weights = [model.model.layers[3].mlp.up_proj.weight for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    batch = kit.ragged()
    assert torch.equal(kit.plain(one, batch), kit.plain(other, batch))


def test_dtype_and_generation_config():
    small = kit.tiny()
    small.generation_config.eos_token_id = [5, 6]
    wide = scaled_target.scale_target(small, **SIZES, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.bfloat16} == {wide.dtype}
    assert wide.model.rotary_emb.inv_freq.dtype == torch.float32
    torch.testing.assert_close(wide.model.rotary_emb.inv_freq, small.model.rotary_emb.inv_freq)
    assert wide.generation_config.eos_token_id == [5, 6]
    assert wide.generation_config is not small.generation_config
    assert next(small.parameters()).dtype == torch.float32


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("reads", [True, False])
def test_heads_give_the_same_logits_through_the_wide_output_embeddings(layers, tied, reads):
    small = kit.tiny(tie_word_embeddings=tied)
    heads = tetris_hf.MedusaHeads(
        tetris_hf.MedusaConfig(
            hidden_size=32, vocab_size=64, medusa_num_heads=3, medusa_num_layers=layers, medusa_reads_next_token=reads
        )
    )
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(5))
    wide, wide_heads = scaled_target.scale_target(small, **SIZES), scaled_target.scale_heads(heads, 80)
    batch = kit.ragged()
    with torch.no_grad():
        states = [m.model(**batch).last_hidden_state.flatten(0, 1) for m in (small, wide)]  # (N * width, hidden_size)
        torch.testing.assert_close(states[1][:, :32], states[0], rtol=1e-4, atol=1e-4)
        assert not states[1][:, 32:].any()
        tokens = batch["input_ids"].flatten()
        embeds = [m.get_input_embeddings()(tokens) if reads else None for m in (small, wide)]
        expected = heads(states[0], small.lm_head, next_embeds=embeds[0])
        actual = wide_heads(states[1], wide.lm_head, next_embeds=embeds[1])
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    out = [kit.speculate(m, batch, h, depth=3) for m, h in ((small, heads), (wide, wide_heads))]
    assert torch.equal(out[0].sequences, out[1].sequences)
    assert torch.equal(out[0].tetris_stats.accepted, out[1].tetris_stats.accepted)


def test_the_named_sizes_fit_smollm2_and_are_as_large_as_their_names():
    for name, billions in (("7b", (6.5, 7.2)), ("7b-split", (6.5, 7.2)), ("30b", (29.0, 31.0))):
        sizes = scaled_target.SIZES[name]
        assert sizes["num_attention_heads"] == 3 * sizes["num_key_value_heads"]
        attention = 2 * 64 * (sizes["num_attention_heads"] + sizes["num_key_value_heads"])
        layer = sizes["hidden_size"] * (attention + 3 * sizes["intermediate_size"])
        total = sizes["num_hidden_layers"] * layer + 49152 * sizes["hidden_size"]
        assert billions[0] <= total / 1e9 <= billions[1], total


def test_a_target_to_be_split_can_be_stored_and_loaded(tmp_path):
    # transformers checks configurations when it writes and reads them; the shape of the real one, an eighth as wide.
    sizes = {name: size // 8 for name, size in scaled_target.SIZES["7b-split"].items()} | {"num_hidden_layers": 2}
    small = kit.tiny(num_attention_heads=3, num_key_value_heads=1, head_dim=8, hidden_size=24)
    wide = scaled_target.scale_target(small, **sizes)
    wide.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path)
    batch = kit.ragged()
    assert torch.equal(kit.plain(loaded, batch), kit.plain(wide, batch))


def test_what_does_not_fit_is_refused():
    small = kit.tiny()
    for name, size in (("hidden_size", 31), ("num_hidden_layers", 1), ("intermediate_size", 47)):
        with pytest.raises(ValueError, match=f"`{name}` must be at least that of `model`, .*, got {size}"):
            scaled_target.scale_target(small, **{**SIZES, name: size})
    with pytest.raises(ValueError, match="must be 2 times `num_key_value_heads`.*got 12 and 4: pass 8"):
        scaled_target.scale_target(small, **{**SIZES, "num_key_value_heads": 4})
    with pytest.raises(ValueError, match="plain `LlamaForCausalLM`, got Qwen3ForCausalLM"):
        scaled_target.scale_target(kit.tiny("qwen3", head_dim=8), **SIZES)
    heads = tetris_hf.MedusaHeads(tetris_hf.MedusaConfig(hidden_size=32, vocab_size=64))
    with pytest.raises(ValueError, match="`hidden_size` must be at least that of the heads, 32, got 16"):
        scaled_target.scale_heads(heads, 16)
    own = tetris_hf.MedusaHeads(tetris_hf.MedusaConfig(hidden_size=32, vocab_size=64, original_lm_head=False))
    with pytest.raises(ValueError, match="`original_lm_head=True`"):
        scaled_target.scale_heads(own, 80)
