"""The share of the mean gain by which a closed batch ends earlier, against a naive reference and by simulated rows."""

import math
import random

import pytest
import torch

from tetris_hf.generation.slowest_row import SlowestRow


def naive(num_rows, batches):
    """The shares at the start and after every window of every batch, row by row."""
    apart, told = 1.4, []
    for longest, windows, rest, idle in batches:
        spread = math.sqrt(2 * math.log(num_rows) / longest)
        usual = share = min(1, max(0, 1 - apart * spread))
        told.append(share)
        begun, learned, promised, gained, offered, last, total = 0, 0, 0.0, 0.0, 0.0, 0.0, [0] * num_rows
        for tokens, steps, remaining, gain in windows:
            live = [row for row in range(num_rows) if remaining[row] > 0]
            before = max((remaining[row] + tokens[row] for row in live), default=0)
            if begun == 0:
                start = min(32, before / 4)
            if begun >= start and live:
                learned, promised = learned + steps, promised + steps * gain
                gained += before - max(remaining[row] for row in live) - steps
                if promised / learned >= 0.05:
                    beforehand = 24 * promised / learned
                    share = min(1, max(0, (gained + usual * beforehand) / (promised + beforehand)))
            begun, offered, last = begun + steps, offered + steps * gain, gain
            total = [one + new for one, new in zip(total, tokens, strict=True)]
            told.append(share)
        drafted, offered = begun + rest, offered + rest * last
        part = drafted / (begun + rest + idle)
        if num_rows > 1 and part < 0.25:
            apart += 0.05 * (1.4 - apart)
        elif num_rows > 1 and offered > 0.05 * drafted:
            whole = min(1, max(0, (max(total) - begun - rest - idle) / offered))
            apart += min(part, 0.5) * ((1 - whole) / spread - apart)
    return told


@pytest.mark.parametrize("num_rows", [1, 2, 7])
@pytest.mark.parametrize("seed", range(3))
def test_shares_are_those_of_a_naive_reference(num_rows, seed):
    draw = random.Random(seed)
    batches, told, slowest = [], [], SlowestRow(num_rows)
    for _ in range(4):
        windows, left = [], [draw.randint(5, 120) for _ in range(num_rows)]
        longest = max(left)
        while max(left) > 0:
            steps = draw.randint(1, 12)
            gained = [min(one, sum(draw.randint(1, 3) for _ in range(steps))) for one in left]
            left = [one - new for one, new in zip(left, gained, strict=True)]
            windows.append((gained, steps, left, draw.choice([0.01, 0.3, 0.8, 1.4])))
        batches.append((longest, windows, draw.randint(0, 4), draw.choice([0, 9, 400])))
    for longest, windows, rest, idle in batches:
        slowest.begin(longest)
        told.append(slowest.share)
        for tokens, steps, remaining, gain in windows:
            slowest.observe(torch.tensor(tokens), steps, torch.tensor(remaining), gain)
            told.append(slowest.share)
        most = max(sum(tokens[row] for tokens, *_ in windows) for row in range(num_rows))
        slowest.end(most, sum(steps for _, steps, *_ in windows) + rest + idle, rest)
    assert told == pytest.approx(naive(num_rows, batches))


def test_a_single_row_that_does_as_promised_gets_all_of_it():
    slowest = SlowestRow(1)
    for _ in range(3):
        slowest.begin(120)
        for window in range(1, 5):
            assert slowest.share == pytest.approx(1)
            slowest.observe(torch.tensor([30]), 16, torch.tensor([120 - 30 * window]), 14 / 16)
        slowest.end(120, 64)


@pytest.mark.parametrize("slow, share", [(1.0, 0.0), (1.3, 0.33), (1.9, 1.0)])
def test_it_comes_to_the_pace_of_the_slowest_row(slow, share):
    """Seven rows at 1.9 tokens a step and one at less: at the end of long texts, and at the start of the next ones."""
    slowest = SlowestRow(8)
    for _ in range(8):
        slowest.begin(2000)
        begun = slowest.share
        for window in range(1, 40):
            tokens = torch.tensor([15.2] * 7 + [8 * slow])
            slowest.observe(tokens, 8, 2000 - window * tokens, 0.9)
        slowest.end(round(312 * slow), 312)
    assert slowest.share == pytest.approx(share, abs=0.05)
    assert begun == pytest.approx(share, abs=0.1)


