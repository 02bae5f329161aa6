"""The doors: `enable` and `disable`, the decoding object, and what passes through them untouched.

`tetris_capacity=None` is stock `generate`, bit for bit, also for a model that brings a `generate` of its own.
"""

import copy
import functools

import kit
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, GenerationMixin, PreTrainedTokenizerFast, pipeline

import tetris_hf
from tetris_hf import TetrisDecoding


SETTINGS = {"do_sample": False, "max_new_tokens": 12}
STOCK = GenerationMixin.generate


@pytest.fixture
def model(target):
    """A target of this test's own: some doors are set on the model."""
    return copy.deepcopy(target)


# enable and disable.


def test_enable_for_all_models(target, near, batch):
    tetris_hf.enable()
    tetris_hf.enable()  # idempotent: not a wrapper around a wrapper
    expected = kit.plain(target, batch, **SETTINGS)
    assert torch.equal(target.generate(**batch, **SETTINGS, assistant_model=near, tetris_capacity=5), expected)
    later = copy.deepcopy(target)
    assert torch.equal(later.generate(**batch, **SETTINGS, assistant_model=near, tetris_capacity=5), expected)
    tetris_hf.disable()
    assert GenerationMixin.generate is STOCK
    tetris_hf.disable()
    assert GenerationMixin.generate is STOCK
    with pytest.raises(ValueError, match="tetris_capacity"):
        target.generate(**batch, **SETTINGS, tetris_capacity=5)


def test_enable_for_one_model(model, target, near, batch):
    tetris_hf.enable(model)
    tetris_hf.enable(model)
    expected = kit.plain(target, batch, **SETTINGS)
    assert torch.equal(model.generate(**batch, **SETTINGS, assistant_model=near, tetris_capacity=5), expected)
    assert torch.equal(model.generate(**batch, **SETTINGS), expected)
    assert GenerationMixin.generate is STOCK and "generate" not in vars(target)
    tetris_hf.disable(model)
    tetris_hf.disable(model)
    assert "generate" not in vars(model)


def test_one_and_all_in_any_order(model, near, batch):
    expected = kit.plain(model, batch, **SETTINGS)
    for undo in ((None, model), (model, None)):
        tetris_hf.enable(model)
        tetris_hf.enable()
        assert torch.equal(model.generate(**batch, **SETTINGS, assistant_model=near, tetris_capacity=5), expected)
        assert torch.equal(model.generate(**batch, **SETTINGS), expected)
        for which in undo:
            tetris_hf.disable(which)
        assert GenerationMixin.generate is STOCK and "generate" not in vars(model)
        assert torch.equal(model.generate(**batch, **SETTINGS), expected)


def test_an_enabled_model_can_be_copied(model, near, batch):
    tetris_hf.enable(model)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.neg_()
    settings = {**SETTINGS, "assistant_model": near, "tetris_capacity": 4}
    tetris_hf.disable(model)
    assert torch.equal(copied.generate(**batch, **settings), kit.plain(copied, batch, **SETTINGS))


def test_a_model_with_a_generate_of_its_own(model, near, batch):
    # As `from_pretrained` leaves a model whose repository brings a decoding method.
    calls = []

    def of_the_repository(inputs=None, model=None, **kwargs):
        calls.append(kwargs)
        return GenerationMixin.generate(model, inputs, **kwargs)

    own = functools.partial(of_the_repository, model=model)
    model.generate = own
    expected = model.generate(**batch, **SETTINGS)
    tetris_hf.enable(model)
    assert torch.equal(model.generate(**batch, **SETTINGS), expected)
    assert torch.equal(model.generate(**batch, **SETTINGS, tetris_capacity=None), expected)
    assert len(calls) == 3, "plain calls reach the model's own method"
    assert torch.equal(model.generate(**batch, **SETTINGS, assistant_model=near, tetris_capacity=4), expected)
    assert len(calls) == 3
    tetris_hf.disable(model)
    assert model.generate is own


