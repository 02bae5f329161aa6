"""Where an assistant reads and writes in the rows of a batch: what is new to its cache, and what it drafts.

Knows positions, lengths and counts. Does not know models or tokens.
"""

from __future__ import annotations

import torch

from .fusing import fused


@fused
def within_context(room: torch.Tensor, text_length: torch.Tensor, context: int, depth: int) -> torch.Tensor:
    """Drafts of each row: as many as it has room for, none past the context of the model. `(R,)`."""
    return torch.minimum(room, context + 1 - text_length).clamp(0, depth)


@fused
def places(
    length: torch.Tensor,
    max_length: torch.Tensor,
    text_length: torch.Tensor,
    lengths: torch.Tensor,
    live: torch.Tensor,
    depth: int,
    width: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Of each row's draft at each place, `(K, R)`: the width of the prefix that it continues; the column to write it to,
    the spare one, `width`, if there is none; and, for the forward that drafts it from the one before, the position to
    feed and how many there are to feed, one or none. A row that drafts no deeper is shown some prefix; its scores are
    not read.
    """
    places = torch.arange(depth, device=live.device)[:, None]
    columns, real = length[live] + places, places < lengths
    prefix = torch.minimum(columns, max_length[live])
    return prefix, columns.where(real, width), text_length + places - 1, real.long()


@fused
def remember(cached: torch.Tensor, text_length: torch.Tensor, lengths: torch.Tensor, live: torch.Tensor) -> None:
    """Count what was fed to draft `lengths` tokens as cached: all of the text and of the draft but its last token."""
    cached[live] = torch.where(lengths > 0, text_length + lengths - 1, cached[live])


@fused
def newest(
    cached: torch.Tensor, text_length: torch.Tensor, lengths: torch.Tensor, live: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """First position and number of the tokens that are new to the cache, two at least; `(R,)` each."""
    first = torch.minimum(cached[live], text_length - 2).clamp(min=0)
    return first, (text_length - first) * (lengths > 0)


def of_all(
    counts: torch.Tensor, first: torch.Tensor, live: torch.Tensor, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and first positions of all N rows, of which those that are not `live` have none."""
    all_counts, all_first = torch.zeros_like(like), torch.zeros_like(like)
    all_counts[live], all_first[live] = counts, first
    return all_counts, all_first


@fused
def add_feed(
    counts: torch.Tensor,
    first: torch.Tensor,
    cached: torch.Tensor,
    position: torch.Tensor,
    taken: torch.Tensor,
    context: int,
) -> None:
    """
    Add `taken` tokens of each row from `position` on to what is fed, in rows that draft nothing, as far as the context
    goes. All of shape `(N,)`.
    """
    taken = torch.minimum(taken, (context - position).clamp(min=0))
    counts += taken
    first.copy_(torch.where(taken > 0, position, first))
    cached.copy_(torch.where(taken > 0, position + taken, cached))


@fused
def forget(
    cached: torch.Tensor,
    text_length: torch.Tensor,
    num_accepted: torch.Tensor,
    verified: torch.Tensor,
    live: torch.Tensor,
) -> None:
    """Count no draft token as cached from the first on that did not become text."""
    kept = text_length - 1 - num_accepted + torch.minimum(num_accepted, verified)
    cached[live] = torch.minimum(cached[live], kept)


@fused
def stopped(lengths: torch.Tensor, wanted: torch.Tensor, place: int, num_skipped: torch.Tensor) -> torch.Tensor:
    """Lengths of drafts, `(R,)`, if `place` is left out unless it is `wanted`, of shape `()`; counts it if so."""
    num_skipped += (~wanted).long()
    return torch.where(wanted, lengths, lengths.clamp(max=place))
