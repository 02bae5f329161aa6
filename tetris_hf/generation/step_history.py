"""What every single step did, where `TetrisStats` has totals only.

Knows outcomes. Selects nothing.
"""

from __future__ import annotations

import torch

from .draft import Draft, Verification
from .selection import DraftSelector
from .staircase import Staircase


class StepHistory(DraftSelector):
    """
    Keeps a [`Staircase`] of every step. Put it behind the selectors that select: it leaves their choice as it is.

    It reads every step on the host, so that a step is not captured whole in a CUDA graph; text is the same.

    Attributes:
        steps (`list[Staircase]`):
            One for each step, over all calls that it took part in. `accepted` is counted before a row is cut at its
            end.

    Examples:

    ```python
    >>> history = StepHistory()
    >>> model.generate(
    ...     **batch, assistant_model=draft, tetris_capacity=64, tetris_selector=[TetrisSelector(), history]
    ... )
    >>> print(history.steps[3])
    >>> history.steps[3].plot()
    ```
    """

    def __init__(self) -> None:
        self.steps: list[Staircase] = []

    def __call__(self, draft: Draft, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
        return lengths

    def observe(self, verification: Verification) -> None:
        lengths = verification.lengths
        accepted = torch.minimum(verification.num_accepted, lengths)
        drafted = verification.draft.lengths
        columns = torch.stack([verification.live, drafted, lengths, accepted]).tolist()
        title = f"Step {len(self.steps) + 1}: {sum(columns[2])} verified, {sum(columns[3])} accepted"
        self.steps.append(Staircase(title, *columns))

    def clear(self) -> None:
        """Forget all steps."""
        self.steps.clear()
