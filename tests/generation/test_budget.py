"""How a budget is spent, against the heap walk of the TETRIS paper and against every other selection of prefixes.

Theorem 1 of the paper: the heap walk takes the set of C tokens with the largest sum of acceptance chances. The library
sorts instead of walking: same value, exactly C tokens, ties included.
"""

import heapq
import itertools
import math

import kit
import pytest
import torch

from tetris_hf.generation.budget import beats_the_worst, evenly, fits_deeper, spend
from tetris_hf.generation.fusing import fusing


def heap_walk(scores: torch.Tensor, lengths: torch.Tensor, capacity: int) -> list[int]:
    """Algorithm 1, word for word, but for rows that end. Returns the frontier plus one: tokens per row."""
    taken, frontier = 0, [0] * len(scores)
    heap = [(-float(scores[i, 0]), i, 0) for i in range(len(scores)) if lengths[i] > 0]
    heapq.heapify(heap)
    while heap and taken < capacity:
        _, i, j = heapq.heappop(heap)
        taken, frontier[i] = taken + 1, j + 1
        if j + 1 < lengths[i]:
            heapq.heappush(heap, (-float(scores[i, j + 1]), i, j + 1))
    return frontier


def value(scores: torch.Tensor, lengths) -> float:
    """Expected number of accepted draft tokens."""
    return sum(float(scores[i, : int(n)].sum()) for i, n in enumerate(lengths))


def random_scores(num_rows: int, depth: int, certain: float, generator: torch.Generator) -> torch.Tensor:
    """Running products of chances, of which a share `certain` is exactly one."""
    chances = torch.rand(num_rows, depth, generator=generator)
    chances[torch.rand(num_rows, depth, generator=generator) < certain] = 1.0
    return chances.cumprod(1)


@pytest.mark.parametrize("certain", [0.0, 0.5, 1.0])
def test_equals_the_heap_walk(certain):
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        num_rows, depth = (int(torch.randint(1, 7, (), generator=generator)) for _ in range(2))
        scores = random_scores(num_rows, depth, certain, generator)
        lengths = torch.randint(0, depth + 1, (num_rows,), generator=generator)
        capacity = int(torch.randint(0, num_rows * depth + 2, (), generator=generator))
        selected = spend(scores, lengths, capacity)
        expected = heap_walk(scores, lengths, capacity)
        assert value(scores, selected) == pytest.approx(value(scores, expected), rel=1e-6)
        assert int(selected.sum()) == min(capacity, int(lengths.sum())) == sum(expected)
        assert (selected <= lengths).all() and (selected >= 0).all()
        if certain == 0.0:  # no ties, one answer
            assert selected.tolist() == expected


def test_ties_never_overshoot():
    # Taking the deepest winner of a row as its length, as the paper's own code does, overshoots in a quarter of these.
    generator = torch.Generator().manual_seed(1)
    for _ in range(3000):
        scores = random_scores(6, 5, 0.5, generator)
        lengths = torch.randint(0, 6, (6,), generator=generator)
        assert int(spend(scores, lengths, 9).sum()) == min(9, int(lengths.sum()))


@pytest.mark.parametrize("num_rows, depth", [(1, 4), (2, 3), (3, 3), (4, 2)])
def test_no_other_selection_of_prefixes_is_better(num_rows, depth):
    generator = torch.Generator().manual_seed(2)
    for _, certain in itertools.product(range(20), (0.0, 0.4)):
        scores = random_scores(num_rows, depth, certain, generator)
        lengths = torch.full((num_rows,), depth)
        for capacity in range(num_rows * depth + 1):
            candidates = itertools.product(range(depth + 1), repeat=num_rows)
            best = max(value(scores, chosen) for chosen in candidates if sum(chosen) <= capacity)
            assert value(scores, spend(scores, lengths, capacity)) == pytest.approx(best, rel=1e-6)


