"""What happens in every step: the budget, the tokens that reach the target, and who drafts.

The reference is speculative decoding of one row after the other in plain Python, without a cache: drafts by repeated
forwards of the assistant, selection by the heap walk of the TETRIS paper, acceptance by comparison.
"""

import heapq
import math

import kit
import pytest
import torch

from tetris_hf import DraftSelector, FixedWindowSelector, TetrisSelector, UnionSelector, generate_batch


class Watching(DraftSelector):
    """Selects nothing by itself; keeps what was drafted and what was verified."""

    def __init__(self):
        self.verifications = []

    def __call__(self, draft, lengths, capacity):
        return lengths

    def observe(self, verification):
        self.verifications.append(verification)


@torch.no_grad()
def next_distribution(model, text: list[int]) -> torch.Tensor:
    return model(torch.tensor([text])).logits[0, -1].float().softmax(-1)


def heap_walk(chances: list[list[float]], capacity: int) -> list[int]:
    """Algorithm 1: tokens per row. `chances[i][j]` is the chance of token j, given those before it."""
    lengths = [0] * len(chances)
    heap = [(-row[0], 0, index) for index, row in enumerate(chances) if row]
    heapq.heapify(heap)
    while heap and sum(lengths) < capacity:
        score, place, index = heapq.heappop(heap)
        lengths[index] = place + 1
        if place + 1 < len(chances[index]):
            heapq.heappush(heap, (score * chances[index][place + 1], place + 1, index))
    return lengths


def reference(target, assistant, prompts: list[list[int]], new_tokens: int, depth: int, select) -> dict:
    """Greedy speculative decoding, row by row. Counts per row and draft place."""
    texts = [prompt + [int(next_distribution(target, prompt).argmax())] for prompt in prompts]
    ends = [len(prompt) + new_tokens for prompt in prompts]
    counts = {name: torch.zeros(len(prompts), depth, dtype=torch.long) for name in ("drafted", "verified", "accepted")}
    while any(len(text) < end for text, end in zip(texts, ends, strict=True)):
        live = [i for i in range(len(texts)) if len(texts[i]) < ends[i]]
        drafts, chances = [], []
        for i in live:
            drafted, chance = [], []
            while len(drafted) < min(depth, ends[i] - 1 - len(texts[i])):
                distribution = next_distribution(assistant, texts[i] + drafted)
                drafted.append(int(distribution.argmax()))
                chance.append(float(distribution.max()))
            drafts.append(drafted)
            chances.append(chance)
        remaining = [ends[i] - len(texts[i]) for i in live]
        for i, drafted, length in zip(live, drafts, select(chances, remaining), strict=True):
            accepted = 0
            while accepted < length and drafted[accepted] == int(next_distribution(target, texts[i]).argmax()):
                texts[i].append(drafted[accepted])
                accepted += 1
            texts[i].append(int(next_distribution(target, texts[i]).argmax()))
            for name, number in (("drafted", len(drafted)), ("verified", length), ("accepted", accepted)):
                counts[name][i, :number] += 1
    return {"texts": [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)], **counts}


@pytest.mark.parametrize("name", ["near", "same", "far"])
@pytest.mark.parametrize("capacity, selector", [(4, None), (9, None), (100, FixedWindowSelector())])
def test_counts_equal_those_of_a_row_by_row_decoder(target, assistants, batch, name, capacity, selector):
    depth, new_tokens = 3, 14

    def select(chances, remaining):
        return heap_walk(chances, capacity) if selector is None else [len(row) for row in chances]

    prompts = [kit.row(batch, index)["input_ids"][0].tolist() for index in range(3)]
    expected = reference(target, assistants[name], prompts, new_tokens, depth, select)
    out = kit.speculate(target, batch, assistants[name], capacity, depth, selector, max_new_tokens=new_tokens)
    assert out.sequences[:, 12:].tolist() == expected["texts"]
    for count in ("verified", "accepted"):
        assert torch.equal(getattr(out.tetris_stats, count), expected[count]), count
    # The library does not draft a place that nothing can be selected of any more.
    drafted = out.tetris_stats.drafted
    assert (drafted <= expected["drafted"]).all() and (drafted >= expected["verified"]).all()
    assert torch.equal(drafted, expected["drafted"]) or capacity == 4


