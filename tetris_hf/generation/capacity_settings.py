"""The (C, K) worth choosing from for a number of rows.

Knows sizes. Does not know seconds, nor what was accepted.
"""

from __future__ import annotations

from collections.abc import Iterable


# C / N, and the K worth trying with each: at most 16 settings with C = 0, since each may become a captured graph.
_CANDIDATES = ((0.5, (1, 2)), (1, (1, 2, 3)), (1.5, (2, 3)), (2, (2, 3, 4)), (3, (3, 4, 5)), (4, (4, 6)))
# C / N and K that are captured in a CUDA graph each: fewer than an eager engine may choose from.
CAPTURED = ((0.5, (2,)), (1, (1, 2)), (1.5, (2, 3)), (2, (2, 3)), (3, (3,)), (4, (4,)))


def candidates(
    num_rows: int, max_depth: int, ratios: Iterable[tuple[float, tuple[int, ...]]] = _CANDIDATES
) -> list[tuple[int, int]]:
    """(C, K) worth considering for N rows: C at most N K, and K at most C, as deep as one row can go."""
    found = [(round(ratio * num_rows + 1e-9), depth) for ratio, depths in ratios for depth in depths]
    return [(c, k) for c, k in dict.fromkeys(found) if 1 <= k <= min(c, max_depth) and c <= num_rows * k]


def promised(capacity: int, depth: int, num_rows: int, chance: float) -> float:
    """Accepted tokens per row and step if every draft token stands with the same chance."""
    share = capacity / num_rows
    return sum(chance**place * min(max(share - place + 1, 0.0), 1.0) for place in range(1, depth + 1))
