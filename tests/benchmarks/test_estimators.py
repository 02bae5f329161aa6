"""The two numbers of `benchmarks/estimators.py` against loops, and the script itself on a small setting."""

import sys
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
estimators = pytest.importorskip("estimators")


def test_auc_equals_a_loop_over_pairs():
    generator = torch.Generator().manual_seed(0)
    estimates = torch.randint(0, 8, (60,), generator=generator) / 8
    stood = (torch.rand(60, generator=generator) < estimates).float()
    wins, pairs = 0.0, 0
    for positive in estimates[stood.bool()].tolist():
        for negative in estimates[~stood.bool()].tolist():
            wins += 1.0 if positive > negative else 0.5 if positive == negative else 0.0
            pairs += 1
    assert estimators.auc(estimates, stood) == pytest.approx(wins / pairs)


def test_calibration_error():
    sure = torch.full((100,), 0.7)
    stood = torch.cat([torch.ones(70), torch.zeros(30)])[
        torch.randperm(100, generator=torch.Generator().manual_seed(1))
    ]
    parts = estimators.reliability(sure, stood)
    assert sum(count for _, _, count in parts) == 100 and all(mean == pytest.approx(0.7) for mean, _, _ in parts)
    assert estimators.calibration_error(torch.ones(50), torch.ones(50)) == 0
    assert estimators.calibration_error(torch.full((50,), 0.25), torch.zeros(50)) == pytest.approx(0.25)
