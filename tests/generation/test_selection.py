"""Selectors: what they take of a draft, alone and in lists, and when they want no deeper place."""

import math
from dataclasses import replace

import pytest
import torch
from test_budget import heap_walk, value
from torch.utils._python_dispatch import TorchDispatchMode

from tetris_hf import (
    AcceptanceCalibration,
    ConfidenceThresholdSelector,
    Draft,
    DraftSelector,
    DraftSelectorList,
    FixedWindowSelector,
    TetrisSelector,
)


def draft_of(probabilities: torch.Tensor, lengths=None, expectations=None) -> Draft:
    num_rows, depth = probabilities.shape
    lengths = torch.full((num_rows,), depth) if lengths is None else torch.tensor(lengths)
    tokens = torch.zeros(num_rows, depth, dtype=torch.long)
    return Draft(tokens, lengths, probabilities, probabilities if expectations is None else expectations)


def test_tetris_selector_takes_the_best_running_products():
    # Running products: .9 .45 .405 and .6 .54 .486.
    draft = draft_of(torch.tensor([[0.9, 0.5, 0.9], [0.6, 0.9, 0.9]]))
    selector = TetrisSelector()
    assert [selector(draft, draft.lengths, c).tolist() for c in range(7)] == [
        [0, 0],
        [1, 0],
        [1, 1],
        [1, 2],
        [1, 3],
        [2, 3],
        [3, 3],
    ]


def test_predictable_score_is_blind_to_the_token_that_it_decides_about():
    probabilities, expectations = torch.tensor([[0.1, 0.8], [0.7, 0.2]]), torch.tensor([[0.5, 0.9], [0.7, 0.6]])
    draft = draft_of(probabilities, expectations=expectations)
    torch.testing.assert_close(draft.prefix_scores(), torch.tensor([[0.5, 0.09], [0.7, 0.42]]))
    torch.testing.assert_close(draft.prefix_scores(predictable=False), torch.tensor([[0.1, 0.08], [0.7, 0.14]]))
    other = draft_of(probabilities + torch.tensor([[0.0, -0.7], [0.0, 0.7]]), expectations=expectations)
    assert torch.equal(draft.prefix_scores(), other.prefix_scores())


def test_prefix_scores_never_increase_and_end_with_the_row():
    # A sure place behind an unlikely one: .2 * 1.0 against .1 before it needs the running minimum.
    draft = draft_of(torch.tensor([[0.2, 1.0, 1.0]]), [2], torch.tensor([[0.1, 1.0, 1.0]]))
    torch.testing.assert_close(draft.prefix_scores(), torch.tensor([[0.1, 0.1, float("-inf")]]))


def test_scores_agree_when_drafts_are_greedy():
    chances = torch.rand(4, 5, generator=torch.Generator().manual_seed(3))
    draft = draft_of(chances)
    torch.testing.assert_close(draft.prefix_scores(), draft.prefix_scores(predictable=False))


def test_paper_score_can_be_asked_for():
    draft = draft_of(torch.tensor([[0.1], [0.7]]), expectations=torch.tensor([[0.9], [0.7]]))
    assert TetrisSelector()(draft, draft.lengths, 1).tolist() == [1, 0]
    assert TetrisSelector(score="paper")(draft, draft.lengths, 1).tolist() == [0, 1]


def test_fixed_window_selector():
    draft = draft_of(torch.tensor([[0.1, 0.1, 0.1], [0.9, 0.9, 0.9], [0.5, 0.5, 0.5]]), [3, 3, 1])
    assert FixedWindowSelector()(draft, draft.lengths, 100).tolist() == [3, 3, 1]
    assert FixedWindowSelector(2)(draft, draft.lengths, 100).tolist() == [2, 2, 1]
    assert FixedWindowSelector(0)(draft, draft.lengths, 100).tolist() == [0, 0, 0]
    # Cut for all rows alike, whatever their scores.
    assert FixedWindowSelector()(draft, draft.lengths, 5).tolist() == [2, 2, 1]
    assert FixedWindowSelector()(draft, draft.lengths, 2).tolist() == [1, 1, 0]


