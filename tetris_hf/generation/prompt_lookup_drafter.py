"""Drafts copied from a row's own text: where its last tokens have occurred before, what followed them then.

Knows tokens and how often copies of a kind stood. Needs no model.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from transformers import PreTrainedModel

from .draft import Draft, Verification, judged
from .drafter import Drafter
from .fusing import fused
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
        length = rows.length[live]
        width = rows.width if rows.fixed_shapes else int(length.max())
        sizes = self.max_matching_ngram_size, depth, self._vocab_size
        text = rows.prefix(width, live), length, rows.padding[live]
        copied, lengths, match = _search(*text, rows.room(live), *sizes)
        self._make_room(depth)
        chances = _chances(self._tried, self._stood, match, depth)  # (R, depth)
        self._match = match
        return Draft(copied, lengths, chances, chances)

    def observe(self, rows: Rows, verification: Verification) -> None:
        """Learn which copied tokens stood: only those whose predecessors did say anything."""
        depth = verification.draft.depth
        if depth == 0:
            return
        self._make_room(depth)
        _learn(self._tried, self._stood, self._match, verification.lengths, verification.num_accepted)

    def _make_room(self, depth: int) -> None:
        """Counts for `depth` places."""
        missing = depth - self._tried.shape[1]
        if missing > 0:
            self._tried, self._stood = (
                torch.nn.functional.pad(counts, (0, missing)) for counts in (self._tried, self._stood)
            )


@fused
def _chances(tried: torch.Tensor, stood: torch.Tensor, match: torch.Tensor, depth: int) -> torch.Tensor:
    """
    Estimated chance that a copied token stands, given that those before it do, by length of the match and place, of
    counts `(max_matching_ngram_size + 1, K)`. Shape `(R, depth)`.

    Before anything is seen, longer matches are trusted more; each guess counts as four observations.
    """
    guess = (1 - 0.6 ** match.float())[:, None]  # 0, .4, .64, .78, ...
    return (stood[match, :depth] + 4 * guess) / (tried[match, :depth] + 4)


@fused
def _learn(
    tried: torch.Tensor,
    stood: torch.Tensor,
    match: torch.Tensor,
    lengths: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    """Count, in place, the copied tokens that were verified behind none that was rejected, and those that stood."""
    reached, right = judged(lengths, num_accepted, tried.shape[1])  # (R, K) each
    own = (match[:, None] == torch.arange(tried.shape[0], device=tried.device))[:, :, None]  # (R, sizes, 1)
    tried += (own & reached[:, None]).float().sum(0)
    stood += (own & right[:, None]).float().sum(0)


@fused
def _search(
    tokens: torch.Tensor,
    length: torch.Tensor,
    padding: torch.Tensor,
    room: torch.Tensor,
    most: int,
    depth: int,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    What followed the best match in each row of `(R, width)` tokens: copies `(R, depth)`, how many of them count, and
    the length of the match, up to `most`; `(R,)` each.
    """
    width = tokens.shape[1]
    columns = torch.arange(width, device=tokens.device)
    # matched[i, c]: of the tokens that end at column c, how many in a row equal those at the row's end.
    matched = torch.zeros_like(tokens)
    running = (columns >= padding[:, None]) & (columns < length[:, None] - 1)
    for back in range(most):
        last = tokens.gather(1, (length - 1 - back).clamp(min=0)[:, None])  # (R, 1)
        running = running & (tokens.roll(back, 1) == last) & (columns - back >= padding[:, None])
        matched = matched + running
    following = (length[:, None] - 1 - columns).clamp(0, depth)  # (R, width) tokens that can be copied from there
    # Longest match first, then enough to copy, then the latest: one number that sorts like the three.
    best = ((matched * (depth + 1) + following) * width + columns).argmax(1, keepdim=True)  # (R, 1)
    match = matched.gather(1, best)[:, 0]
    lengths = torch.minimum(following.gather(1, best)[:, 0], room) * (match > 0)  # (R,)
    places = torch.arange(depth, device=tokens.device)
    copied = tokens.gather(1, (best + 1 + places).clamp(max=width - 1))  # (R, depth)
    # A prompt may hold ids that the target cannot say: copy up to the first of them.
    unsayable = torch.where(copied >= vocab_size, places, depth).amin(1)  # (R,)
    return copied.clamp(max=vocab_size - 1), torch.minimum(lengths, unsayable), match
