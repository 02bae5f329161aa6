"""Selection and acceptance together, in exact arithmetic: every possible draft of two rows is enumerated.

The theorem of `docs/algorithm.md`: if the number of tokens that a row verifies is a stopping time of its drafts, the
output has the target's law, and the rows stay independent. The paper's score is no stopping time, and fails.
"""

import itertools

import pytest
import torch

from tetris_hf import Draft, FixedWindowSelector, TetrisSelector
from tetris_hf.generation.selection import DraftSelectorList


def law_given_drafts(p: torch.Tensor, q: torch.Tensor, drafts: tuple[int, ...], length: int) -> torch.Tensor:
    """
    Law of the first K tokens of a row given its K drafts, the first `length` of which are verified, as a K-dimensional
    table. `p[t]` and `q[t]` are the laws after token t; a row starts after token 0.
    """
    size, depth = len(p), len(drafts)
    law = torch.zeros([size] * depth, dtype=torch.double)

    def free(prefix: list[int], chance: float, first: torch.Tensor | None = None) -> None:
        """The rest follows the target, but for a first law of its own."""
        if len(prefix) == depth:
            law[tuple(prefix)] += chance
            return
        weights = p[prefix[-1] if prefix else 0] if first is None else first
        for token in range(size):
            if weights[token] > 0:
                free([*prefix, token], chance * float(weights[token]))

    chance, prefix = 1.0, []
    for token in drafts[:length]:
        before = prefix[-1] if prefix else 0
        accept = min(1.0, float(p[before, token] / q[before, token]))
        if accept < 1:
            residual = (p[before] - q[before]).clamp(min=0)
            free(prefix, chance * (1 - accept), residual / residual.sum())
        chance, prefix = chance * accept, [*prefix, token]
    free(prefix, chance)
    return law


def joint_law(p: torch.Tensor, q: torch.Tensor, selector, capacity: int, depth: int, remaining=None) -> torch.Tensor:
    """Exact joint law of the first `depth` tokens of two rows, shape `(V ** depth, V ** depth)`."""
    size = len(p)
    selectors = DraftSelectorList.of(selector)
    total = torch.zeros(size**depth, size**depth, dtype=torch.double)
    rows = list(itertools.product(range(size), repeat=depth))
    for pair in itertools.product(rows, repeat=2):
        before = torch.tensor([(0, *drafts[:-1]) for drafts in pair])  # (2, K)
        tokens = torch.tensor(pair)
        laws = q[before]  # (2, K, V)
        chances = laws.gather(2, tokens[:, :, None])[:, :, 0]
        draft = Draft(
            tokens, torch.full((2,), depth), chances.float(), laws.amax(-1).float(), laws.float(), remaining=remaining
        )
        lengths = selectors(draft, capacity).tolist()
        one, other = (law_given_drafts(p, q, pair[i], lengths[i]).flatten() for i in range(2))
        total += chances.prod() * torch.outer(one, other)
    return total


def wanted(p: torch.Tensor, depth: int) -> torch.Tensor:
    """What plain sampling of two rows gives: their product."""
    law = law_given_drafts(p, p, (0,) * depth, 0).flatten()
    return torch.outer(law, law)


FIRST_P, FIRST_Q = (0.3, 0.3, 0.2, 0.2), (0.55, 0.25, 0.15, 0.05)


def tables(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(2, size, size, generator=generator, dtype=torch.double).pow(2) + 0.01
    p, q = weights / weights.sum(-1, keepdim=True)
    return p, q


@pytest.mark.parametrize("selector", [TetrisSelector(), FixedWindowSelector(), FixedWindowSelector(1)])
@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_two_rows_keep_their_joint_law(selector, capacity, seed):
    p, q = tables(3, seed)
    # The scores travel in float32; their order does not depend on that, so the law is exact to rounding.
    torch.testing.assert_close(joint_law(p, q, selector, capacity, 2), wanted(p, 2), atol=1e-12, rtol=0)


@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_so_they_do_with_slow_rows_first(capacity, ahead):
    p, q = tables(3)
    law = joint_law(p, q, TetrisSelector(slowest_first=True), capacity, 2, torch.tensor([20, 20 - ahead]))
    torch.testing.assert_close(law, wanted(p, 2), atol=1e-12, rtol=0)


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_the_score_of_the_paper_does_not(capacity):
    p, q = tables(3)
    law = joint_law(p, q, TetrisSelector(score="paper"), capacity, 2)
    assert (law - wanted(p, 2)).abs().sum() > 0.01


def test_the_counter_example_of_the_documentation():
    p, q = (torch.tensor([law] * 4, dtype=torch.double) for law in (FIRST_P, FIRST_Q))
    law = joint_law(p, q, TetrisSelector(score="paper"), 1, 1)
    of_a_row = (law.sum(0) + law.sum(1)) / 2
    torch.testing.assert_close(of_a_row, torch.tensor([0.368, 0.267, 0.155, 0.210]).double(), atol=1e-3, rtol=0)
    exact = joint_law(p, q, TetrisSelector(), 1, 1)
    torch.testing.assert_close(exact, wanted(p, 1), atol=1e-12, rtol=0)