@pytest.mark.parametrize("num_rows", [4, 16, 64, 128])
def test_the_first_steps_of_a_batch_say_nothing(num_rows):
    """Rows that begin side by side fall apart by luck: the slowest of them is the unluckiest, not a slow one."""
    slowest = SlowestRow(num_rows)
    slowest.begin(120)
    begun, left = slowest.share, torch.full((num_rows,), 120)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        tokens = 4 + torch.binomial(torch.full((num_rows,), 4.0), torch.tensor(0.5), generator=generator)
        left = left - tokens
        slowest.observe(tokens, 4, left, 0.5)
        assert slowest.share == begun
    tokens = torch.full((num_rows,), 4)
    slowest.observe(tokens, 4, left - tokens, 0.5)
    assert slowest.share < begun


def test_drafts_that_bring_nothing_and_rows_that_ended_say_nothing():
    slowest = SlowestRow(4)
    slowest.begin(66)
    before = slowest.share
    ones = torch.ones(4, dtype=torch.long)
    slowest.observe(16 * ones, 16, 50 * ones, 0.4)
    slowest.observe(16 * ones, 16, 34 * ones, 0.01)
    slowest.observe(40 * ones, 16, 0 * ones, 0.4)
    assert slowest.share == before
    slowest.observe(torch.tensor([16, 40, 40, 40]), 16, torch.tensor([18, 0, 0, 0]), 0.4)
    assert slowest.share < before, "those that ended do not count, the one that is left does"


@pytest.mark.parametrize("num_rows", [2, 16, 128])
def test_more_is_expected_of_long_texts_and_of_few_rows(num_rows):
    slowest, shares = SlowestRow(num_rows), []
    for longest in (1, 8, 32, 128, 1024):
        slowest.begin(longest)
        shares.append(slowest.share)
    assert shares == sorted(shares) and shares[0] < shares[-1] <= 1 and min(shares) >= 0
    fewer = SlowestRow(num_rows // 2)
    fewer.begin(128)
    assert fewer.share > shares[3]


def test_what_a_batch_of_one_length_has_shown_holds_for_another():
    """Rows that fall apart as random walks do: the share of short texts says that of long ones."""
    slowest = SlowestRow(16)
    for _ in range(12):
        slowest.begin(32)
        share = 1 - 1.0 * math.sqrt(2 * math.log(16) / 32)  # whose rows fall apart less than is expected
        slowest.observe(torch.full((16,), 20), 20, torch.full((16,), 5), 0.8)
        slowest.end(20 + round(20 * 0.8 * share), 20)
    slowest.begin(512)
    assert slowest.share == pytest.approx(1 - math.sqrt(2 * math.log(16) / 512), abs=0.03)


def test_batches_without_drafts_forget_and_those_without_steps_do_not():
    """After one in which a row took no draft at all, drafts are not given up for good."""
    slowest = SlowestRow(8)
    slowest.begin(64)
    usual = slowest.share
    slowest.end(0, 0)
    slowest.begin(64)
    assert slowest.share == usual
    shares = []
    slowest.observe(torch.full((8,), 16), 16, torch.full((8,), 48), 0.8)
    for _ in range(120):
        slowest.end(64, 64, 48 if not shares else 0)
        slowest.begin(64)
        shares.append(slowest.share)
    assert shares[0] == pytest.approx(usual / 2) and shares == sorted(shares)
    assert shares[-1] == pytest.approx(usual, abs=0.01)


def test_after_steps_without_drafts_less_is_expected_of_what_is_left():
    slowest, fresh = SlowestRow(16), SlowestRow(16)
    slowest.begin(128)
    slowest.go_on(40)
    fresh.begin(40)
    assert slowest.share == fresh.share
    tokens, left = torch.full((16,), 24), torch.full((16,), 16)
    slowest.observe(tokens, 16, left, 0.5)  # too early to say something
    slowest.go_on(16)
    fresh.begin(16)
    assert slowest.share == fresh.share
    slowest.observe(tokens, 16, left, 0.5)
    seen = slowest.share
    slowest.go_on(8)
    assert slowest.share == seen, "what the batch itself has shown holds for the rest of it"
