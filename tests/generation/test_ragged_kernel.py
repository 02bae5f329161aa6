"""The Triton kernel against a loop over tokens, in Triton's interpreter, which needs no GPU."""

import importlib.util
import itertools

import kit
import pytest

from tetris_hf.generation.ragged_kernel import fits_tiles


CHECK = """
import itertools
import torch
from tetris_hf.generation.ragged_kernel import attend_rows

def naive(query, key, value, starts, slots, lengths, window, scaling, softcap, sinks):
    _, heads, num_tokens, _ = query.shape
    group = heads // key.shape[1]
    out = torch.zeros(1, num_tokens, heads, value.shape[3])
    for row, length in enumerate(lengths):
        count = starts[row + 1] - starts[row]
        for place in range(count):
            position = length - count + place
            first = 0 if window == -1 else max(0, position - window + 1)
            own = slice(slots[row] + first, slots[row] + position + 1)
            for head in range(heads):
                logits = key[0, head // group, own] @ query[0, head, starts[row] + place] * scaling
                logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                if sinks is not None:
                    logits = torch.cat([logits, sinks[head : head + 1]])
                weights = logits.softmax(0)[: position + 1 - first]
                out[0, starts[row] + place, head] = weights @ value[0, head // group, own]
    return out

generator = torch.Generator().manual_seed(0)
shapes = [
    (16, 16, 2, 3, [1, 3, 0, 2], [5, 70, 0, 130], 5),   # key heads in groups, a row that takes no part
    (24, 16, 1, 1, [2, 2, 1, 1], [2, 9, 66, 1], 4),     # no groups, widths that differ and are no powers of 2
    (16, 16, 1, 8, [9, 1, 4, 3], [80, 65, 64, 100], 9), # several tiles
]
for width, v_width, key_heads, group, counts, lengths, most in shapes:
    starts = [0, *itertools.accumulate(counts)]
    num_tokens, slots = starts[-1] + 2, [300, 0, 140, 160]  # two of filler; rows lie anywhere
    key = torch.randn(1, key_heads, 440, width, generator=generator)
    value = torch.randn(1, key_heads, 440, v_width, generator=generator)
    query = torch.randn(1, num_tokens, key_heads * group, width, generator=generator).transpose(1, 2)
    sinks = torch.randn(key_heads * group, generator=generator)
    bounds = [torch.tensor(x, dtype=torch.int32) for x in (starts, slots, lengths)]
    for window, softcap, s_aux in itertools.product((-1, 4, 70), (None, 2.0), (None, sinks)):
        out = attend_rows(
            query, key, value, *bounds, 4, most, window, 0.3, softcap, s_aux
        )
        expected = naive(query, key, value, starts, slots, lengths, window, 0.3, softcap, s_aux)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="this build of torch comes without Triton")
def test_equals_a_loop_over_tokens():
    kit.interpret(CHECK)


@pytest.mark.parametrize("group", [1, 3, 4, 7, 8])
def test_who_attends(group):
    """Our kernel in every step of usual depth, prompts fed beside it or not; not in a prefill or a large feed."""
    for num_rows, depth in itertools.product((1, 8, 16, 32, 64, 128), (0, 1, 2, 3, 5)):
        for capacity in {num_rows * depth // 2, num_rows * depth}:
            for feed in (0, 64):
                num_tokens, most = num_rows + capacity + feed, max(depth, feed) + 1
                assert fits_tiles(num_tokens, most, num_rows, group), (num_rows, depth, capacity, feed)
            assert not fits_tiles(num_rows + capacity + 1024, 1025, num_rows, group)
    for lengths in ([500], [2000, 3, 3], [70, 90, 120, 100], [300] * 64):
        assert fits_tiles(sum(lengths), max(lengths), len(lengths), group) is False
