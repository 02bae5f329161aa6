"""The shallow assistant: its own layers between the target's very embeddings, stored alone, trained alone."""

import json
import sys
from pathlib import Path

import kit
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig

from tetris_hf import LayerSkipAssistant
from tetris_hf.models import ShallowAssistant


def deep(model_type: str = "llama", **overrides):
    """A target of four layers."""
    if model_type == "gemma3_text":
        overrides["layer_types"] = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    depth = {"num_hidden_layers": 4, **({"n_layer": 4} if model_type == "gpt2" else {})}
    return kit.tiny(model_type, **depth, **overrides)


def trained(target, layers=(0, 3), seed=0):
    """An assistant whose own weights have moved."""
    assistant = ShallowAssistant.from_target(target, layers)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in ShallowAssistant.own_parameters(assistant).values():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return assistant.eval()


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "opt", "mixtral"])
def test_begins_as_the_layers_and_shares_the_embeddings(model_type):
    target, batch = deep(model_type), kit.ragged()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    assistant = ShallowAssistant.from_target(target, [0, 2]).eval()
    assert type(assistant) is type(target)
    torch.testing.assert_close(assistant(**batch).logits, LayerSkipAssistant(target, [0, 2])(**batch).logits)
    own = ShallowAssistant.own_parameters(assistant)
    targets = {id(parameter) for parameter in target.parameters()}
    for name, parameter in assistant.named_parameters():
        assert (name in own) == (id(parameter) not in targets), name
    assert assistant.get_input_embeddings().weight is target.get_input_embeddings().weight
    assert assistant.get_output_embeddings().weight is target.get_output_embeddings().weight
    # Two layers and the final norm: of a target of two layers, all but the embeddings and what else is not a vector.
    assert {name.split(".layers.")[-1].split(".h.")[-1].split(".")[0] for name in own} >= {"0", "1"}
    with torch.no_grad():
        for parameter in own.values():
            parameter.add_(1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text"])
def test_stores_its_own_weights_alone(tmp_path, model_type):
    target, batch = deep(model_type), kit.ragged()
    assistant = trained(target)
    ShallowAssistant.save_pretrained(assistant, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    stored = load_file(tmp_path / "model.safetensors")
    assert stored.keys() == ShallowAssistant.own_parameters(assistant).keys()
    assert sum(tensor.numel() for tensor in stored.values()) < sum(p.numel() for p in assistant.parameters())
    loaded = ShallowAssistant.from_pretrained(tmp_path, target=target)
    assert torch.equal(loaded(**batch).logits, assistant(**batch).logits)
    assert loaded.get_output_embeddings().weight is target.get_output_embeddings().weight
    assert loaded.config.num_hidden_layers == 2 and not loaded.training
    ShallowAssistant.save_pretrained(loaded, tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in stored.items())


def test_takes_the_dtype_of_its_target(tmp_path):
    target = deep()
    ShallowAssistant.save_pretrained(trained(target), tmp_path)
    loaded = ShallowAssistant.from_pretrained(tmp_path, target=target.to(torch.float64))
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float64}


@pytest.mark.parametrize("lengths", [(7,), (3, 12), (3, 7, 12, 5, 9)])
@pytest.mark.parametrize("capacity", [2, 100])
def test_text_is_that_of_plain_generate(enabled, lengths, capacity):
    target, batch = deep(), kit.ragged(lengths)
    expected = kit.plain(target, batch)
    out = target.generate(
        **batch, max_new_tokens=20, do_sample=False, assistant_model=trained(target), tetris_capacity=capacity,
        num_assistant_tokens=3, return_dict_in_generate=True,
    )  # fmt: skip
    assert torch.equal(out.sequences, expected)
    assert out.tetris_stats.verified.sum() > 0


def test_all_layers_are_the_target_and_always_right():
    target, batch = deep(), kit.ragged()
    assistant = ShallowAssistant.from_target(target, range(4)).eval()
    out = kit.speculate(target, batch, assistant, capacity=9, depth=3)
    assert torch.equal(out.sequences, kit.plain(target, batch))
    assert out.tetris_stats.vsr == 1


def test_others_are_refused(tmp_path):
    target = deep()
    target.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"is no shallow assistant, .* no `shallow_layers`\. Load an ordinary model"):
        ShallowAssistant.from_pretrained(tmp_path / "plain", target=target)
    folder = tmp_path / "shallow"
    ShallowAssistant.save_pretrained(trained(target), folder)
    with pytest.raises(ValueError, match=r"its `hidden_size` is 32, that of `target` \(LlamaForCausalLM\) is 64"):
        ShallowAssistant.from_pretrained(folder, target=deep(hidden_size=64))
    with pytest.raises(ValueError, match="its `model_type` is 'llama', that of `target`"):
        ShallowAssistant.from_pretrained(folder, target=deep("qwen2"))
    with pytest.raises(ValueError, match=r"decoder layers 0 to 1, got \[0, 3\]"):
        ShallowAssistant.from_pretrained(folder, target=kit.tiny())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "shallow_layers": [0]}))
    with pytest.raises(ValueError, match=r"is damaged: `model\.layers\.1\..*` is missing or too much"):
        ShallowAssistant.from_pretrained(folder, target=target)
    assert AutoConfig.from_pretrained(tmp_path / "plain").num_hidden_layers == 4


class Quantized(nn.Linear):
    """As bitsandbytes makes them: a linear layer whose weight is no matrix of floats."""

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.weight = nn.Parameter(linear.weight.detach().mul(8).round().to(torch.int8), requires_grad=False)

    def forward(self, x):
        return x @ self.weight.to(x.dtype).T / 8


def test_quantized_targets(tmp_path):
    target, batch = deep(), kit.ragged()
    assistant = trained(target)
    expected = assistant(**batch).logits
    ShallowAssistant.save_pretrained(assistant, tmp_path)
    for layer in target.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Quantized(getattr(layer.mlp, name)))
    with pytest.raises(ValueError, match="`target` is quantized .*int8.*: its layers cannot be trained"):
        ShallowAssistant.from_target(target, [0, 3])
    loaded = ShallowAssistant.from_pretrained(tmp_path, target=target)
    torch.testing.assert_close(loaded(**batch).logits, expected)
    assert not any(isinstance(module, Quantized) for module in loaded.modules())


# The loss that trains it, and the heads.


@pytest.fixture
def loss_module():
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import self_distillation_loss

    yield self_distillation_loss
    sys.path.pop(0)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_loss_and_gradient_are_those_of_the_definition(loss_module, monkeypatch, temperature):
    monkeypatch.setattr(loss_module.Distillation, "slice_size", 4)
    generator = torch.Generator().manual_seed(0)
    student, target = (torch.randn(11, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    matrix = torch.randn(9, 6, generator=generator, dtype=torch.float64)
    weights = torch.rand(11, generator=generator, dtype=torch.float64)
    student.requires_grad_()
    loss, agree = loss_module.Distillation.apply(student, target, matrix, weights, temperature)
    (gradient,) = torch.autograd.grad(3 * loss, student)
    p, q = (target @ matrix.T / temperature).softmax(-1), (student @ matrix.T).softmax(-1)
    expected = ((p * (p / q).log()).sum(-1) * weights).sum()
    torch.testing.assert_close(loss, expected, check_dtype=False)
    torch.testing.assert_close(gradient, torch.autograd.grad(3 * expected, student)[0], atol=1e-5, rtol=1e-4)
    assert torch.equal(agree, p.argmax(-1) == q.argmax(-1))
