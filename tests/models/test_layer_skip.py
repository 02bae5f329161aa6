"""The assistant against the target, against models built by hand, and the search against one forward per candidate."""

import copy
import dataclasses
import inspect

import pytest
import torch
from accelerate import dispatch_model
from accelerate.hooks import remove_hook_from_module
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    CompileConfig,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tetris_hf.models import LayerChoice, LayerSkipAssistant, choose_layers


DEPTH = 6
SUBSET = [1, 3, 4]
VOCABULARY = 97

# Windows are shorter than the prompts, and the subset changes the order of the layer types.
ARCHITECTURES = {
    "llama": {},
    "gpt2": {"n_head": 4, "n_embd": 32, "n_positions": 64, "scale_attn_by_inverse_layer_idx": True},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neo": {"num_heads": 4, "attention_types": [[["global", "local"], 3]], "window_size": 5},
    "gpt_neox": {},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    },
    "mistral": {"sliding_window": 5},
    "phi3": {},
    "qwen3": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
}


def tiny(model_type: str = "llama", **overrides: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": DEPTH,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        | ARCHITECTURES[model_type]
        | overrides,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)  # layers must matter, or leaving them out would go unnoticed
    return model


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return tiny(request.param)


@pytest.fixture
def prompts() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    input_ids = torch.randint(3, VOCABULARY, (3, 11))  # (N, T)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[0, :4] = 0
    attention_mask[1, :1] = 0
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def name_in_target(model: PreTrainedModel, name: str, kept: list[int]) -> str:
    """The target's name for a tensor that a model of the layers `kept` calls `name`."""
    stack = layers_of(model)
    prefix = next(path for path, module in model.named_modules() if module is stack)
    if not name.startswith(f"{prefix}."):
        return name
    position, rest = name[len(prefix) + 1 :].split(".", 1)
    return f"{prefix}.{kept[int(position)]}.{rest}"


