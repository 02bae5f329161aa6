"""Each rule against a loop over rows and places, and inside `generate`, where no rule may change a greedy text."""

import math

import kit
import pytest
import torch

from tetris_hf import (
    ConfidenceThresholdSelector,
    Draft,
    DynamicWindowSelector,
    EntropySelector,
    FixedWindowSelector,
    TetrisSelector,
    UnionSelector,
    Verification,
)


def draft(rows: int = 6, depth: int = 4, seed: int = 0) -> Draft:
    generator = torch.Generator().manual_seed(seed)
    q = torch.rand(rows, depth, 8, generator=generator).pow(4).softmax(-1) ** 3
    q = q / q.sum(-1, keepdim=True)
    tokens = q.argmax(-1)
    best = q.amax(-1)
    lengths = torch.randint(0, depth + 1, (rows,), generator=generator)
    return Draft(tokens, lengths, best, best, q, entropies=-(q * q.log()).sum(-1))


def outcome(draft: Draft, lengths: list[int], accepted: list[int]) -> Verification:
    rows = torch.arange(len(lengths))
    return Verification(rows, draft, torch.tensor(lengths), torch.tensor(accepted), None, rows)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("threshold", [0.0, 0.2, 0.35, 1.0])
def test_thresholds_equal_a_loop(seed, threshold):
    given = draft(seed=seed)
    by_confidence = ConfidenceThresholdSelector(threshold)(given, given.lengths, 100)
    by_entropy = EntropySelector(threshold, scale=0.3)(given, given.lengths, 100)
    union = UnionSelector([ConfidenceThresholdSelector(threshold), EntropySelector(threshold, scale=0.3)])
    for row in range(6):
        expected = []
        for sure in (
            lambda q: float(q.max()) >= threshold,
            lambda q: 1 - math.sqrt(0.3 * -sum(p * math.log(p) for p in q.tolist())) >= threshold - 1e-6,
        ):
            length = 0
            while length < given.lengths[row] and sure(given.q[row, length]):
                length += 1
            expected.append(length)
        assert [int(by_confidence[row]), int(by_entropy[row])] == expected
        assert int(union(given, given.lengths, 100)[row]) == max(expected)


@pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("token_cost", [0.0, 0.01, 0.2])
def test_the_dynamic_window_is_the_best_by_its_own_model(acceptance, token_cost):
    given = draft()
    given = Draft(given.tokens, torch.full((6,), 4), given.probabilities, given.expectations)
    selector = DynamicWindowSelector(token_cost, base_cost=1.0, draft_cost=0.05, momentum=0.0)
    tried = 100
    many = Draft(
        torch.zeros(tried, 1, dtype=torch.long), torch.ones(tried, dtype=torch.long), *2 * [torch.ones(tried, 1)]
    )
    stood = int(acceptance * tried)
    selector(given, given.lengths, 100)
    selector.observe(outcome(many, [1] * tried, [1] * stood + [0] * (tried - stood)))

    def rate(window):
        tokens = sum(acceptance**place for place in range(window + 1))
        return tokens / (1.0 + token_cost * 6 * (window + 1) + 0.05 * window)

    best = max(range(5), key=rate)
    assert selector(given, given.lengths, 100).tolist() == [best] * 6
    assert int(selector(given, given.lengths, 8).sum()) <= 8


def test_the_average_counts_tokens_that_were_tried():
    selector = DynamicWindowSelector(0.1, momentum=0.5)
    given = draft()
    selector(given, given.lengths, 100)
    # Row 0: all three stand. Row 1: the second fails, the third was not tried. Row 2 verified nothing.
    selector.observe(outcome(given, [3, 3, 0], [3, 1, 0]))
    assert float(selector._acceptance) == pytest.approx(0.5 * 0.7 + 0.5 * 4 / 5)
    before = float(selector._acceptance)
    selector.observe(outcome(given, [0, 0, 0], [0, 0, 0]))
    assert float(selector._acceptance) == before


SELECTORS = {
    "confidence": lambda: ConfidenceThresholdSelector(0.2),
    "entropy": lambda: EntropySelector(0.1),
    "union": lambda: UnionSelector([ConfidenceThresholdSelector(0.2), EntropySelector(0.1)]),
    "dynamic": lambda: DynamicWindowSelector(0.01, draft_cost=0.1),
    "in a list": lambda: [ConfidenceThresholdSelector(0.05), TetrisSelector()],
}


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("capacity", [0, 2, 7, 50])
def test_no_rule_changes_a_greedy_text(target, near, name, capacity):
    expected = kit.plain(target, kit.ragged())
    out = kit.speculate(target, kit.ragged(), near, capacity, 4, SELECTORS[name]())
    assert torch.equal(out.sequences, expected)
    assert int(out.tetris_stats.verified.sum()) <= capacity * out.tetris_stats.steps


def test_entropies_are_there_when_they_are_asked_for(target, near):
    seen = []

    class Look(EntropySelector):
        def __call__(self, draft, lengths, capacity):
            seen.append(draft)
            return super().__call__(draft, lengths, capacity)

    for do_sample in (False, True):
        kit.speculate(target, kit.ragged(), near, 9, 3, Look(0.0), do_sample=do_sample, top_k=5)
    for given in seen:
        assert given.entropies.shape == given.tokens.shape and (given.entropies >= 0).all()
        if given.q is not None:
            q = given.q
            expected = -(q * q.clamp(min=1e-30).log()).sum(-1)
            real = torch.arange(given.depth) < given.lengths[:, None]
            torch.testing.assert_close(given.entropies[real], expected[real], atol=1e-4, rtol=1e-3)
    seen.clear()
    kit.speculate(target, kit.ragged(), near, 9, 3, FixedWindowSelector())
    assert not seen


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: ConfidenceThresholdSelector(1.5), "`threshold` must be in \\[0, 1\\], got 1.5"),
        (lambda: EntropySelector(0.1, scale=0), "`scale` must be positive, got 0"),
        (lambda: UnionSelector([TetrisSelector()]), "`selectors` must be two or more, got 1"),
        (lambda: DynamicWindowSelector(-1), "`token_cost` must be at least 0, got -1"),
        (lambda: DynamicWindowSelector(1, momentum=1), "`momentum` must be in \\[0, 1\\), got 1"),
    ],
)
def test_bad_numbers_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()
