"""What the paper compares: no drafts, SD, DSD, TETRIS with extra draft tokens, and the ceiling of all of them."""

from __future__ import annotations

from dataclasses import dataclass

import tetris_hf


NAMES = {"none": "no drafts", "sd": "SD", "dsd": "DSD", "tetris": "TETRIS", "oracle": "oracle"}
# Costs of the dynamic window where none were measured: those of a 7 B target and a two-layer assistant on one H100, as
# parts of a step without drafts.
USUAL_COSTS = {"token_cost": 0.001, "base_cost": 0.94, "draft_cost": 0.04}


@dataclass(frozen=True)
class Method:
    """
    One rule at one size.

    Args:
        name (`str`): A key of `NAMES`.
        window (`int`, *optional*, defaults to 0): k of the paper: C is N * k.
        extra (`int`, *optional*, defaults to 0): Extra draft tokens of the paper: K is k + extra.
    """

    name: str
    window: int = 0
    extra: int = 0

    def __str__(self) -> str:
        return NAMES[self.name] + (f" (extra={self.extra})" if self.name == "tetris" else "")

    @property
    def depth(self) -> int:
        """K."""
        return self.window + self.extra

    def capacity(self, num_rows: int) -> int:
        """C."""
        return num_rows * self.window

    def selector(self, costs: dict[str, float] | None = None) -> tetris_hf.DraftSelector:
        """A fresh selector; `costs` are the arguments of the dynamic window."""
        if self.name == "oracle":
            from paper.replay import Foresight

            return Foresight()
        if self.name == "dsd":
            return tetris_hf.DynamicWindowSelector(**(costs or USUAL_COSTS))
        return tetris_hf.TetrisSelector() if self.name == "tetris" else tetris_hf.FixedWindowSelector(self.window)


def methods(windows: list[int], extras: list[int], deepest: int | None, oracle: bool = False) -> list[Method]:
    """
    All rules at all sizes that fit, what matters most first: windows, few extra tokens, dynamic windows, the rest.

    Args:
        windows (`list[int]`): k.
        extras (`list[int]`): Extra draft tokens of TETRIS.
        deepest (`int`, *optional*): The most that can be drafted.
        oracle (`bool`, *optional*, defaults to `False`): With the ceiling, which drafts as deep as TETRIS at most.
    """
    limit = max(windows) + max(extras, default=0) if deepest is None else deepest
    fitting = [window for window in windows if window <= limit]
    tetris = [
        [Method("tetris", window, extra) for window in fitting if window + extra <= limit] for extra in sorted(extras)
    ]
    found = [Method("none"), *(Method("sd", window) for window in fitting), *sum(tetris[:2], [])]
    found += [Method("dsd", window) for window in fitting] + sum(tetris[2:], [])
    if oracle:
        most = max(extras, default=0)
        found += [Method("oracle", window, min(most, limit - window)) for window in fitting]
    return found
