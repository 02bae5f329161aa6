"""The rows of a batch: their tokens, how far each has come, and which are done.

Knows columns of the padded batch, as plain `generate` shows them. Does not know models, drafts or probabilities.
"""

from __future__ import annotations

import torch

from .fusing import fused


class Rows:
    """
    N rows of tokens in the coordinates of plain `generate`: a left-padded prompt of `prompt_width` columns, then what
    was generated. `length[i]` columns of row i are committed; what lies beyond is scratch. `seeds[i]` is what the
    draws of its text depend on, if they are to depend on nothing else. `unfed[i]` tokens of the prompt, besides its
    last one, have yet to be computed; until then the row waits.

    Args:
        input_ids (`torch.LongTensor` of shape `(N, prompt_width)`): Left-padded prompts.
        padding (`torch.LongTensor` of shape `(N,)`): Padding columns at the left of each row.
        max_length (`int`): Columns at which a row ends, prompt and padding included.
        pad_token_id (`int`): What fills a row after its end.
        width (`int`, *optional*): Columns to make room for, by default `max_length`.
        fixed_shapes (`bool`, *optional*, defaults to `False`):
            Whether no tensor of a step may have a shape that depends on values, so that the step can be captured in a
            CUDA graph. All rows then take part in every step, the finished ones with no tokens.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        padding: torch.Tensor,
        max_length: int,
        pad_token_id: int,
        width: int | None = None,
        fixed_shapes: bool = False,
    ):
        self.width = max_length if width is None else width
        self.pad_token_id = pad_token_id
        self.fixed_shapes = fixed_shapes
        self.padding = torch.empty_like(padding)
        # One column more than a row can fill: it takes what must not be kept.
        self.tokens = input_ids.new_empty((len(input_ids), self.width + 1))  # (N, width + 1)
        self.length, self.max_length = torch.empty_like(padding), torch.empty_like(padding)
        self.finished = torch.empty_like(padding, dtype=torch.bool)
        self.seeds, self.unfed = torch.zeros_like(padding), torch.zeros_like(padding)
        self.everyone = torch.arange(len(input_ids), device=padding.device)
        self.restart(input_ids, padding, max_length)

    def restart(self, input_ids: torch.Tensor, padding: torch.Tensor, max_length: int) -> None:
        """
        Begin a new batch of as many rows in the same tensors, which a captured step has at their addresses.

        Args:
            input_ids (`torch.LongTensor` of shape `(N, prompt_width)`): Left-padded prompts.
            padding (`torch.LongTensor` of shape `(N,)`): Padding columns at the left of each row.
            max_length (`int`): Columns at which a row ends, at most `width`.
        """
        self.prompt_width = input_ids.shape[1]
        self.tokens.fill_(self.pad_token_id)
        self.tokens[:, : self.prompt_width] = input_ids
        self.padding.copy_(padding)
        self.length.fill_(self.prompt_width)
        self.max_length.fill_(max_length)
        self.unfed.zero_()
        self.finished.zero_()

    def admit(
        self,
        rows: torch.Tensor,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        max_length: torch.Tensor,
        seeds: torch.Tensor,
    ) -> None:
        """
        Put new prompts, without padding and not yet computed, into rows that have ended.

        Args:
            rows (`torch.LongTensor` of shape `(R,)`): Rows.
            input_ids (`torch.LongTensor` of shape `(R, W)`): Prompts, padded on the right; W at most `width`.
            lengths (`torch.LongTensor` of shape `(R,)`): Tokens of each prompt.
            max_length (`torch.LongTensor` of shape `(R,)`): Columns at which each row ends, at most `width`.
            seeds (`torch.LongTensor` of shape `(R,)`): Of their texts.
        """
        self.tokens[rows] = self.pad_token_id
        self.tokens[rows, : input_ids.shape[1]] = input_ids
        self.padding[rows] = 0
        self.length[rows] = lengths
        self.max_length[rows] = max_length
        self.seeds[rows] = seeds
        self.unfed[rows] = lengths - 1
        self.finished[rows] = False

    @property
    def num_rows(self) -> int:
        return self.tokens.shape[0]

    def live(self) -> torch.Tensor:
        """Rows that take part in the next step: those that are not finished, or all, if shapes are fixed. `(R,)`."""
        return self.everyone if self.fixed_shapes else (~self.finished).nonzero()[:, 0]

    def room(self, rows: torch.Tensor) -> torch.Tensor:
        """
        Draft tokens that may still be accepted, leaving one column for the bonus token; 0 for rows that have ended or
        wait for their prompt. Shape `(R,)`.
        """
        return _room(self.length, self.max_length, self.finished, self.unfed, rows)

    def feed(self, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Count what [`~Rows.next_feed`] names as computed, and return it."""
        first, taken = self.next_feed(budget)
        self.unfed.sub_(taken)
        return first, taken

    def next_feed(self, budget: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The next prompt tokens of rows that wait: `budget` of them at most, lower rows first.

        Returns:
            `tuple[torch.LongTensor, torch.LongTensor]`: Position of the first one in each row's text, that of
            the last committed token where a row does not wait, and how many, both of shape `(N,)`.
        """
        return _next_feed(self.length, self.padding, self.unfed, budget)

    @property
    def remaining(self) -> torch.Tensor:
        """Tokens that each row may still get, 0 if it has ended. Shape `(N,)`."""
        return (self.max_length - self.length).masked_fill(self.finished, 0)

    def text_length(self, rows: torch.Tensor) -> torch.Tensor:
        """Committed tokens of each row without padding, shape `(R,)`."""
        return _text_length(self.length, self.padding, rows)

    def read(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """
        Tokens at positions of the unpadded text; a position outside reads some token of the row.

        Args:
            rows (`torch.LongTensor`): Rows.
            positions (`torch.LongTensor` of the same shape): Positions from 0.
        """
        return _read(self.tokens, self.padding, rows, positions, self.width)

    def write(self, rows: torch.Tensor, block: torch.Tensor, counts: torch.Tensor) -> None:
        """
        Write the first `counts[i]` tokens of `block[i]` behind the committed ones, without committing them.

        Args:
            rows (`torch.LongTensor` of shape `(R,)`): Rows.
            block (`torch.LongTensor` of shape `(R, J)`): Tokens.
            counts (`torch.LongTensor` of shape `(R,)`): How many of each.
        """
        _write(self.tokens, self.length, self.max_length, rows, block, counts, self.width)

    def commit(self, rows: torch.Tensor, counts: torch.Tensor, finished: torch.Tensor) -> None:
        """
        Commit the next `counts[i]` written columns of each row.

        Args:
            rows (`torch.LongTensor` of shape `(R,)`): Rows.
            counts (`torch.LongTensor` of shape `(R,)`): Columns to commit.
            finished (`torch.BoolTensor` of shape `(R,)`):
                Rows that end with them, besides those that reach `max_length`.
        """
        _commit(self.length, self.finished, self.max_length, rows, counts, finished)

    def shown(self, columns: int, rows: torch.Tensor) -> torch.Tensor:
        """
        All rows' first `columns` columns for someone who may look at other rows too: those of `rows` with what is
        written, committed or not, the others as if they had ended. Shape `(N, columns)`.
        """
        beyond = torch.arange(columns, device=rows.device) >= self.length[:, None]  # (N, columns)
        beyond[rows] = False
        return self.prefix(columns).masked_fill(beyond, self.pad_token_id)

    def cut(self, rows: torch.Tensor, column: int) -> None:
        """End the rows of the mask `rows`, of shape `(N,)`, at `column`, which they have reached or passed."""
        self.length.masked_fill_(rows, column)
        self.finished |= rows

    def prefix(self, columns: int, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The first `columns` columns, padding included, as plain `generate` shows them. Shape `(R, columns)`."""
        return self.tokens[:, :columns] if rows is None else self.tokens[rows, :columns]

    def sequences(self) -> torch.Tensor:
        """Prompts and continuations, right-padded to the longest row: what `generate` returns. Shape `(N, width)`."""
        width = int(self.length.max())
        beyond = torch.arange(width, device=self.length.device) >= self.length[:, None]
        return self.tokens[:, :width].masked_fill(beyond, self.pad_token_id)


def resting(finished: torch.Tensor, unfed: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Which of `rows`, of shape `(R,)`, have ended or wait for their prompt."""
    return finished[rows] | (unfed[rows] > 0)


@fused
def _text_length(length: torch.Tensor, padding: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return length[rows] - padding[rows]


@fused
def _next_feed(
    length: torch.Tensor, padding: torch.Tensor, unfed: torch.Tensor, budget: int
) -> tuple[torch.Tensor, torch.Tensor]:
    before = unfed.cumsum(0) - unfed
    return length - padding - 1 - unfed, torch.minimum(unfed, (budget - before).clamp(min=0))


@fused
def _room(
    length: torch.Tensor, max_length: torch.Tensor, finished: torch.Tensor, unfed: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    room = (max_length[rows] - 1 - length[rows]).clamp(min=0)
    return room.masked_fill(resting(finished, unfed, rows), 0)


@fused
def _read(
    tokens: torch.Tensor, padding: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, width: int
) -> torch.Tensor:
    return tokens[rows, (padding[rows] + positions).clamp(0, width)]


@fused
def _write(
    tokens: torch.Tensor,
    length: torch.Tensor,
    max_length: torch.Tensor,
    rows: torch.Tensor,
    block: torch.Tensor,
    counts: torch.Tensor,
    width: int,
) -> None:
    offsets = torch.arange(block.shape[1], device=block.device)
    columns = length[rows, None] + offsets  # (R, J)
    kept = (offsets < counts[:, None]) & (columns < max_length[rows, None])
    tokens[rows[:, None], columns.where(kept, width)] = block


@fused
def _commit(
    length: torch.Tensor,
    finished: torch.Tensor,
    max_length: torch.Tensor,
    rows: torch.Tensor,
    counts: torch.Tensor,
    ended: torch.Tensor,
) -> None:
    grown = length[rows] + counts
    finished[rows] = finished[rows] | ended | (grown >= max_length[rows])
    length[rows] = grown
