"""Which places of a draft a budget takes: scores and lengths of R rows in, tokens per row out.

Knows scores, lengths and C. Does not know where scores come from.
"""

from __future__ import annotations

import torch

from .draft import survival
from .fusing import fused


def evenly(lengths: torch.Tensor, depth: int) -> torch.Tensor:
    """Scores that prefer shallow places over deep ones and know no other difference. Shape `(R, K)`."""
    return -torch.arange(depth, device=lengths.device, dtype=torch.float32).expand(len(lengths), depth)


def spend(scores: torch.Tensor, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
    """
    The lengths of rows that take the `capacity` best-scored tokens (TETRIS paper, Algorithm 1 and Theorem 1).

    Scores do not increase along a row, so the best tokens are, by number, prefixes of rows: the heap walk of the paper
    in one sort. Among equal scores the shallower place wins, then the lower row: winners are counted, never looked up
    by their depth, so that ties cannot overshoot.

    Args:
        scores (`torch.FloatTensor` of shape `(R, K)`): Non-increasing along K.
        lengths (`torch.LongTensor` of shape `(R,)`): Tokens of each row that can be taken.
        capacity (`int`): C.

    Returns:
        `torch.LongTensor` of shape `(R,)`, with sum `min(capacity, lengths.sum())`.
    """
    num_rows, depth = scores.shape
    if capacity >= num_rows * depth:
        return lengths
    order = _ranked(scores, lengths).sort(descending=True, stable=True).indices[:capacity]  # (C,)
    rows, takable = _winners(order, lengths)
    return torch.zeros_like(lengths).scatter_add_(0, rows, takable)


@fused
def _ranked(scores: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Place-major, so that a stable sort settles ties by place. Shape `(K * R,)`."""
    takable = torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]  # (R, K)
    # Two sorts would settle -inf scores (a draft that is certain to fail) against places that do not exist; a finite
    # floor does it in one.
    floor = torch.finfo(scores.dtype).min
    return scores.clamp(min=floor).nan_to_num(floor).masked_fill(~takable, -torch.inf).T.flatten()


@fused
def _winners(order: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the C places in front: their rows, and 1 where a row does have so many tokens."""
    rows = order % len(lengths)
    return rows, (order // len(lengths) < lengths[rows]).long()


@fused
def beats_the_worst(
    probabilities: torch.Tensor,
    expectations: torch.Tensor,
    lengths: torch.Tensor,
    urgency: torch.Tensor,
    predictable: bool,
    capacity: int,
) -> torch.Tensor:
    """Of a draft of `(R, K)` places, whether the best that a next place can score is among the best C so far; `()`."""
    certain = torch.ones_like(probabilities[:, :1])  # (R, 1)
    estimates = torch.cat([probabilities, certain], 1), torch.cat([expectations, certain], 1)  # (R, K + 1)
    scores = survival(*estimates, lengths, predictable) * urgency[:, None]
    best = scores[:, -1].amax()
    # Better than the C-th best: fewer than C are at least as good.
    return (best > -torch.inf) & ((scores[:, :-1] >= best).sum() < capacity)


@fused
def fits_deeper(lengths: torch.Tensor, depth: int, capacity: int) -> torch.Tensor:
    """Whether some row goes deeper, and the budget does so too; `()`."""
    return (lengths > depth).any() & (lengths.clamp(max=depth).sum() < capacity)


@fused
def no_longer(lengths: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """What a selector wants of what is still selectable, `(R,)`."""
    return torch.minimum(lengths, wanted).clamp(min=0)
