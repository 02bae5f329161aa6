"""Sampled text has the target's distribution, with selection on: chi-square tests through the real `generate`.

Many rows with the same two prompts compete for less than half of the drafts that are proposed. The law to compare with
is that of stock `generate`, from its own scores for every possible prefix.
"""

import copy
import itertools

import kit
import pytest
import torch
from scipy import stats as scipy_stats
from test_step_graphs import pretend_gpu
from transformers.generation.logits_process import LogitsProcessorList

import tetris_hf
from tetris_hf import AssistantDrafter, FixedWindowSelector, PromptLookupDrafter, TetrisSelector
from tetris_hf.generation import speculation


ROWS, CALLS = 10_000, 20  # 100,000 draws for each of two prompts
PROMPTS = ((3, 1), (2, 1))
# The law after each token: the target's, and a draft's that is good after some tokens and bad after others.
P = torch.tensor([[0.1, 0.6, 0.2, 0.1], [0.3, 0.3, 0.2, 0.2], [0.05, 0.05, 0.1, 0.8], [0.4, 0.1, 0.4, 0.1]])
Q = torch.tensor([[0.3, 0.4, 0.2, 0.1], [0.55, 0.25, 0.15, 0.05], [0.1, 0.05, 0.05, 0.8], [0.1, 0.4, 0.1, 0.4]])

SETTINGS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 3},
    "top-p": {"top_p": 0.75},
    "min-p": {"min_p": 0.3},
    "repetition penalty": {"repetition_penalty": 1.6},
    "several": {"temperature": 1.4, "top_p": 0.9, "repetition_penalty": 1.3},
}


@pytest.fixture(scope="module")
def models():
    return kit.markov(P), kit.markov(Q)


def law(model, prompt, settings, depth):
    """Chances of every continuation of `depth` tokens, from stock `generate`'s processed scores. `(V,) * depth`."""
    size = model.config.vocab_size
    chances = torch.ones(())
    for length in range(depth):
        prefixes = torch.tensor([[*prompt, *rest] for rest in itertools.product(range(size), repeat=length)])
        wanted = {"do_sample": True, "output_scores": True, "return_dict_in_generate": True, "top_k": 0, **settings}
        out = model.generate(prefixes, attention_mask=torch.ones_like(prefixes), max_new_tokens=1, **wanted)
        chances = chances[..., None] * out.scores[0].softmax(-1).view(*[size] * (length + 1))
    return chances


