"""One call of batched speculative decoding: the loop.

Reads from top to bottom: prefill, then propose, select, verify, commit until every row has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .drafting import Draft, Drafter, Verification
from .outputs import OutputRecorder
from .packed_model import PackedModel, PackedOutput
from .packing import Packing
from .processing import LogitsProcessing
from .rejection import Accepted, rejection_sample, sample
from .rows import Rows
from .selection import DraftSelectorList
from .stats import TetrisStats
from .stopping import RowStopping
from .streaming import RowStreamer, stream_new_tokens


@dataclass
class Speculation:
    """
    Everything that one call of `generate` needs, and the loop over it.

    Attributes:
        target (`PackedModel`): The model and its cache.
        drafter ([`Drafter`], *optional*): Who drafts; without one, and without a capacity, every step adds one token.
        rows (`Rows`): The batch.
        processing (`LogitsProcessing`): From the target's logits to scores.
        selectors (`DraftSelectorList`): Which drafts are verified.
        stopping (`RowStopping`): Where rows end.
        capacity (`int`): C.
        depth (`int`): K.
        stats (`TetrisStats`): Counted as it goes.
        recorder (`OutputRecorder`): Keeps what the user wants besides tokens.
        streamer ([`RowStreamer`], *optional*): Receives tokens as they are committed.
    """

    target: PackedModel
    drafter: Drafter | None
    rows: Rows
    processing: LogitsProcessing
    selectors: DraftSelectorList
    stopping: RowStopping
    capacity: int
    depth: int
    stats: TetrisStats
    recorder: OutputRecorder
    streamer: RowStreamer | None = None

    def __post_init__(self) -> None:
        if self.capacity == 0:
            self.drafter = None

    def run(self) -> None:
        """Generate until every row has ended."""
        rows, stats = self.rows, self.stats
        with stats.timed("prefill"):
            self._prefill()
        live = rows.live()  # (R,)
        while len(live):
            with stats.timed("propose"):
                draft = self._propose(live)  # tokens (R, K)
            with stats.timed("select"):
                lengths = self.selectors(draft, self.capacity)  # (R,)
            with stats.timed("verify"):
                output, scores, starts = self._verify(live, lengths)  # (R + C, V)
            with stats.timed("commit"):
                accepted = rejection_sample(self._distributions(scores), draft.q, draft.tokens, lengths, starts)
                verification = Verification(live, draft, lengths, accepted.counts - 1, output.hidden_states, starts)
                kept = self._commit(accepted, verification, output, scores)
                stats.count(live, draft.lengths, lengths, verification.num_accepted, kept)
                self.selectors.observe(verification)
                live = rows.live()
        stats.target_forwards, stats.target_tokens = self.target.num_forwards, self.target.num_tokens
        stats.draft_forwards = self.drafter.num_forwards if self.drafter is not None else 0
        if self.streamer is not None:
            self.streamer.end()

    def _prefill(self) -> None:
        """One forward over all prompts, packed; each row's first token comes from the logits of its last one."""
        live = self.rows.live()
        lengths = self.rows.text_length(live)
        packing = Packing.fitting(lengths, torch.zeros_like(lengths))
        tokens = self.rows.read(packing.rows, packing.positions)
        output = self.target.forward(tokens, packing, keep=packing.last)
        scores = self.processing(output.logits, live, self.rows.length)  # (N, V)
        if self.drafter is not None:
            self.drafter.begin(self.target.model, self.rows, scores.shape[1], self.processing.for_drafts())
        p = self._distributions(scores)
        first = Accepted(tokens=(p if p.dim() == 1 else sample(p))[:, None], counts=torch.ones_like(live))
        none = torch.zeros_like(live)
        seen = Verification(live, Draft.empty(live), none, none, output.hidden_states, starts=live)
        self._commit(first, seen, output, scores)

    def _propose(self, live: torch.Tensor) -> Draft:
        """Drafts for the live rows, no deeper than any of them has room for."""
        depth = min(self.depth, int(self.rows.room(live).max()))
        if self.drafter is None or depth == 0:
            return Draft.empty(live)
        draft = self.drafter.propose(self.rows, live, depth)
        self.rows.write(live, draft.tokens, draft.lengths)
        return draft

    def _verify(self, live: torch.Tensor, lengths: torch.Tensor) -> tuple[PackedOutput, torch.Tensor, torch.Tensor]:
        """
        One target forward over each row's last committed token and its selected drafts, nothing else.

        Returns:
            `tuple[PackedOutput, torch.FloatTensor, torch.LongTensor]`: What the target said; its processed scores in
            packed order, `(T, V)`; and the packed index of each live row's first ones, `(R,)`.
        """
        counts = torch.zeros_like(self.rows.length).index_copy_(0, live, lengths + 1)  # (N,)
        packing = Packing.fitting(counts, self.rows.length - self.rows.padding - 1)
        output = self.target.forward(self.rows.read(packing.rows, packing.positions), packing)
        columns = self.rows.padding[packing.rows] + packing.positions + 1
        return output, self.processing(output.logits, packing.rows, columns), packing.starts[live]

    def _commit(
        self, accepted: Accepted, verification: Verification, output: PackedOutput, scores: torch.Tensor
    ) -> torch.Tensor:
        """
        Commit what was accepted, each row cut where it ends, and show it to everybody who asked.

        Returns:
            `torch.LongTensor` of shape `(R,)`: Tokens committed in each live row.
        """
        rows, live = self.rows, verification.live
        rows.write(live, accepted.tokens, accepted.counts)
        kept, finished = self.stopping(rows, live, accepted.tokens, accepted.counts)
        self.recorder.record(rows, verification, kept, output, scores)
        rows.commit(live, kept, finished)
        if self.drafter is not None:
            self.drafter.observe(rows, verification)
        if self.streamer is not None:
            stream_new_tokens(self.streamer, rows, live, kept)
        return kept

    def _distributions(self, scores: torch.Tensor) -> torch.Tensor:
        """float32 `(T, V)` when sampling, else `(T,)`: the token at which each is one."""
        return scores.softmax(-1) if self.processing.do_sample else scores.argmax(-1)
