"""Several drafters for one batch: in every step, each row takes the proposal that promises most.

Knows proposals and what they promise. Does not know how any of them comes about.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch.nn.functional import one_hot, pad
from transformers import PreTrainedModel

from .draft import Draft, Verification
from .drafter import Drafter
from .fusing import fused
from .packed_model import PackedModel
from .processing import LogitsProcessing
from .rows import Rows


class MixedDrafter(Drafter):
    """
    Combines drafters per row and step, in one ranking under one capacity: lookup where it hits, else heads or a model.

    A row takes the proposal whose first place has the largest `expectations`; of equals, that of the earlier drafter.
    That number is blind to the token drawn there and known before it, so the choice keeps sampling exact
    (`docs/algorithm.md`).

    Args:
        drafters (`Sequence[Drafter]`): Two or more.

    Raises:
        `ValueError`: If there are fewer than two, or one of them is no [`Drafter`].
    """

    def __init__(self, drafters: Sequence[Drafter]):
        if len(drafters) < 2 or not all(isinstance(drafter, Drafter) for drafter in drafters):
            raise ValueError(f"`drafters` must be two or more `Drafter`s, got {[type(d).__name__ for d in drafters]}.")
        self.drafters = list(drafters)
        for drafter in self.drafters:
            drafter.shares_rows = True
        self._drafts: list[Draft] = []
        self._chosen = torch.zeros(0, dtype=torch.long)

    @property
    def needs_hidden_states(self) -> bool:  # type: ignore[override]
        return any(drafter.needs_hidden_states for drafter in self.drafters)

    @property
    def models(self) -> list[PreTrainedModel]:
        return [model for drafter in self.drafters for model in drafter.models]

    @property
    def is_capturable(self) -> bool:  # type: ignore[override]
        return all(drafter.is_capturable for drafter in self.drafters)

    @property
    def packed_models(self) -> list[PackedModel]:
        return [packed for drafter in self.drafters for packed in drafter.packed_models]

    def fingerprint(self) -> Hashable:
        return self.keeps_entropies, *(drafter.fingerprint() for drafter in self.drafters)

    def check(self, target: PreTrainedModel) -> None:
        for drafter in self.drafters:
            drafter.check(target)

    def begin(self, target: PreTrainedModel, rows: Rows, vocab_size: int, processing: LogitsProcessing) -> None:
        self._vocab_size = vocab_size
        for drafter in self.drafters:
            drafter.begin(target, rows, vocab_size, processing)

    def admit(self, rows: Rows, live: torch.Tensor) -> None:
        for drafter in self.drafters:
            drafter.admit(rows, live)

    def await_prompts(self, rows: Rows, live: torch.Tensor) -> None:
        for drafter in self.drafters:
            drafter.await_prompts(rows, live)

    def propose(self, rows: Rows, live: torch.Tensor, depth: int) -> Draft:
        """See [`Drafter.propose`]. Every drafter proposes for every row."""
        for drafter in self.drafters:
            drafter.keeps_entropies, drafter.feed = self.keeps_entropies, self.feed
        self._drafts = [drafter.propose(rows, live, depth) for drafter in self.drafters]
        deepest = max(draft.depth for draft in self._drafts)
        parts = [(draft.lengths, draft.tokens, draft.probabilities, draft.expectations) for draft in self._drafts]
        self._chosen, lengths, tokens, probabilities, expectations = _mixed(parts, deepest)
        q, entropies = None, None
        if any(draft.q is not None for draft in self._drafts):
            q = _of_chosen(self._chosen, [self._q(draft, deepest) for draft in self._drafts])  # (R, K, V)
        if self.keeps_entropies:
            known = [torch.zeros_like(d.probabilities) if d.entropies is None else d.entropies for d in self._drafts]
            entropies = _of_chosen(self._chosen, [_padded(one, deepest) for one in known])  # (R, K)
        return Draft(tokens, lengths, probabilities, expectations, q, entropies)

    def _q(self, draft: Draft, depth: int) -> torch.Tensor:
        """The draft's q `depth` deep; where its tokens were not sampled, while others were, one at its tokens."""
        if draft.q is not None:
            return pad(draft.q, (0, 0, 0, depth - draft.depth))
        return one_hot(_padded(draft.tokens, depth), self._vocab_size).float()

    def observe(self, rows: Rows, verification: Verification) -> None:
        """Each drafter learns from the rows that took its proposal: elsewhere, nothing of it was verified."""
        for index, drafter in enumerate(self.drafters):
            own = verification
            if verification.draft.depth > 0:
                lengths = verification.lengths * (self._chosen == index)
                own = replace(verification, draft=self._drafts[index], lengths=lengths)
            drafter.observe(rows, own)

    def end(self) -> None:
        self._drafts = []
        for drafter in self.drafters:
            drafter.end()


@fused
def _mixed(parts: Sequence[tuple[torch.Tensor, ...]], depth: int) -> tuple[torch.Tensor, ...]:
    """
    The proposal that each row takes, by its number, and what it says: lengths of shape `(R,)`, then tokens,
    probabilities and expectations of shape `(R, depth)`, given of each proposal as deep as it is.
    """
    first = [_padded(expectations, 1)[:, 0].masked_fill(lengths == 0, -1.0) for lengths, *_, expectations in parts]
    chosen = torch.stack(first).argmax(0)  # (R,)
    lengths, *deep = zip(*parts, strict=True)
    mixed = [_of_chosen(chosen, [_padded(one, depth) for one in some]) for some in deep]
    return chosen, _of_chosen(chosen, lengths), *mixed


def _padded(one: torch.Tensor, depth: int) -> torch.Tensor:
    """`(R, K)` to `(R, depth)`, if that is deeper."""
    return pad(one, (0, depth - one.shape[1])) if one.shape[1] < depth else one


def _of_chosen(chosen: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Of `parts`, all of shape `(R, ...)`, in each row the one of the number `chosen`, of shape `(R,)`."""
    found = parts[0]
    for number, part in enumerate(parts[1:], start=1):
        found = torch.where((chosen == number).view(-1, *[1] * (part.dim() - 1)), part, found)
    return found