@pytest.mark.parametrize("name", ["near", "same"])
@pytest.mark.parametrize("capacity", [2, 4])
def test_so_they_do_with_slow_rows_first(target, assistants, batch, name, capacity):
    """Scores of a row two tokens ahead of the slowest one count e times less."""
    depth, new_tokens = 3, 20

    def select(chances, remaining):
        urgent = [math.exp((one - max(remaining)) / 2) for one in remaining]
        weighted = [[row[0] * u, *row[1:]] if row else [] for row, u in zip(chances, urgent, strict=True)]
        return heap_walk(weighted, capacity)

    prompts = [kit.row(batch, index)["input_ids"][0].tolist() for index in range(3)]
    expected = reference(target, assistants[name], prompts, new_tokens, depth, select)
    plain = reference(target, assistants[name], prompts, new_tokens, depth, lambda c, _: heap_walk(c, capacity))
    selector = TetrisSelector(slowest_first=True)
    out = kit.speculate(target, batch, assistants[name], capacity, depth, selector, max_new_tokens=new_tokens)
    assert out.sequences[:, 12:].tolist() == expected["texts"] == plain["texts"]
    for count in ("verified", "accepted"):
        assert torch.equal(getattr(out.tetris_stats, count), expected[count]), count
    assert not torch.equal(expected["verified"], plain["verified"]), "the weights decide something"


class Asking(Watching):
    needs_remaining = True


@pytest.mark.parametrize(
    "wrapped", [lambda asking: asking, lambda asking: UnionSelector([FixedWindowSelector(1), asking])]
)
def test_a_selector_that_asks_is_told_how_far_rows_are_where_none_is_replaced(target, near, batch, wrapped):
    asking = Asking()
    kit.speculate(target, batch, near, 6, 3, wrapped(asking), max_new_tokens=20)
    left = [19, 19, 19]  # the prompts' own forward gives the first token
    for step in asking.verifications:
        assert step.draft.depth == 0 or step.draft.remaining.tolist() == [left[row] for row in step.live.tolist()]
        for row, accepted in zip(step.live.tolist(), step.num_accepted.tolist(), strict=True):
            left[row] -= accepted + 1
    assert left == [0, 0, 0]
    silent = Watching()
    kit.speculate(target, batch, near, 6, 3, silent, max_new_tokens=20)
    job = Asking()
    prompts = [kit.row(batch, index)["input_ids"][0].tolist() for index in (0, 1, 2, 0)]
    generate_batch(
        target, prompts, assistant_model=near, tetris_capacity=6, num_assistant_tokens=3, tetris_selector=wrapped(job),
        batch_size=2, max_new_tokens=20, do_sample=False,
    )  # fmt: skip
    assert silent.verifications and job.verifications
    assert all(step.draft.remaining is None for step in silent.verifications + job.verifications)


@pytest.mark.parametrize("capacity", [1, 2, 5, 7])
@pytest.mark.parametrize("name", ["near", "far"])
def test_tokens_per_step_are_rows_plus_selected_drafts(target, assistants, batch, name, capacity):
    watching = Watching()
    with kit.counted_tokens(target) as tokens:
        out = kit.speculate(target, batch, assistants[name], capacity, 4, [watching], max_new_tokens=24)
    stats, steps = out.tetris_stats, watching.verifications
    assert tokens[0] == sum(kit.LENGTHS), "one forward for all prompts, without their padding"
    assert tokens[1:] == [len(step.live) + int(step.lengths.sum()) for step in steps]
    assert all(int(step.lengths.sum()) == min(capacity, int(step.draft.lengths.sum())) for step in steps)
    # While every row is live and drafts suffice, a step has one shape: N + C.
    usual = [
        number
        for number, step in zip(tokens[1:], steps, strict=True)
        if len(step.live) == 3 and int(step.draft.lengths.sum()) >= capacity
    ]
    assert set(usual) == {3 + capacity} and 2 * len(usual) > len(steps)
    assert (stats.target_forwards, stats.target_tokens) == (len(tokens), sum(tokens))


def test_no_capacity_computes_one_token_per_row(target, near, batch):
    with kit.counted_tokens(near) as drafted, kit.counted_tokens(target) as tokens:
        kit.speculate(target, batch, near, 0, max_new_tokens=6)
    assert tokens == [22, 3, 3, 3, 3, 3]
    assert drafted == [], "drafts that cannot be verified are not made"