def by_hand(model: PreTrainedModel, kept: list[int]) -> PreTrainedModel:
    """A separate model of `len(kept)` layers with copies of those layers' weights, built by the class itself."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(kept)
    for name in ("layer_types", "attention_layers"):
        if hasattr(config, name):
            setattr(config, name, [getattr(config, name)[index] for index in kept])
    built = type(model)(config).eval()
    target = model.state_dict()
    built.load_state_dict({name: target[name_in_target(model, name, kept)] for name in built.state_dict()})
    if model.config.model_type == "gpt2":  # the scale of a layer follows its place in the target
        for layer, index in zip(layers_of(built), kept, strict=True):
            layer.attn.scaling = layers_of(model)[index].attn.scaling
    return built


def fingerprint(model: PreTrainedModel) -> tuple:
    """All that a user could find changed: modules, attributes, hooks, tensors (by identity and by value), configs."""
    modules = tuple(
        (name, id(module), tuple((key, repr(value)) for key, value in vars(module).items()))
        for name, module in model.named_modules()
        if not isinstance(module, PreTrainedModel)
    )
    tensors = tuple((name, id(value), value.sum().item()) for name, value in model.state_dict(keep_vars=True).items())
    return modules, tensors, sorted(vars(model)), str(model.config), str(model.generation_config), model.training


def test_all_layers_are_the_target(model, prompts):
    assistant = LayerSkipAssistant(model, range(DEPTH))
    assert type(assistant) is type(model)
    assert torch.equal(assistant(**prompts).logits, model(**prompts).logits)
    expected = model.generate(**prompts, max_new_tokens=12, do_sample=False)
    assert torch.equal(assistant.generate(**prompts, max_new_tokens=12, do_sample=False), expected)


def test_subset_is_the_model_built_by_hand(model, prompts):
    assistant, reference = LayerSkipAssistant(model, SUBSET), by_hand(model, SUBSET)
    assert torch.equal(assistant(**prompts).logits, reference(**prompts).logits)
    assert not torch.allclose(assistant(**prompts).logits, model(**prompts).logits, atol=1e-2)
    expected = reference.generate(**prompts, max_new_tokens=12, do_sample=False)
    assert torch.equal(assistant.generate(**prompts, max_new_tokens=12, do_sample=False), expected)


def test_token_by_token_is_the_whole_sequence(model, prompts):
    # With the cache that its own config describes: a layer that kept its old index or type would not fit into it.
    assistant = LayerSkipAssistant(model, SUBSET)
    input_ids = prompts["input_ids"]
    positions = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    whole = assistant(input_ids).logits  # (N, T, V)
    cache = DynamicCache(config=assistant.config)
    name = "cache" if "cache" in inspect.signature(assistant.forward).parameters else "past_key_values"
    steps = [
        assistant(token, position_ids=position, logits_to_keep=1, **{name: cache}).logits
        for token, position in zip(input_ids.split(1, dim=1), positions.split(1, dim=1), strict=True)
    ]
    assert len(cache.layers) == len(SUBSET)
    torch.testing.assert_close(torch.cat(steps, dim=1), whole, atol=1e-4, rtol=1e-4)


def test_weights_are_shared_and_the_rest_is_not(model):
    assistant = LayerSkipAssistant(model, SUBSET)
    target = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in assistant.named_parameters(remove_duplicate=False):
        assert parameter is target[name_in_target(model, name, SUBSET)]
    buffers = {id(buffer) for buffer in model.buffers()}
    assert all(id(buffer) in buffers for buffer in assistant.buffers())

    assert not {id(module) for module in assistant.modules()} & {id(module) for module in model.modules()}
    configs = {id(module.config) for module in assistant.modules() if hasattr(module, "config")}
    assert configs == {id(assistant.config)} != {id(model.config)}
    assert assistant.generation_config is not model.generation_config
    for position, layer in enumerate(layers_of(assistant)):
        indices = [vars(m)[name] for m in layer.modules() for name in ("layer_idx", "layer_id") if name in vars(m)]
        assert set(indices) == {position}


def test_target_is_unchanged(model, prompts):
    before = fingerprint(model)
    logits = model(**prompts).logits
    assistant = LayerSkipAssistant(model, SUBSET)
    assistant.generate(**prompts, max_new_tokens=4, do_sample=False)
    assistant.config.use_cache = False
    assistant.generation_config.max_new_tokens = 1
    assistant.train().register_forward_hook(print)
    choose_layers(model, **prompts, num_layers=DEPTH - 1, max_new_tokens=3)
    assert fingerprint(model) == before
    assert torch.equal(model(**prompts).logits, logits)


def test_lists_with_one_entry_a_layer_follow():
    config = LayerSkipAssistant(tiny("gemma3_text"), SUBSET).config
    assert config.layer_types == ["sliding_attention", "sliding_attention", "sliding_attention"]
    model = tiny("llama")
    model.config.architectures = ["LlamaForCausalLM"] * DEPTH
    model.config.eos_token_id = list(range(DEPTH))
    model.config.anything = tuple("abcdef")
    config = LayerSkipAssistant(model, SUBSET).config
    assert config.anything == ("b", "d", "e")
    assert (config.architectures, config.eos_token_id) == (model.config.architectures, model.config.eos_token_id)


def test_hooks_and_replaced_methods_stay_behind(prompts):
    model = tiny()
    calls = []

    class Uncopyable:
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

        def hook(self, *args):
            calls.append(args)

    # What transformers keeps on a model after its first use.
    model(**prompts, output_hidden_states=True)
    model.get_compiled_call(CompileConfig(backend="eager"))
    model.register_forward_hook(Uncopyable().hook)
    layers_of(model)[1].mlp.register_forward_pre_hook(Uncopyable().hook)
    model.generate = Uncopyable().hook
    assistant = LayerSkipAssistant(model, SUBSET)
    assert assistant.generate.__func__ is type(model).generate
    assert not hasattr(assistant, "_compiled_call")
    assistant.generate(**prompts, max_new_tokens=3, do_sample=False)
    assert calls == []
    assert len(assistant(**prompts, output_hidden_states=True).hidden_states) == len(SUBSET) + 1
    model(**prompts)
    assert len(calls) == 2


def test_device_hooks_follow(prompts):
    # `device_map` replaces `forward` everywhere by something that refers to the module: it must refer to the copy.
    model = tiny()
    expected = LayerSkipAssistant(model, SUBSET).generate(**prompts, max_new_tokens=5, do_sample=False)
    dispatch_model(model, device_map={"": "cpu"}, force_hooks=True)
    assistant = LayerSkipAssistant(model, SUBSET)
    assert assistant.forward.args[0] is assistant
    assert torch.equal(assistant.generate(**prompts, max_new_tokens=5, do_sample=False), expected)
    remove_hook_from_module(model, recurse=True)
    assert hasattr(assistant, "_hf_hook")


def test_function_bound_to_a_module_is_refused():
    model = tiny()
    layer = layers_of(model)[2]
    forward = layer.mlp.up_proj.forward
    layer.mlp.up_proj.forward = lambda x: forward(x)  # of the leaf's own weights: harmless
    LayerSkipAssistant(model, [2])
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ValueError, match=r"`forward` of `model\.layers\.2` has been replaced"):
        LayerSkipAssistant(model, [2])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], r"decoder layers 0 to 5, got \[\]"),
        ([0, 6], r"decoder layers 0 to 5, got \[0, 6\]"),
        ([-1, 2], r"decoder layers 0 to 5, got \[-1, 2\]"),
        ([1, 1], r"strictly increasing, got \[1, 1\]. Pass \[1\]"),
        ([4, 2], r"strictly increasing, got \[4, 2\]. Pass \[2, 4\]"),
    ],
)
def test_wrong_layers(layers, message):
    with pytest.raises(ValueError, match=f"`layers` must .*{message}"):
        LayerSkipAssistant(tiny(), layers)


def test_wrong_models():
    sizes = {"vocab_size": 50, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    with pytest.raises(ValueError, match="encoder-decoder, BartForConditionalGeneration. Pass a decoder-only"):
        LayerSkipAssistant(BartForConditionalGeneration(BartConfig(**sizes, **heads)), [0])

    class Unlisted(LlamaForCausalLM):
        def __init__(self, config: LlamaConfig):
            super().__init__(config)
            self.model.layers = nn.Sequential(*self.model.layers)

    with pytest.raises(ValueError, match=r"`config.num_hidden_layers=6` decoder layers, and Unlisted has 0\."):
        LayerSkipAssistant(Unlisted(tiny().config), [0])
    model = tiny()
    model.adapters = nn.ModuleList(nn.Identity() for _ in range(DEPTH))
    with pytest.raises(ValueError, match="LlamaForCausalLM has 2: model.layers, adapters. Use another draft"):
        LayerSkipAssistant(model, [0])
    model = tiny()
    model.config.num_kv_shared_layers = 2
    with pytest.raises(ValueError, match="tied: `config.num_kv_shared_layers=2`"):
        LayerSkipAssistant(model, [0])


def test_layer_types_that_follow_from_the_depth_are_refused():
    class Alternating(LlamaConfig):
        @property
        def layer_types(self) -> list[str]:
            return [("full_attention", "sliding_attention")[i % 2] for i in range(self.num_hidden_layers)]

    model = LlamaForCausalLM(Alternating(**tiny().config.to_dict() | {"sliding_window": 5}))
    LayerSkipAssistant(model, [0, 3])
    with pytest.raises(ValueError, match=r"Alternating computes `layer_types`.*got \[0, 2\]"):
        LayerSkipAssistant(model, [0, 2])


@torch.no_grad()
def naive_search(model, input_ids, attention_mask, num_layers, max_new_tokens):
    """One forward per candidate through a model built by hand, and a loop over rows and tokens."""
    width = input_ids.shape[1]
    answers = model.generate(
        input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, do_sample=False, num_beams=1
    )
    mask = torch.cat([attention_mask, torch.ones_like(answers[:, width:])], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    kept, removed, agreement = list(range(DEPTH)), [], []
    while len(kept) > num_layers:
        scores = []
        for candidate in kept:
            reduced = by_hand(model, [layer for layer in kept if layer != candidate])
            logits = reduced(answers, attention_mask=mask, position_ids=positions).logits
            hits, log_probabilities = [], []
            for row in range(len(answers)):
                for column in range(width, answers.shape[1]):
                    token = answers[row, column]
                    hits.append(float(logits[row, column - 1].argmax() == token))
                    log_probabilities.append(logits[row, column - 1].log_softmax(-1)[token].item())
                    if token == model.generation_config.eos_token_id:
                        break
            scores.append((sum(hits) / len(hits), sum(log_probabilities) / len(log_probabilities)))
        best = max(range(len(kept)), key=scores.__getitem__)
        removed.append(kept.pop(best))
        agreement.append(scores[best][0])
    return kept, removed, agreement


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text"])
def test_search_is_the_naive_search(model_type, prompts):
    model = tiny(model_type)
    # An end that the rows reach at different columns: what follows it must not count.
    answers = model.generate(**prompts, max_new_tokens=9, do_sample=False, eos_token_id=None)
    model.generation_config.eos_token_id = answers[0, 11 + 3].item()
    kept, removed, agreement = naive_search(model, **prompts, num_layers=2, max_new_tokens=9)
    model.generation_config.update(do_sample=True, repetition_penalty=1.5)  # the search asks for plain greedy answers
    model.train()
    progress = []
    choice = choose_layers(
        model, **prompts, num_layers=2, max_new_tokens=9, progress=lambda *update: progress.append(update)
    )
    assert choice.layers == tuple(kept)
    assert choice.removed == tuple(removed)
    assert choice.agreement == pytest.approx(agreement)
    assert progress == list(zip([5, 4, 3, 2], choice.agreement, strict=True))
    assert model.training


def test_search_without_a_mask(prompts):
    model, input_ids = tiny(), prompts["input_ids"]
    assert choose_layers(model, input_ids, num_layers=4, max_new_tokens=4) == choose_layers(
        model, input_ids, torch.ones_like(input_ids), num_layers=4, max_new_tokens=4
    )


def test_choice_answers_for_every_depth_above():
    choice = LayerChoice(layers=(0, 4), removed=(2, 1, 3), agreement=(0.9, 0.7, 0.4))
    assert [choice.layers_at(n) for n in (2, 3, 4, 5)] == [(0, 4), (0, 3, 4), (0, 1, 3, 4), (0, 1, 2, 3, 4)]
    for depth in (1, 6):
        with pytest.raises(ValueError, match=rf"`num_layers` must be in \[2, 5\], got {depth}"):
            choice.layers_at(depth)
    with pytest.raises(dataclasses.FrozenInstanceError):
        choice.layers = ()


def test_wrong_search_arguments(prompts):
    for num_layers in (0, DEPTH + 1):
        with pytest.raises(ValueError, match=rf"`num_layers` must be in \[1, 6\].*got {num_layers}"):
            choose_layers(tiny(), **prompts, num_layers=num_layers)
    right_padded = prompts["attention_mask"].flip(1)
    with pytest.raises(ValueError, match="`attention_mask` ends in 0. Pad on the left"):
        choose_layers(tiny(), prompts["input_ids"], right_padded, num_layers=2)
