"""What cannot be done exactly is refused before the first forward of any model, by a message with argument and fix."""

import copy
import inspect
import re
import warnings
from contextlib import contextmanager

import kit
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DynamicCache,
    LogitsProcessor,
    TextStreamer,
    WatermarkingConfig,
)
from transformers.generation import SynthIDTextWatermarkingConfig

from tetris_hf import FixedWindowSelector, TetrisDecoding, TetrisSelector


@contextmanager
def refused(*models, names: str, fix: str = ""):
    """Within this context a `ValueError` is raised that names the argument and the fix, and no model is called."""
    forwards = []
    handles = [model.register_forward_pre_hook(lambda *_: forwards.append(1)) for model in models]
    try:
        with pytest.raises(ValueError, match=re.escape(names)) as raised:
            yield
    finally:
        for handle in handles:
            handle.remove()
    assert forwards == [], "refused too late"
    assert re.search(fix or "[Ll]eave|[Uu]se|[Pp]ass|[Cc]all|must", str(raised.value)), raised.value


def ask(target, batch, assistant, **kwargs):
    settings = {"do_sample": False, "max_new_tokens": 6, "tetris_capacity": 4, "assistant_model": assistant}
    return target.generate(**batch, **{**settings, **kwargs})


def other_model(model_type: str, **overrides):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**kit.TINY, **overrides})
    return AutoModelForCausalLM.from_config(config).eval()