def test_a_good_row_does_not_wait_for_a_bad_one(target, batch):
    texts = kit.alone(target, batch, max_new_tokens=21)
    good = kit.speculate(target, batch, kit.ScriptedDrafter(texts), 12, 4, max_new_tokens=21)
    mixed = kit.speculate(target, batch, kit.ScriptedDrafter(texts, wrong=(1,)), 12, 4, max_new_tokens=21)
    assert torch.equal(mixed.sequences, good.sequences)
    # One first token, then five tokens a step.
    assert good.tetris_stats.live_steps.tolist() == [4, 4, 4]
    assert mixed.tetris_stats.live_steps.tolist() == [4, 20, 4]
    assert mixed.tetris_stats.accepted.sum(1).tolist() == [16, 0, 16]


def test_a_finished_row_neither_drafts_nor_spends(target, batch):
    texts = kit.alone(target, batch)
    drafter = kit.ScriptedDrafter(texts, wrong=(0, 2))
    out = kit.speculate(target, batch, drafter, 3, 3)
    ended = out.tetris_stats.live_steps[1]
    assert all((1 in asked) == (step < ended) for step, asked in enumerate(drafter.asked))
    for step in drafter.verifications[1:]:
        # What the row leaves behind goes to the others: the whole budget is spent as long as they have drafts for it.
        assert int(step.lengths.sum()) == min(3, int(step.draft.lengths.sum()))
    assert any(len(step.live) == 2 and int(step.lengths.sum()) == 3 for step in drafter.verifications)


def test_silent_rows_still_get_their_token(target, batch):
    # Batches of drafted and undrafted rows, in every order; the budget goes to those that have something to show.
    texts = kit.alone(target, batch)
    for silent in ((0,), (1,), (2,), (0, 2), (0, 1, 2)):
        out = kit.speculate(target, batch, kit.ScriptedDrafter(texts, silent=silent), 4, 3)
        assert out.sequences[:, 12:].tolist() == texts
        assert all(out.tetris_stats.drafted[index].sum() == 0 for index in silent)
        assert out.tetris_stats.live_steps[list(silent)].tolist() == [19] * len(silent)


def test_the_budget_goes_to_the_confident_row(target, batch):
    texts = kit.alone(target, batch)
    drafter = kit.ScriptedDrafter(texts, confidence=[0.1, 0.9, 0.2])
    out = kit.speculate(target, batch, drafter, 3, 3)
    # .9, .81 and .729 come before .2, until row 1 has ended.
    first = drafter.verifications[1]
    assert first.lengths.tolist() == [0, 3, 0] and first.num_accepted.tolist() == [0, 3, 0]
    assert out.tetris_stats.live_steps[1] == 5


def test_verification_tells_where_the_states_are(target, batch):
    """`starts[i] + num_accepted[i]` points at the state that gave the newest token: checked by the head."""

    class Reading(kit.ScriptedDrafter):
        needs_hidden_states = True
        newest = 0

        def observe(self, rows, verification):
            states = verification.hidden_states[verification.starts + verification.num_accepted]
            newest = rows.tokens[verification.live, rows.length[verification.live] - 1]
            assert torch.equal(target.lm_head(states).argmax(-1), newest)
            self.newest += len(newest)

    drafter = Reading(kit.alone(target, batch), wrong=(1,))
    kit.speculate(target, batch, drafter, 5, 3)
    assert drafter.newest > 3 * 5


# K, the depth of drafts.


def depth_of(out) -> int:
    return out.tetris_stats.drafted.shape[1]


def test_depth_comes_from_call_then_object_then_assistant_then_budget(target, batch):
    assistant = kit.near(target)
    for capacity, depth in ((2, 1), (7, 3), (12, 5)):
        assert depth_of(kit.speculate(target, batch, assistant, capacity)) == depth, "C // 3 + 1"
    assistant.generation_config.num_assistant_tokens = 4
    assert depth_of(kit.speculate(target, batch, assistant, 7)) == 4
    assert depth_of(kit.speculate(target, batch, assistant, 7, depth=3)) == 3
    assert depth_of(kit.speculate(target, batch, assistant, 7, depth=3, num_assistant_tokens=2)) == 2


def test_nothing_is_drafted_past_the_end(target, same, batch):
    out = kit.speculate(target, batch, same, 64, 19, max_new_tokens=6)
    # One token comes from the prompts, one is the bonus token: four drafts a row, not nineteen.
    assert out.tetris_stats.drafted.sum(1).tolist() == [4, 4, 4]
    assert out.tetris_stats.steps == 1
