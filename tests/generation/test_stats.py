"""Counts against a loop, and the paper's ratios by hand."""

import math

import pytest
import torch

from tetris_hf import TetrisStats


def test_count_equals_a_loop():
    generator = torch.Generator().manual_seed(2)
    stats, totals = TetrisStats.zeros(4, 3, capacity=5), torch.zeros(5, 4, 3, dtype=torch.long)
    for _ in range(20):
        live = torch.tensor([0, 2, 3])
        drafted = torch.randint(0, 4, (3,), generator=generator)
        verified = torch.minimum(drafted, torch.randint(0, 4, (3,), generator=generator))
        accepted = torch.minimum(verified, torch.randint(0, 4, (3,), generator=generator))
        kept = torch.minimum(accepted + 1, torch.randint(1, 5, (3,), generator=generator))
        stats.count(live, drafted, verified, accepted, kept)
        for index, row in enumerate(live.tolist()):
            for total, length in zip(totals, (drafted, verified, torch.minimum(accepted, kept)), strict=False):
                total[row, : length[index]] += 1
            totals[3, row, 0] += int(kept[index] > accepted[index])
            totals[4, row, 0] += 1
    assert torch.equal(torch.stack([stats.drafted, stats.verified, stats.accepted]), totals[:3])
    assert stats.bonus.tolist() == totals[3, :, 0].tolist() and stats.live_steps.tolist() == totals[4, :, 0].tolist()
    assert stats.steps == 20


def test_ratios_by_hand():
    stats = TetrisStats.zeros(2, 2, capacity=3)
    # Row 0: two verified, one accepted, one bonus. Row 1: one verified, accepted, then its end: no bonus.
    stats.count(*(torch.tensor(pair) for pair in ([0, 1], [2, 2], [2, 1], [1, 1], [2, 1])))
    assert stats.vsr == pytest.approx(2 / 3)
    assert stats.ter == pytest.approx(3 / 5)
    assert stats.mean_accepted == pytest.approx(3 / 2)
    assert stats.acceptance.tolist() == [1.0, 0.0]
    with stats.timed("verify"):
        pass
    assert "2 accepted, 1 bonus; VSR 0.667" in str(stats) and "verify" in stats.seconds


def test_nothing_verified_is_no_number():
    assert math.isnan(TetrisStats.zeros(1, 1, 0).vsr) and math.isnan(TetrisStats.zeros(1, 1, 0).ter)