class Threshold(DraftSelector):
    def __call__(self, draft, lengths, capacity):
        return torch.minimum(lengths, (draft.prefix_scores() > 0.3).sum(1))


class Greedy(DraftSelector):
    """Asks for more than there is, or for less than nothing."""

    def __init__(self, wish: int):
        self.wish = wish

    def __call__(self, draft, lengths, capacity):
        return torch.full_like(lengths, self.wish)


def test_a_threshold_in_front_of_a_budget():
    draft = draft_of(torch.tensor([[0.9, 0.5, 0.5], [0.8, 0.9, 0.9], [0.2, 1.0, 1.0]]))
    selectors = DraftSelectorList.of([Threshold(), TetrisSelector()])
    assert selectors(draft, 100).tolist() == [2, 3, 0]
    assert selectors(draft, 3).tolist() == [1, 2, 0]


@pytest.mark.parametrize("capacity", [0, 1, 4, 5, 100])
def test_a_selector_that_takes_too_much_is_cut(capacity):
    draft = draft_of(torch.rand(3, 3), [3, 0, 2])
    lengths = DraftSelectorList.of(Greedy(99))(draft, capacity)
    assert int(lengths.sum()) == min(capacity, 5) and (lengths <= draft.lengths).all()
    assert DraftSelectorList.of(Greedy(-2))(draft, capacity).tolist() == [0, 0, 0]


