"""`tetris_capacity="auto"` in the loop: the clock that a controller reads, the steps that a cost table is timed on.

Knows when a window of steps begins and ends. Does not know how C and K are chosen: that is `CapacityController`.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from .capacity_controller import CapacityController
from .capacity_settings import CAPTURED, candidates
from .captured_steps import StepSize
from .cost_key import cost_key
from .cost_table import CostTable
from .cuda_graph import LateCopies, Moment, drawing_none
from .model_support import text_limit


if TYPE_CHECKING:
    from .speculation import Speculation

MAX_DEPTH = 6
# Tokens of the texts on which steps are timed, and steps: a few to settle, some to time.
_TEXT, _SETTLING, _TIMED = 64, 2, 5
# Columns that these texts need: the first token, and what every step may add.
ROOM = _TEXT + 1 + (_SETTLING + _TIMED) * (MAX_DEPTH + 1)

_kept: WeakKeyDictionary[PreTrainedModel, dict[Hashable, CapacityController]] = WeakKeyDictionary()


def controller_for(speculation: Speculation, max_depth: int) -> CapacityController:
    """
    The controller of this model, drafter, batch size and way of running: what it learned stays as long as the model.

    Args:
        speculation ([`Speculation`]): What is to run.
        max_depth (`int`): The largest K.
    """
    rows, drafter = speculation.rows, speculation.drafter
    assert drafter is not None
    key = rows.num_rows, rows.fixed_shapes, max_depth, drafter.fingerprint(), speculation.processing.do_sample
    known = _kept.setdefault(speculation.target.model, {})
    if key not in known:
        settings = candidates(rows.num_rows, max_depth, CAPTURED) if rows.fixed_shapes else None
        known[key] = CapacityController(
            rows.num_rows, None, max_depth=max_depth, settings=settings, device=rows.length.device
        )
    return known[key]


class AutoCapacity:
    """
    Sets C and K of a [`Speculation`] between its steps.

    Args:
        controller ([`CapacityController`]): Who chooses.
    """

    def __init__(self, controller: CapacityController):
        self.controller = controller
        self.steps: dict[tuple[int, int], int] = {}
        self._count, self._pure = 0, True  # steps of the window, and whether its time is theirs alone

    def prepare(self, speculation: Speculation) -> None:
        """Make sure that the costs of steps are known: from disk, or timed now, on a batch of its own."""
        if self.controller.table is not None:
            return
        drafter = speculation.drafter
        mode = "eager" if speculation.captured is None else "captured"
        mode += ", compiled" if speculation.compiles else ""
        key = cost_key(speculation.target.model, drafter, speculation.rows.num_rows, mode)
        with drawing_none(speculation.rows.length.device), speculation.rehearsing() as rehearsal:
            num_rows, max_depth = speculation.rows.num_rows, self.controller.max_depth
            captured = speculation.captured is not None
            settings = self.controller.settings if captured else CostTable.settings_to_time(num_rows, max_depth)
            self.controller.table = CostTable.cached(key, _StepTimer(rehearsal), num_rows, settings)
        self.controller.reset()

    def begin(self, speculation: Speculation) -> None:
        """Start a call."""
        self.steps = {}
        self._gone = torch.zeros(2, speculation.rows.num_rows)
        self._told = LateCopies()
        longest = int(speculation.rows.remaining.max())
        speculation.capacity, speculation.depth = self.controller.begin(not speculation.refills, longest)
        self._open(speculation)

    def count(self, speculation: Speculation, feed: int = 0) -> None:
        """
        After every step. Where steps are captured, what a window of them taught is read when the next step is under
        way, so that the device never waits; that step is of the old setting still, and belongs to no window.

        Args:
            speculation ([`Speculation`]): What runs.
            feed (`int`, *optional*, defaults to 0): Prompt tokens that the step took in: its time says little then.
        """
        setting = speculation.capacity, speculation.depth
        self.steps[setting] = self.steps.get(setting, 0) + 1
        self._count += 1
        if self._count <= self.controller.interval:
            self._pure = self._pure and feed == 0
        if self._count == self.controller.interval:
            self._end = Moment(speculation.rows.length.device)
            self._told.put(self._state(speculation))
        if self._count == self.controller.interval + (speculation.captured is not None):
            self._decide(speculation)

    def end(self, speculation: Speculation) -> None:
        """After the last step of a call."""
        if not speculation.refills:
            self.controller.end(*self._counts(speculation))

    def prefilled(self, speculation: Speculation) -> None:
        """After a forward over prompts, whose time is that of no step."""
        if self._count == 0:
            self._start = Moment(speculation.rows.length.device)
        else:
            self._pure = False

    def _open(self, speculation: Speculation) -> None:
        self._count, self._pure, self._start = 0, True, Moment(speculation.rows.length.device)

    def _state(self, speculation: Speculation) -> torch.Tensor:
        """What the controller decides by, in one tensor: its gains, and how far each row of a closed batch came."""
        gains = self.controller.gains  # (S,)
        if speculation.refills:
            return gains
        counts = torch.stack([*self._counts(speculation), speculation.rows.remaining])  # (3, N)
        return torch.cat([gains, counts.flatten().float()])

    def _counts(self, speculation: Speculation) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that each row got in steps, and steps that it took part in, both of shape `(N,)`."""
        stats = speculation.stats
        return stats.accepted.sum(1) + stats.bonus, stats.live_steps

    def _decide(self, speculation: Speculation) -> None:
        state = self._told.get(rest=True)
        assert state is not None
        gains, counts = state.tensor_split([len(self.controller.settings)])
        seconds = self._end.seconds_since(self._start) / self.controller.interval if self._pure else None
        if not speculation.refills:
            counts = counts.view(3, -1)
            tokens, steps = counts[:2] - self._gone  # (N,) each
            self.controller.follow_rows(tokens, steps, counts[2], gains)
            self._gone = counts[:2]
        drafted = speculation.depth > 0
        speculation.capacity, speculation.depth = self.controller.decide(seconds, gains)
        self._open(speculation)
        if speculation.depth > 0 and not drafted:
            speculation.catch_up()
            self._pure = False


class _StepTimer:
    """
    Seconds of a step of some C and K.

    Args:
        speculation ([`Speculation`]): Whose steps. Its batch is lost.
    """

    def __init__(self, speculation: Speculation):
        self.speculation = speculation

    def __call__(self, capacity: int, depth: int) -> float:
        speculation, rows = self.speculation, self.speculation.rows
        device = rows.length.device
        longest = min(rows.width, text_limit(speculation.target.model) or rows.width)
        width = max(1, min(_TEXT, longest - 1 - (_SETTLING + _TIMED) * (depth + 1)))
        vocabulary = speculation.target.model.get_input_embeddings().weight.shape[0]
        text = torch.randint(vocabulary, (rows.num_rows, width), device=device)
        seconds = []
        with speculation.sized(StepSize(capacity, depth)):
            speculation.begin_again(text)
            for step in range(_SETTLING + _TIMED):
                if bool((rows.length >= longest).any()):
                    speculation.begin_again(text)
                rows.finished.zero_()  # by an end token, which captured steps look for
                start = Moment(device)
                speculation.advance()
                taken = Moment(device).seconds_since(start)
                if step >= _SETTLING:
                    seconds.append(taken)
        return statistics.median(seconds)
