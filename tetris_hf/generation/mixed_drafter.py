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
        first = [pad(draft.expectations, (0, 1))[:, 0].masked_fill(draft.lengths == 0, -1.0) for draft in self._drafts]
        self._chosen = torch.stack(first).argmax(0)  # (R,)
        sampled = any(draft.q is not None for draft in self._drafts)
        deepest = max(draft.depth for draft in self._drafts)
        mixed = self._padded(self._drafts[0], deepest, sampled)
        for index, draft in enumerate(self._drafts[1:], start=1):
            mixed = _where(self._chosen == index, self._padded(draft, deepest, sampled), mixed)
        return mixed

    def _padded(self, draft: Draft, depth: int, sampled: bool) -> Draft:
        """The draft `depth` deep; with a q of its own if some other draft was sampled: one at its tokens."""
        missing = (0, depth - draft.depth)
        tokens = pad(draft.tokens, missing)
        q = None
        if draft.q is not None:
            q = pad(draft.q, (0, 0, *missing))
        elif sampled:
            q = one_hot(tokens, self._vocab_size).float()  # (R, K, V)
        entropies = None
        if self.keeps_entropies:
            known = draft.entropies if draft.entropies is not None else torch.zeros_like(draft.probabilities)
            entropies = pad(known, missing)
        probabilities, expectations = pad(draft.probabilities, missing), pad(draft.expectations, missing)
        return Draft(tokens, draft.lengths, probabilities, expectations, q, entropies)

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


def _where(chosen: torch.Tensor, one: Draft, other: Draft) -> Draft:
    """`one` in the rows `chosen`, of shape `(R,)`, else `other`; both equally deep."""
    deep = chosen[:, None]
    return Draft(
        tokens=torch.where(deep, one.tokens, other.tokens),
        lengths=torch.where(chosen, one.lengths, other.lengths),
        probabilities=torch.where(deep, one.probabilities, other.probabilities),
        expectations=torch.where(deep, one.expectations, other.expectations),
        q=None if one.q is None or other.q is None else torch.where(deep[:, :, None], one.q, other.q),
        entropies=None
        if one.entropies is None or other.entropies is None
        else torch.where(deep, one.entropies, other.entropies),
    )
