"""The share of the mean gain by which a closed batch ends earlier, against a naive reference and by simulated rows."""

import random

import pytest
import torch

from tetris_hf.generation.slowest_row import SlowestRow


def naive(num_rows, batches):
    """The shares after every window of every batch, row by row."""
    usual = share = num_rows**-0.125
    told = []
    for batch in batches:
        begun, learned, promised, gained = 0, 0, 0.0, 0.0
        for tokens, steps, remaining, gain in batch:
            live = [row for row in range(num_rows) if remaining[row] > 0]
            if begun >= 16 and live:
                before = max(remaining[row] + tokens[row] for row in live)
                learned, promised = learned + steps, promised + steps * gain
                gained += before - max(remaining[row] for row in live) - steps
                if promised / learned >= 0.05:
                    beforehand = 8 * promised / learned
                    share = min(1, max(0, (gained + usual * beforehand) / (promised + beforehand)))
            begun += steps
            told.append(share)
        usual += 0.9 * learned / (learned + 16) * (share - usual)
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
            steps = draw.randint(1, 12)
            gained = [min(one, sum(draw.randint(1, 3) for _ in range(steps))) for one in left]
            left = [one - new for one, new in zip(left, gained, strict=True)]
            batch.append((gained, steps, left, draw.choice([0.01, 0.3, 0.8, 1.4])))
        batches.append(batch)
    for batch in batches:
        slowest.begin()
        for tokens, steps, remaining, gain in batch:
            slowest.observe(torch.tensor(tokens), steps, torch.tensor(remaining), gain)
            told.append(slowest.share)
    assert told == pytest.approx(naive(num_rows, batches))


def test_a_single_row_that_does_as_promised_gets_all_of_it():
    slowest = SlowestRow(1)
    for _ in range(3):
        slowest.begin()
        for window in range(1, 5):
            assert slowest.share == pytest.approx(1)
            slowest.observe(torch.tensor([30]), 16, torch.tensor([120 - 30 * window]), 14 / 16)


@pytest.mark.parametrize("slow, share", [(1.0, 0.0), (1.3, 0.33), (1.9, 1.0)])
def test_it_comes_to_the_pace_of_the_slowest_row(slow, share):
    """Seven rows at 1.9 tokens a step and one at less: at the end of long texts, and at the start of the next ones."""
    slowest = SlowestRow(8)
    for _ in range(8):
        slowest.begin()
        begun = slowest.share
        for window in range(1, 40):
            tokens = torch.tensor([15.2] * 7 + [8 * slow])
            slowest.observe(tokens, 8, 2000 - window * tokens, 0.9)
    assert slowest.share == pytest.approx(share, abs=0.05)
    assert begun == pytest.approx(share, abs=0.1)


@pytest.mark.parametrize("num_rows", [4, 16, 64, 128])
def test_the_first_steps_of_a_batch_say_nothing(num_rows):
    """Rows that begin side by side fall apart by luck: the slowest of them is the unluckiest, not a slow one."""
    slowest = SlowestRow(num_rows)
    begun, left = slowest.share, torch.full((num_rows,), 120)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        tokens = 4 + torch.binomial(torch.full((num_rows,), 4.0), torch.tensor(0.5), generator=generator)
        left = left - tokens
        slowest.observe(tokens, 4, left, 0.5)
        assert slowest.share == begun
    tokens = torch.full((num_rows,), 4)
    slowest.observe(tokens, 4, left - tokens, 0.5)
    assert slowest.share < begun


def test_drafts_that_bring_nothing_and_rows_that_ended_say_nothing():
    slowest = SlowestRow(4)
    before = slowest.share
    ones = torch.ones(4, dtype=torch.long)
    slowest.observe(16 * ones, 16, 50 * ones, 0.4)
    slowest.observe(16 * ones, 16, 34 * ones, 0.01)
    slowest.observe(40 * ones, 16, 0 * ones, 0.4)
    assert slowest.share == before
    slowest.observe(torch.tensor([16, 40, 40, 40]), 16, torch.tensor([18, 0, 0, 0]), 0.4)
    assert slowest.share < before, "those that ended do not count, the one that is left does"