def test_among_equals_the_shallow_place_comes_first_then_the_lower_row():
    ones, lengths = torch.ones(3, 4), torch.full((3,), 4)
    assert [spend(ones, lengths, c).tolist() for c in (0, 1, 2, 3, 4, 8, 11)] == [
        [0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
        [2, 1, 1],
        [3, 3, 2],
        [4, 4, 3],
    ]
    # The place matters more than the row: row 0 is short, and what it leaves goes on to the others.
    assert spend(ones, torch.tensor([1, 4, 4]), 5).tolist() == [1, 2, 2]


@pytest.mark.parametrize("capacity", [12, 13, 1000])
def test_a_capacity_for_everything(capacity):
    lengths = torch.tensor([4, 0, 3])
    assert spend(torch.rand(3, 4), lengths, capacity).tolist() == [4, 0, 3]


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), -3.0])
def test_odd_scores_lose_but_are_spent_on_rather_than_nothing(bad):
    scores = torch.tensor([[bad, bad, bad], [0.5, 0.4, 0.3], [0.9, bad, bad]])
    lengths = torch.tensor([3, 3, 2])
    assert spend(scores, lengths, 4).tolist() == [0, 3, 1]
    for capacity in range(10):
        assert int(spend(scores, lengths, capacity).sum()) == min(capacity, 8)


def test_no_rows_and_no_places():
    assert spend(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), 5).tolist() == []
    assert spend(torch.zeros(2, 0), torch.zeros(2, dtype=torch.long), 5).tolist() == [0, 0]


def test_even_scores_go_round_by_place():
    assert spend(evenly(torch.tensor([3, 3]), 3), torch.tensor([3, 3]), 3).tolist() == [2, 1]


def naive_beats_the_worst(probabilities, expectations, lengths, urgency, predictable, capacity) -> bool:
    """Whether the best that one place more could score would be taken instead of something that is taken now."""
    taken, next_ones = [], []
    for chances, expected, length, weight in zip(probabilities, expectations, lengths, urgency, strict=True):
        reached, least = 1.0, math.inf
        for place, chance in enumerate(chances):
            least = min(least, reached * (expected[place] if predictable else chance))
            reached *= chance
            if place < length:
                taken.append(weight * least)
        if length > len(chances):
            next_ones.append(weight * min(least, reached))
    worst = sorted(taken, reverse=True)[capacity - 1] if len(taken) >= capacity else -math.inf
    return any(score > worst for score in next_ones)


@kit.compiled_or_not
def test_one_place_more_is_wanted_as_a_loop_wants_it(compiled):
    generator, wanted = torch.Generator().manual_seed(6), []
    for num_rows, depth in ((1, 1), (5, 3), (16, 2)):
        for _ in range(40):
            # Powers of two, so that ties are ties in any order of multiplication.
            probabilities, expectations = (
                0.5 ** torch.randint(0, 4, (2, num_rows, depth), generator=generator).double()
            )
            lengths = torch.randint(0, depth + 3, (num_rows,), generator=generator)
            urgency = 0.5 ** torch.randint(0, 3, (num_rows,), generator=generator).double()
            capacity = int(torch.randint(1, num_rows * depth + 2, (), generator=generator))
            for predictable in (True, False):
                given = probabilities, expectations, lengths, urgency, predictable, capacity
                naive = naive_beats_the_worst(*(one.tolist() if torch.is_tensor(one) else one for one in given))
                with fusing(compiled):
                    assert bool(beats_the_worst(*given)) == naive, given
                wanted.append(naive)
    assert 0.2 < sum(wanted) / len(wanted) < 0.8


@kit.compiled_or_not
def test_a_window_goes_deeper_while_some_row_and_the_budget_do(compiled):
    lengths = torch.tensor([3, 0, 1])
    with fusing(compiled):
        for depth, capacity, expected in ((1, 3, True), (1, 2, False), (2, 4, True), (2, 3, False), (3, 9, False)):
            assert bool(fits_deeper(lengths, depth, capacity)) == expected
