"""Rejection sampling against a loop over rows with the same uniforms, and against the laws that it must keep.

The loop is the published algorithm (Leviathan et al., 2023; Chen et al., 2023), one row and one token at a time.
"""

import pytest
import torch
from scipy.stats import chisquare

from tetris_hf.generation import rejection
from tetris_hf.generation.rejection import rejection_sample, sample


DRAWS = 200_000


def starts_of(lengths: torch.Tensor) -> torch.Tensor:
    """Packed rows one behind the other: `lengths[i] + 1` distributions each."""
    return (lengths + 1).cumsum(0) - (lengths + 1)


def random_laws(*shape: int, seed: int = 0) -> torch.Tensor:
    weights = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)).pow(2) + 1e-3
    return weights / weights.sum(-1, keepdim=True)


def one_hot(tokens: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens, size).float()


def one_row(p, q, tokens: list[int], uniforms: list[float]) -> tuple[list[int], torch.Tensor]:
    """
    The published algorithm on one row: p of shape (n + 1, V), q of shape (n, V), n draft tokens.

    Returns the accepted tokens and the law of the token that the target adds.
    """
    accepted: list[int] = []
    for place, token in enumerate(tokens):
        if uniforms[place] >= min(1.0, float(p[place, token]) / float(q[place, token])):
            residual = (p[place] - q[place]).clamp(min=0)
            return accepted, residual / residual.sum()
        accepted.append(token)
    return accepted, p[len(tokens)]


@pytest.fixture
def fixed_draws(monkeypatch):
    """Uniforms set by the test; the weights of the added token are kept, and their maximum is drawn."""

    def fix(uniforms: torch.Tensor) -> list[torch.Tensor]:
        weights: list[torch.Tensor] = []
        monkeypatch.setattr(torch, "rand_like", lambda like: uniforms[:, : like.shape[1]])
        monkeypatch.setattr(rejection, "sample", lambda w: (weights.append(w), w.argmax(-1))[1])
        return weights

    return fix


@pytest.mark.parametrize(
    "lengths", [[4, 2, 3], [1, 2, 1], [4, 0, 3], [0, 0, 1], [0, 0, 0], [4, 4, 4], [1], [3, 1, 4, 1, 0, 2, 4, 3]]
)
def test_equals_the_loop_over_rows(lengths, fixed_draws):
    # Rows of unequal length: a row that is addressed as row * K + place reads the distributions of another.
    num_rows, depth, size = len(lengths), 4, 5
    lengths = torch.tensor(lengths)
    starts = starts_of(lengths)
    for seed in range(20):
        p = random_laws(int((lengths + 1).sum()), size, seed=seed)
        q = random_laws(num_rows, depth, size, seed=seed + 99)
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(size, (num_rows, depth), generator=generator)
        uniforms = torch.rand(num_rows, depth, generator=generator)
        weights = fixed_draws(uniforms)
        accepted = rejection_sample(p, q, tokens, lengths, starts)
        for i in range(num_rows):
            n, start = int(lengths[i]), int(starts[i])
            expected, law = one_row(p[start : start + n + 1], q[i], tokens[i, :n].tolist(), uniforms[i].tolist())
            assert accepted.counts[i] == len(expected) + 1
            assert accepted.tokens[i, : len(expected) + 1].tolist() == [*expected, int(law.argmax())]
            torch.testing.assert_close(weights[0][i] / weights[0][i].sum(), law)


@pytest.mark.parametrize("stop", [0, 1, 2, None])
@pytest.mark.parametrize("with_q", [True, False])
def test_rejection_at_every_place(stop, with_q):
    # Forced: p is 0 at the rejected token and 1 at the accepted ones; what follows a rejection is forced as well, as
    # the residual has one token left. An index off by one takes residual or bonus from the neighbouring place.
    size, tokens = 6, torch.tensor([[1, 2, 3]])
    p = one_hot(torch.tensor([1, 2, 3, 5]), size)
    if stop is not None:
        p[stop] = one_hot(torch.tensor(4), size)
    q = torch.full((1, 3, size), 1 / size) if with_q else None
    accepted = rejection_sample(p, q, tokens, torch.tensor([3]), torch.tensor([0]))
    number = 3 if stop is None else stop
    assert accepted.counts.tolist() == [number + 1]
    assert accepted.tokens[0, : number + 1].tolist() == [*[1, 2, 3][:number], 5 if stop is None else 4]