# What passes through.


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("whom", ["all", "one"])
def test_no_capacity_is_stock_bit_for_bit(model, batch, do_sample, whom):
    settings = {**SETTINGS, "do_sample": do_sample, "return_dict_in_generate": True, "output_scores": True}
    torch.manual_seed(0)
    expected = model.generate(**batch, **settings)
    tetris_hf.enable(model if whom == "one" else None)
    for more in ({}, {"tetris_capacity": None}):
        torch.manual_seed(0)
        out = model.generate(**batch, **settings, **more)
        assert type(out) is type(expected) and torch.equal(out.sequences, expected.sequences)
        assert all(torch.equal(a, b) for a, b in zip(out.scores, expected.scores, strict=True))


def test_no_capacity_keeps_stock_assisted_decoding(model, near, batch):
    tetris_hf.enable(model)
    alone = kit.row(batch, 2)
    assert torch.equal(model.generate(**alone, **SETTINGS, assistant_model=near), kit.plain(model, alone, **SETTINGS))
    with pytest.raises(ValueError, match="batch_size"):
        model.generate(**batch, **SETTINGS, assistant_model=near)


def test_positional_inputs(model, near):
    level = kit.ragged((6, 6))["input_ids"]
    tetris_hf.enable(model)
    config = GenerationConfig(**SETTINGS, pad_token_id=0)
    expected = model.generate(level, config)
    assert torch.equal(model.generate(level, config, assistant_model=near, tetris_capacity=4), expected)
    assert torch.equal(model.generate(inputs=level, assistant_model=near, tetris_capacity=4, **SETTINGS), expected)


