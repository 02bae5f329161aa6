"""Estimates become chances: on drafts whose acceptance follows a known curve, and inside `generate`."""

import kit
import pytest
import torch

from tetris_hf import AcceptanceCalibration, Draft, MedusaConfig, MedusaHeads, TetrisSelector, Verification
from tetris_hf.generation.rejection import rejection_sample
from tetris_hf.generation.selection import DraftSelectorList


def rounds(calibration, count, slope=0.5, shift=-1.0, rows=64, depth=3, seed=0):
    """Drafts whose tokens stand with chance `sigmoid(slope * logit(estimate) + shift)`, shown to `calibration`."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        estimates = torch.rand(rows, depth, generator=generator).clamp(0.02, 0.98)
        chances = torch.sigmoid(slope * estimates.logit() + shift)
        stands = torch.rand(rows, depth, generator=generator) < chances
        lengths = torch.randint(0, depth + 1, (rows,), generator=generator)
        verified = torch.arange(depth) < lengths[:, None]
        accepted = (stands & verified).long().cumprod(1).sum(1)
        draft = Draft(torch.zeros(rows, depth, dtype=torch.long), lengths, estimates, estimates)
        calibration.observe(Verification(torch.arange(rows), draft, lengths, accepted, None, torch.arange(rows)))


def test_it_begins_as_the_identity_and_goes_back_to_it():
    calibration = AcceptanceCalibration()
    estimates = torch.rand(5, 20)
    torch.testing.assert_close(calibration(estimates), estimates.clamp(1e-4, 1 - 1e-4), atol=1e-5, rtol=1e-4)
    rounds(calibration, 20)
    assert not torch.allclose(calibration(estimates), estimates, atol=1e-2)
    calibration.reset()
    torch.testing.assert_close(calibration(estimates), estimates.clamp(1e-4, 1 - 1e-4), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("slope, shift", [(0.5, -1.0), (1.5, 0.7)])
def test_it_learns_the_curve_in_a_few_hundred_rounds(slope, shift):
    calibration = AcceptanceCalibration()
    rounds(calibration, 400, slope, shift)
    estimates = torch.linspace(0.05, 0.95, 19)[:, None].expand(19, 3)
    truth = torch.sigmoid(slope * estimates.logit() + shift)
    off = (calibration(estimates) - truth).abs().amax(0)  # (K,)
    assert off[0] < 0.06 and off[1] < 0.08 and off[2] < 0.12, "a place that few drafts reach learns slower"
    assert (estimates - truth).abs().max() > 0.15


def test_tokens_behind_a_rejected_one_teach_nothing():
    one, other = AcceptanceCalibration(), AcceptanceCalibration()
    estimates = torch.full((1, 3), 0.6)
    for calibration, last in ((one, 0.6), (other, 0.1)):
        changed = estimates.clone()
        changed[0, 2] = last
        draft = Draft(torch.zeros(1, 3, dtype=torch.long), torch.tensor([3]), changed, changed)
        row = torch.tensor([0])
        calibration.observe(Verification(row, draft, torch.tensor([3]), torch.tensor([1]), None, row))
    assert torch.equal(one.slope, other.slope) and torch.equal(one.shift, other.shift)
    assert one.shift[2] == 0 and one.shift[1] < 0 < one.shift[0]


def test_what_was_learned_can_be_stored():
    calibration, other = AcceptanceCalibration(), AcceptanceCalibration()
    rounds(calibration, 10)
    other.load_state_dict(calibration.state_dict())
    estimates = torch.rand(4, 5)
    assert torch.equal(calibration(estimates), other(estimates))
    with pytest.raises(ValueError, match="make it with `max_depth=16`"):
        AcceptanceCalibration(max_depth=3).load_state_dict(calibration.state_dict())
    for bad in ({"max_depth": 0}, {"rate": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            AcceptanceCalibration(**bad)


def test_no_calibration_changes_a_greedy_text(target, near):
    calibration = AcceptanceCalibration()
    for seed in range(3):
        out = kit.speculate(target, kit.ragged(seed=seed), near, 4, 4, TetrisSelector(calibration=calibration))
        assert torch.equal(out.sequences, kit.plain(target, kit.ragged(seed=seed)))
    assert calibration.shift.any()


def test_a_calibrated_selection_keeps_the_law():
    """Two rows compete for one token in 60,000 rounds while the calibration learns: p comes out."""
    torch.manual_seed(0)
    p, q = torch.tensor([0.4, 0.4, 0.2]), torch.tensor([0.6, 0.3, 0.1])
    calibration = AcceptanceCalibration(rate=0.02)
    selectors = DraftSelectorList.of(TetrisSelector(calibration=calibration))
    counts, rows, pairs = torch.zeros(3), 64, torch.arange(64)
    for _ in range(1_000):
        # Each row has a distribution of its own, so that scores differ and selection has something to choose.
        own = torch.where((torch.rand(rows, 1) < 0.5), q, torch.tensor([0.34, 0.33, 0.33]))[:, None]  # (R, 1, V)
        tokens = torch.multinomial(own[:, 0], 1)
        chosen = own.gather(2, tokens[:, :, None])[:, :, 0]
        draft = Draft(tokens, torch.ones(rows, dtype=torch.long), chosen, own.amax(2), own)
        lengths = selectors(draft, rows // 2)
        starts = torch.cumsum(lengths + 1, 0) - lengths - 1
        accepted = rejection_sample(p.expand(rows + rows // 2, 3), own, tokens, lengths, starts)
        counts += torch.bincount(accepted.tokens[:, 0], minlength=3)
        selectors.observe(Verification(pairs, draft, lengths, accepted.counts - 1, None, starts))
    expected = p * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < 13.8, "chi-square, 2 degrees of freedom, p = .001"


def test_what_was_learned_lies_beside_the_heads(tmp_path):
    calibration = AcceptanceCalibration(max_depth=3, rate=0.2)
    calibration.slope[1], calibration.shift[2] = 0.7, -0.25
    MedusaHeads(MedusaConfig(hidden_size=8, vocab_size=11, medusa_num_heads=3)).save_pretrained(tmp_path)
    calibration.save_pretrained(tmp_path)
    loaded = AcceptanceCalibration.from_pretrained(tmp_path)
    assert (loaded.max_depth, loaded.rate) == (3, 0.2)
    estimates = torch.rand(4, 5)
    assert torch.equal(loaded(estimates), calibration(estimates)) and not torch.equal(loaded(estimates), estimates)
    assert MedusaHeads.from_pretrained(tmp_path).config.medusa_num_heads == 3
    with pytest.raises(OSError):
        AcceptanceCalibration.from_pretrained(tmp_path / "elsewhere")
