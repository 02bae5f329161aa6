"""Lookup for a whole batch equals a naive search row by row; text is exact, and rows without a match draft nothing."""

import kit
import pytest
import torch

from tetris_hf import PromptLookupDrafter
from tetris_hf.generation.processing import LogitsProcessing
from tetris_hf.generation.prompt_lookup_drafter import _chances
from tetris_hf.generation.rows import Rows


def naive_lookup(text, size, depth):
    """The longest match; of equals the one with most to copy up to `depth`; of those the latest. A loop over all."""
    best = (0, 0, -1)
    for end in range(len(text) - 1):
        match = 0
        while match < size and match <= end and text[end - match] == text[len(text) - 1 - match]:
            match += 1
        best = max(best, (match, min(depth, len(text) - 1 - end), end))
    match, following, end = best
    return text[end + 1 : end + 1 + following] if match else [], match


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("depth", [1, 4, 7])
def test_equals_a_naive_search(size, depth):
    generator = torch.Generator().manual_seed(size * 10 + depth)
    for _ in range(60):
        lengths = torch.randint(1, 25, (5,), generator=generator).tolist()
        # Few ids, so that there are matches; id 0 is padding and text at once.
        batch = kit.ragged(tuple(lengths), vocabulary=5, seed=int(torch.randint(10**6, (), generator=generator)))
        padding = (batch["attention_mask"] == 0).sum(1)
        width = batch["input_ids"].shape[1]
        rows = Rows(batch["input_ids"], padding, max_length=width + 5, pad_token_id=0)
        drafter = PromptLookupDrafter(size)
        drafter.begin(None, rows, 5, LogitsProcessing([], rows, False))
        live = torch.tensor([0, 2, 3, 4])
        draft = drafter.propose(rows, live, depth)
        for index, row in enumerate(live.tolist()):
            expected, match = naive_lookup(batch["input_ids"][row, padding[row] :].tolist(), size, depth)
            expected = expected[: width + 5 - 1 - width]  # the row's room
            assert draft.tokens[index, : draft.lengths[index]].tolist() == expected
            assert int(drafter._match[index]) == match


@pytest.mark.parametrize("capacity", [1, 4, 50])
def test_text_is_that_of_plain_generate(target, enabled, capacity):
    # Row 0 repeats itself, the others match nothing at first.
    batch = kit.ragged((12, 5, 9))
    batch["input_ids"][0] = torch.tensor([7, 8, 9, 10] * 3)
    settings = {"max_new_tokens": 40, "do_sample": False}
    expected = target.generate(**batch, **settings)
    out = target.generate(
        **batch, **settings, prompt_lookup_num_tokens=5, tetris_capacity=capacity, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected)
    assert out.tetris_stats.draft_forwards == 0 and out.tetris_stats.drafted[0, 0] > 0


def test_rows_without_a_match_draft_nothing(target, enabled):
    batch = {"input_ids": torch.tensor([[7, 8, 7, 8, 7, 8], [11, 12, 13, 14, 15, 16]])}
    out = target.generate(
        **batch, max_new_tokens=2, do_sample=False, prompt_lookup_num_tokens=4, tetris_capacity=8,
        return_dict_in_generate=True, max_matching_ngram_size=6,
    )  # fmt: skip
    first = out.sequences[:, 6].tolist()
    drafted = [(row, token) for row, token in enumerate(first) if token in batch["input_ids"][row, :-1].tolist()]
    assert out.tetris_stats.drafted[:, 0].nonzero()[:, 0].tolist() == [row for row, _ in drafted]


def test_chances_are_learned_by_length_of_the_match(target, enabled):
    drafter = PromptLookupDrafter(2)
    drafter._make_room(3)
    start = _chances(drafter._tried, drafter._stood, torch.arange(3), 3)  # (3, 3), by length of the match
    assert start[2, 0] > start[1, 0] > start[0, 0]
    batch = {"input_ids": torch.tensor([[7, 8, 9, 10] * 3])}
    out = target.generate(
        **batch,
        max_new_tokens=40,
        do_sample=False,
        assistant_model=drafter,
        num_assistant_tokens=3,
        tetris_capacity=4,
        return_dict_in_generate=True,
    )
    stats = out.tetris_stats
    # What was reached is what was verified up to and including the first that fell.
    assert drafter._stood.sum() == stats.accepted.sum()
    assert stats.accepted.sum() <= drafter._tried.sum() <= stats.verified.sum()
    expected = (drafter._stood + 4 * start[:, :3]) / (drafter._tried + 4)
    torch.testing.assert_close(_chances(drafter._tried, drafter._stood, torch.arange(3), 3), expected)


def test_ids_that_the_target_cannot_say_are_not_drafted():
    rows = Rows(torch.tensor([[3, 9, 4, 3]]), torch.tensor([0]), max_length=9, pad_token_id=0)
    drafter = PromptLookupDrafter(1)
    drafter.begin(None, rows, 8, LogitsProcessing([], rows, False))
    draft = drafter.propose(rows, torch.tensor([0]), 3)
    assert draft.lengths.tolist() == [0] and int(draft.tokens.max()) < 8


def test_arguments(target, near, enabled):
    batch = kit.ragged()
    with pytest.raises(ValueError, match="`max_matching_ngram_size` must be at least 1, got 0"):
        PromptLookupDrafter(0)
    with pytest.raises(ValueError, match="`prompt_lookup_num_tokens` and `assistant_model`"):
        target.generate(**batch, assistant_model=near, prompt_lookup_num_tokens=3, tetris_capacity=4)
    with pytest.raises(ValueError, match="`prompt_lookup_num_tokens` must be .*got 0"):
        target.generate(**batch, prompt_lookup_num_tokens=0, tetris_capacity=4)