def test_what_lies_past_the_verified_tokens_does_not_matter(fixed_draws):
    # The drafts of row 0 that were not selected would be accepted: the distributions behind its own are row 1's.
    size, lengths = 4, torch.tensor([1, 2])
    tokens = torch.tensor([[1, 2, 2], [2, 2, 3]])
    p = one_hot(torch.tensor([1, 3, 2, 2, 0]), size)
    fixed_draws(torch.zeros(2, 3))
    accepted = rejection_sample(p, None, tokens, lengths, starts_of(lengths))
    assert accepted.counts.tolist() == [2, 3]
    assert accepted.tokens[0, :2].tolist() == [1, 3] and accepted.tokens[1].tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize("with_q", [True, False])
def test_greedy_is_the_one_hot_case(with_q):
    size = 5
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 4, (6,), generator=generator)
        tokens = torch.randint(size, (6, 3), generator=generator)
        ids = torch.randint(size, (int((lengths + 1).sum()),), generator=generator)
        starts = starts_of(lengths)
        for i in range(6):  # let most drafts be right, so that rows of all lengths occur
            n = int(lengths[i])
            right = torch.rand(n, generator=generator) < 0.7
            ids[starts[i] : starts[i] + n] = torch.where(right, tokens[i, :n], ids[starts[i] : starts[i] + n])
        q = one_hot(tokens, size) if with_q else None
        greedy = rejection_sample(ids, q, tokens, lengths, starts)
        sampled = rejection_sample(one_hot(ids, size), q, tokens, lengths, starts)
        assert torch.equal(greedy.counts, sampled.counts)
        kept = torch.arange(4) < greedy.counts[:, None]
        assert torch.equal(greedy.tokens[kept], sampled.tokens[kept])


def test_no_drafts_at_all():
    nothing = torch.zeros(3, 0, dtype=torch.long)
    starts, lengths = torch.arange(3), torch.zeros(3, dtype=torch.long)
    for p in (torch.tensor([4, 0, 2]), one_hot(torch.tensor([4, 0, 2]), 5)):
        accepted = rejection_sample(p, None, nothing, lengths, starts)
        assert accepted.tokens.tolist() == [[4], [0], [2]] and accepted.counts.tolist() == [1, 1, 1]


def test_a_rejection_although_p_equals_q_falls_back_to_p(fixed_draws):
    # Rounding can bring it about: u * q >= p with p equal to q. The residual is then zero everywhere.
    law = torch.tensor([0.1, 0.6, 0.3])
    weights = fixed_draws(torch.ones(1, 1))
    lengths = torch.tensor([1])
    accepted = rejection_sample(law.expand(2, 3), law[None, None], torch.tensor([[2]]), lengths, starts_of(lengths))
    assert accepted.counts.tolist() == [1]
    assert torch.equal(weights[0][0], law)


def test_results_reach_every_row_of_a_mixed_batch():
    # In-place updates through a boolean mask are lost when the indexing copies.
    lengths = torch.tensor([0, 2, 0, 1])
    p = one_hot(torch.tensor([7, 1, 2, 3, 6, 4, 5]), 8)
    tokens = torch.tensor([[0, 0], [1, 2], [0, 0], [0, 0]])
    accepted = rejection_sample(p, None, tokens, lengths, starts_of(lengths))
    assert [accepted.tokens[i, : accepted.counts[i]].tolist() for i in range(4)] == [[7], [1, 2, 3], [6], [4]]


# Laws. Rows are draws: one call gives as many as wanted.


def assert_law(counts: torch.Tensor, law: torch.Tensor) -> None:
    """Chi-square with fixed seeds; ids of probability zero must not occur at all."""
    counts, law = counts.flatten().double(), law.flatten().double()
    assert counts[law == 0].sum() == 0
    counts, law = counts[law > 0], law[law > 0]
    assert chisquare(counts, law / law.sum() * counts.sum()).pvalue > 1e-3


@pytest.mark.parametrize(
    "law", [[0.1, 0.6, 0.3], [0.999, 0.001, 0.0], [0.25, 0.0, 0.5, 0.25], [1e-3, 2e-3, 0.5, 0.497, 0.0]]
)
@pytest.mark.parametrize("scale", [1.0, 1e-6, 50.0])
def test_law_of_sample(law, scale):
    torch.manual_seed(0)
    law = torch.tensor(law)
    drawn = sample((law * scale).expand(DRAWS, -1))
    assert_law(drawn.bincount(minlength=len(law)), law)


