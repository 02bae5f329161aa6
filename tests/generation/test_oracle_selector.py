"""The oracle verifies what is accepted and nothing else, whatever drafts, in any number of replays."""

import copy

import kit
import pytest
import torch
from kit import ScriptedDrafter

from tetris_hf import FixedWindowSelector, OracleSelector, StepHistory, TetrisSelector


def finished(target, batch, **kwargs):
    return kit.speculate(target, batch, None, 0, **kwargs)


@pytest.mark.parametrize("assistant", ["near", "same", "far"])
@pytest.mark.parametrize("capacity, depth", [(3, 2), (7, 4), (100, 5)])
def test_all_that_it_verifies_is_accepted(target, assistants, assistant, capacity, depth):
    batch = kit.ragged()
    run = finished(target, batch)
    oracle = OracleSelector(run)
    for _ in range(2):
        out = kit.speculate(target, batch, assistants[assistant], capacity, depth, oracle)
        stats = out.tetris_stats
        assert torch.equal(out.sequences, run.sequences)
        assert torch.equal(stats.accepted, stats.verified)
        assert stats.accepted.sum() > 0 or assistant == "far"


def test_it_takes_all_that_stands_when_the_budget_is_large(target, near):
    # Everything verified is the most that can be accepted; the oracle accepts as much, step by step.
    batch, everything, known = kit.ragged(), StepHistory(), StepHistory()
    kit.speculate(target, batch, near, 100, 4, [FixedWindowSelector(), everything])
    kit.speculate(target, batch, near, 100, 4, [OracleSelector(finished(target, batch)), known])
    assert [step.rows for step in known.steps] == [step.rows for step in everything.steps]
    assert sum(sum(step.accepted) for step in known.steps) > 0
    for ours, theirs, following in zip(known.steps, everything.steps, known.steps[1:], strict=False):
        assert ours.verified == ours.accepted
        for row, length, other in zip(ours.rows, ours.accepted, theirs.accepted, strict=True):
            # Behind the end of a row the target may agree with drafts that are no text any more.
            assert length == other or (row not in following.rows and length < other)


@pytest.mark.parametrize("capacity", [2, 5, 11])
def test_no_selector_needs_fewer_steps(target, near, capacity):
    batch = kit.ragged((4, 9, 5, 11))
    run = finished(target, batch)
    steps = {
        type(selector).__name__: kit.speculate(target, batch, near, capacity, 4, selector).tetris_stats
        for selector in (OracleSelector(run), TetrisSelector(), FixedWindowSelector())
    }
    assert steps["OracleSelector"].vsr == 1.0
    assert steps["OracleSelector"].steps <= min(stats.steps for stats in steps.values())


def test_rows_that_end_at_an_end_token_at_unequal_times(target, near):
    batch = kit.ragged()
    texts = kit.alone(target, batch)
    with_end = copy.deepcopy(target)
    # One row ends at its fourth token, the others where the same token comes or not at all.
    settings = {"eos_token_id": texts[1][3]}
    run = finished(with_end, batch, **settings)
    out = kit.speculate(with_end, batch, near, 9, 3, OracleSelector(run), **settings)
    assert torch.equal(out.sequences, run.sequences) and out.tetris_stats.vsr == 1.0
    assert len(set(out.tetris_stats.live_steps.tolist())) > 1


def test_wrong_drafts_are_never_verified(target):
    batch = kit.ragged()
    run = finished(target, batch)
    drafter = ScriptedDrafter(kit.alone(target, batch), wrong=(1,))
    stats = kit.speculate(target, batch, drafter, 100, 3, OracleSelector(run)).tetris_stats
    assert stats.verified[1].sum() == 0 and stats.vsr == 1.0
    assert stats.accepted.sum(1).tolist()[0] > 0


def test_what_is_no_replay_is_refused(target, near):
    batch = kit.ragged()
    run = finished(target, batch)
    with pytest.raises(ValueError, match="`output` must have `tetris_stats`, got dict without"):
        OracleSelector({})
    with pytest.raises(ValueError, match="had 3 rows, 3 of them live.*the call has 2"):
        kit.speculate(target, kit.ragged((3, 7)), near, 6, 3, OracleSelector(run))
    with pytest.raises(ValueError, match="it cannot foresee a sampled one"):
        kit.speculate(target, batch, near, 6, 3, OracleSelector(run), do_sample=True)


def test_reset_after_a_call_that_was_cut_short(target, near):
    class Interrupted(TetrisSelector):
        calls = 0

        def __call__(self, draft, lengths, capacity):
            self.calls += 1
            if self.calls == 4:
                raise KeyboardInterrupt
            return super().__call__(draft, lengths, capacity)

    batch = kit.ragged()
    oracle = OracleSelector(finished(target, batch))
    expected = kit.speculate(target, batch, near, 6, 3, oracle).tetris_stats
    with pytest.raises(KeyboardInterrupt):
        kit.speculate(target, batch, near, 6, 3, [oracle, Interrupted()])
    oracle.reset()
    assert torch.equal(kit.speculate(target, batch, near, 6, 3, oracle).tetris_stats.accepted, expected.accepted)