class Sorts(TorchDispatchMode):
    """Counts sorts."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket is torch.ops.aten.sort
        return func(*args, **(kwargs or {}))


class Spendthrift(TetrisSelector):
    """A subclass that forgets the budget."""

    def __call__(self, draft, lengths, capacity):
        return super().__call__(draft, lengths, capacity) + 1


@pytest.mark.parametrize("capacity", [1, 7, 11])
@pytest.mark.parametrize(
    "selectors, sorts",
    [
        ([TetrisSelector()], 1),
        ([FixedWindowSelector(2)], 1),
        ([TetrisSelector(), FixedWindowSelector(1)], 2),
        ([FixedWindowSelector(2), ConfidenceThresholdSelector(0.5)], 1),
        ([ConfidenceThresholdSelector(0.5)], 1),
        ([ConfidenceThresholdSelector(0.5), TetrisSelector()], 1),
        ([Spendthrift()], 2),
    ],
)
def test_the_budget_holds_and_is_sorted_for_no_more_often_than_need_be(selectors, sorts, capacity):
    estimates = torch.rand(5, 3, generator=torch.Generator().manual_seed(1))
    draft = Draft(torch.zeros(5, 3, dtype=torch.long), torch.tensor([3, 2, 3, 0, 3]), estimates, estimates)
    with Sorts() as counted:
        lengths = DraftSelectorList.of(selectors)(draft, capacity)
    assert lengths.sum() <= capacity and (lengths <= draft.lengths).all()
    assert counted.count == sorts


def test_the_default_is_tetris():
    assert [type(selector) for selector in DraftSelectorList.of(None)] == [TetrisSelector]
    assert DraftSelectorList.of(None)[0].score == "predictable"
    window = FixedWindowSelector()
    assert DraftSelectorList.of(window) == [window]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: TetrisSelector(score="best"), "`score`.*'best'"),
        (lambda: FixedWindowSelector(-1), "`window`.*-1"),
        (lambda: DraftSelectorList.of([3]), "`tetris_selector`.*int"),
        (lambda: DraftSelectorList.of(3), "`tetris_selector`.*int"),
        (lambda: DraftSelectorList.of("paper"), "`tetris_selector`.*str"),
    ],
)
def test_errors_name_argument_and_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_slow_rows_first_is_the_heap_walk_of_scores_times_urgency():
    generator = torch.Generator().manual_seed(6)
    for _ in range(200):
        num_rows, depth = (int(torch.randint(1, 7, (), generator=generator)) for _ in range(2))
        remaining = torch.randint(0, 30, (num_rows,), generator=generator)
        lengths = torch.randint(0, depth + 1, (num_rows,), generator=generator)
        draft = replace(
            draft_of(torch.rand(num_rows, depth, generator=generator), lengths.tolist()), remaining=remaining
        )
        most = max(remaining.tolist())
        weights = [max(math.exp((one - most) / 2), 1e-20) for one in remaining.tolist()]
        assert draft.urgency().tolist() == pytest.approx(weights, rel=1e-5)
        scores = draft.probabilities.cumprod(1) * torch.tensor(weights)[:, None]
        for capacity in range(num_rows * depth + 1):
            selected = TetrisSelector(slowest_first=True)(draft, lengths, capacity)
            assert value(scores, selected) == pytest.approx(
                value(scores, heap_walk(scores, lengths, capacity)), rel=1e-5
            )
            assert int(selected.sum()) == min(capacity, int(lengths.sum()))


def test_slow_rows_first_changes_nothing_where_all_are_as_far_or_rows_are_replaced():
    draft = draft_of(torch.rand(5, 3, generator=torch.Generator().manual_seed(0)))
    for known in (draft, replace(draft, remaining=torch.full((5,), 7))):
        assert known.urgency().tolist() == [1.0] * 5
        for capacity in range(16):
            slow_first = TetrisSelector(slowest_first=True)(known, known.lengths, capacity)
            assert torch.equal(slow_first, TetrisSelector()(known, known.lengths, capacity))


def test_a_row_far_behind_takes_all_that_it_can_use():
    chances = torch.tensor([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1], [0.8, 0.8, 0.8]])
    draft = replace(draft_of(chances), remaining=torch.tensor([10, 60, 9]))
    assert TetrisSelector(slowest_first=True)(draft, draft.lengths, 4).tolist() == [1, 3, 0]
    assert TetrisSelector()(draft, draft.lengths, 4).tolist() == [3, 0, 1]
    for calibration in (None, AcceptanceCalibration(3)):
        far = replace(draft, remaining=torch.tensor([1, 100_000, 1]))  # the weight of others is next to nothing
        selected = TetrisSelector(calibration=calibration, slowest_first=True)(far, far.lengths, 7)
        assert int(selected[1]) == 3 and int(selected.sum()) == 7


@pytest.mark.parametrize("score", ["predictable", "paper"])
def test_a_batch_stops_drafting_exactly_where_nothing_deeper_can_be_selected(score):
    """Drafting place by place: what is selected is what would be selected from drafts of full depth, and going on
    is needed: were the places to come certain, one would get into the budget."""
    generator = torch.Generator().manual_seed(4)
    stopped = 0
    for _ in range(300):
        num_rows, depth = (int(torch.randint(1, 6, (), generator=generator)) for _ in range(2))
        capacity = int(torch.randint(1, num_rows * depth + 2, (), generator=generator))
        lengths = torch.randint(0, depth + 1, (num_rows,), generator=generator)
        tokens = torch.zeros(num_rows, depth, dtype=torch.long)
        chances = torch.rand(num_rows, depth, generator=generator).round(decimals=1)
        expectations = torch.maximum(chances, torch.rand(num_rows, depth, generator=generator))
        known_ends = {"remaining": torch.randint(1, 6, (num_rows,), generator=generator)}
        selectors = [TetrisSelector(score=score, slowest_first=slow) for slow in (False, True)]
        for selector in (*selectors, FixedWindowSelector(), FixedWindowSelector(2)):
            full = DraftSelectorList([selector])(Draft(tokens, lengths, chances, expectations, **known_ends), capacity)
            place = 1
            while place < depth:
                so_far = Draft(tokens[:, :place], lengths, chances[:, :place], expectations[:, :place], **known_ends)
                if not selector.wants_deeper(so_far, capacity):
                    break
                certain = Draft(
                    tokens, lengths, *(torch.cat([known[:, :place], torch.ones_like(known[:, place:])], 1)
                                       for known in (chances, expectations)), **known_ends,
                )  # fmt: skip
                deepest = DraftSelectorList([selector])(certain, capacity)
                assert int(deepest.max()) > place, (selector, so_far, capacity, deepest, place)
                place += 1
            stopped += place < depth
            short = lengths.clamp(max=place)
            shallow = Draft(tokens[:, :place], short, chances[:, :place], expectations[:, :place], **known_ends)
            assert torch.equal(DraftSelectorList([selector])(shallow, capacity), full)
    assert stopped > 100
