"""The pool against one flag per block."""

import random

import pytest

from tetris_hf.generation.slot_pool import SlotPool


class Flags:
    """One flag per block."""

    def __init__(self, blocks: int):
        self.free = [True] * blocks

    def take(self, blocks: int) -> int | None:
        for first in range(len(self.free) - blocks + 1):
            if all(self.free[first : first + blocks]):
                self.free[first : first + blocks] = [False] * blocks
                return first
        return None

    def give(self, first: int, blocks: int) -> None:
        assert not any(self.free[first : first + blocks])
        self.free[first : first + blocks] = [True] * blocks


@pytest.mark.parametrize("num_slots", [0, 3, 4, 41, 200])
def test_ranges_are_those_of_the_naive_reference(num_slots):
    draw = random.Random(num_slots)
    pool, flags, taken = SlotPool(num_slots, block_size=4), Flags(num_slots // 4), []
    for _ in range(2000):
        if taken and draw.random() < 0.5:
            first, length = taken.pop(draw.randrange(len(taken)))
            pool.give(first, length)
            flags.give(first // 4, pool.size(length) // 4)
        else:
            length = draw.randint(1, 40)
            first, expected = pool.take(length), flags.take(pool.size(length) // 4)
            assert first == (None if expected is None else 4 * expected)
            if first is not None:
                taken.append((first, length))
                assert first + pool.size(length) <= num_slots
    for first, length in taken:
        pool.give(first, length)
    whole = num_slots // 4 * 4
    assert whole == 0 or pool.take(whole) == 0, "nothing is lost"
