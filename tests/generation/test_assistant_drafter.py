"""The assistant drafts for all rows at once what it would for each alone, within its context and vocabulary."""

import kit
import pytest
import torch

import tetris_hf
from tetris_hf import AssistantDrafter, TetrisSelector


class Watch(TetrisSelector):
    """Selects as always, and keeps every draft with the texts that it continued."""

    def __init__(self, rows_of):
        super().__init__()
        self.rows_of, self.drafts = rows_of, []

    def __call__(self, draft, lengths, capacity):
        self.drafts.append((draft, self.rows_of()))
        return super().__call__(draft, lengths, capacity)


class Recording(AssistantDrafter):
    """Remembers the committed text of every live row at each proposal."""

    def propose(self, rows, live, depth):
        self.texts = [rows.tokens[row, rows.padding[row] : rows.length[row]].tolist() for row in live.tolist()]
        return super().propose(rows, live, depth)


@pytest.mark.parametrize("who", ["near", "same", "far"])
def test_drafts_equal_its_own_greedy_text_row_by_row(target, assistants, who):
    drafter = Recording(assistants[who])
    watch = Watch(lambda: drafter.texts)
    kit.speculate(target, kit.ragged((1, 2, 7, 12)), drafter, 7, 4, watch, max_new_tokens=20)
    assert len(watch.drafts) > 5
    for draft, texts in watch.drafts:
        for index, text in enumerate(texts):
            length = int(draft.lengths[index])
            if length:
                prompt = torch.tensor([text])
                whole = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
                alone = kit.plain(assistants[who], whole, max_new_tokens=length)
                assert draft.tokens[index, :length].tolist() == alone[0, len(text) :].tolist()


def test_the_last_two_tokens_are_fed_first(target, near):
    with kit.counted_tokens(near) as tokens:
        out = kit.speculate(target, kit.ragged(), near, 100, 3, max_new_tokens=20)
    # The prompts come by themselves; then every round feeds two tokens a row, then one.
    assert tokens[0] == sum(kit.LENGTHS)
    rounds = [tokens[index : index + 3] for index in range(1, len(tokens), 3)]
    full = [counts for counts in rounds[1:] if counts[1:] == [3, 3]]
    assert len(full) >= 2 and all(counts[0] == 6 for counts in full)
    assert out.tetris_stats.draft_forwards == len(tokens)


def test_a_context_shorter_than_the_targets():
    target, drafter = kit.tiny(), kit.tiny("gpt2", n_positions=24, max_position_embeddings=24)
    expected = kit.plain(target, kit.ragged(), max_new_tokens=60)
    out = kit.speculate(target, kit.ragged(), drafter, 9, 4, max_new_tokens=60)
    assert torch.equal(out.sequences, expected)
    drafted = out.tetris_stats.drafted.sum(1)
    # Row 0 has 3 tokens of prompt and row 2 has 12: the one drafts longer than the other, and neither to the end.
    assert 0 < drafted[2] < drafted[0] < 60 * 4
    assert (out.tetris_stats.drafted[:, 0] < out.tetris_stats.live_steps).all()


def test_a_prompt_longer_than_the_drafters_context():
    target, drafter = kit.tiny(), kit.tiny("gpt2", n_positions=8, max_position_embeddings=8)
    expected = kit.plain(target, kit.ragged())
    out = kit.speculate(target, kit.ragged(), drafter, 9, 4)
    assert torch.equal(out.sequences, expected) and not out.tetris_stats.drafted[2].any()


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("size", [72, 56])
def test_vocabularies_of_other_widths(target, size, do_sample):
    drafter = kit.tiny(vocab_size=size)
    watch = Watch(lambda: None)
    out = kit.speculate(target, kit.ragged(vocabulary=56), drafter, 9, 4, watch, do_sample=do_sample)
    if not do_sample:
        assert torch.equal(out.sequences, kit.plain(target, kit.ragged(vocabulary=56)))
    assert all(int(draft.tokens.max()) < min(size, 64) for draft, _ in watch.drafts)
    assert all(draft.q is None or draft.q.shape[-1] == 64 for draft, _ in watch.drafts)


def test_q_is_what_was_drawn_from(target, near):
    settings = {"do_sample": True, "temperature": 0.8, "top_k": 5}
    sharpness = {}
    for temperature in (0.5, None, 2.0):
        torch.manual_seed(3)
        watch = Watch(lambda: None)
        kit.speculate(target, kit.ragged(), AssistantDrafter(near, temperature=temperature), 9, 4, watch, **settings)
        for draft, _ in watch.drafts:
            real = torch.arange(draft.depth) < draft.lengths[:, None]
            q = draft.q[real]
            torch.testing.assert_close(q.sum(-1), torch.ones(len(q)))
            assert ((q > 0).sum(-1) <= 5).all(), "the target's processors apply to drafts"
            drawn = q.gather(1, draft.tokens[real][:, None])[:, 0]
            assert torch.equal(drawn, draft.probabilities[real]) and (drawn > 0).all()
            assert torch.equal(q.amax(-1), draft.expectations[real])
        sharpness[temperature] = float(torch.cat([d.expectations.flatten() for d, _ in watch.drafts]).mean())
    assert sharpness[0.5] > sharpness[None] > sharpness[2.0]
    with pytest.raises(ValueError, match="`temperature` must be positive, got 0"):
        AssistantDrafter(near, temperature=0)


def test_no_place_is_drafted_that_cannot_be_selected():
    """The same text, verification and acceptance from fewer draft forwards."""
    target = kit.tiny()
    expected = kit.plain(target, kit.ragged())

    class Deep(tetris_hf.TetrisSelector):
        def wants_deeper(self, draft, capacity):
            return True

    all_places = kit.speculate(target, kit.ragged(), kit.near(target), 4, 6, selector=Deep())
    needed = kit.speculate(target, kit.ragged(), kit.near(target), 4, 6)
    assert torch.equal(needed.sequences, expected) and torch.equal(all_places.sequences, expected)
    for name in ("verified", "accepted", "bonus", "live_steps"):
        assert torch.equal(getattr(needed.tetris_stats, name), getattr(all_places.tetris_stats, name))
    assert needed.tetris_stats.draft_forwards < all_places.tetris_stats.draft_forwards
