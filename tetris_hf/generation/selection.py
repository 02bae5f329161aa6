"""Which draft tokens of the batch are verified: from scores to a number of tokens per row.

Knows drafts and a budget. Does not know models; whatever it selects, the text is exact as long as the rule of
`docs/algorithm.md` is kept: how many tokens a row verifies may not depend on the token it stops before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers.utils import logging

from .budget import beats_the_worst, evenly, fits_deeper, no_longer, spend
from .calibration import AcceptanceCalibration
from .draft import Draft, Verification


logger = logging.get_logger(__name__)


class DraftSelector(ABC):
    """
    Shortens the rows of a draft, in the manner of a `LogitsProcessor`: small, callable, composable in a list.

    Attributes:
        is_capturable (`bool`):
            Whether calls, `wants_deeper` and `observe` may be captured in a CUDA graph: they never wait for the
            device, make no shape depend on values and keep what they learn in the same tensors, changed in place. Rows
            that have ended then come along with a length of 0.
        needs_entropies (`bool`): Whether drafts are to hold the entropy of the distribution at each place.
        needs_remaining (`bool`): Whether drafts are to tell how far each row of a closed batch is from its end.

    Examples:

    ```python
    >>> class Threshold(DraftSelector):
    ...     def __call__(self, draft, lengths, capacity):
    ...         return torch.minimum(lengths, (draft.prefix_scores() > 0.1).sum(1))

    >>> selectors = [Threshold(), TetrisSelector()]
    >>> model.generate(**batch, assistant_model=draft, tetris_capacity=64, tetris_selector=selectors)
    ```
    """

    is_capturable: bool = False
    needs_entropies: bool = False
    needs_remaining: bool = False

    @abstractmethod
    def __call__(self, draft: Draft, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
        """
        Args:
            draft ([`Draft`]): Tokens of R rows, K deep, with their scores.
            lengths (`torch.LongTensor` of shape `(R,)`): What is still selectable: the first `lengths[i]` of each row.
            capacity (`int`): C, draft tokens that may be verified over all rows.

        Returns:
            `torch.LongTensor` of shape `(R,)`: At most `lengths`.
        """

    def wants_deeper(self, draft: Draft, capacity: int) -> bool | torch.Tensor:
        """
        Whether a place behind those of `draft` could still be selected, for this selector alone and known before that
        place is drafted. If not, the whole batch stops drafting.

        Args:
            draft ([`Draft`]): What was drafted so far; its `lengths` say how deep each row can go.
            capacity (`int`): C.

        Returns:
            `bool` or `torch.BoolTensor` of shape `()`: If `is_capturable`, found without waiting for the device.
        """
        return True

    def check_sampling(self) -> None:  # noqa: B027
        """Called once before a call that samples. A selector that would bias it warns or raises here."""

    def observe(self, verification: Verification) -> None:  # noqa: B027
        """Called after every step, for selectors that learn. What is learned may only affect later steps."""


class DraftSelectorList(list[DraftSelector]):
    """Selectors applied one after the other. Whatever they leave, [`spend`] keeps the total within the capacity."""

    @classmethod
    def of(cls, selectors: DraftSelector | Iterable[DraftSelector] | None) -> DraftSelectorList:
        """A list of what the user gave: nothing (a [`TetrisSelector`]), one selector or several."""
        if selectors is None:
            return cls([TetrisSelector()])
        if isinstance(selectors, Iterable) and not isinstance(selectors, str):
            found = cls(selectors)
        else:
            found = cls([selectors])
        for selector in found:
            if not callable(selector):
                raise ValueError(
                    f"`tetris_selector` must be a `DraftSelector` or a list of them, got {type(selector).__name__}."
                )
        return found

    def __call__(self, draft: Draft, capacity: int) -> torch.Tensor:
        """Lengths of shape `(R,)`, their sum at most `capacity`."""
        lengths = draft.lengths
        if draft.depth == 0:
            return lengths
        for selector in self:
            lengths = no_longer(lengths, selector(draft, lengths, capacity))
        # These two spend the budget themselves, and others can only take away; of their subclasses nobody knows.
        if any(type(selector) in (TetrisSelector, FixedWindowSelector) for selector in self):
            return lengths
        return spend(evenly(lengths, draft.depth), lengths, capacity)

    @property
    def needs_entropies(self) -> bool:
        """Whether some selector reads the entropies of a draft."""
        return any(getattr(selector, "needs_entropies", False) for selector in self)

    @property
    def needs_remaining(self) -> bool:
        """Whether some selector asks for [`Draft.remaining`]."""
        return any(getattr(selector, "needs_remaining", False) for selector in self)

    def wants_deeper(self, draft: Draft, capacity: int) -> bool | torch.Tensor:
        """See [`DraftSelector.wants_deeper`]. Of several, a later one may want what an earlier one leaves."""
        asked = getattr(self[0], "wants_deeper", None) if len(self) == 1 else None
        return True if asked is None else asked(draft, capacity)

    def observe(self, verification: Verification) -> None:
        """Show a step's outcome to every selector."""
        for selector in self:
            selector.observe(verification)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within this context, what selectors learn in tensors is of no account: at its end they are as before."""
        before = [(tensor, tensor.clone()) for tensor in _tensors_of(list(self), set())]
        try:
            yield
        finally:
            for tensor, value in before:
                tensor.copy_(value)


def _tensors_of(holder: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that an object keeps in its attributes and theirs, models left aside. `seen` holds ids."""
    if id(holder) in seen:
        return
    seen.add(id(holder))
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, Mapping | list | tuple):
        for one in holder.values() if isinstance(holder, Mapping) else holder:
            yield from _tensors_of(one, seen)
    elif hasattr(holder, "__dict__") and not isinstance(holder, type | torch.nn.Module):
        yield from _tensors_of(vars(holder), seen)


