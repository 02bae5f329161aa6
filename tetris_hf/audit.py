"""Where two texts of one prompt part, and how sure the model was there.

In bfloat16 and float16 the text of batched decoding depends on the shape of the batch, with or without speculation:
sums in another order round differently, and where the two best tokens are nearly equal, the other one wins. This tells
such near ties from real errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Difference:
    """
    The first column at which a row of two outputs differs.

    Attributes:
        row (`int`): The row.
        column (`int`): The first differing column; everything before it is equal.
        token (`int`): What `sequences` has there.
        reference_token (`int`): What `reference` has there.
        margin (`float`):
            Logit of the best token minus that of the second best, after the common prefix, in a forward of that row
            alone.
        gap (`float`):
            Logit of the best token minus the lower one of `token` and `reference_token`, in the same forward.
    """

    row: int
    column: int
    token: int
    reference_token: int
    margin: float
    gap: float

    def is_near_tie(self, tolerance: float) -> bool:
        """Whether both tokens are within `tolerance` of the best one: rounding of that size explains the "
        "difference."""
        return self.gap <= tolerance


@torch.no_grad()
def first_differences(
    model: PreTrainedModel,
    sequences: torch.Tensor,
    reference: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
) -> list[Difference]:
    """
    Compare two greedy outputs of `generate` for the same prompts, row by row.

    Args:
        model (`PreTrainedModel`): The model that generated both. One forward is made per differing row.
        sequences (`torch.LongTensor` of shape `(N, width)`): One output, prompts included.
        reference (`torch.LongTensor` of shape `(N, other_width)`): The other output. A narrower one counts as padded.
        attention_mask (`torch.LongTensor` of shape `(N, prompt_width)`, *optional*): That of the prompts.

    Returns:
        `list[Difference]`: One for each row that differs in the columns that both have.

    Raises:
        `ValueError`: If the outputs have different numbers of rows.

    Examples:

    ```python
    >>> differences = first_differences(model, ours, plain, batch["attention_mask"])
    >>> [d for d in differences if not d.is_near_tie(0.125)]
    []
    ```
    """
    if len(sequences) != len(reference):
        raise ValueError(
            f"`sequences` has {len(sequences)} rows, `reference` has {len(reference)}: pass one output of each."
        )
    width = min(sequences.shape[1], reference.shape[1])
    differs = sequences[:, :width] != reference[:, :width].to(sequences.device)  # (N, width)
    found = []
    for row in differs.any(1).nonzero()[:, 0].tolist():
        column = int(differs[row].nonzero()[0])
        padding = 0 if attention_mask is None else int((attention_mask[row] == 0).sum())
        logits = model(sequences[row : row + 1, padding:column]).logits[0, -1].float()  # (V,)
        best, second = logits.topk(2).values.tolist()
        tokens = int(sequences[row, column]), int(reference[row, column])
        found.append(
            Difference(row, column, *tokens, margin=best - second, gap=best - float(logits[list(tokens)].min()))
        )
    return found
