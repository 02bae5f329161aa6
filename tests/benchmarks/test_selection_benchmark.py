"""The ratios of `benchmarks/selection.py` by hand, and what its folder must not hide."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest

from tetris_hf import Staircase, StepHistory


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def selection():
    if importlib.util.find_spec("gguf") is None:
        pytest.skip("the demo's loader reads GGUF")
    sys.path.insert(0, str(BENCHMARKS))
    yield pytest.importorskip("selection")
    sys.path.remove(str(BENCHMARKS))


def test_ratios_by_hand(selection):
    steps = [Staircase("", [0, 1], [4, 4], [3, 1], [2, 0]), Staircase("", [0, 1], [4, 4], [2, 2], [1, 2])]
    found = selection.summary(steps)
    assert found["vsr"] == pytest.approx(5 / 8) and found["ter"] == pytest.approx(9 / 12)
    assert found["tokens"] == pytest.approx(1 + 5 / 4) and found["verified"] == 2.0 and found["steps"] == 2
    assert math.isnan(selection.summary([Staircase("", [0], [4], [0], [0])])["vsr"])


def test_only_steps_of_all_rows_count(selection):
    history = StepHistory()
    history.steps = [Staircase("", [0, 1], [1, 1], [1, 1], [1, 1]), Staircase("", [1], [1], [1], [1])]
    assert selection.full_steps(history, 2) == history.steps[:1]


def test_every_rule_is_there_once(selection):
    rules = selection.rules(2, 0.01)
    assert len({type(make(None)).__name__ for name, make in rules.items() if name != "oracle"}) == 6


def test_no_benchmark_hides_a_module_of_python():
    """A script's folder comes first on the path: a `selectors.py` there would break `subprocess`."""
    assert not {path.stem for path in BENCHMARKS.glob("*.py")} & sys.stdlib_module_names
