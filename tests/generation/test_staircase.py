"""Bars against a loop over places, single steps against totals, and a folder that the Hub loader takes."""

import sys
from pathlib import Path

import kit
import pytest
from transformers.dynamic_module_utils import get_imports

from tetris_hf import FixedWindowSelector, Staircase, StepHistory, TetrisSelector
from tetris_hf.generation import staircase


def example() -> Staircase:
    return Staircase("Step 3", [0, 2, 11], [4, 4, 3], [3, 1, 0], [2, 1, 0])


def test_text_by_hand():
    lines = example().text(cell=1).splitlines()
    assert lines[0].startswith("Step 3")
    assert lines[1:] == ["    0 |##=.", "    2 |#...", "   11 |..."]
    assert str(example()).splitlines()[1] == "    0 |########====...."


def test_means_are_rounded_to_characters():
    means = Staircase("Average step", [0], [4.0], [1.5], [0.74])
    assert means.text(cell=4).splitlines()[1] == "    0 |" + "#" * 3 + "=" * 3 + "." * 10
    with pytest.raises(ValueError, match="`cell` must be at least 1, got 0"):
        means.text(cell=0)


def test_an_empty_batch_has_a_title_only():
    assert len(Staircase("Nothing", [], [], [], []).text().splitlines()) == 1


@pytest.mark.parametrize("selector", [TetrisSelector(), FixedWindowSelector(2)])
def test_steps_add_up_to_the_totals(target, near, selector):
    history = StepHistory()
    out = kit.speculate(target, kit.ragged(), near, 5, 4, [selector, history])
    stats = out.tetris_stats
    assert len(history.steps) == stats.steps
    drafted, verified, accepted, live = ([0] * 3 for _ in range(4))
    for step in history.steps:
        for row, *lengths in zip(step.rows, step.drafted, step.verified, step.accepted, strict=True):
            assert lengths[0] >= lengths[1] >= lengths[2]
            live[row] += 1
            drafted[row], verified[row] = drafted[row] + lengths[0], verified[row] + lengths[1]
            accepted[row] += lengths[2]
    assert drafted == stats.drafted.sum(1).tolist() and verified == stats.verified.sum(1).tolist()
    assert live == stats.live_steps.tolist()
    # Before the cut at the end of a row.
    assert all(0 <= ours - cut <= 4 for ours, cut in zip(accepted, stats.accepted.sum(1).tolist(), strict=True))
    average = stats.staircase()
    assert average.verified == pytest.approx([v / n for v, n in zip(verified, live, strict=True)])
    assert average.drafted == pytest.approx([d / n for d, n in zip(drafted, live, strict=True)])
    assert f"VSR {stats.vsr:.3f}" in average.title


def test_the_text_is_that_without_a_history(target, near):
    history = StepHistory()
    with_history = kit.speculate(target, kit.ragged(), near, 5, 4, [TetrisSelector(), history])
    without = kit.speculate(target, kit.ragged(), near, 5, 4, TetrisSelector())
    assert with_history.tetris_stats.verified.tolist() == without.tetris_stats.verified.tolist()
    history.clear()
    assert history.steps == []


def test_stats_without_a_step_have_empty_bars(target):
    stats = kit.speculate(target, kit.ragged(), None, 0, max_new_tokens=1).tetris_stats
    assert [line.split("|")[1] for line in str(stats.staircase()).splitlines()[1:]] == ["", "", ""]


def test_plot_draws_a_bar_for_every_row(target, near, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    axes = example().plot()
    bars = [[bar.get_width() for bar in layer] for layer in axes.containers]
    assert bars == [[4, 4, 3], [3, 1, 0], [2, 1, 0]]
    assert axes.get_title() == "Step 3" and axes.yaxis_inverted()
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "2", "11"]
    stats = kit.speculate(target, kit.ragged(), near, 5, 4).tetris_stats
    axes.clear()
    assert stats.plot(axes) is axes and len(axes.containers[0]) == 3


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install tetris-hf\[plots\]"):
        example().plot()


def test_the_hub_loader_asks_for_no_matplotlib():
    assert "matplotlib" not in get_imports(Path(staircase.__file__))
