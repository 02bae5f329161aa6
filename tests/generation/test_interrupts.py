"""An interrupted call leaves nothing behind: models, configs, hooks and the decoding object are as they were."""

import copy

import kit
import pytest
import torch
from transformers import LogitsProcessor, PreTrainedModel

import tetris_hf
from tetris_hf import TetrisDecoding
from tetris_hf.generation import ragged_mask


class Stop(Exception):
    pass


class RaisesAt(LogitsProcessor):
    """Raises when it is called for the n-th time."""

    def __init__(self, n: int, error: type[BaseException]):
        self.left, self.error = n, error

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left == 0:
            raise self.error
        return scores


def state_of(model: PreTrainedModel) -> dict:
    """Everything of a model that a call could leave changed."""
    state = {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "config": copy.deepcopy(model.config.to_dict()),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
        "training": model.training,
    }
    for path, module in model.named_modules():
        config = getattr(module, "config", None)
        state[path] = {
            "attributes": sorted(vars(module)),
            "hooks": [len(module._forward_hooks), len(module._forward_pre_hooks)],
            "attention": getattr(config, "_attn_implementation", None),
            "config": id(config),
        }
    return state


def assert_same_state(before: dict, after: dict) -> None:
    before, after = dict(before), dict(after)
    old, new = before.pop("weights"), after.pop("weights")
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
    assert before == after


@pytest.fixture
def models():
    """A target and an assistant of this test's own, and what they were like."""
    target = kit.tiny()
    assistant = kit.near(target)
    # transformers installs its own recording hooks at a model's first forward; that is none of ours.
    for model in (target, assistant):
        kit.plain(model, kit.ragged(), max_new_tokens=2)
    return target, assistant, state_of(target), state_of(assistant)


@pytest.mark.parametrize("n", range(1, 8))
def test_a_processor_that_raises(models, batch, n):
    target, assistant, target_before, assistant_before = models
    tetris_hf.enable(target)
    settings = {"do_sample": False, "max_new_tokens": 12}
    with pytest.raises(Stop):
        target.generate(
            **batch, **settings, assistant_model=assistant, tetris_capacity=4, logits_processor=[RaisesAt(n, Stop)]
        )
    tetris_hf.disable(target)
    assert_same_state(target_before, state_of(target))
    assert_same_state(assistant_before, state_of(assistant))


@pytest.mark.parametrize("whose", ["target", "assistant"])
@pytest.mark.parametrize("n", range(1, 8))
def test_control_c_inside_a_forward(models, batch, whose, n):
    target, assistant, target_before, assistant_before = models
    decoding = TetrisDecoding(assistant, 3, num_assistant_tokens=3)
    settings = {"do_sample": False, "max_new_tokens": 12, "custom_generate": decoding}
    calls = []

    def interrupt(module, args, output):
        calls.append(module)
        if len(calls) == n:
            raise KeyboardInterrupt

    # In the middle of the forward, between the layers.
    handle = (target if whose == "target" else assistant).model.layers[0].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        target.generate(**batch, **settings)
    handle.remove()
    assert_same_state(target_before, state_of(target))
    assert_same_state(assistant_before, state_of(assistant))
    with pytest.raises(LookupError):
        ragged_mask._forward.get()
    # The same object goes on to serve as if nothing had happened.
    assert torch.equal(target.generate(**batch, **settings), kit.plain(target, batch, max_new_tokens=12))


def test_an_uninterrupted_call_leaves_nothing_either(models, batch):
    target, assistant, target_before, assistant_before = models
    kit.speculate(target, batch, assistant, 4, eos_token_id=5, min_new_tokens=3, repetition_penalty=1.3)
    assert_same_state(target_before, state_of(target))
    assert_same_state(assistant_before, state_of(assistant))


def test_arguments_are_not_changed(models, batch):
    target, assistant, _, _ = models
    before = {name: tensor.clone() for name, tensor in batch.items()}
    processors, criteria = [RaisesAt(0, Stop)], []
    kit.speculate(target, batch, assistant, 4, logits_processor=processors, stopping_criteria=criteria)
    assert all(torch.equal(before[name], batch[name]) for name in before)
    assert len(processors) == 1 and criteria == []


def test_a_model_may_be_its_own_assistant(models, batch):
    target, _, target_before, _ = models
    out = kit.speculate(target, batch, target, 6)
    assert torch.equal(out.sequences, kit.plain(target, batch))
    assert out.tetris_stats.vsr == 1
    assert_same_state(target_before, state_of(target))


def test_one_config_shared_by_both(batch):
    # A layer-skipping assistant or two heads on one body share a config: it is put back once, and rightly.
    target = kit.tiny()
    assistant = kit.near(target)
    for module in assistant.modules():
        if hasattr(module, "config"):
            module.config = target.config
    before = target.config._attn_implementation
    assert torch.equal(kit.speculate(target, batch, assistant, 4).sequences, kit.plain(target, batch))
    assert target.config._attn_implementation == before
