"""The theorems of the TETRIS paper, section 4.2, for the selection that ships.

Theorem 1 (one step, given the true acceptance rates) is also in `test_budget.py`, over scores. Theorem 2 (all
steps): if every token of row i is accepted with the same chance a(i) (Assumption 1), then no other way to spend C per
step, adaptive or not, serves more tokens; with one chance for all rows, the fixed window serves as many.
"""

import itertools

import pytest
import torch

from tetris_hf import Draft, FixedWindowSelector, TetrisSelector
from tetris_hf.generation.selection import DraftSelectorList


def rows_of(chances: torch.Tensor, depth: int) -> Draft:
    """Drafts of rows in which every token stands with the row's own chance, `(N,)`, and is known to."""
    estimates = chances[:, None].expand(-1, depth)  # (N, K)
    tokens = torch.zeros(len(chances), depth, dtype=torch.long)
    return Draft(tokens, torch.full((len(chances),), depth), estimates, estimates)


def served(chances: list[float], lengths: tuple[int, ...]) -> float:
    """Expected tokens of one step, bonus included: the paper's G of a step, times its time."""
    return sum(sum(a**j for j in range(1, n + 1)) + 1 for a, n in zip(chances, lengths, strict=True))


def selections(num_rows: int, depth: int, capacity: int) -> list[tuple[int, ...]]:
    return [s for s in itertools.product(range(depth + 1), repeat=num_rows) if sum(s) <= capacity]


def outcomes(chances: list[float], lengths: tuple[int, ...]):
    """Every number of accepted tokens of each row, with its probability."""
    for accepted in itertools.product(*(range(n + 1) for n in lengths)):
        probability = 1.0
        for a, n, m in zip(chances, lengths, accepted, strict=True):
            probability *= a**m * (1 - a if m < n else 1.0)
        yield accepted, probability


@pytest.mark.parametrize("num_rows, depth", [(2, 4), (3, 3)])
def test_theorem_1_in_expected_tokens(num_rows, depth):
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        rates = torch.rand(num_rows, depth, generator=generator)  # another for every token
        draft = Draft(torch.zeros(num_rows, depth, dtype=torch.long), torch.full((num_rows,), depth), rates, rates)
        for capacity in range(num_rows * depth + 1):
            lengths = DraftSelectorList.of(TetrisSelector())(draft, capacity).tolist()
            # By the outcomes, not by scores: row i gets m tokens and one if m stand and the next one does not.
            values = {}
            for chosen in {*selections(num_rows, depth, capacity), tuple(lengths)}:
                values[chosen] = 0.0
                for row, n in zip(rates.tolist(), chosen, strict=True):
                    stands = 1.0
                    for m in range(n + 1):
                        fails = 1 - row[m] if m < n else 1.0
                        values[chosen] += stands * fails * (m + 1)
                        stands *= row[m] if m < n else 1.0
            assert values[tuple(lengths)] == pytest.approx(max(values.values()), rel=1e-6)


@pytest.mark.parametrize("chances", [[0.9, 0.4], [0.7, 0.7], [0.5, 0.95]])
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_theorem_2_no_plan_over_two_steps_is_better(chances, capacity):
    """Over every first selection and every second one that may depend on what the first step accepted."""
    depth = 3
    lengths = tuple(DraftSelectorList.of(TetrisSelector())(rows_of(torch.tensor(chances), depth), capacity).tolist())
    possible = selections(2, depth, capacity)
    best = 0.0
    for first in possible:
        # The best plan chooses the best second selection after every outcome on its own.
        second = sum(
            probability * max(served(chances, then) for then in possible)
            for _, probability in outcomes(chances, first)
        )
        best = max(best, served(chances, first) + second)
    assert 2 * served(chances, lengths) == pytest.approx(best, rel=1e-6)


def run(policy, chances: torch.Tensor, depth: int, capacity: int, steps: int, seed: int) -> tuple[float, float]:
    """Tokens served per step and the standard error of that. A policy sees what was accepted in the step before."""
    generator = torch.Generator().manual_seed(seed)
    accepted, counts = torch.zeros(len(chances), dtype=torch.long), []
    for _ in range(steps):
        lengths = policy(accepted)
        assert int(lengths.sum()) <= capacity and int(lengths.max()) <= depth
        stands = torch.rand(len(chances), depth, generator=generator) < chances[:, None]
        stands &= torch.arange(depth) < lengths[:, None]
        accepted = stands.long().cumprod(1).sum(1)
        counts.append(int(accepted.sum()) + len(chances))
    counted = torch.tensor(counts, dtype=torch.double)
    return float(counted.mean()), float(counted.std()) / steps**0.5


def test_theorem_2_by_simulation():
    chances, depth, capacity, steps = torch.tensor([0.95, 0.3, 0.8, 0.6, 0.1]), 6, 10, 3000
    draft = rows_of(chances, depth)
    tetris, fixed = (DraftSelectorList.of(selector) for selector in (TetrisSelector(), FixedWindowSelector()))
    generator = torch.Generator().manual_seed(7)

    def at_random(accepted):
        places = torch.randint(0, len(chances), (capacity,), generator=generator)
        return torch.bincount(places, minlength=len(chances)).clamp(max=depth)

    def follow_the_last_step(accepted):
        """Rows that did well get more: one token each, the rest in proportion to what they had accepted."""
        share = (accepted.float() / max(1, int(accepted.sum())) * (capacity - len(chances))).long()
        return (1 + share).clamp(max=depth)

    results = {
        name: run(policy, chances, depth, capacity, steps, seed)
        for seed, (name, policy) in enumerate(
            {
                "tetris": lambda accepted: tetris(draft, capacity),
                "fixed": lambda accepted: fixed(draft, capacity),
                "random": at_random,
                "last step": follow_the_last_step,
            }.items()
        )
    }
    mean, error = results.pop("tetris")
    assert mean == pytest.approx(served(chances.tolist(), tuple(tetris(draft, capacity).tolist())), abs=4 * error)
    for name, (other, its_error) in results.items():
        assert mean - other > 4 * (error**2 + its_error**2) ** 0.5, name


@pytest.mark.parametrize("chance", [0.2, 0.7, 0.95])
@pytest.mark.parametrize("capacity", [0, 3, 4, 9, 12])
def test_theorem_2_with_equal_rows_is_the_fixed_window(chance, capacity):
    draft = rows_of(torch.full((4,), chance), 3)
    tetris, fixed = (
        DraftSelectorList.of(s)(draft, capacity).tolist() for s in (TetrisSelector(), FixedWindowSelector())
    )
    assert tetris == fixed
