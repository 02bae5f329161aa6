"""The rows of a batch: their tokens, how far each has come, and which are done.

Knows columns of the padded batch, as plain `generate` shows them. Does not know models, drafts or probabilities.
"""

from __future__ import annotations

import torch


class Rows:
    """
    N rows of tokens in the coordinates of plain `generate`: a left-padded prompt of `prompt_width` columns, then what
    was generated. `length[i]` columns of row i are committed; what lies beyond is scratch.

    Args:
        input_ids (`torch.LongTensor` of shape `(N, prompt_width)`): Left-padded prompts.
        padding (`torch.LongTensor` of shape `(N,)`): Padding columns at the left of each row.
        max_length (`int`): Columns at which a row ends, prompt and padding included.
        pad_token_id (`int`): What fills a row after its end.
    """

    def __init__(self, input_ids: torch.Tensor, padding: torch.Tensor, max_length: int, pad_token_id: int):
        num_rows, self.prompt_width = input_ids.shape
        self.max_length = max_length
        self.pad_token_id = pad_token_id
        self.padding = padding
        # One column more than a row can fill: it takes what must not be kept.
        self.tokens = input_ids.new_full((num_rows, max_length + 1), pad_token_id)  # (N, max_length + 1)
        self.tokens[:, : self.prompt_width] = input_ids
        self.length = torch.full_like(padding, self.prompt_width)
        self.finished = torch.zeros_like(padding, dtype=torch.bool)

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    def live(self) -> torch.Tensor:
        """Rows that are not finished, shape `(R,)`."""
        return (~self.finished).nonzero()[:, 0]

    def room(self, rows: torch.Tensor) -> torch.Tensor:
        """Draft tokens that may still be accepted, leaving one column for the bonus token. Shape `(R,)`."""
        return (self.max_length - 1 - self.length[rows]).clamp(min=0)

    def text_length(self, rows: torch.Tensor) -> torch.Tensor:
        """Committed tokens of each row without padding, shape `(R,)`."""
        return self.length[rows] - self.padding[rows]

    def read(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """
        Tokens at positions of the unpadded text; a position outside reads some token of the row.

        Args:
            rows (`torch.LongTensor`): Rows.
            positions (`torch.LongTensor` of the same shape): Positions from 0.
        """
        return self.tokens[rows, (self.padding[rows] + positions).clamp(0, self.max_length)]

    def write(self, rows: torch.Tensor, block: torch.Tensor, counts: torch.Tensor) -> None:
        """
        Write the first `counts[i]` tokens of `block[i]` behind the committed ones, without committing them.

        Args:
            rows (`torch.LongTensor` of shape `(R,)`): Rows.
            block (`torch.LongTensor` of shape `(R, J)`): Tokens.
            counts (`torch.LongTensor` of shape `(R,)`): How many of each.
        """
        offsets = torch.arange(block.shape[1], device=block.device)
        columns = self.length[rows, None] + offsets  # (R, J)
        kept = (offsets < counts[:, None]) & (columns < self.max_length)
        self.tokens[rows[:, None], columns.where(kept, self.max_length)] = block

    def commit(self, rows: torch.Tensor, counts: torch.Tensor, finished: torch.Tensor) -> None:
        """
        Commit the next `counts[i]` written columns of each row.

        Args:
            rows (`torch.LongTensor` of shape `(R,)`): Rows.
            counts (`torch.LongTensor` of shape `(R,)`): Columns to commit.
            finished (`torch.BoolTensor` of shape `(R,)`):
                Rows that end with them, besides those that reach `max_length`.
        """
        self.length[rows] += counts
        self.finished[rows] = finished | (self.length[rows] >= self.max_length)

    def prefix(self, columns: int, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The first `columns` columns, padding included, as plain `generate` shows them. Shape `(R, columns)`."""
        return self.tokens[:, :columns] if rows is None else self.tokens[rows, :columns]

    def sequences(self) -> torch.Tensor:
        """Prompts and continuations, right-padded to the longest row: what `generate` returns. Shape `(N, width)`."""
        width = int(self.length.max())
        beyond = torch.arange(width, device=self.length.device) >= self.length[:, None]
        return self.tokens[:, :width].masked_fill(beyond, self.pad_token_id)
