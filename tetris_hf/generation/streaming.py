"""Tokens handed out while they are generated, row by row.

Knows committed tokens and who wants them. Does not know how they came about.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .rows import Rows


class RowStreamer:
    """
    Receives the tokens of every row of a batch as they are committed. Subclass it and override what you need.

    Rows advance by unequal numbers of tokens; a call gives one row's new tokens, already cut where the row ends.
    """

    def put_row(self, row: int, tokens: torch.Tensor) -> None:
        """
        Args:
            row (`int`): Index of the row in the batch.
            tokens (`torch.LongTensor` of shape `(n,)`): Its next tokens, on the CPU.
        """

    def end_row(self, row: int) -> None:
        """
        Args:
            row (`int`): Index of a row that has ended.
        """

    def end(self) -> None:
        """All rows have ended."""


class RowTextStreamer(RowStreamer):
    """
    Decodes every row as it grows and hands on the text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        on_text (`Callable[[int, str], None]`): Called with a row's index and its next piece of text.
        decode_kwargs: Passed on to `tokenizer.decode`, `skip_special_tokens=True` for instance.

    Examples:

    ```python
    >>> streamer = RowTextStreamer(tokenizer, lambda row, text: print(f"[{row}] {text}"), skip_special_tokens=True)
    >>> model.generate(**batch, assistant_model=draft, tetris_capacity=64, streamer=streamer)
    ```
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[int, str], None], **decode_kwargs: Any):
        self.tokenizer = tokenizer
        self.on_text = on_text
        self.decode_kwargs = decode_kwargs
        self._pending: dict[int, list[int]] = {}

    def put_row(self, row: int, tokens: torch.Tensor) -> None:
        pending = self._pending.setdefault(row, [])
        pending.extend(tokens.tolist())
        text = self.tokenizer.decode(pending, **self.decode_kwargs)
        # A character may be spread over several tokens: until it is whole, it decodes to the replacement character.
        if text and not text.endswith("\ufffd"):
            self._pending[row] = []
            self.on_text(row, text)

    def end_row(self, row: int) -> None:
        pending = self._pending.pop(row, [])
        if pending:
            self.on_text(row, self.tokenizer.decode(pending, **self.decode_kwargs))


class _OneRow(RowStreamer):
    """A stock streamer as transformers serves it: the prompt first, then the tokens of the only row."""

    def __init__(self, streamer: BaseStreamer):
        self.streamer = streamer

    def put_row(self, row: int, tokens: torch.Tensor) -> None:
        for token in tokens.split(1):
            self.streamer.put(token)

    def end(self) -> None:
        self.streamer.end()


def as_row_streamer(streamer: RowStreamer | BaseStreamer, input_ids: torch.Tensor) -> RowStreamer:
    """
    Args:
        streamer ([`RowStreamer`] or `BaseStreamer`): What the user gave.
        input_ids (`torch.LongTensor` of shape `(N, prompt_width)`):
            The prompts, which a stock streamer is shown first.

    Raises:
        `ValueError`: If a stock streamer, which cannot tell rows apart, is given for several of them.
    """
    if isinstance(streamer, RowStreamer):
        return streamer
    if len(input_ids) > 1:
        raise ValueError(
            f"`streamer` ({type(streamer).__name__}) cannot tell the {len(input_ids)} rows of this batch apart: pass "
            "a `tetris_hf.RowStreamer`, or one prompt."
        )
    streamer.put(input_ids.cpu())
    return _OneRow(streamer)


def stream_new_tokens(
    streamer: RowStreamer, rows: Rows, live: torch.Tensor, counts: torch.Tensor, settled: int | None = None
) -> None:
    """
    Hand out what was just committed.

    Args:
        streamer ([`RowStreamer`]): Who receives it.
        rows (`Rows`): The batch, after the commit.
        live (`torch.LongTensor` of shape `(R,)`): Rows that took part.
        counts (`torch.LongTensor` of shape `(R,)`): New tokens of each.
        settled (`int`, *optional*): Column behind which tokens may still be taken back and are not shown.
    """
    lengths, finished = rows.length[live].tolist(), rows.finished[live].tolist()
    for row, count, length, ended in zip(live.tolist(), counts.tolist(), lengths, finished, strict=True):
        until = length if settled is None else min(length, settled)
        streamer.put_row(row, rows.tokens[row, until - count : until].cpu())
        if ended and until == length:
            streamer.end_row(row)
