"""A step of all rows in CUDA graphs, one for each size that steps come in, and their replay.

Knows when a replay may start and what it stands for. Does not know what a step does: that is `Speculation`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from .cuda_graph import CudaGraph, LateCopies, StageClock, drawing_none
from .fusing import fusing


if TYPE_CHECKING:
    from .packed_model import PackedModel
    from .speculation import Speculation

# The one replay whose stages are timed, for which the host has to wait: late enough to be like most.
TIMED_STEP = 4


class StepSize(NamedTuple):
    """
    What the shapes of a step follow from.

    Attributes:
        capacity (`int`): C.
        depth (`int`): K.
        feed (`int`): Prompt tokens of newly admitted rows that the step can take in besides.
    """

    capacity: int
    depth: int
    feed: int = 0


class CapturedSteps:
    """
    Steps of a [`Speculation`] with fixed shapes, captured: those of its [`~Speculation.sizes`].

    They are captured on a batch of its own, of prompts of one token, all of them ended: so no trace is left but the
    memory that every replay finds again.

    Args:
        speculation ([`Speculation`]): What steps do.

    Raises:
        [`CannotCapture`]: If some part of a step waits for the device.
    """

    def __init__(self, speculation: Speculation):
        self.speculation = speculation
        self.graphs: dict[StepSize, CudaGraph[torch.Tensor]] = {}
        self._clocks: dict[StepSize, StageClock] = {}
        self._work: dict[StepSize, list[tuple[PackedModel, int, int]]] = {}
        rows = speculation.rows
        with drawing_none(rows.tokens.device):
            speculation.begin_again(rows.tokens.new_full((rows.num_rows, 1), rows.pad_token_id))
            rows.finished.fill_(True)
            with fusing(speculation.compiles):
                # The deepest first: what a drafter learns by place has its final shape then.
                for size in sorted(speculation.sizes(), key=lambda size: -size.depth):
                    self._capture(size)

    def _capture(self, size: StepSize) -> None:
        speculation = self.speculation
        models = speculation.packed_models()
        before = [(packed.num_forwards, packed.num_tokens) for packed in models]
        self._clocks[size] = speculation.clock = StageClock()
        with speculation.sized(size):
            self.graphs[size] = CudaGraph(lambda: speculation.step(speculation.rows.everyone, size.feed))
        runs = CudaGraph.RUNS
        self._work[size] = [
            (packed, (packed.num_forwards - forwards) // runs, (packed.num_tokens - tokens) // runs)
            for packed, (forwards, tokens) in zip(models, before, strict=True)
        ]

    def replay(self, size: StepSize) -> None:
        """One step."""
        self.graphs[size]()
        for packed, forwards, tokens in self._work[size]:
            packed.num_forwards += forwards
            packed.num_tokens += tokens

    def seconds(self, size: StepSize) -> dict[str, float]:
        """Device seconds of each stage in the last replay of this size. Waits for it."""
        return self._clocks[size].seconds()

    def run(self) -> None:
        """Replay until every row has ended, and once more: the host hears of the end one step late."""
        speculation, rows, ended = self.speculation, self.speculation.rows, LateCopies()
        steps = int(rows.remaining.max())  # each adds a token at least
        for number in range(steps):
            length = rows.length.clone() if speculation.committer.streamer is not None else None
            size = speculation.size()
            self.replay(size)
            speculation.stepped()
            if length is not None:
                speculation.committer.stream(rows.everyone, rows.length - length)
            if number == min(TIMED_STEP, steps - 1):
                speculation.stats.step_seconds = self.seconds(size)
            ended.put(rows.finished.all())
            told = ended.get()
            if told is not None and bool(told):
                break
