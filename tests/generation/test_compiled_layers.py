"""What runs compiled in a step, that it is put back, and what the compiler's refusal of a small module costs: nothing.
That the text stays the same is seen in `test_step_graphs.py`."""

import kit
import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from transformers.modeling_layers import GradientCheckpointingLayer

from tetris_hf.generation import compiled_layers
from tetris_hf.generation.compiled_layers import compiled_layers as compiling


def own_forwards(model):
    return {name for name, module in model.named_modules() if "forward" in vars(module)}


@pytest.mark.parametrize("model_type", sorted(kit.ZOO))
def test_layers_and_the_small_modules_beside_them(model_type):
    model = kit.tiny(model_type)
    layers = {name for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    with compiling(model):
        found = own_forwards(model)
        assert layers and layers <= found
        for name in found - layers:
            module = model.get_submodule(name)
            assert not any(name.startswith(f"{layer}.") for layer in layers), "parts of a layer belong to it"
            assert not isinstance(module, nn.Embedding) and not list(module.children())
            assert all(parameter.dim() == 1 for parameter in module.parameters())
    assert not own_forwards(model)
    beside = {name.split(".")[-1] for name in found - layers}
    if model_type in ("llama", "mistral", "qwen3", "gemma3_text", "gpt_oss"):
        assert beside == {"norm", "rotary_emb"}
    if model_type in ("gpt2", "opt"):  # a norm of torch is one kernel as it is
        assert not beside


def test_what_somebody_replaced_is_left_alone_and_all_is_put_back_after_an_error():
    model = kit.tiny()
    model.model.norm.forward = own = lambda hidden: hidden
    with pytest.raises(KeyboardInterrupt), compiling(model):
        assert model.model.norm.forward is own and "forward" in vars(model.model.rotary_emb)
        raise KeyboardInterrupt
    assert own_forwards(model) == {"model.norm"}


def test_a_small_module_that_the_compiler_refuses_runs_as_it_is(monkeypatch):
    model = kit.tiny()
    norm, hidden = model.model.norm, torch.randn(1, 5, 32)
    expected = norm(hidden)
    calls, warnings = [], []

    def refusing(function, **settings):
        def compiled(*args, **kwargs):
            calls.append(function)
            raise TorchDynamoException("cannot do this\nand much more")

        return compiled

    monkeypatch.setattr(torch, "compile", refusing)
    monkeypatch.setattr(compiled_layers, "_refused", set())
    monkeypatch.setattr(compiled_layers.logger, "warning", warnings.append)
    for _ in range(2):
        with compiling(model):
            assert torch.equal(norm(hidden), expected) and torch.equal(norm(hidden), expected)
    assert len(calls) == 1, "asked once"
    assert warnings == ["LlamaRMSNorm runs without being compiled: cannot do this"]


def test_other_errors_of_a_small_module_are_not_hidden(monkeypatch):
    model = kit.tiny()
    monkeypatch.setattr(compiled_layers, "_refused", set())
    with compiling(model), pytest.raises(Exception, match="(?i)attribute|NoneType"):
        model.model.norm(None)
    assert not own_forwards(model)
