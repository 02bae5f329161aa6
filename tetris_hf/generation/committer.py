"""What becomes of accepted tokens: rows are cut where they end, outputs kept, streamers told.

Knows where rows end and who is told. Does not know who drafted or who judged.
"""

from __future__ import annotations

import torch

from .draft import Verification
from .fusing import fused
from .outputs import OutputRecorder
from .packed_model import PackedOutput
from .rejection import Accepted
from .rows import Rows, resting
from .stopping import RowStopping
from .streaming import RowStreamer, stream_new_tokens


class Committer:
    """
    Commits accepted tokens.

    Args:
        rows (`Rows`): The batch.
        stopping (`RowStopping`): Where rows end.
        recorder (`OutputRecorder`): Keeps what the user wants besides tokens.
        streamer ([`RowStreamer`], *optional*): Receives tokens when they are certain to stay.
    """

    def __init__(
        self, rows: Rows, stopping: RowStopping, recorder: OutputRecorder, streamer: RowStreamer | None = None
    ):
        self.rows = rows
        self.stopping = stopping
        self.recorder = recorder
        self.streamer = streamer
        self._shown = rows.length.clone()

    def restart(self, other: Committer, with_stopping: bool) -> None:
        """
        Take over another batch, whose `Rows` these rows have become.

        Args:
            other ([`Committer`]): What the new batch wants.
            with_stopping (`bool`): Whether its rows may end otherwise than before.
        """
        self.recorder, self.streamer = other.recorder, other.streamer
        if with_stopping:
            self.stopping = other.stopping
        self.recorder.rows = self.rows
        self._shown = self.rows.length.clone()

    def __call__(
        self, accepted: Accepted, verification: Verification, output: PackedOutput, scores: torch.Tensor
    ) -> torch.Tensor:
        """
        Commit what was accepted, each row cut where it ends.

        Args:
            accepted (`Accepted`): Tokens of the live rows and how many of them count.
            verification ([`Verification`]): What they were accepted from.
            output (`PackedOutput`): Of the target's forward.
            scores (`torch.FloatTensor` of shape `(T, V)`): Its processed scores.

        Returns:
            `torch.LongTensor` of shape `(R,)`: Tokens committed in each live row.
        """
        rows, live = self.rows, verification.live
        counts = _only_going(accepted.counts, rows.finished, rows.unfed, live)  # (R,)
        rows.write(live, accepted.tokens, counts)
        kept, finished = self.stopping(rows, live, accepted.tokens, counts)
        self.recorder.record(verification, kept, output, scores)
        rows.commit(live, kept, finished)
        self.stopping.settle(rows)
        return kept

    def stream(self, live: torch.Tensor, kept: torch.Tensor) -> None:
        """
        Show the streamer what is new and certain to stay: up to the column about which all criteria were asked.

        Args:
            live (`torch.LongTensor` of shape `(R,)`): Rows that took part.
            kept (`torch.LongTensor` of shape `(R,)`): Tokens committed in each.
        """
        if self.streamer is None:
            return
        rows, settled = self.rows, self.stopping.settled
        if settled is not None:
            until = rows.length.clamp(max=settled)
            live, kept = rows.everyone, until - self._shown
            self._shown = until
        live, kept = live[kept > 0], kept[kept > 0]
        stream_new_tokens(self.streamer, rows, live, kept, settled)

    def end(self) -> None:
        """The last row has ended."""
        if self.streamer is not None:
            self.streamer.end()


@fused
def _only_going(counts: torch.Tensor, finished: torch.Tensor, unfed: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Nothing for rows that have ended or wait for their prompt."""
    return counts.masked_fill(resting(finished, unfed, live), 0)
