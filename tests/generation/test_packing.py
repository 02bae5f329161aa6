"""Packed tokens lie where a loop over rows would put them, with filler behind them."""

import pytest
import torch

from tetris_hf.generation.packing import Packing


def naive(counts, first, num_tokens):
    """Row, offset and position of every packed token, one by one."""
    tokens = [(row, j, start + j) for row, (n, start) in enumerate(zip(counts, first, strict=True)) for j in range(n)]
    return tokens + [(-1, 0, -1)] * (num_tokens - len(tokens))


@pytest.mark.parametrize("filler", [0, 3])
def test_equals_a_loop(filler):
    generator = torch.Generator().manual_seed(filler)
    for _ in range(100):
        counts = torch.randint(0, 5, (6,), generator=generator)
        counts[int(torch.randint(0, 6, (), generator=generator))] += 1
        first = torch.randint(0, 30, (6,), generator=generator)
        total = int(counts.sum())
        packing = Packing.of(counts, first, total + filler, max_count=6, max_length=40)
        expected = naive(counts.tolist(), first.tolist(), total + filler)
        found = torch.stack([packing.rows, packing.offsets, packing.positions], 1).tolist()
        assert [tuple(token) for token in found] == expected
        assert (packing.num_rows, packing.num_tokens) == (6, total + filler)
        for row, count in enumerate(counts.tolist()):
            if count:
                assert expected[int(packing.last[row])] == (row, count - 1, int(first[row]) + count - 1)

        values = torch.randn(total + filler, 2, generator=generator)
        padded = packing.pad(values)
        assert padded.shape == (6, 6, 2)
        assert torch.equal(packing.unpad(padded)[:total], values[:total])
        for index, (row, offset, _) in enumerate(expected[:total]):
            assert torch.equal(padded[row, offset], values[index])


def test_fitting_takes_the_tightest_sizes():
    counts, first = torch.tensor([2, 0, 3]), torch.tensor([4, 90, 1])
    packing = Packing.fitting(counts, first)
    # The absent row's position counts for nothing.
    assert (packing.num_tokens, packing.max_count, packing.max_length) == (5, 3, 6)
    assert packing.starts.tolist() == [0, 2, 2]