class TetrisSelector(DraftSelector):
    """
    Spends the budget on the tokens most likely to be accepted, over the whole batch (TETRIS paper, Algorithm 1).

    Args:
        score (`str`, *optional*, defaults to `"predictable"`):
            `"predictable"` judges a token by the distribution at its place, not by the token drawn: exact at every
            temperature, and the paper's own score when drafts are greedy. `"paper"` judges it by the probability of
            the very token drawn, for reproduction: when sampling, this biases the output, and a warning says so.
        calibration ([`AcceptanceCalibration`], *optional*):
            Turns a drafter's estimates into chances of acceptance, learned from what was accepted before.
        slowest_first (`bool`, *optional*, defaults to `False`):
            Whether, in a closed batch (`generate`), tokens of rows that lag behind go first: scores are multiplied by
            [`Draft.urgency`]. The batch ends with its slowest row, so that it takes fewer steps, though each accepts
            fewer tokens. Not of the paper.

    Raises:
        `ValueError`: If `score` is neither of the two.
    """

    is_capturable = True

    def __init__(
        self,
        score: str = "predictable",
        calibration: AcceptanceCalibration | None = None,
        slowest_first: bool = False,
    ):
        if score not in ("predictable", "paper"):
            raise ValueError(f'`score` must be "predictable" or "paper", got {score!r}.')
        self.score = score
        self.calibration = calibration
        self.slowest_first = self.needs_remaining = slowest_first

    def __call__(self, draft: Draft, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
        scored = draft.prefix_scores if self.calibration is None else partial(self.calibration.prefix_scores, draft)
        scores = scored(predictable=self.score == "predictable")  # (R, K)
        if self.slowest_first and draft.remaining is not None:
            scores = scores * draft.urgency()[:, None]
        return spend(scores, lengths, capacity)

    def wants_deeper(self, draft: Draft, capacity: int) -> torch.Tensor:
        """
        Whether some row's chance to get as far as its next place beats the worst score that the budget holds by now. A
        tie goes to the shallower place.
        """
        if self.calibration is not None:
            draft = self.calibration.calibrated(draft)
        urgency = draft.urgency() if self.slowest_first else torch.ones_like(draft.probabilities[:, 0])
        chances = draft.probabilities, draft.expectations
        return beats_the_worst(*chances, draft.lengths, urgency, self.score == "predictable", capacity)

    def observe(self, verification: Verification) -> None:
        if self.calibration is not None:
            self.calibration.observe(verification)

    def check_sampling(self) -> None:
        if self.score == "paper":
            logger.warning(
                '`TetrisSelector(score="paper")` biases sampling: the text does not follow the distribution of the '
                'target. Use `score="predictable"`, which is exact and the same when drafts are greedy.'
            )


class FixedWindowSelector(DraftSelector):
    """
    Gives every row the same window: standard speculative decoding (Leviathan et al., 2023).

    A window that does not fit the capacity is cut for all rows alike, one place at a time.

    Args:
        window (`int`, *optional*): Draft tokens per row; by default all that were drafted.

    Raises:
        `ValueError`: If `window` is negative.
    """

    is_capturable = True

    def __init__(self, window: int | None = None):
        if window is not None and window < 0:
            raise ValueError(f"`window` must be at least 0, got {window}.")
        self.window = window

    def __call__(self, draft: Draft, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
        if self.window is not None:
            lengths = lengths.clamp(max=self.window)
        return spend(evenly(lengths, draft.depth), lengths, capacity)

    def wants_deeper(self, draft: Draft, capacity: int) -> bool | torch.Tensor:
        if self.window is not None and draft.depth >= self.window:
            return False
        return fits_deeper(draft.lengths, draft.depth, capacity)
