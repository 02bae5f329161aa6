"""The settings to choose from: few, possible, and what they promise beforehand."""

import pytest

from tetris_hf.generation.capacity_settings import candidates, promised


def test_promises_without_data_fill_places_one_by_one():
    assert promised(0, 0, 4, 0.5) == 0
    assert promised(2, 3, 4, 0.5) == pytest.approx(0.25)
    assert promised(6, 3, 4, 0.5) == pytest.approx(0.5 + 0.25 / 2)
    assert promised(40, 3, 4, 0.5) == pytest.approx(0.5 + 0.25 + 0.125)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("max_depth", [1, 2, 4, 6, 9])
def test_settings_are_few_and_possible(num_rows, max_depth):
    found = candidates(num_rows, max_depth)
    assert 1 <= len(found) <= 15 and len(set(found)) == len(found)
    for capacity, depth in found:
        assert 1 <= capacity <= num_rows * depth and depth <= max_depth
        assert depth <= min(capacity, -(-capacity // num_rows) + 2)
