"""Top-p as one Triton kernel that finds each row's threshold by bisection, where transformers sorts the vocabulary.

Knows scores and their probabilities. Does not know whose they are.
"""

from __future__ import annotations

import torch


try:
    import triton
    import triton.language as tl
except ImportError:  # a build of torch for the CPU
    triton = None

# Tokens that a program looks at side by side.
BLOCK = 4096


def kernel_serves(scores: torch.Tensor, min_tokens_to_keep: int) -> bool:
    """Whether the kernel can filter these scores."""
    on_gpu = triton is not None and scores.device.type == "cuda"
    return on_gpu and scores.dtype == torch.float32 and min_tokens_to_keep == 1


def keep_top_p(scores: torch.Tensor, top_p: float, filter_value: float = -torch.inf) -> torch.Tensor:
    """
    What `TopPLogitsWarper` does: the least likely tokens, whose probabilities add up to `1 - top_p` at most, are
    filtered out, but never all. Sums are rounded otherwise, so at the edge one token may be judged otherwise; of equal
    scores there, those of the lowest indices go.

    Args:
        scores (`torch.FloatTensor` of shape `(M, V)`): In float32.
        top_p (`float`): Probability that is kept at least.
        filter_value (`float`, *optional*, defaults to `-inf`): Score of what is filtered out.

    Returns:
        `torch.FloatTensor` of shape `(M, V)`: New scores.
    """
    scores = scores.contiguous()
    kept = torch.empty_like(scores)
    _keep_top_p[(len(scores),)](scores, kept, scores.shape[1], 1 - top_p, filter_value, BLOCK=BLOCK, num_warps=8)
    return kept


if triton is not None:

    @triton.jit
    def _key(x):  # type: ignore[no-untyped-def]
        """Integers in the order of the floats."""
        bits = x.to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    @triton.jit  # type: ignore[untyped-decorator]
    def _block(scores, start, vocab_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        places = start + tl.arange(0, BLOCK)
        return tl.load(scores + places, mask=places < vocab_size, other=float("-inf")) + 0.0  # there is no -0.0

    @triton.jit  # type: ignore[untyped-decorator]
    def _keep_top_p(scores, kept, vocab_size, removed, filler, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        """One program for each row."""
        base = tl.program_id(0).to(tl.int64) * vocab_size
        scores += base
        kept += base
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            highest = tl.maximum(highest, _block(scores, start, vocab_size, BLOCK))
        most = tl.max(highest, 0)
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, vocab_size, BLOCK):
            sums += tl.exp(_block(scores, start, vocab_size, BLOCK) - most)
        limit = removed * tl.sum(sums, 0)

        # The least score that, with all below it, has more than may go. Adding in one order keeps the sums monotone.
        high = _key(most)
        low = tl.full((), -0x7F800002, tl.int32)  # below the key of -inf
        for _ in range(32):
            middle = (low & high) + ((low ^ high) >> 1)  # the mean, which must not overflow
            sums = tl.zeros((BLOCK,), tl.float32)
            for start in range(0, vocab_size, BLOCK):
                x = _block(scores, start, vocab_size, BLOCK)
                sums += tl.where(_key(x) <= middle, tl.exp(x - most), 0.0)
            enough = tl.sum(sums, 0) > limit
            high = tl.where(enough, middle, high)
            low = tl.where(enough, low, middle)

        # Of the tokens with that score, as many go as still may, those of the lowest indices; but never all.
        sums = tl.zeros((BLOCK,), tl.float32)
        ties = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, vocab_size, BLOCK):
            x = _block(scores, start, vocab_size, BLOCK)
            sums += tl.where(_key(x) < high, tl.exp(x - most), 0.0)
            inside = start + tl.arange(0, BLOCK) < vocab_size
            ties += ((_key(x) == high) & inside).to(tl.int32)
        edge = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        each = tl.exp(edge - most)
        going = tl.where(each > 0, ((limit - tl.sum(sums, 0)) / each).to(tl.int32), 0)
        going = tl.minimum(tl.maximum(going, 0), tl.sum(ties, 0) - 1)
        seen = tl.full((), 0, tl.int32)
        for start in range(0, vocab_size, BLOCK):
            x = _block(scores, start, vocab_size, BLOCK)
            places = start + tl.arange(0, BLOCK)
            tied = ((_key(x) == high) & (places < vocab_size)).to(tl.int32)
            gone = (_key(x) < high) | ((tied > 0) & (seen + tl.cumsum(tied, 0) <= going))
            tl.store(kept + places, tl.where(gone, filler, x), mask=places < vocab_size)
            seen += tl.sum(tied, 0)
