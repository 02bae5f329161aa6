"""TRL: rollouts of `GRPOTrainer` by speculative decoding, two training steps, and the law of what is drawn."""

import functools
import sys

import kit
import pytest
import torch
from scipy import stats as scipy_stats

import tetris_hf


trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

PROMPTS = ["the cat", "a", "what is two and two", "say it", "that hat", "on", "the rat sat on a mat", "two cats"]


def trainer(model, tokenizer, reward, folder, prompts=PROMPTS, peft_config=None, **settings):
    config = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 12,
        "max_steps": 2,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        **settings,
    }
    return trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(**config),
        train_dataset=datasets.Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def speculating(model, draft, capacity, door):
    """TRL calls `generate` with a `generation_config` and nothing else: what is to be added is bound to the method."""
    if door == "enable":
        tetris_hf.enable(model)
        more = {"assistant_model": draft, "tetris_capacity": capacity}
    else:
        more = {"custom_generate": tetris_hf.TetrisDecoding(draft, capacity)}
    model.generate = functools.partial(model.generate, **more)


@pytest.mark.slow
@pytest.mark.parametrize("door", ["enable", "decoding object"])
@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_two_steps_of_training(model, draft, tokenizer, tmp_path, door, gradient_checkpointing):
    rewarded = []

    def reward(completion_ids, **kwargs):
        rewarded.append(completion_ids)
        return [float(len(set(ids))) for ids in completion_ids]

    before = model.lm_head.weight.clone()
    job = trainer(model, tokenizer, reward, tmp_path, gradient_checkpointing=gradient_checkpointing)
    speculating(job.model, draft, 10, door)
    with kit.counted_tokens(model) as tokens:
        job.train()
    assert len(rewarded) == 2 and all(len(ids) == 4 for ids in rewarded)
    assert all(0 < len(completion) <= 12 for ids in rewarded for completion in ids)
    assert 4 + 10 in tokens, "four rollouts in one batch, with drafts"
    assert not torch.equal(model.lm_head.weight, before), "trained"
    checkpointed = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    assert checkpointed == gradient_checkpointing, "on again after each batch of rollouts"
    assert model.training and model.config._attn_implementation == "sdpa", "left as the trainer wants it"


@pytest.mark.slow
def test_a_policy_with_an_adapter(model, draft, tokenizer, tmp_path):
    peft = pytest.importorskip("peft")
    rewarded = []

    def reward(completion_ids, **kwargs):
        rewarded.append(completion_ids)
        return [float(len(set(ids))) for ids in completion_ids]

    job = trainer(model, tokenizer, reward, tmp_path, peft_config=peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    speculating(job.model, draft, 10, "decoding object")
    with kit.counted_tokens(model) as tokens:
        job.train()
    assert len(rewarded) == 2 and 4 + 10 in tokens
    assert any(weight.any() for name, weight in job.model.named_parameters() if "lora_B" in name), "trained"


# The law after each token: the target's, and a draft's that is good after some tokens and bad after others.
P = torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.3, 0.3, 0.2, 0.2], [0.05, 0.05, 0.1, 0.8], [0.4, 0.1, 0.4, 0.1]])
Q = torch.tensor([[0.3, 0.4, 0.2, 0.1], [0.55, 0.25, 0.15, 0.05], [0.1, 0.05, 0.05, 0.8], [0.1, 0.4, 0.1, 0.4]])


def over_letters(law, letters, size):
    """A table over a whole vocabulary that draws four letters only, each after each by `law`."""
    table = torch.zeros(size, size)
    table[:, letters] = law[0]
    for place, letter in enumerate(letters):
        table[letter, letters] = law[place]
    return table


@pytest.mark.slow
def test_rollouts_have_the_law_of_the_target(tokenizer, tmp_path):
    letters = tokenizer.convert_tokens_to_ids(list("BCDE"))  # no merge contains them
    target, draft = (kit.markov(over_letters(law, letters, len(tokenizer))) for law in (P, Q))
    drawn = []

    def reward(completion_ids, **kwargs):
        drawn.extend(completion_ids)
        return [0.0] * len(completion_ids)

    size, calls = 1500, 2
    job = trainer(
        target, tokenizer, reward, tmp_path, prompts=["B", "B"], max_completion_length=4, max_steps=calls,
        per_device_train_batch_size=size, num_generations=size, learning_rate=0.0,
    )  # fmt: skip
    speculating(job.model, draft, size, "decoding object")
    torch.manual_seed(0)
    job.train()
    # The first token is the prompt's own; the next two come of drafts.
    second, third = torch.tensor([[letters.index(token) for token in ids[1:3]] for ids in drawn]).T
    counts = torch.bincount(second * 4 + third, minlength=16).double()
    law = ((P[0] @ P)[:, None] * P).flatten().double()
    assert counts.sum() == size * calls
    assert scipy_stats.chisquare(counts, law / law.sum() * counts.sum()).pvalue > 1e-3


@pytest.mark.slow
def test_generation_kwargs_reach_the_call(model, tokenizer, tmp_path, enabled, monkeypatch):
    # They make a `GenerationConfig`, the only thing that TRL hands on.
    made = []
    decoding = tetris_hf.TetrisDecoding

    def noted(drafter, capacity, **kwargs):
        made.append((type(drafter), capacity))
        return decoding(drafter, capacity, **kwargs)

    monkeypatch.setattr(sys.modules["tetris_hf.generation.generate"], "TetrisDecoding", noted)

    def reward(completion_ids, **kwargs):
        return [float(len(set(ids))) for ids in completion_ids]

    settings = {"tetris_capacity": 10, "prompt_lookup_num_tokens": 4}
    trainer(model, tokenizer, reward, tmp_path, max_steps=1, generation_kwargs=settings).train()
    assert made and set(made) == {(tetris_hf.PromptLookupDrafter, 10)}
