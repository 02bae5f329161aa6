"""The share of the mean gain by which a closed batch ends earlier, against a naive reference and by simulated rows."""

import random

import pytest
import torch

from tetris_hf.generation.slowest_row import SlowestRow


def naive(num_rows, batches):
    """The shares after every window of every batch, row by row."""
    usual = share = num_rows**-0.25
    told = []
    for batch in batches:
        tokens, steps = [0] * num_rows, [0] * num_rows
        for gained, went, remaining in batch:
            tokens = [a + b for a, b in zip(tokens, gained, strict=True)]
            steps = [a + b for a, b in zip(steps, went, strict=True)]
            live = [row for row in range(num_rows) if remaining[row] > 0 and steps[row] > 0]
            if live and sum(tokens) / sum(steps) >= 1.05:
                mean = sum(tokens) / sum(steps)
                paces = {row: (tokens[row] + 24 * (1 + usual * (mean - 1))) / (steps[row] + 24) for row in live}
                with_drafts = max(remaining[row] / paces[row] for row in live)
                seen = (max(remaining[row] for row in live) / with_drafts - 1) / (mean - 1)
                share = min(1, max(0, seen))
            told.append(share)
        usual += 0.75 * max(steps) / (max(steps) + 16) * (share - usual)
        share = usual
    return told


@pytest.mark.parametrize("num_rows", [1, 2, 7])
@pytest.mark.parametrize("seed", range(3))
def test_shares_are_those_of_a_naive_reference(num_rows, seed):
    draw = random.Random(seed)
    batches, told, slowest = [], [], SlowestRow(num_rows)
    for _ in range(3):
        batch, left = [], [draw.randint(5, 120) for _ in range(num_rows)]
        while max(left) > 0:
            went = [draw.randint(1, 8) if one > 0 else 0 for one in left]
            gained = [min(one, sum(draw.randint(1, 3) for _ in range(n))) for one, n in zip(left, went, strict=True)]
            left = [one - new for one, new in zip(left, gained, strict=True)]
            batch.append((gained, went, left))
        batches.append(batch)
    for batch in batches:
        slowest.begin()
        for window in batch:
            slowest.observe(*map(torch.tensor, window))
            told.append(slowest.share)
    assert told == pytest.approx(naive(num_rows, batches))


def test_a_single_row_is_its_own_slowest_one():
    slowest = SlowestRow(1)
    for _ in range(3):
        slowest.begin()
        assert slowest.share == pytest.approx(1)
        slowest.observe(torch.tensor([30]), torch.tensor([16]), torch.tensor([70]))
        assert slowest.share == pytest.approx(1)


@pytest.mark.parametrize("slow, share", [(1.0, 0.0), (1.3, 0.33), (1.9, 1.0)])
def test_it_comes_to_the_pace_of_the_slowest_row(slow, share):
    """Seven rows at 1.9 tokens a step and one at less: at the end of long texts, and at the start of the next ones."""
    slowest = SlowestRow(8)
    for _ in range(8):
        slowest.begin()
        begun = slowest.share
        for window in range(1, 40):
            tokens = torch.tensor([15.2] * 7 + [8 * slow])
            slowest.observe(tokens, torch.full((8,), 8), torch.full((8,), 1000 - 16 * window))
    assert slowest.share == pytest.approx(share, abs=0.1)
    assert begun == pytest.approx(share, abs=0.15)


@pytest.mark.parametrize("num_rows", [4, 16, 64, 128])
def test_a_few_steps_of_rows_that_are_alike_move_it_little(num_rows):
    """Else every short trial of drafts would look good: luck and a mean pace say nothing of the slowest row."""
    slowest = SlowestRow(num_rows)
    begun = slowest.share
    generator = torch.Generator().manual_seed(0)
    for steps in range(4, 17, 4):
        tokens = 4 + torch.binomial(torch.full((num_rows,), 4.0), torch.tensor(0.5), generator=generator)
        slowest.observe(tokens, torch.full((num_rows,), 4), torch.full((num_rows,), 120 - steps))
        assert 0.4 * begun < slowest.share < 1.3 * begun


def test_drafts_that_bring_nothing_and_rows_that_ended_say_nothing():
    slowest = SlowestRow(4)
    before = slowest.share
    ones = torch.ones(4, dtype=torch.long)
    slowest.observe(16 * ones, 16 * ones, 50 * ones)
    slowest.observe(40 * ones, 16 * ones, 0 * ones)
    slowest.begin()
    slowest.observe(0 * ones, 0 * ones, 50 * ones)
    assert slowest.share == before
