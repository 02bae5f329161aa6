"""One call of batched speculative decoding: the loop.

Reads from top to bottom: prefill, then propose, select, verify, commit until every row has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .cuda_graph import CudaGraph, LateFlag, StageClock
from .drafting import Draft, Drafter, Verification
from .fingerprint import of_object
from .fusing import fusing
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


# The one replay whose stages are timed, for which the host has to wait: late enough to be like most.
TIMED_STEP = 4


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
        compiles (`bool`): Whether layers run compiled in the steps.
        captures_forwards (`bool`): Whether each forward of a step is captured in a CUDA graph of its own.
        compile_config (`CompileConfig`, *optional*): How layers are compiled.
        graph (`CudaGraph`, *optional*): A whole step of all rows, captured ([`capture`]).
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
    compiles: bool = False
    captures_forwards: bool = False
    compile_config: Any = None
    graph: CudaGraph[None] | None = None

    def __post_init__(self) -> None:
        self._clock, self._begun = StageClock(), False
        if self.capacity == 0:
            self.drafter = None

    def run(self) -> None:
        """Generate until every row has ended."""
        with self.stats.timed("prefill"):
            self._stream(self.rows.everyone, self.prefill())
            ended = bool(self.rows.finished.all())
        if self.graph is not None:
            with self.stats.timed("replay"):
                self._replay(self.graph)
        else:
            while not ended:
                live = self.rows.live()
                self._stream(live, self.step(live))
                ended = bool(self.rows.finished.all())
        self._finish()

    def prefill(self, live: torch.Tensor | None = None) -> torch.Tensor:
        """
        One forward over new prompts, packed; each row's first token comes from the logits of its last one.

        Args:
            live (`torch.LongTensor` of shape `(R,)`, *optional*): Rows with a new prompt, by default all.

        Returns:
            `torch.LongTensor` of shape `(R,)`: Tokens committed in each of them.
        """
        rows = self.rows
        live = rows.everyone if live is None else live
        counts = torch.zeros_like(rows.length).index_copy_(0, live, rows.text_length(live))  # (N,)
        packing = Packing.fitting(counts, torch.zeros_like(counts))
        tokens = rows.read(packing.rows, packing.positions)
        output = self.target.forward(tokens, packing, keep=packing.last[live])
        scores = self.processing(output.logits, live, rows.length[live])  # (R, V)
        if self.drafter is not None:
            if not self._begun:
                self.drafter.begin(self.target.model, rows, scores.shape[1], self.processing.for_drafts())
            self.drafter.admit(rows, live)
        p = self._distributions(scores)
        first = Accepted(tokens=(p if p.dim() == 1 else sample(p))[:, None], counts=torch.ones_like(live))
        none = torch.zeros_like(live)
        starts = torch.arange(len(live), device=live.device)
        seen = Verification(live, Draft.empty(live), none, none, output.hidden_states, starts)
        kept = self._commit(first, seen, output, scores)
        if not self._begun:
            for packed in self._packed_models():
                packed.compiles, packed.captures = self.compiles, self.captures_forwards
                packed.compile_config = self.compile_config
        self._begun = True
        return kept

    def step(self, live: torch.Tensor) -> torch.Tensor:
        """
        Advance every live row by one token at least.

        Args:
            live (`torch.LongTensor` of shape `(R,)`): `rows.live()`.

        Returns:
            `torch.LongTensor` of shape `(R,)`: Tokens committed in each of them.
        """
        with self._stage("propose"):
            draft = self._propose(live)  # tokens (R, K)
        with self._stage("select"):
            lengths = self.selectors(draft, self.capacity)  # (R,)
        with self._stage("verify"):
            output, scores, starts = self._verify(live, lengths)  # (T, V)
        with self._stage("commit"):
            accepted = rejection_sample(self._distributions(scores), draft.q, draft.tokens, lengths, starts)
            verification = Verification(live, draft, lengths, accepted.counts - 1, output.hidden_states, starts)
            kept = self._commit(accepted, verification, output, scores)
            self.stats.count(live, draft.lengths, lengths, verification.num_accepted, kept)
            self.selectors.observe(verification)
        return kept

    def capture(self) -> None:
        """
        Capture a step of all rows in a CUDA graph, which [`run`] then replays.

        Runs on a batch of its own, of prompts of one token, all of them ended: so the capture leaves no trace but the
        memory that every later call finds again.

        Raises:
            [`CannotCapture`]: If some part of a step waits for the device.
        """
        rows, none = self.rows, torch.zeros_like(self.rows.padding)
        rows.restart(rows.tokens.new_full((rows.num_rows, 1), rows.pad_token_id), none, rows.width)
        self._begun = False
        self._ended, self._clock = LateFlag(), StageClock()
        random_state = torch.random.fork_rng([rows.tokens.device] if rows.tokens.is_cuda else [])
        with random_state, fusing(self.compiles):
            self.prefill()
            rows.finished.fill_(True)
            before = [(packed.num_forwards, packed.num_tokens) for packed in self._packed_models()]
            self.graph = CudaGraph(self._step_and_tell)
        # What one replay stands for.
        runs = self.graph.RUNS
        self._forwards = [
            (packed, (packed.num_forwards - forwards) // runs, (packed.num_tokens - tokens) // runs)
            for packed, (forwards, tokens) in zip(self._packed_models(), before, strict=True)
        ]

    def users(self) -> list[Any]:
        """Objects of the caller's that hold tensors of this batch, and so can work for one batch at a time."""
        drafters = getattr(self.drafter, "drafters", [self.drafter])
        return [*drafters, *(selector for selector in self.selectors if isinstance(of_object(selector), int))]

    def restart(self, batch: Speculation, input_ids: torch.Tensor, padding: torch.Tensor, max_length: int) -> None:
        """
        Take over another batch of as many rows, in the tensors of the last one.

        Args:
            batch ([`Speculation`]): What the new batch wants besides tokens.
            input_ids (`torch.LongTensor` of shape `(N, prompt_width)`): Left-padded prompts.
            padding (`torch.LongTensor` of shape `(N,)`): Padding columns at the left of each row.
            max_length (`int`): Columns at which a row ends.
        """
        self.rows.restart(input_ids, padding, max_length)
        self._shown = self.rows.length.clone()
        self.stats.reset()
        self._begun = False
        for packed in self._packed_models():
            packed.num_forwards = packed.num_tokens = 0
        self.recorder, self.streamer = batch.recorder, batch.streamer
        if self.graph is None:  # else the graph holds equal ones
            self.processing, self.stopping = batch.processing, batch.stopping
        self.processing.rows = self.recorder.rows = self.rows

    def _packed_models(self) -> list[PackedModel]:
        return [self.target, *(self.drafter.packed_models if self.drafter is not None else [])]

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        with self.stats.timed(name), self._clock.stage(name):
            yield

    def _step_and_tell(self) -> None:
        self.step(self.rows.everyone)
        self._ended.tell(self.rows.finished.all())

    def _replay(self, graph: CudaGraph[None]) -> None:
        """Replay the step until every row has ended, and once more: the host hears of the end one step late."""
        rows = self.rows
        self._ended.clear()
        steps = int((rows.max_length - rows.length).masked_fill(rows.finished, 0).max())  # each adds a token at least
        for number in range(steps):
            length = rows.length.clone() if self.streamer is not None else None
            graph()
            self._count_replay()
            if length is not None:
                self._stream(rows.everyone, rows.length - length)
            if number == min(TIMED_STEP, steps - 1):
                self.stats.step_seconds = self._clock.seconds()
            if self._ended.seen():
                break

    def advance(self) -> None:
        """One step of whichever rows are live, by a replay where steps are captured."""
        if self.graph is None:
            self.step(self.rows.live())
        else:
            self.graph()
            self._count_replay()

    def _count_replay(self) -> None:
        for packed, forwards, tokens in self._forwards:
            packed.num_forwards += forwards
            packed.num_tokens += tokens

    def _finish(self) -> None:
        """Everything that waits for the last row."""
        stats = self.stats
        stats.target_forwards, stats.target_tokens = self.target.num_forwards, self.target.num_tokens
        stats.draft_forwards = sum(packed.num_forwards for packed in self._packed_models()[1:])
        if self.streamer is not None:
            self.streamer.end()

    def _propose(self, live: torch.Tensor) -> Draft:
        """Drafts for the live rows, no deeper than any of them has room for."""
        if self.drafter is None:
            return Draft.empty(live)
        depth = self.depth
        if not self.rows.fixed_shapes:
            depth = min(depth, int(self.rows.room(live).max()))
        if depth == 0:
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
        rows = self.rows
        going = (lengths + 1).masked_fill(rows.finished[live], 0)
        counts = torch.zeros_like(rows.length).index_copy_(0, live, going)  # (N,)
        first = rows.text_length(rows.everyone) - 1
        if rows.fixed_shapes:
            num_tokens = rows.num_rows + min(self.capacity, rows.num_rows * self.depth)
            packing = Packing.of(counts, first, num_tokens, self.depth + 1, self.target.cache.length)
        else:
            packing = Packing.fitting(counts, first)
        tokens = rows.read(packing.rows, packing.positions)
        output = self.target.forward(tokens, packing, recurring=rows.fixed_shapes)
        columns = rows.padding[packing.rows] + packing.positions + 1
        # A row that takes no part may start behind the last token.
        starts = packing.starts[live].clamp(max=packing.num_tokens - 1)
        return output, self.processing(output.logits, packing.rows, columns), starts

    def _commit(
        self, accepted: Accepted, verification: Verification, output: PackedOutput, scores: torch.Tensor
    ) -> torch.Tensor:
        """
        Commit what was accepted, each row cut where it ends.

        Returns:
            `torch.LongTensor` of shape `(R,)`: Tokens committed in each live row.
        """
        rows, live = self.rows, verification.live
        counts = accepted.counts.masked_fill(rows.finished[live], 0)
        rows.write(live, accepted.tokens, counts)
        kept, finished = self.stopping(rows, live, accepted.tokens, counts)
        self.recorder.record(verification, kept, output, scores)
        rows.commit(live, kept, finished)
        self.stopping.settle(rows)
        if self.drafter is not None:
            self.drafter.observe(rows, verification)
        return kept

    def _stream(self, live: torch.Tensor, kept: torch.Tensor) -> None:
        """Show the streamer what is new and certain to stay: up to the column about which all criteria were asked."""
        if self.streamer is None:
            return
        rows, settled = self.rows, self.stopping.settled
        if settled is not None:
            until = rows.length.clamp(max=settled)
            live, kept = rows.everyone, until - self._shown
            self._shown = until
        live, kept = live[kept > 0], kept[kept > 0]
        stream_new_tokens(self.streamer, rows, live, kept, settled)

    def _distributions(self, scores: torch.Tensor) -> torch.Tensor:
        """float32 `(T, V)` when sampling, else `(T,)`: the token at which each is one."""
        return scores.softmax(-1) if self.processing.do_sample else scores.argmax(-1)
