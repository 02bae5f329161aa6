"""Rejection sampling over rows of unequal draft length: which draft tokens stand, and what follows them.

Knows distributions and tokens. Does not know models, caches or stopping.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .fusing import fused


@dataclass(frozen=True)
class Accepted:
    """
    The outcome of one verification.

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, K + 1)`):
            Accepted draft tokens, then the one token that the target adds.
        counts (`torch.LongTensor` of shape `(R,)`): Tokens of each row that stand, 1 to K + 1: accepted plus one.
    """

    tokens: torch.Tensor
    counts: torch.Tensor


def exponential_noise(like: torch.Tensor) -> torch.Tensor:
    """Draws of Exp(1) in the shape of a tensor of floats."""
    # Zero noise would divide 0 by 0 for a token that must never be drawn.
    return torch.empty_like(like).exponential_().clamp_(min=torch.finfo(like.dtype).tiny)


def sample(weights: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
    """
    Draw one index per row, with chances in proportion to `weights`.

    The largest of `weights / Exp(1)` noise has exactly that law and, unlike `torch.multinomial`, needs neither
    normalised weights nor a wait for the device.

    Args:
        weights (`torch.FloatTensor` of shape `(R, V)`): Weights, not negative and not all zero.
        noise (`torch.FloatTensor` of shape `(R, V)`, *optional*): Of [`exponential_noise`], if it was drawn before.

    Returns:
        `torch.LongTensor` of shape `(R,)`.
    """
    return (weights / (exponential_noise(weights) if noise is None else noise)).argmax(-1)


def rejection_sample(
    p: torch.Tensor, q: torch.Tensor | None, tokens: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor
) -> Accepted:
    """
    Speculative sampling (Leviathan et al., 2023; Chen et al., 2023) for R rows of unequal draft length at once.

    Token j of row i is accepted with chance min(1, p / q). After the last accepted one, the target adds a token: from
    p if all verified drafts stand, else from norm(max(0, p - q)). Acceptance and addition use draws of their own.

    Args:
        p (`torch.Tensor`):
            Target distributions in packed order. Either of shape `(T, V)`, float32, or `torch.LongTensor` of shape
            `(T,)`: each is then one at that token, which is greedy decoding.
        q (`torch.FloatTensor` of shape `(R, K, V)`, *optional*):
            Distributions that the drafts were sampled from. `None`: one at the draft token.
        tokens (`torch.LongTensor` of shape `(R, K)`): Draft tokens.
        lengths (`torch.LongTensor` of shape `(R,)`): Draft tokens verified in each row, 0 to K.
        starts (`torch.LongTensor` of shape `(R,)`):
            Packed index of each row's first distribution: that of its first draft token. The next `lengths[i]` follow
            it.

    Returns:
        [`Accepted`]
    """
    if p.dim() == 1:
        return Accepted(*_accept_equals(p, tokens, lengths, starts))
    num_rows, depth = tokens.shape
    places = torch.arange(depth, device=tokens.device)
    verified = places < lengths[:, None]  # (R, K)
    # Packed index of the distribution at each place, (R, K).
    index = (starts[:, None] + places).clamp(max=p.shape[0] - 1)
    p_token = p[index, tokens]  # (R, K)
    q_token = torch.ones_like(p_token) if q is None else q.gather(2, tokens[:, :, None])[:, :, 0]
    # u * q < p is u < p / q without the division; u < 1, so p >= q always accepts and p = 0 never does.
    accepts = torch.rand_like(p_token) * q_token < p_token
    num_accepted = (accepts & verified).long().cumprod(1).sum(1)  # (R,)

    p_at = p[starts + num_accepted]  # (R, V)
    if depth == 0:
        added = sample(p_at)
    else:
        rejected = num_accepted < lengths
        place = num_accepted.clamp(max=depth - 1)
        rows = torch.arange(num_rows, device=tokens.device)
        if q is None:
            taken = torch.zeros_like(p_at).scatter_(1, tokens[rows, place][:, None], 1.0)
        else:
            taken = q[rows, place]  # (R, V)
        residual = (p_at - taken * rejected[:, None]).clamp_(min=0)
        # A rejection with p = q has probability zero, but rounding can bring it about: then nothing is left but p.
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_at)
        added = sample(residual)
    block = torch.nn.functional.pad(tokens, (0, 1)).scatter(1, num_accepted[:, None], added[:, None])  # (R, K + 1)
    return Accepted(tokens=block, counts=num_accepted + 1)


@fused
def _accept_equals(
    p: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Tokens `(R, K + 1)` and counts `(R,)` where p is one at a token: drafts stand as far as they equal it, and where
    one does not, the residual is p itself.
    """
    num_accepted = torch.zeros_like(lengths)
    for place in range(tokens.shape[1]):
        equal = p[(starts + place).clamp(max=p.shape[0] - 1)] == tokens[:, place]
        num_accepted = num_accepted + (equal & (num_accepted == place) & (place < lengths)).long()
    places = torch.arange(tokens.shape[1] + 1, device=tokens.device)
    added = p[starts + num_accepted][:, None]  # (R, 1)
    block = torch.where(places == num_accepted[:, None], added, torch.nn.functional.pad(tokens, (0, 1)))  # (R, K + 1)
    return block, num_accepted + 1
