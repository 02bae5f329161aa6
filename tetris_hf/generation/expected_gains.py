"""What any C and K would have gained in a step, from the scores of its drafts: tensors in, averages in place.

Knows scores and outcomes. Does not know what steps cost or who chooses.
"""

from __future__ import annotations

import torch

from .fusing import fused


# How fast the rate of a place that is not drafted any more is forgotten, per step.
_FORGET = 0.002


@fused
def learn_rates(scores: torch.Tensor, rates: torch.Tensor, rated: torch.Tensor, memory: float) -> torch.Tensor:
    """
    Follow the chance of each place given the one before, over all rows, and continue prefix scores of shape `(R, K)`
    by it to `(R, max_depth)`, with 0 where there is no draft token. A place that was never drafted is as good as the
    deepest that is; one that is not drafted now moves with that one, and what set it apart is slowly forgotten. Rows
    keep the differences of their last place.
    """
    depth, max_depth = scores.shape[1], rates.shape[0]
    scores = scores.clamp(min=0)
    before = torch.cat([(scores[:, :1] > 0).to(scores.dtype), scores[:, :-1]], 1)  # (R, K)
    reached, tried = scores.sum(0), before.sum(0)  # (K,)
    seen = (tried > 0).float()
    weight = torch.maximum(1 / (rated[:depth] + 1), torch.full_like(tried, memory)) * seen
    moved = rates[:depth] + weight * (reached / tried.clamp(min=1e-6) - rates[:depth])
    ahead = (rates[depth:] * moved[-1] / rates[depth - 1].clamp(min=1e-3)).clamp(1e-3, 0.99)
    ahead = torch.where(rated[depth:] > 0, ahead + _FORGET * (moved[-1] - ahead), moved[-1])
    rates.copy_(torch.where(seen[0] > 0, torch.cat([moved, ahead]), rates))
    rated[:depth] += seen
    columns, own = [scores], scores[:, -1] / before[:, -1].clamp(min=1e-6)  # (R,)
    for place in range(depth, max_depth):
        last = columns[-1][:, -1]
        share = rates[place] * last.sum() / (last * own).sum().clamp(min=1e-6)
        columns.append((last * (own * share).clamp(max=1))[:, None])
    return torch.cat(columns, 1)


@fused
def learn_trust(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    num_accepted: torch.Tensor,
    live: torch.Tensor,
    outcome: torch.Tensor,
    memory: float,
) -> torch.Tensor:
    """How much more stood lately of what was verified than its scores, of shape `(R, K)`, had promised: a factor."""
    verified = torch.arange(scores.shape[1], device=scores.device) < lengths[:, None]  # (R, K)
    stood = torch.minimum(num_accepted, lengths).sum()
    now = torch.stack([stood.float(), (scores.clamp(min=0) * verified).sum()])  # (2,)
    outcome += (now - memory * outcome) * (live > 0)
    # Two tokens as promised beforehand: a single row's luck says little.
    return ((outcome[0] + 2) / (outcome[1] + 2)).clamp(0, 4)


def best_sums(scores: torch.Tensor, depths: torch.Tensor, capacities: torch.Tensor) -> torch.Tensor:
    """Sum of the C largest scores at the first K places, for each setting: `(R, max_depth)` to `(S,)`, by one sort."""
    sums = _by_depth(scores).sort(1, descending=True).values.cumsum(1)  # (max_depth, R * max_depth)
    return _sums_at(sums, depths, capacities)


@fused
def _by_depth(scores: torch.Tensor) -> torch.Tensor:
    number = torch.arange(scores.shape[1], device=scores.device)
    return (scores * (number < number[:, None, None] + 1)).flatten(1)  # (max_depth, R * max_depth)


@fused
def _sums_at(sums: torch.Tensor, depths: torch.Tensor, capacities: torch.Tensor) -> torch.Tensor:
    place = (capacities - 1).clamp(0, sums.shape[1] - 1)
    return sums[(depths - 1).clamp(min=0), place] * (capacities > 0)


@fused
def learn_gains(
    best: torch.Tensor,
    trust: torch.Tensor,
    rows: torch.Tensor,
    capacities: torch.Tensor,
    depths: torch.Tensor,
    gains: torch.Tensor,
    steps: torch.Tensor,
    memory: float,
) -> None:
    """What each setting would have gained per row, of sums of shape `(S,)`; `rows` live ones or their weight."""
    here = (rows > 0).float()
    rows = rows.clamp(min=1)
    most = torch.minimum(capacities / rows, depths.float())
    weight = torch.maximum(1 / (steps + 1), torch.full_like(steps, memory)) * here
    gains += weight * (torch.minimum(best * trust / rows, most) - gains)
    steps += here
