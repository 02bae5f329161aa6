"""Random draws that belong to a text, not to a batch: the same whoever runs beside it and whoever drafts for it.

Knows seeds, positions and one law of noise. Does not know models or drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .fusing import fused


# The increment and the two multipliers of SplitMix64 (Steele, Lea and Flood, 2014), as signed 64-bit numbers.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def row_seeds(seed: int | Sequence[int], num_rows: int, first: int = 0) -> torch.Tensor:
    """
    A seed for each row.

    Args:
        seed (`int` or `Sequence[int]`): One for all, from which each row gets its own by its number, or one per row.
        num_rows (`int`): N.
        first (`int`, *optional*, defaults to 0): Number of the first row.

    Returns:
        `torch.LongTensor` of shape `(N,)`.

    Raises:
        `ValueError`: If there is not one seed per row, or a seed is no 64-bit integer.
    """
    given = seed.tolist() if isinstance(seed, torch.Tensor) else list(seed) if isinstance(seed, Sequence) else [seed]
    for one in given:
        if isinstance(one, bool) or not isinstance(one, int) or not -(2**63) <= one < 2**63:
            raise ValueError(f"`seed` must be an integer of 64 bits, or one per row, got {one!r}.")
    if not isinstance(seed, Sequence | torch.Tensor):
        return _mixed(_mixed(torch.tensor(given)) + torch.arange(first, first + num_rows) * _INCREMENT)
    if len(given) != num_rows:
        raise ValueError(f"`seed` has {len(given)} numbers for {num_rows} rows: pass one number, or one per row.")
    return torch.tensor(given, dtype=torch.long)


@fused
def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """
    Standard Gumbel noise that is a function of seed, position and token: the largest of scores plus noise is a draw
    from their softmax (Gumbel, 1954). A drafter that adds the same noise to its own scores mostly finds the same
    token, and what is drawn does not depend on the drafter (Daliri et al., 2024, drafter-invariant decoding).

    Args:
        seeds (`torch.LongTensor` of shape `(M,)`): Seed of the text that each place belongs to.
        positions (`torch.LongTensor` of shape `(M,)`): Position of the token to be drawn in its text.
        vocab_size (`int`): V.

    Returns:
        `torch.FloatTensor` of shape `(M, V)`.
    """
    places = _mixed(_mixed(seeds) + positions * _INCREMENT)  # (M,)
    # The mask changes nothing. Without it, the compiler takes the product for a subscript, which on a CPU it works out
    # in a way that does not wrap.
    tokens = (torch.arange(vocab_size, device=seeds.device) & 0x7FFFFFFF) * _INCREMENT
    bits = (_mixed(places[:, None] + tokens) >> 32) & 0xFFFFFFFF  # (M, V)
    # The winner has a large Gumbel number, so a small exponential one: u is fine-grained near 0, and so is it.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-uniform)).log()


def _mixed(numbers: torch.Tensor) -> torch.Tensor:
    """The output function of SplitMix64; products wrap, and shifts are made logical by the masks."""
    numbers = (numbers ^ ((numbers >> 30) & 0x3FFFFFFFF)) * _FIRST
    numbers = (numbers ^ ((numbers >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return numbers ^ ((numbers >> 31) & 0x1FFFFFFFF)
