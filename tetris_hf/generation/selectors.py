"""Other rules of how many drafts are verified: those that TETRIS is compared to, and parts to compose.

Knows drafts, scores and what was accepted before. Each rule is exact when sampling: it judges a place by the
distribution there and by the past, never by the token drawn at that place.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .budget import evenly, spend
from .draft import Draft, Verification
from .selection import DraftSelector, DraftSelectorList


class ConfidenceThresholdSelector(DraftSelector):
    """
    Ends a row at the first place whose draft distribution is less sure than a threshold (BiLD, Kim et al., 2023;
    Kangaroo, Liu et al., 2024; TETRIS paper, section 2).

    Args:
        threshold (`float`): Least `expectations` of a verified place, in [0, 1].

    Raises:
        `ValueError`: If `threshold` is outside of [0, 1].
    """

    is_capturable = True

    def __init__(self, threshold: float):
        if not 0 <= threshold <= 1:
            raise ValueError(f"`threshold` must be in [0, 1], got {threshold}.")
        self.threshold = threshold

    def __call__(self, draft: Draft, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
        return torch.minimum(lengths, _leading(draft.expectations >= self.threshold))


class EntropySelector(DraftSelector):
    """
    Ends a row at the first place where a lower bound of the chance of acceptance, `1 - sqrt(scale * H(q))`, falls
    below a threshold (AdaEDL, Agrawal et al., 2024; TETRIS paper, related work).

    Args:
        threshold (`float`): Least bound of a verified place.
        scale (`float`, *optional*, defaults to 0.2): Factor on the entropy in nats.

    Raises:
        `ValueError`: If `scale` is not positive.
    """

    is_capturable = True
    needs_entropies = True

    def __init__(self, threshold: float, scale: float = 0.2):
        if not scale > 0:
            raise ValueError(f"`scale` must be positive, got {scale}.")
        self.threshold = threshold
        self.scale = scale

    def __call__(self, draft: Draft, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
        if draft.entropies is None:  # a copy from the text has no distribution
            return lengths
        return torch.minimum(lengths, _leading(1 - (self.scale * draft.entropies).sqrt() >= self.threshold))


class UnionSelector(DraftSelector):
    """
    Verifies what at least one of several selectors would: with a confidence threshold and an entropy bound, the rule
    of Medusa (Cai et al., 2024) for which tokens are worth it.

    Args:
        selectors (`Sequence[DraftSelector]`): Two or more.

    Raises:
        `ValueError`: If there are fewer than two.
    """

    def __init__(self, selectors: Sequence[DraftSelector]):
        if len(selectors) < 2:
            raise ValueError(f"`selectors` must be two or more, got {len(selectors)}.")
        self.selectors = DraftSelectorList(selectors)

    @property
    def is_capturable(self) -> bool:  # type: ignore[override]
        return all(selector.is_capturable for selector in self.selectors)

    @property
    def needs_entropies(self) -> bool:  # type: ignore[override]
        return self.selectors.needs_entropies

    @property
    def needs_remaining(self) -> bool:  # type: ignore[override]
        return self.selectors.needs_remaining

    def __call__(self, draft: Draft, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
        return torch.stack([selector(draft, lengths, capacity) for selector in self.selectors]).amax(0)

    def observe(self, verification: Verification) -> None:
        self.selectors.observe(verification)

    def check_sampling(self) -> None:
        for selector in self.selectors:
            selector.check_sampling()


class DynamicWindowSelector(DraftSelector):
    """
    One window for the whole batch, chosen anew in every step for the most tokens per time: dynamic speculative
    decoding, or SmartSpec (Liu et al., 2024), the paper's baseline DSD.

    With a the moving average of acceptance in earlier steps, a window of k gives each row `(1 - a^(k+1)) / (1 - a)`
    tokens for `base_cost + token_cost * R * (k + 1) + draft_cost * k`, R rows. All K places are drafted anyway, so the
    saving is in what is verified.

    Args:
        token_cost (`float`): Time of the target for one more token in a step.
        base_cost (`float`, *optional*, defaults to 1.0): Time of a step of the target that does not depend on tokens.
        draft_cost (`float`, *optional*, defaults to 0.0): Time of one place of a draft.
        momentum (`float`, *optional*, defaults to 0.9): Weight of the past in the average.

    Raises:
        `ValueError`: If a cost is negative, or `momentum` is outside of [0, 1).
    """

    is_capturable = True

    def __init__(self, token_cost: float, base_cost: float = 1.0, draft_cost: float = 0.0, momentum: float = 0.9):
        for name, cost in (("token_cost", token_cost), ("base_cost", base_cost), ("draft_cost", draft_cost)):
            if cost < 0:
                raise ValueError(f"`{name}` must be at least 0, got {cost}.")
        if not 0 <= momentum < 1:
            raise ValueError(f"`momentum` must be in [0, 1), got {momentum}.")
        self.token_cost, self.base_cost, self.draft_cost, self.momentum = token_cost, base_cost, draft_cost, momentum
        self._acceptance: torch.Tensor | None = None

    def __call__(self, draft: Draft, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
        acceptance = self._average(lengths.device)
        windows = torch.arange(draft.depth + 1, device=lengths.device)  # (K + 1,)
        tokens = acceptance.pow(windows).cumsum(0)
        rows = (lengths > 0).sum()
        cost = self.base_cost + self.token_cost * rows * (windows + 1) + self.draft_cost * windows
        lengths = torch.minimum(lengths, (tokens / cost).argmax())
        return spend(evenly(lengths, draft.depth), lengths, capacity)

    def observe(self, verification: Verification) -> None:
        """The average follows the share of tried tokens that stood; the tokens after a rejected one were not tried."""
        if verification.draft.depth == 0:
            return
        average = self._average(verification.lengths.device)
        accepted = torch.minimum(verification.num_accepted, verification.lengths)
        tried = (accepted + (accepted < verification.lengths)).sum()
        share = accepted.sum() / tried.clamp(min=1)
        weight = (1 - self.momentum) * (tried > 0)
        average.add_(weight * (share.clamp(0.01, 0.99) - average))

    def _average(self, device: torch.device) -> torch.Tensor:
        if self._acceptance is None or self._acceptance.device != device:
            self._acceptance = torch.full((), 0.7, device=device)
        return self._acceptance


def _leading(wanted: torch.Tensor) -> torch.Tensor:
    """How many places are wanted before the first that is not: `(R, K)` to `(R,)`."""
    return wanted.long().cumprod(1).sum(1)
