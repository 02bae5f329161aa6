"""What `throughput.py` can measure: contenders by name, and the settings of each to try at a batch size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


# What each contender is, by the name that the command line knows.
CONTENDERS = {
    "dynamic": "stock generate",
    "static": "stock generate, static cache + compile",
    "batch": "stock continuous batching",
    "assisted": "stock assisted, row by row",
    "c0": "ours, C = 0",
    "fixed": "ours, fixed window",
    "tetris": "ours, TETRIS",
    "slowest": "ours, TETRIS, slow rows first",
    "auto": 'ours, C = "auto"',
}
STOCK = ("dynamic", "static", "batch", "assisted")


@dataclass(frozen=True)
class Setting:
    """
    One thing to measure.

    Args:
        contender (`str`): A key of `CONTENDERS`.
        drafter (`str`, *optional*): Who drafts.
        depth (`int`, *optional*): K.
        capacity (`int`, *optional*): C.
    """

    contender: str
    drafter: str | None = None
    depth: int | None = None
    capacity: int | None = None

    def __str__(self) -> str:
        sizes = {"K": self.depth, "C": self.capacity if self.contender != "c0" else None}
        details = [self.drafter] + [f"{name} = {size}" for name, size in sizes.items() if size is not None]
        return ", ".join([CONTENDERS[self.contender], *filter(None, details)])


def settings_for(
    contenders: Iterable[str],
    drafters: dict[str, int | None],
    num_rows: int,
    windows: list[int],
    depths: list[int],
    ratios: list[float],
) -> list[Setting]:
    """
    What to measure at one batch size, stock first, each setting once.

    Args:
        contenders (`Iterable[str]`): Keys of `CONTENDERS`.
        drafters (`dict[str, int | None]`): The deepest draft that each can make, `None` without a limit.
        num_rows (`int`): N.
        windows (`list[int]`): Draft tokens per row of the fixed window.
        depths (`list[int]`): K of TETRIS.
        ratios (`list[float]`): C / N of TETRIS.
    """
    found: dict[Setting, None] = {}  # a set that keeps the order
    for contender in (name for name in CONTENDERS if name in contenders):
        if contender not in ("assisted", "fixed", "tetris", "slowest", "auto"):
            found[Setting(contender, capacity=0 if contender == "c0" else None)] = None
            continue
        for drafter, deepest in drafters.items():
            if contender == "assisted" and drafter != "medusa":  # stock has no Medusa heads
                found[Setting(contender, drafter, max(depths) if drafter == "lookup" else None)] = None
            if contender == "auto":
                found[Setting(contender, drafter)] = None
            if contender == "fixed":
                for window in windows:
                    if deepest is None or window <= deepest:
                        found[Setting(contender, drafter, window, window * num_rows)] = None
            if contender in ("tetris", "slowest"):
                for depth in (min(depth, deepest or depth) for depth in depths):
                    for ratio in ratios:
                        capacity = max(1, round(ratio * num_rows))
                        if capacity < depth * num_rows:  # more leaves nothing to select
                            found[Setting(contender, drafter, depth, capacity)] = None
    return list(found)
