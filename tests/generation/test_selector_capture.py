"""Selectors that call themselves capturable never wait for the device, and learn in place: shown without a GPU.

Fake tensors have no values. Whoever asks for one (`.item()`, `.tolist()`, `nonzero`, a mask as an index) raises, and
so would a capture.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from tetris_hf import (
    AcceptanceCalibration,
    ConfidenceThresholdSelector,
    Draft,
    DraftSelector,
    DynamicWindowSelector,
    EntropySelector,
    FixedWindowSelector,
    TetrisSelector,
    UnionSelector,
    Verification,
)
from tetris_hf.generation.selection import DraftSelectorList


ROWS, DEPTH = 5, 3

SELECTORS = {
    "fixed": FixedWindowSelector,
    "fixed, cut": lambda: FixedWindowSelector(2),
    "tetris": TetrisSelector,
    "paper": lambda: TetrisSelector(score="paper"),
    "slow rows first": lambda: TetrisSelector(slowest_first=True),
    "calibrated": lambda: TetrisSelector(calibration=AcceptanceCalibration()),
    "confidence": lambda: ConfidenceThresholdSelector(0.5),
    "entropy": lambda: EntropySelector(0.5),
    "union": lambda: UnionSelector([ConfidenceThresholdSelector(0.5), EntropySelector(0.5)]),
    "dynamic": lambda: DynamicWindowSelector(0.1),
}


class Waits(DraftSelector):
    is_capturable = True

    def __call__(self, draft, lengths, capacity):
        return lengths if bool((draft.expectations > 0.5).all()) else lengths - 1


class Looks(DraftSelector):
    is_capturable = True

    def __call__(self, draft, lengths, capacity):
        return lengths.new_zeros(ROWS).index_fill_(0, lengths.nonzero()[:, 0], 1)


def step(selectors: DraftSelectorList, capacity: int) -> torch.Tensor:
    """One step of a selector as the loop makes it: select, then observe."""
    estimates = torch.rand(ROWS, DEPTH)
    rows = torch.arange(ROWS)
    draft = Draft(
        torch.zeros(ROWS, DEPTH, dtype=torch.long),
        torch.tensor([3, 0, 2, 3, 1]),
        estimates,
        estimates,
        entropies=torch.rand(ROWS, DEPTH),
        remaining=torch.tensor([9, 0, 5, 9, 7]),
    )
    lengths = selectors(draft, capacity)
    selectors.observe(Verification(rows, draft, lengths, torch.minimum(lengths, rows % 3), None, rows))
    return lengths


@pytest.mark.parametrize("capacity", [4, 100])
@pytest.mark.parametrize("name", SELECTORS)
def test_no_step_waits_for_a_value(name, capacity):
    selectors = DraftSelectorList.of(SELECTORS[name]())
    assert all(selector.is_capturable for selector in selectors)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for _ in range(2):
            assert step(selectors, capacity).shape == (ROWS,)


@pytest.mark.parametrize("selector", [Waits(), Looks()])
def test_a_selector_that_waits_is_caught(selector):
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises((DataDependentOutputException, DynamicOutputShapeException)),
    ):
        step(DraftSelectorList.of(selector), 4)


def tensors(value) -> list[torch.Tensor]:
    """All tensors that a selector holds, at any depth."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list):
        return [tensor for one in value for tensor in tensors(one)]
    return [tensor for one in getattr(value, "__dict__", {}).values() for tensor in tensors(one)]


@pytest.mark.parametrize("name", SELECTORS)
def test_what_is_learned_stays_in_the_same_tensors(name):
    selectors = DraftSelectorList.of(SELECTORS[name]())
    step(selectors, 9)
    held = [(tensor.data_ptr(), tensor.clone()) for tensor in tensors(list(selectors))]
    step(selectors, 9)
    after = tensors(list(selectors))
    assert [pointer for pointer, _ in held] == [tensor.data_ptr() for tensor in after]
    learns = name in ("calibrated", "dynamic")
    assert any(not torch.equal(before, now) for (_, before), now in zip(held, after, strict=True)) == learns


@pytest.mark.parametrize("name", ["calibrated", "dynamic"])
def test_rows_that_have_ended_teach_nothing(name):
    learned = []
    for ended in (False, True):
        selectors = DraftSelectorList.of(SELECTORS[name]())
        estimates = torch.full((3, DEPTH), 0.6)
        lengths, accepted = torch.tensor([3, 2, 0]), torch.tensor([1, 2, 0])
        if ended:  # what a replay holds for a row without drafts is arbitrary
            estimates[2], accepted[2] = 0.1, 2
        rows = torch.arange(3)
        draft = Draft(torch.zeros(3, DEPTH, dtype=torch.long), lengths, estimates, estimates)
        selectors.observe(Verification(rows, draft, selectors(draft, 99), accepted, None, rows))
        learned.append(tensors(list(selectors)))
    assert all(torch.equal(one, other) for one, other in zip(*learned, strict=True))
