"""Drafts copied from a row's own text: where its last tokens have occurred before, what followed them then.

Knows tokens and how often copies of a kind stood. Needs no model.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from transformers import PreTrainedModel

from .drafting import Draft, Drafter, Verification
from .processing import LogitsProcessing
from .rows import Rows


class PromptLookupDrafter(Drafter):
    """
    Prompt lookup decoding (Saxena, 2023) for every row of a batch at once, on the device.

    A row's last tokens, up to `max_matching_ngram_size` of them, are searched in its prompt and its answer. The
    longest match wins; of equally long ones, the latest that is followed by enough tokens. A row without a match
    drafts nothing and its share of the budget goes to others. How likely a copied token is to stand is learned from
    the steps before, by length of the match and draft position, across calls.

    Args:
        max_matching_ngram_size (`int`, *optional*, defaults to 3): Tokens that a match has at most.

    Raises:
        `ValueError`: If `max_matching_ngram_size` is under 1.
    """

    is_capturable = True

    def __init__(self, max_matching_ngram_size: int = 3):
        if max_matching_ngram_size < 1:
            raise ValueError(f"`max_matching_ngram_size` must be at least 1, got {max_matching_ngram_size}.")
        self.max_matching_ngram_size = max_matching_ngram_size
        self._tried = torch.zeros(max_matching_ngram_size + 1, 0)
        self._stood = torch.zeros(max_matching_ngram_size + 1, 0)
        self._match = torch.zeros(0, dtype=torch.long)

    def fingerprint(self) -> Hashable:
        return type(self), self.max_matching_ngram_size

    def begin(self, target: PreTrainedModel, rows: Rows, vocab_size: int, processing: LogitsProcessing) -> None:
        self._vocab_size = vocab_size
        self._tried, self._stood = (counts.to(rows.length.device) for counts in (self._tried, self._stood))

    def propose(self, rows: Rows, live: torch.Tensor, depth: int) -> Draft:
        """See [`Drafter.propose`]. No forward of any model."""
        length, padding = rows.length[live], rows.padding[live]
        width = rows.width if rows.fixed_shapes else int(length.max())
        tokens, columns = rows.prefix(width, live), torch.arange(width, device=live.device)  # (R, width)
        # matched[i, c]: of the tokens that end at column c, how many in a row equal those at the row's end.
        matched = torch.zeros_like(tokens)
        running = (columns >= padding[:, None]) & (columns < length[:, None] - 1)
        for back in range(self.max_matching_ngram_size):
            last = tokens.gather(1, (length - 1 - back).clamp(min=0)[:, None])  # (R, 1)
            running = running & (tokens.roll(back, 1) == last) & (columns - back >= padding[:, None])
            matched += running
        following = (length[:, None] - 1 - columns).clamp(0, depth)  # (R, width) tokens that can be copied from there
        # Longest match first, then enough to copy, then the latest: one number that sorts like the three.
        best = ((matched * (depth + 1) + following) * width + columns).argmax(1, keepdim=True)  # (R, 1)
        match = matched.gather(1, best)[:, 0]
        lengths = torch.minimum(following.gather(1, best)[:, 0], rows.room(live)) * (match > 0)  # (R,)
        places = torch.arange(depth, device=live.device)
        copied = tokens.gather(1, (best + 1 + places).clamp(max=width - 1))  # (R, depth)
        # A prompt may hold ids that the target cannot say: copy up to the first of them.
        sayable = (copied < self._vocab_size).long().cumprod(1).sum(1)
        chances = self._chances(depth)[match]  # (R, depth)
        self._match = match
        return Draft(copied.clamp(max=self._vocab_size - 1), torch.minimum(lengths, sayable), chances, chances)

    def observe(self, rows: Rows, verification: Verification) -> None:
        """Learn which copied tokens stood: only those whose predecessors did say anything."""
        depth = verification.draft.depth
        if depth == 0:
            return
        self._chances(depth)
        places = torch.arange(depth, device=verification.live.device)
        reached = (places < verification.lengths[:, None]) & (places <= verification.num_accepted[:, None])  # (R, K)
        stood = places < verification.num_accepted[:, None]
        for counts, seen in ((self._tried, reached), (self._stood, reached & stood)):
            counts[:, :depth].index_add_(0, self._match, seen.to(counts.dtype))

    def _chances(self, depth: int) -> torch.Tensor:
        """
        Estimated chance that a copied token stands, given that those before it do, by length of the match and place.

        Before anything is seen, longer matches are trusted more; each guess counts as four observations.

        Returns:
            `torch.FloatTensor` of shape `(max_matching_ngram_size + 1, depth)`.
        """
        missing = depth - self._tried.shape[1]
        if missing > 0:
            self._tried, self._stood = (
                torch.nn.functional.pad(counts, (0, missing)) for counts in (self._tried, self._stood)
            )
        sizes = torch.arange(self.max_matching_ngram_size + 1, device=self._tried.device)
        guess = (1 - 0.6 ** sizes.float())[:, None]  # 0, .4, .64, .78, ...
        return ((self._stood + 4 * guess) / (self._tried + 4))[:, :depth]
