"""One call of batched speculative decoding: the loop.

Reads from top to bottom: prefill, then propose, select, verify, commit until every row has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig

from .auto_capacity import AutoCapacity
from .captured_steps import CapturedSteps, StepSize
from .committer import Committer
from .cuda_graph import StageClock
from .draft import Draft, Verification
from .drafter import Drafter
from .outputs import OutputRecorder
from .packed_model import PackedModel
from .processing import LogitsProcessing
from .rejection import Accepted, rejection_sample, sample
from .rows import Rows
from .selection import DraftSelectorList
from .stats import TetrisStats
from .stopping import RowStopping
from .tensor_parallel import Lead
from .verifier import Verified, Verifier


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
        committer ([`Committer`]): What becomes of accepted tokens.
        capacity (`int`): C.
        depth (`int`): K.
        stats (`TetrisStats`): Counted as it goes.
        compiles (`bool`): Whether layers run compiled in the steps.
        captures_forwards (`bool`): Whether each forward of a step is captured in a CUDA graph of its own.
        compile_config (`CompileConfig`, *optional*): How layers are compiled.
        branches (`bool`): Whether captured steps leave out places of a draft that cannot be selected.
        feeds (`tuple[int, ...]`, *optional*, defaults to `(0,)`):
            Prompt tokens of rows admitted on the way that a step can take in besides, if steps have fixed shapes.
        captured ([`CapturedSteps`], *optional*): Whole steps of all rows, which [`run`] and [`advance`] then replay.
        auto ([`AutoCapacity`], *optional*): Sets `capacity` and `depth` between steps.
        clock ([`StageClock`]): Times the stages of a step that is being captured.
    """

    target: PackedModel
    drafter: Drafter | None
    rows: Rows
    processing: LogitsProcessing
    selectors: DraftSelectorList
    committer: Committer
    capacity: int
    depth: int
    stats: TetrisStats
    compiles: bool = False
    captures_forwards: bool = False
    compile_config: Any = None
    branches: bool = False
    feeds: tuple[int, ...] = (0,)
    captured: CapturedSteps | None = None
    auto: AutoCapacity | None = None
    clock: StageClock = field(default_factory=StageClock)

    def __post_init__(self) -> None:
        self._begun = False
        self._lead = Lead(self.target.model)
        self._verifier = Verifier(self.target, self.rows, self.processing)
        if self.capacity == 0:
            self.drafter = None

    def run(self) -> None:
        """Generate until every row has ended."""
        self.begin()
        with self.stats.timed("prefill"):
            self.committer.stream(self.rows.everyone, self.prefill())
            ended = bool(self.rows.finished.all())
        if self.captured is not None:
            with self.stats.timed("replay"):
                self.captured.run()
        else:
            while not ended:
                live = self.rows.live()
                self.committer.stream(live, self.step(live))
                self.stepped()
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
        verified = self._verifier.prompts(live)  # scores (R, V)
        if self.drafter is not None:
            if not self._begun:
                self.drafter.begin(self.target.model, rows, verified.scores.shape[1], self.processing.for_drafts())
            if self.depth > 0:
                self.drafter.admit(rows, live)
        p = verified.p
        first = Accepted(tokens=(p if p.dim() == 1 else sample(p))[:, None], counts=torch.ones_like(live))
        self._lead(first.tokens)
        none, states = torch.zeros_like(live), verified.output.hidden_states
        verification = Verification(live, Draft.empty(live), none, none, states, verified.starts)
        kept = self._commit(first, verification, verified)
        if not self._begun:
            for packed in self.packed_models():
                packed.compiles, packed.captures = self.compiles, self.captures_forwards
                packed.compile_config = self.compile_config
        self._begun = True
        if self.auto is not None:
            self.auto.prefilled(self)
        return kept

    def step(self, live: torch.Tensor, feed: int = 0) -> torch.Tensor:
        """
        Advance every live row by one token at least, but those that wait for their prompt.

        Args:
            live (`torch.LongTensor` of shape `(R,)`): `rows.live()`.
            feed (`int`, *optional*, defaults to 0): Prompt tokens of waiting rows to compute besides, at most.

        Returns:
            `torch.LongTensor` of shape `(R,)`: Tokens committed in each of them.
        """
        with self._stage("propose"):
            draft = self._propose(live, feed)  # tokens (R, K)
        with self._stage("select"):
            lengths = self.selectors(draft, self.capacity)  # (R,)
            self._lead(lengths)
        with self._stage("verify"):
            verified = self._verifier(live, lengths, self.size(feed))  # scores (T, V)
        with self._stage("commit"):
            accepted = rejection_sample(verified.p, draft.q, draft.tokens, lengths, verified.starts)
            self._lead(accepted.tokens, accepted.counts)
            num_accepted, states = accepted.counts - 1, verified.output.hidden_states
            verification = Verification(live, draft, lengths, num_accepted, states, verified.starts)
            kept = self._commit(accepted, verification, verified)
            self.stats.count(live, draft.lengths, lengths, num_accepted, kept)
            self.selectors.observe(verification)
            if self.auto is not None:
                self.auto.controller.observe(verification, going=kept > 0)
        return kept

    def admit(
        self,
        live: torch.Tensor,
        prompts: torch.Tensor,
        lengths: torch.Tensor,
        max_length: torch.Tensor,
        seeds: torch.Tensor,
        at_once: bool,
    ) -> None:
        """
        Put new prompts into the ended rows `live`, as [`Rows.admit`] does; they are computed `at_once`, or by and by
        in steps with a feed, which other rows must have begun.
        """
        self.rows.admit(live, prompts, lengths, max_length, seeds)
        self.stats.forget(live)
        if at_once:
            self.prefill(live)
        elif self.drafter is not None and self.depth > 0:
            self.drafter.await_prompts(self.rows, live)

    @property
    def refills(self) -> bool:
        """Whether rows that end make room for others."""
        return self.feeds != (0,)

    def begin(self) -> None:
        """Before the prompts of a call."""
        if self.auto is not None:
            self.auto.begin(self)

    def stepped(self, feed: int = 0) -> None:
        """After every step; a feed as of [`step`]."""
        if self.auto is not None:
            self.auto.count(self, feed)

    def catch_up(self) -> None:
        """Show the drafter what was committed in steps without it."""
        if self.drafter is not None:
            self.drafter.admit(self.rows, self.rows.live())

    def advance(self, feed: int = 0) -> None:
        """
        One step of whichever rows are live, by a replay where steps are captured.

        Args:
            feed (`int`, *optional*, defaults to 0): As of [`step`]; one of `feeds` if shapes are fixed.
        """
        if self.captured is None:
            self.step(self.rows.live(), feed)
        else:
            self.captured.replay(self.size(feed))

    def sizes(self) -> list[StepSize]:
        """In which steps may come, if their shapes are fixed."""
        settings = [self.size()[:2]] if self.auto is None else self.auto.controller.settings
        return [StepSize(capacity, depth, feed) for capacity, depth in settings for feed in self.feeds]

    def size(self, feed: int = 0) -> StepSize:
        """Of the steps that are taken now."""
        return StepSize(self.capacity, self.depth, feed)

    @contextmanager
    def sized(self, size: StepSize) -> Iterator[None]:
        """Within this context, steps are of this size."""
        before = self.capacity, self.depth
        self.capacity, self.depth = size.capacity, size.depth
        try:
            yield
        finally:
            self.capacity, self.depth = before

    def begin_again(self, input_ids: torch.Tensor) -> None:
        """Begin a batch that is nobody's, with prompts of shape `(N, W)` without padding."""
        self.rows.restart(input_ids, torch.zeros_like(self.rows.padding), self.rows.width)
        self.target.cache.share()
        self._begun = False
        self.prefill()

    @contextmanager
    def rehearsing(self) -> Iterator[Speculation]:
        """
        Within this context, the same steps for batches that are nobody's: of those, the call's criteria, processors
        that look at texts, selectors and outputs are told nothing. Whole captured steps have none of them that could
        remember, but for what selectors learn: that is taken back at the end.
        """
        if self.captured is not None:
            with self.selectors.unchanged():
                yield self
            return
        rows = self.rows
        yield replace(
            self,
            processing=self.processing.for_drafts(history=False),
            selectors=DraftSelectorList.of(None),
            committer=Committer(rows, RowStopping([], rows.length.device), OutputRecorder(GenerationConfig(), rows)),
        )

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
        self.rows.seeds.copy_(batch.rows.seeds)
        self.stats.reset()
        self._begun = False
        for packed in self.packed_models():
            packed.num_forwards = packed.num_tokens = 0
            packed.num_skipped.zero_()
        fresh = self.captured is None  # else the graphs hold equal criteria and processors
        self.committer.restart(batch.committer, with_stopping=fresh)
        if fresh:
            self.processing = batch.processing
        self.processing.rows = self.rows
        self._verifier.processing = self.processing

    def packed_models(self) -> list[PackedModel]:
        """The target's and those of the drafter."""
        return [self.target, *(self.drafter.packed_models if self.drafter is not None else [])]

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        with self.stats.timed(name), self.clock.stage(name):
            yield

    def _finish(self) -> None:
        """Everything that waits for the last row."""
        stats = self.stats
        stats.target_forwards, stats.target_tokens = self.target.num_forwards, self.target.num_tokens
        if self.auto is not None:
            self.auto.end(self)
            stats.settings = dict(self.auto.steps)
            stats.capacity = max((capacity for capacity, _ in stats.settings), default=0)
        drafting = self.packed_models()[1:]
        stats.draft_forwards = sum(packed.num_forwards - int(packed.num_skipped) for packed in drafting)
        self.committer.end()

    def _propose(self, live: torch.Tensor, feed: int) -> Draft:
        """Drafts for the live rows, no deeper than any of them has room for or the budget reaches."""
        if self.drafter is None:
            return Draft.empty(live)
        depth = min(self.depth, self.capacity)  # no row can verify more than the whole budget
        if not self.rows.fixed_shapes:
            depth = min(depth, int(self.rows.room(live).max()))
        if depth == 0:
            return Draft.empty(live)
        if self.branches or not self.rows.fixed_shapes:
            self.drafter.wants_deeper = partial(self._wants_deeper, live)
            self.drafter.sure_depth = sure_depth(self.capacity, self.rows.num_rows) if self.branches else 1
        self.drafter.feed = feed
        try:
            draft = self.drafter.propose(self.rows, live, depth)
        finally:
            self.drafter.feed, self.drafter.wants_deeper = 0, None
        self._lead(draft.tokens, draft.lengths)
        self.rows.write(live, draft.tokens, draft.lengths)
        return self._told(draft, live)

    def _wants_deeper(self, live: torch.Tensor, draft: Draft) -> bool | torch.Tensor:
        """See [`Drafter.wants_deeper`]."""
        wanted = self.selectors.wants_deeper(self._told(draft, live), self.capacity)
        return wanted if self.branches else bool(wanted)

    def _told(self, draft: Draft, live: torch.Tensor) -> Draft:
        """The draft with how far its rows are from their ends, if somebody asks and rows are not replaced."""
        if self.refills or not self.selectors.needs_remaining:
            return draft
        return replace(draft, remaining=self.rows.remaining[live])

    def _commit(self, accepted: Accepted, verification: Verification, verified: Verified) -> torch.Tensor:
        """Tokens committed in each live row, `(R,)`, of which the drafter is told."""
        kept = self.committer(accepted, verification, verified.output, verified.scores)
        if self.drafter is not None:
            self.drafter.observe(self.rows, verification)
        return kept


def sure_depth(capacity: int, num_rows: int) -> int:
    """
    Places that so often take part in the selection that to ask, in a captured step, would cost more than it spares: 30
    to 35 microseconds on an H200, where a place of a two-layer assistant takes 150 (`docs/reproduction.md`).
    """
    return capacity // num_rows + max(1, num_rows.bit_length() - 2)
