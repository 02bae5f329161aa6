"""Which slots of a key/value cache are free: rows of a job take what their text needs and give it back.

Knows ranges of numbers. Does not know what lies in them.
"""

from __future__ import annotations

import bisect


class SlotPool:
    """
    Ranges of slots, in blocks, from one pool. A row keeps one range from its admission to its end, so nothing is ever
    moved, and a row's slots lie side by side as attention kernels like them.

    Args:
        num_slots (`int`): Slots in all.
        block_size (`int`, *optional*, defaults to 128): Ranges begin and end at multiples of it.
    """

    def __init__(self, num_slots: int, block_size: int = 128):
        self.block_size = block_size
        # Free ranges as (first block, number of blocks), in order, none touching the next.
        self._free = [(0, num_slots // block_size)] if num_slots >= block_size else []

    def size(self, length: int) -> int:
        """Slots of a range for `length` tokens."""
        return -(-length // self.block_size) * self.block_size

    def take(self, length: int) -> int | None:
        """
        Args:
            length (`int`): Tokens of a row, at least 1.

        Returns:
            `int`, *optional*: First slot of the lowest free range of `size(length)` slots; `None` if there is none.
        """
        wanted = self.size(length) // self.block_size
        for place, (first, number) in enumerate(self._free):
            if number >= wanted:
                self._free[place : place + 1] = [(first + wanted, number - wanted)] if number > wanted else []
                return first * self.block_size
        return None

    def give(self, first: int, length: int) -> None:
        """
        Take back a range.

        Args:
            first (`int`): What [`take`] returned.
            length (`int`): What it was asked for.
        """
        block, number = first // self.block_size, self.size(length) // self.block_size
        place = bisect.bisect(self._free, (block, number))
        if place < len(self._free) and block + number == self._free[place][0]:
            number += self._free.pop(place)[1]
        if place > 0 and sum(self._free[place - 1]) == block:
            place -= 1
            before, its_number = self._free.pop(place)
            block, number = before, number + its_number
        self._free.insert(place, (block, number))