def test_generation_config_of_the_call_is_read_and_not_changed(model, near, batch):
    tetris_hf.enable(model)
    config = GenerationConfig(max_new_tokens=9, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
    before = config.to_dict()
    out = model.generate(**batch, generation_config=config, assistant_model=near, tetris_capacity=4)
    assert torch.equal(out.sequences, kit.plain(model, batch, max_new_tokens=9))
    assert out.tetris_stats.capacity == 4
    assert config.to_dict() == before


def test_num_assistant_tokens_is_honoured(model, same, batch):
    tetris_hf.enable(model)
    forwards = []
    for depth in (1, 3, None):
        more = {} if depth is None else {"num_assistant_tokens": depth}
        with kit.counted_tokens(model) as tokens:
            model.generate(**batch, **SETTINGS, assistant_model=same, tetris_capacity=100, **more)
        forwards.append(len(tokens))
    # 11 tokens after the first: two a step, four a step, all at once.
    assert forwards == [1 + 6, 1 + 3, 1 + 1]


def test_num_assistant_tokens_in_the_call_beats_that_of_the_assistant(model, batch):
    tetris_hf.enable(model)
    assistant = copy.deepcopy(model)
    assistant.generation_config.num_assistant_tokens = 5
    settings = {**SETTINGS, "tetris_capacity": 100, "return_dict_in_generate": True, "assistant_model": assistant}
    assert model.generate(**batch, **settings).tetris_stats.drafted.shape == (3, 5)
    assert model.generate(**batch, **settings, num_assistant_tokens=2).tetris_stats.drafted.shape == (3, 2)


@pytest.mark.parametrize("depth", [19, 20, 21])
def test_any_depth_can_be_asked_for(model, same, batch, depth):
    # 20 is what transformers itself fills in when nobody asked; asked for, it must count all the same.
    tetris_hf.enable(model)
    config = GenerationConfig(max_new_tokens=30, do_sample=False, pad_token_id=0, num_assistant_tokens=depth)
    settings = {"assistant_model": same, "tetris_capacity": 9, "return_dict_in_generate": True}
    out = model.generate(**batch, **settings, num_assistant_tokens=depth, max_new_tokens=30, do_sample=False)
    assert out.tetris_stats.drafted.shape == (3, depth)
    out = model.generate(**batch, **settings, generation_config=config)
    assert out.tetris_stats.drafted.shape == (3, depth)


@pytest.mark.parametrize("do_sample", [False, True])
def test_num_return_sequences(model, near, batch, do_sample):
    tetris_hf.enable(model)
    settings = {**SETTINGS, "assistant_model": near, "tetris_capacity": 6, "num_return_sequences": 3}
    if not do_sample:  # stock refuses it without sampling
        with pytest.raises(ValueError, match="num_return_sequences"):
            model.generate(**batch, **settings)
        return
    torch.manual_seed(0)
    out = model.generate(**batch, **{**settings, "do_sample": True})
    assert out.shape == (9, 24)
    assert torch.equal(out[:, :12], batch["input_ids"].repeat_interleave(3, 0)), "rows in the order of stock"
    assert len(out.unique(dim=0)) == 9, "independent draws"


def test_through_the_decoding_object(model, near, batch):
    expected = kit.plain(model, batch, **SETTINGS)
    decoding = TetrisDecoding(near, capacity=5, num_assistant_tokens=3)
    assert torch.equal(model.generate(**batch, **SETTINGS, custom_generate=decoding), expected)
    out = model.generate(**batch, **SETTINGS, custom_generate=decoding, return_dict_in_generate=True)
    again = model.generate(**batch, **SETTINGS, custom_generate=decoding, return_dict_in_generate=True)
    assert out.tetris_stats is not again.tetris_stats and out.tetris_stats.steps == again.tetris_stats.steps


# With a tokenizer.


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level BPE trained in memory: 256 bytes and a few merges. The models below have as many ids."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<pad>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    trained.train_from_iterator(["the cat sat on the mat", "a hat for the rat", "that cat"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=trained, pad_token="<pad>", padding_side="left")


@pytest.fixture(scope="module")
def talkative(tokenizer):
    return kit.tiny(vocab_size=len(tokenizer))


PROMPTS = ["the cat", "a", "on the mat sat a rat"]


@pytest.mark.parametrize("where", ["call", "config"])
def test_stop_strings(talkative, tokenizer, where):
    tetris_hf.enable()
    batch = dict(tokenizer(PROMPTS, padding=True, return_tensors="pt", return_token_type_ids=False))
    width = batch["input_ids"].shape[1]
    text = kit.plain(talkative, batch)[1, width:]
    # From the middle of row 1's text, inside an accepted block. Stock finds whole characters only.
    stop = next(pair for n in range(3, 15) if (pair := tokenizer.decode(text[n : n + 2])).isascii())
    settings = {"max_new_tokens": 20, "do_sample": False, "stop_strings": [stop]}
    config = GenerationConfig(**settings, pad_token_id=0, eos_token_id=None)
    given = settings if where == "call" else {"generation_config": config}
    for assistant in (kit.near(talkative), copy.deepcopy(talkative)):
        out = talkative.generate(
            **batch, **given, tokenizer=tokenizer, assistant_model=assistant, tetris_capacity=9, num_assistant_tokens=9
        )
        expected = talkative.generate(**batch, **settings, tokenizer=tokenizer)
        for index in range(3):
            # Row by row up to the end; behind it stock writes on, if there is no EOS id.
            ends = [n for n in range(1, 21) if stop in tokenizer.decode(expected[index, width : width + n])]
            end = width + ends[0] if ends else out.shape[1]
            assert torch.equal(out[index, :end], expected[index, :end])
            assert set(out[index, end:].tolist()) <= {0}
    assert config.stop_strings == [stop], "the user's config is not changed"


def test_pipeline_passes_the_arguments_on(talkative, tokenizer):
    tetris_hf.enable()
    pipe = pipeline("text-generation", model=talkative, tokenizer=tokenizer, batch_size=3)
    settings = {"max_new_tokens": 10, "do_sample": False}
    expected = pipe(PROMPTS, **settings)
    near = kit.near(talkative)
    with kit.counted_tokens(talkative) as tokens:
        out = pipe(PROMPTS, **settings, assistant_model=near, tetris_capacity=6)
    assert out == expected
    assert max(tokens[1:]) > 3, "drafts were verified"