def test_sample_never_draws_what_has_no_weight():
    torch.manual_seed(0)
    weights = one_hot(torch.arange(5), 5).repeat(40_000, 1) * 1e-30
    assert torch.equal(sample(weights), torch.arange(5).repeat(40_000))


def markov_draws(first: torch.Tensor, after: torch.Tensor, q_first, q_after, lengths: torch.Tensor) -> torch.Tensor:
    """
    The first two tokens of `len(lengths)` rows whose law is `first`, then `after[token]`; drafts follow q likewise.

    A row that gains only one token from its drafts draws the second one from the target.
    """
    num_rows, size = len(lengths), len(first)
    d0 = sample(q_first.expand(num_rows, -1))
    d1 = sample(q_after[d0])
    tokens = torch.stack([d0, d1], 1)
    q = torch.stack([q_first.expand(num_rows, -1), q_after[d0]], 1)  # (R, 2, V)
    at_all_places = torch.stack([first.expand(num_rows, -1), after[d0], after[d1]], 1)  # (R, 3, V)
    p = at_all_places[torch.arange(3) <= lengths[:, None]]  # packed, (T, V)
    accepted = rejection_sample(p, q, tokens, lengths, starts_of(lengths))
    drawn = accepted.tokens[:, 0]
    second = torch.where(accepted.counts > 1, accepted.tokens[:, 1], sample(after[drawn]))
    return (drawn * size + second).bincount(minlength=size * size)


CASES = {
    "three": ([0.1, 0.6, 0.3], [0.7, 0.1, 0.2]),
    "q misses a token": ([0.1, 0.6, 0.3], [0.0, 0.5, 0.5]),
    "p misses a token": ([0.0, 0.6, 0.4], [0.5, 0.3, 0.2]),
    "equal": ([0.1, 0.6, 0.3], [0.1, 0.6, 0.3]),
    "four": ([0.3, 0.3, 0.2, 0.2], [0.55, 0.25, 0.15, 0.05]),
    "five": ([0.05, 0.05, 0.5, 0.2, 0.2], [0.4, 0.3, 0.1, 0.1, 0.1]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mixed", [False, True])
def test_joint_law_of_two_tokens(case, mixed):
    torch.manual_seed(1)
    first, q_first = (torch.tensor(law) for law in CASES[case])
    size = len(first)
    # The law after each token: the first one, turned.
    after, q_after = (torch.stack([law.roll(t) for t in range(size)]) for law in (first, q_first))
    lengths = torch.arange(DRAWS) % 3 if mixed else torch.full((DRAWS,), 2)
    counts = markov_draws(first, after, q_first, q_after, lengths)
    assert_law(counts, first[:, None] * after)


def test_law_with_drafts_that_were_not_sampled():
    # A drafter without distributions: q is one at its token, here always token 1.
    torch.manual_seed(2)
    law = torch.tensor([0.1, 0.6, 0.3])
    tokens = torch.ones(DRAWS, 1, dtype=torch.long)
    lengths = torch.ones(DRAWS, dtype=torch.long)
    accepted = rejection_sample(law.expand(2 * DRAWS, 3), None, tokens, lengths, starts_of(lengths))
    assert_law(accepted.tokens[:, 0].bincount(minlength=3), law)


def test_acceptance_and_addition_are_independent():
    # The noise that accepts must not serve again for the added token: after a rejection the token follows the
    # residual, after acceptance the bonus follows p, whatever the uniform was.
    torch.manual_seed(3)
    p, q = torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.7, 0.1, 0.2])
    tokens = sample(q.expand(DRAWS, 3))[:, None]
    lengths = torch.ones(DRAWS, dtype=torch.long)
    accepted = rejection_sample(p.expand(2 * DRAWS, 3), q.expand(DRAWS, 1, 3), tokens, lengths, starts_of(lengths))
    stands = accepted.counts == 2
    assert_law(torch.stack([stands.sum(), (~stands).sum()]), torch.tensor([0.4, 0.6]))  # sum of min(p, q)
    assert_law(accepted.tokens[~stands, 0].bincount(minlength=3), (p - q).clamp(min=0))
    for token in range(3):  # the bonus does not depend on the draft that it follows
        bonus = accepted.tokens[stands & (tokens[:, 0] == token), 1]
        assert_law(bonus.bincount(minlength=3), p)


def test_a_seed_reproduces_and_rows_differ():
    law = torch.full((64, 8), 1 / 8)
    runs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        runs.append(sample(law))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert len(runs[0].unique()) == 8