def encoder_decoder():
    config = AutoConfig.for_model(
        "t5", vocab_size=64, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return AutoModelForSeq2SeqLM.from_config(config).eval()


# Sizes that the tiny kit has no names for.
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "num_experts": 4}
CANNOT_BE_CUT = {
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "rwkv": {"attention_hidden_size": 32},
    "qwen3_next": {**HYBRID, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
OWN_ATTENTION = {"bloom": {"n_head": 4}, "falcon": {"alibi": True, "new_decoder_architecture": False}}

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.mark.parametrize(
    "setting, value",
    [
        ("num_beams", 2),
        ("guidance_scale", 1.5),
        ("output_attentions", True),
        ("watermarking_config", SynthIDTextWatermarkingConfig(keys=[1, 2, 3], ngram_len=2)),
        ("assistant_early_exit", 1),
        ("cache_implementation", "offloaded"),
    ],
)
def test_settings(target, near, batch, setting, value):
    if value == "offloaded" and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("transformers opens a CUDA stream for this cache before the decoding method is asked, and fails")
    names = "SynthID" if setting == "watermarking_config" else setting
    with refused(target, near, names=names):
        ask(target, batch, near, **{setting: value, "return_dict_in_generate": True})


def test_settings_of_a_generation_config(target, near, batch):
    model = copy.deepcopy(target)
    model.generation_config.num_beams = 3
    with refused(model, near, names="num_beams=3"):
        ask(model, batch, near)


def test_green_red_watermarking_is_equal_or_refused(target, near, batch):
    settings = {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="lefthash")}
    try:
        out = ask(target, batch, near, **settings)
    except ValueError as refusal:
        assert "atermark" in str(refusal)
    else:
        assert torch.equal(out, kit.plain(target, batch, max_new_tokens=6, **settings))


@pytest.mark.parametrize("value", [-1, 2.5, "8", True])
def test_capacity(target, near, batch, value):
    with refused(target, near, names="`tetris_capacity`", fix="at least 0"):
        ask(target, batch, near, tetris_capacity=value)
    with pytest.raises(ValueError, match="`capacity`"):
        TetrisDecoding(near, value)


@pytest.mark.parametrize("value", [0, -3, 1.5])
def test_depth(target, near, batch, value):
    with refused(target, near, names="`num_assistant_tokens`", fix="at least 1"):
        ask(target, batch, near, num_assistant_tokens=value)
    with pytest.raises(ValueError, match="`num_assistant_tokens`"):
        TetrisDecoding(near, 4, num_assistant_tokens=value)


@pytest.mark.parametrize("selector", [3, "paper", [TetrisSelector(), None]])
def test_selector(target, near, batch, selector):
    with refused(target, near, names="`tetris_selector`"):
        ask(target, batch, near, tetris_selector=selector)


def test_a_selector_without_a_budget(target, near, batch):
    with refused(target, near, names="`tetris_selector`", fix="pass `tetris_capacity`"):
        ask(target, batch, None, tetris_capacity=None, tetris_selector=FixedWindowSelector())


def test_a_budget_without_anybody_to_draft(target, batch):
    with refused(target, names="`tetris_capacity=4`", fix="`assistant_model`"):
        ask(target, batch, None)
    assert torch.equal(ask(target, batch, None, tetris_capacity=0), kit.plain(target, batch, max_new_tokens=6))


def test_two_drafters(target, near, batch):
    with refused(target, near, names="prompt_lookup_num_tokens"):
        ask(target, batch, near, prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("assistant", ["near", 3, object()])
def test_assistant_of_a_wrong_kind(target, batch, assistant):
    with refused(target, names="`assistant_model`", fix="from_pretrained"):
        ask(target, batch, assistant)


def test_encoder_decoder(near, batch):
    model = encoder_decoder()
    with refused(model, near, names="`model` (T5ForConditionalGeneration)", fix="eave"):
        ask(model, batch, near)


def test_encoder_decoder_as_assistant(target, batch):
    assistant = encoder_decoder()
    with refused(target, assistant, names="`assistant_model` (T5ForConditionalGeneration)"):
        ask(target, batch, assistant)


@pytest.mark.parametrize("model_type", CANNOT_BE_CUT)
def test_models_whose_state_cannot_be_cut(target, near, batch, model_type):
    other = other_model(model_type, **CANNOT_BE_CUT[model_type])
    with refused(other, near, names=f"`model` ({type(other).__name__})"):
        ask(other, batch, near)
    with refused(target, other, names=f"`assistant_model` ({type(other).__name__})"):
        ask(target, batch, other)


@pytest.mark.parametrize("model_type", OWN_ATTENTION)
def test_models_that_compute_attention_by_themselves(target, near, batch, model_type):
    other = other_model(model_type, **OWN_ATTENTION[model_type])
    with refused(other, near, names=f"`model` ({type(other).__name__})"):
        ask(other, batch, near)
    with refused(target, other, names=f"`assistant_model` ({type(other).__name__})"):
        ask(target, batch, other)


@pytest.mark.parametrize("model_type", ["bert", "bert-generation"])
def test_models_that_attend_to_later_tokens(near, batch, model_type):
    other = other_model(model_type)
    with refused(other, near, names=f"`model` ({type(other).__name__})"):
        ask(other, batch, near)


def test_a_vocabulary_of_another_tokenizer(target, batch):
    for size in (200, 20):
        assistant = kit.tiny(vocab_size=size)
        with refused(target, assistant, names="`assistant_model`", fix="tokenizer"):
            ask(target, batch, assistant)


def test_other_special_tokens_betray_another_tokenizer(target, batch):
    assistant = kit.tiny(vocab_size=72)
    model = copy.deepcopy(target)
    model.generation_config.eos_token_id, assistant.generation_config.eos_token_id = 5, [6, 7]
    with refused(model, assistant, names="`eos_token_id`", fix="tokenizer"):
        ask(model, batch, assistant)


def test_inputs_embeds(target, near, batch):
    embeddings = target.get_input_embeddings()(batch["input_ids"])
    with refused(target, near, names="`inputs_embeds`", fix="`input_ids`"):
        ask(target, {"inputs_embeds": embeddings, "attention_mask": batch["attention_mask"]}, near)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_that_is_not_empty(target, near, batch, name):
    if name == "cache" and name not in inspect.signature(target.forward).parameters:
        pytest.skip("this transformers knows the older name only")
    cache = DynamicCache(config=target.config)
    states = torch.zeros(3, 2, 5, 8)
    for layer in range(2):
        cache.update(states, states, layer)
    with warnings.catch_warnings(), refused(target, near, names="5 tokens", fix="input_ids"):
        warnings.simplefilter("ignore", FutureWarning)  # the older of the two names
        ask(target, batch, near, **{name: cache})


def test_synced_gpus(target, near, batch):
    with refused(target, near, names="`synced_gpus`"):
        ask(target, batch, near, synced_gpus=True)


def test_two_decoding_methods(target, near, batch):
    with refused(target, near, names="`custom_generate`", fix="one of them"):
        ask(target, batch, near, custom_generate=TetrisDecoding(near, 4))


def test_a_second_tokenizer(target, near, batch):
    with refused(target, near, names="`assistant_tokenizer`"):
        ask(target, batch, near, assistant_tokenizer=object(), tokenizer=object())


def test_a_streamer_for_many_rows(target, near, batch):
    # Stock's streamers put one row together; what would reach them here belongs to several.
    with refused(target, near, names="streamer"):
        ask(target, batch, near, streamer=TextStreamer(None))


def test_stop_strings_without_a_tokenizer(target, near, batch):
    with refused(target, near, names="`tokenizer`"):
        ask(target, batch, near, stop_strings=["a"])


def test_right_padding(target, near, batch):
    flipped = {name: tensor.flip(1) for name, tensor in batch.items()}
    with refused(target, near, names="`attention_mask` row 0", fix="left"):
        ask(target, flipped, near)


def test_an_empty_row_and_a_hole(target, near, batch):
    for columns in (slice(None), slice(10, 11)):
        mask = batch["attention_mask"].clone()
        mask[1, columns] = 0
        with refused(target, near, names="`attention_mask` row 1", fix="left"):
            ask(target, {**batch, "attention_mask": mask}, near)


def test_positions_of_ones_own(target, near, batch):
    with refused(target, near, names="`position_ids`"):
        ask(target, {**batch, "position_ids": torch.arange(12).expand(3, 12) + 1}, near)


def test_training_with_gradient_checkpointing(target, near, batch):
    model = copy.deepcopy(target)
    model.gradient_checkpointing_enable()
    model.train()
    with refused(model, near, names="gradient checkpointing", fix="eval"):
        ask(model, batch, near)


def test_an_unknown_argument_stays_an_error(target, near, batch):
    with refused(target, near, names="tetris_capacty"):
        ask(target, batch, near, tetris_capacty=3)


def test_a_processor_that_keeps_state_is_refused_by_name(target, near, batch):
    from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

    processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, target)
    with refused(target, near, names="UnbatchedClassifierFreeGuidance"):
        ask(target, batch, near, logits_processor=[processor])


def test_padding_that_no_mask_tells(target, near, warnings_of_transformers):
    # With pad = eos nobody can tell padding from text: it is read as text, as plain `generate` reads it, which lowers
    # quality without a sign. Half of the batch begins with it, so a warning is due.
    batch = {"input_ids": kit.ragged((4, 9))["input_ids"]}
    settings = {"eos_token_id": 0, "pad_token_id": 0}
    assert torch.equal(ask(target, batch, near, **settings), kit.plain(target, batch, max_new_tokens=6, **settings))
    assert "begin with the padding token" in warnings_of_transformers.text


def test_a_warning_when_the_score_would_bias_sampling(target, near, batch, warnings_of_transformers):
    ask(target, batch, near, tetris_selector=TetrisSelector(score="paper"))
    assert "biases" not in warnings_of_transformers.text, "greedy text is exact with any score"
    ask(target, batch, near, tetris_selector=TetrisSelector(score="paper"), do_sample=True)
    assert "biases" in warnings_of_transformers.text


class Harmless(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


def test_processors_of_ones_own_are_welcome(target, near, batch):
    assert torch.equal(
        ask(target, batch, near, logits_processor=[Harmless()]), kit.plain(target, batch, max_new_tokens=6)
    )
