"""Drafters mixed per row and step: one ranking, exact text, and nobody learns from what another proposed."""

import kit
import pytest
import torch

from tetris_hf import AssistantDrafter, MixedDrafter, PromptLookupDrafter


@pytest.fixture(scope="module")
def half_repeating():
    """Two rows that repeat themselves, where lookup hits, and two that do not."""
    batch = kit.ragged((12, 12, 5, 7))
    batch["input_ids"][:2] = torch.tensor([[7, 8, 9] * 4, [11, 12, 13, 14] * 3])
    return batch


@pytest.mark.parametrize("capacity", [2, 7, 40])
@pytest.mark.parametrize("who", ["near", "same", "far"])
def test_text_is_that_of_plain_generate(target, assistants, half_repeating, enabled, who, capacity):
    settings = {"max_new_tokens": 40, "do_sample": False}
    expected = target.generate(**half_repeating, **settings)
    mixed = [PromptLookupDrafter(), assistants[who]]
    out = target.generate(
        **half_repeating, **settings, assistant_model=mixed, tetris_capacity=capacity, num_assistant_tokens=5
    )
    assert torch.equal(out, expected)


def test_a_row_takes_what_promises_most(target, half_repeating):
    text = kit.plain(target, half_repeating, max_new_tokens=30)[:, 12:].tolist()
    sure = kit.ScriptedDrafter(text, confidence=[0.9, 0.1, 0.9, 0.1])
    unsure = kit.ScriptedDrafter(text, wrong=(0, 1, 2, 3), confidence=0.5)
    out = kit.speculate(target, half_repeating, MixedDrafter([unsure, sure]), 100, 3, max_new_tokens=30)
    # Rows 0 and 2 follow the sure drafter, who is right; rows 1 and 3 the other one, who is wrong.
    accepted = out.tetris_stats.accepted.sum(1)
    assert accepted[0] > 10 and accepted[2] > 10 and accepted[1] == accepted[3] == 0


def test_a_silent_drafter_leaves_the_row_to_the_others(target, half_repeating):
    text = kit.plain(target, half_repeating, max_new_tokens=30)[:, 12:].tolist()
    first = kit.ScriptedDrafter(text, confidence=0.9, silent=(1, 2))
    second = kit.ScriptedDrafter(text, confidence=0.1)
    out = kit.speculate(target, half_repeating, MixedDrafter([first, second]), 100, 3, max_new_tokens=30)
    assert (out.tetris_stats.accepted.sum(1) > 10).all()


def test_lookup_learns_only_from_its_own_drafts(target, near, half_repeating):
    lookup = PromptLookupDrafter()
    out = kit.speculate(target, half_repeating, [lookup, near], 12, 4, max_new_tokens=40)
    assert 0 < lookup._tried.sum() < out.tetris_stats.verified.sum()
    assert lookup._stood.sum() < out.tetris_stats.accepted.sum()


def test_drafts_of_an_assistant_stay_right_after_other_drafts(target, same, half_repeating):
    """What the assistant's cache holds of a draft that another drafter overrode is not taken for text."""
    text = kit.plain(target, half_repeating, max_new_tokens=40)[:, 12:].tolist()

    class InTurns(kit.ScriptedDrafter):
        """Overrides the assistant in every second step, other rows each time, so that their cache goes stale."""

        def propose(self, rows, live, depth):
            self.confidence = torch.tensor([1.1, 0.0, 1.1, 0.0]).roll(int(rows.length.sum()) % 3)
            return super().propose(rows, live, depth)

    out = kit.speculate(target, half_repeating, [InTurns(text), AssistantDrafter(same)], 100, 4, max_new_tokens=40)
    stats = out.tetris_stats
    assert torch.equal(stats.accepted, stats.verified), "both are always right, so nothing is ever rejected"


def test_sampled_and_copied_drafts_under_one_q(target, near, half_repeating):
    torch.manual_seed(4)
    out = kit.speculate(
        target, half_repeating, [PromptLookupDrafter(), near], 9, 4, do_sample=True, max_new_tokens=30, top_k=0
    )
    assert out.sequences.shape[1] == 42 and out.tetris_stats.accepted.sum() > 0


def test_arguments(near):
    with pytest.raises(ValueError, match="`drafters` must be two or more"):
        MixedDrafter([AssistantDrafter(near)])
    with pytest.raises(ValueError, match="`drafters`.*LlamaForCausalLM"):
        MixedDrafter([near, near])


@pytest.mark.parametrize("who", ["near", "far"])
def test_an_overridden_assistant_drafts_on_from_the_text(target, assistants, who):
    """Not from what its cache still holds of the draft that did not become text."""
    batch = kit.ragged((3, 7, 12, 5))
    text = kit.plain(target, batch, max_new_tokens=40)[:, 12:].tolist()
    seen = []

    class InTurns(kit.ScriptedDrafter):
        def propose(self, rows, live, depth):
            self.confidence = torch.tensor([1.1, 0.0, 1.1, 0.0]).roll(int(rows.length.sum()) % 3)
            return super().propose(rows, live, depth)

    class Recording(AssistantDrafter):
        def propose(self, rows, live, depth):
            texts = [rows.tokens[row, rows.padding[row] : rows.length[row]].tolist() for row in live.tolist()]
            draft = super().propose(rows, live, depth)
            seen.append((texts, draft))
            return draft

    mixed = MixedDrafter([InTurns(text), Recording(assistants[who])])
    out = kit.speculate(target, batch, mixed, 100, 3, max_new_tokens=40)
    assert out.tetris_stats.accepted.sum() > 20
    for texts, draft in seen:
        for index, prompt in enumerate(texts):
            length = int(draft.lengths[index])
            if length:
                ids = torch.tensor([prompt])
                one = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                alone = kit.plain(assistants[who], one, max_new_tokens=length)[0, len(prompt) :]
                assert draft.tokens[index, :length].tolist() == alone.tolist()
