"""Models that the user has compiled: as target, as assistant, by all three ways that torch offers."""

import kit
import pytest
import torch


SETTINGS = {"max_new_tokens": 6, "do_sample": False}


class CountingBackend:
    """Runs graphs as they are, and counts how often."""

    def __init__(self):
        self.calls = 0

    def __call__(self, graph_module, example_inputs):
        def run(*args):
            self.calls += 1
            return graph_module.forward(*args)

        return run


@pytest.fixture
def model(tokenizer):
    """One layer: tracing is what takes the time."""
    return kit.tiny(vocab_size=len(tokenizer), num_hidden_layers=1)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    # One shape compiled, the others run as they are: tracing takes seconds.
    with torch._dynamo.config.patch(recompile_limit=1):
        yield
    torch._dynamo.reset()


def _compiled(model, way, backend):
    if way == "forward":
        model.forward = torch.compile(model.forward, backend=backend, dynamic=True)
    elif way == "in place":
        model.compile(backend=backend, dynamic=True)
    else:
        return torch.compile(model, backend=backend, dynamic=True)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("way", ["forward", "in place", "wrapper"])
def test_a_compiled_target(model, encoded, enabled, way):
    draft = kit.near(model)
    expected = model.generate(**encoded, **SETTINGS)
    backend = CountingBackend()
    compiled = _compiled(model, way, backend)
    with kit.counted_tokens(model) as tokens:
        out = compiled.generate(**encoded, **SETTINGS, assistant_model=draft, tetris_capacity=12)
    assert torch.equal(out, expected) and max(tokens[1:]) == 8 + 12
    # `torch.compile(model)` compiles the call of a wrapper; its `generate` is the model's own and runs uncompiled, in
    # stock as here.
    assert bool(backend.calls) == (way != "wrapper")


@pytest.mark.slow
def test_a_compiled_assistant(model, encoded, enabled):
    draft = kit.near(model)
    expected = model.generate(**encoded, **SETTINGS)
    backend = CountingBackend()
    _compiled(draft, "forward", backend)
    out = model.generate(**encoded, **SETTINGS, assistant_model=draft, tetris_capacity=12)
    assert torch.equal(out, expected) and backend.calls