def draw(
    models, settings, selector=None, capacity=ROWS, depth=3, rows=ROWS, calls=CALLS, new_tokens=5, assistant=None
):
    """What `calls` calls of `generate` add to the two prompts, `(2, draws, new_tokens)`, and the last statistics."""
    target, draft = models
    prompts = torch.tensor(PROMPTS).repeat(rows // 2, 1)
    drawn = []
    for _ in range(calls):
        out = kit.speculate(
            target, {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}, assistant or draft, capacity,
            depth, selector, do_sample=True, max_new_tokens=new_tokens, **{"top_k": 0, **settings},
        )  # fmt: skip
        drawn.append(out.sequences[:, 2:].view(rows // 2, 2, new_tokens).transpose(0, 1))
    return torch.cat(drawn, 1), out.tetris_stats


def p_value(tokens, chances):
    """Of a chi-square test of `(draws, depth)` tokens against the law of their first places."""
    size, depth = chances.shape[0], chances.dim()
    cells = sum(tokens[:, place] * size ** (depth - 1 - place) for place in range(depth))
    counts = torch.bincount(cells, minlength=size**depth).double()
    expected = chances.flatten().double() * len(tokens)
    assert counts[expected == 0].sum() == 0, "a token of probability zero was drawn"
    kept = expected > 0
    return float(scipy_stats.chisquare(counts[kept], expected[kept] * counts.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize("name", SETTINGS)
def test_three_tokens_have_the_joint_law_of_the_target(models, name):
    torch.manual_seed(11)
    drawn, stats = draw(models, SETTINGS[name])
    assert 0 < stats.verified.sum() < 0.7 * stats.drafted.sum(), "selection had something to leave out"
    assert 0.1 < stats.vsr < 0.98
    for prompt, tokens in zip(PROMPTS, drawn, strict=True):
        assert len(tokens) >= 100_000
        assert p_value(tokens, law(models[0], prompt, SETTINGS[name], 3)) > 1e-3


def test_other_drafters_and_selectors(models):
    torch.manual_seed(12)
    for settings in (
        {"assistant": AssistantDrafter(models[1], temperature=0.5)},
        {"selector": FixedWindowSelector(2), "capacity": 2 * ROWS},
        {"selector": TetrisSelector(slowest_first=True)},
        {"assistant": copy.deepcopy(models[0])},
        {"assistant": PromptLookupDrafter(1)},
        {"assistant": [PromptLookupDrafter(1), models[1]]},
    ):
        drawn, _ = draw(models, {}, calls=10, **settings)
        for prompt, tokens in zip(PROMPTS, drawn, strict=True):
            assert p_value(tokens, law(models[0], prompt, {}, 3)) > 1e-3


def test_slow_rows_first_keeps_the_law_of_later_tokens(models):
    """By the third token rows have fallen apart, so that who drafts depends on all that was accepted before."""
    torch.manual_seed(14)
    selector = TetrisSelector(slowest_first=True)
    drawn, stats = draw(models, {}, selector=selector, capacity=ROWS // 2, depth=2, new_tokens=7)
    assert 0 < stats.verified.sum() < 0.7 * stats.drafted.sum()
    for prompt, tokens in zip(PROMPTS, drawn, strict=True):
        assert len(tokens) >= 100_000
        chances = law(models[0], prompt, {}, 3)
        assert p_value(tokens, chances) > 1e-3
        # The chain knows its last token only: three tokens after any other have the law of three after a prompt.
        for last in range(4):
            later = tokens[tokens[:, 3] == last][:, 4:]
            assert p_value(later, law(models[0], (1, last), {}, 3)) > 1e-3


def test_leaving_places_out_of_captured_steps_keeps_the_law(models, monkeypatch):
    """Whether a place is drafted depends on all that was drawn before, in all rows."""
    pretend_gpu(monkeypatch)
    monkeypatch.setattr(speculation, "sure_depth", lambda capacity, num_rows: 2)  # not as many as for so many rows
    torch.manual_seed(18)
    drawn, stats = draw(models, {}, capacity=8 * ROWS // 5, calls=10)
    drafted = stats.drafted.sum(0)
    assert 0 < stats.verified[:, 2].sum() < drafted[2] < 0.9 * drafted[1], "left out in some steps, not in all"
    for prompt, tokens in zip(PROMPTS, drawn, strict=True):
        assert p_value(tokens, law(models[0], prompt, {}, 3)) > 1e-3
    tetris_hf.release_graphs()


def test_the_rule_of_the_paper_fails_the_same_test(models, caplog, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers.utils.logging.get_logger("tetris_hf"), "propagate", True)
    torch.manual_seed(13)
    drawn, _ = draw(models, {}, selector=TetrisSelector(score="paper"), calls=4, capacity=ROWS // 2)
    worst = min(p_value(t, law(models[0], prompt, {}, 2)) for prompt, t in zip(PROMPTS, drawn, strict=True))
    assert worst < 1e-9
    torch.manual_seed(13)
    drawn, _ = draw(models, {}, calls=4, capacity=ROWS // 2)
    assert min(p_value(t, law(models[0], prompt, {}, 2)) for prompt, t in zip(PROMPTS, drawn, strict=True)) > 1e-3


def test_rows_that_compete_are_independent(models):
    # Neighbouring rows share the budget of their call; their joint law must be the product of both.
    torch.manual_seed(14)
    target, draft = models
    prompts = torch.tensor(PROMPTS)
    pairs = []
    for _ in range(2500):
        out = kit.speculate(
            target, {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}, draft, 1, 3,
            do_sample=True, max_new_tokens=3, top_k=0,
        )  # fmt: skip
        pairs.append(out.sequences[:, 3])
    pairs = torch.stack(pairs)  # (draws, 2) the second new token of each row, the first after a selection
    laws = [law(target, prompt, {}, 2).sum(0) for prompt in PROMPTS]
    assert p_value(pairs, laws[0][:, None] * laws[1]) > 1e-3


def test_equal_rows_of_one_call_differ_and_seeds_reproduce(models):
    target, draft = models
    prompts = torch.tensor([[3, 1]] * 8)
    batch = {"input_ids": prompts, "attention_mask": torch.ones_like(prompts)}
    texts = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        out = kit.speculate(target, batch, draft, 8, 3, do_sample=True, max_new_tokens=20, top_k=0)
        texts.append(out.sequences)
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])
    assert len({tuple(row) for row in texts[0].tolist()}) == 8


def test_nothing_under_the_min_p_threshold_at_any_place(models):
    torch.manual_seed(15)
    drawn, _ = draw(models, {"min_p": 0.5}, rows=2000, calls=2, new_tokens=8)
    kept = P >= 0.5 * P.amax(1, keepdim=True)
    for prompt, tokens in zip(PROMPTS, drawn, strict=True):
        before = torch.cat([torch.full((len(tokens), 1), prompt[-1]), tokens[:, :-1]], 1)
        assert kept[before, tokens].all()


def test_a_cold_self_drafter_gives_no_nan(target, same):
    torch.manual_seed(16)
    batch = kit.ragged((3, 7, 12, 5))
    out = kit.speculate(target, batch, same, 8, 4, do_sample=True, temperature=0.01, max_new_tokens=110, top_k=0)
    cold = kit.plain(target, batch, max_new_tokens=110)
    assert out.tetris_stats.vsr > 0.95
    # Nearly greedy: a temperature of 0.01 leaves no doubt but at near ties.
    assert (out.sequences[:, 12:40] == cold[:, 12:40]).float().mean() > 0.8


def test_num_return_sequences(models, enabled):
    target, draft = models
    prompts = torch.tensor([[3, 1], [2, 1]])
    torch.manual_seed(17)
    out = target.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, num_return_sequences=3, max_new_tokens=12,
        assistant_model=draft, tetris_capacity=6, top_k=0, pad_token_id=0,
    )  # fmt: skip
    assert out[:, 0].tolist() == [3, 3, 3, 2, 2, 2] and out.shape == (6, 14)
    assert len({tuple(row) for row in out.tolist()}) == 6


def test_a_users_processor_when_sampling(models):
    # Looks at the whole prefix, so it is shown to every verified place, and left to the verification on drafts.
    class Forbids:
        def __call__(self, input_ids, scores):
            return scores.scatter(1, input_ids[:, -2:-1], -torch.inf)

    torch.manual_seed(18)
    settings = {"logits_processor": LogitsProcessorList([Forbids()])}
    drawn, _ = draw(models, settings, calls=4)
    for prompt, tokens in zip(PROMPTS, drawn, strict=True):
        assert p_value(tokens, law(models[0], prompt, settings, 3)) > 1e-3
