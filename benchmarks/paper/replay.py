"""A recorded trace under any selector: the engine's loop with the target replaced by the text that it is known to say.

Drafts, selectors and rows are the library's own classes, so a replay verifies and accepts, step by step, what a real
call would (`tests/benchmarks/test_paper_replay.py`), in milliseconds and on any machine. Knows no models and no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import tetris_hf
from paper.traces import Trace, coming, leading_matches
from tetris_hf import Draft, Drafter, DraftSelector, DraftSelectorList, MixedDrafter, Verification
from tetris_hf.generation.budget import evenly, spend
from tetris_hf.generation.rows import Rows


LOOKUP = "lookup"


class TraceDrafter(Drafter):
    """
    Proposes again what a drafter proposed when the trace was recorded.

    Args:
        trace ([`Trace`]): What was recorded.
        name (`str`): The drafter.
        place (`Callable`): For rows of shape `(R,)`, the text that each serves and its tokens so far but one.
    """

    def __init__(self, trace: Trace, name: str, place: Callable[[Rows, torch.Tensor], Any]):
        self.drafted = trace.drafts[name]
        self.place = place

    def propose(self, rows: Rows, live: torch.Tensor, depth: int) -> Draft:
        where = self.place(rows, live)
        tokens = self.drafted.tokens[where][:, :depth].long()  # (R, K)
        lengths = torch.minimum(self.drafted.lengths[where].long(), rows.room(live)).clamp(max=tokens.shape[1])
        probabilities = self.drafted.probabilities[where][:, :depth]
        return Draft(tokens, lengths, probabilities, probabilities)


class Foresight(DraftSelector):
    """Verifies exactly what will stand, the shallow places first: the ceiling of every selector. For replays only."""

    stands: torch.Tensor

    def __call__(self, draft: Draft, lengths: torch.Tensor, capacity: int) -> torch.Tensor:
        return spend(evenly(lengths, draft.depth), torch.minimum(lengths, self.stands), capacity)


@dataclass(frozen=True)
class Replayed:
    """
    What the steps of a replay did.

    Attributes:
        steps (`torch.LongTensor` of shape `(S, 4)`):
            Of each step: live rows, drafts verified, drafts that became text, bonus tokens.
        windows (`torch.LongTensor` of shape `(S,)`): Drafts verified in the row with the most of them.
        took (`torch.LongTensor` of shape `(Q, 2)`): First step of each request and the one after its last.
        num_rows (`int`): N.
    """

    steps: torch.Tensor
    windows: torch.Tensor
    took: torch.Tensor
    num_rows: int

    @property
    def full(self) -> torch.Tensor:
        """The steps in which all rows were live, as a mask of shape `(S,)`."""
        return self.steps[:, 0] == self.num_rows

    def ratios(self, full_only: bool = True) -> dict[str, float]:
        """
        Over the steps with all rows live, or over all of them: `vsr` (paper, `eq:VSR`; `nan` if nothing was verified),
        `ter` (`eq:TER`), `tokens` and `verified` per row and step, and the number of `steps`.
        """
        steps = self.steps[self.full] if full_only else self.steps
        rows, verified, accepted, bonus = steps.sum(0).tolist()
        return {
            "vsr": accepted / verified if verified else float("nan"),
            "ter": (accepted + bonus) / (verified + rows) if rows else float("nan"),
            "tokens": (accepted + bonus) / rows if rows else float("nan"),
            "verified": verified / rows if rows else float("nan"),
            "steps": len(steps),
        }


def replay(
    trace: Trace,
    requests: Sequence[int],
    drafters: str | Sequence[str],
    num_rows: int,
    capacity: int,
    depth: int,
    selector: DraftSelector | Sequence[DraftSelector] | None = None,
    refill: bool = True,
    max_new_tokens: int | None = None,
    steer: Callable[[Rows, Verification], tuple[int, int]] | None = None,
) -> Replayed:
    """
    Serve requests from a trace.

    Args:
        trace ([`Trace`]): What was recorded.
        requests (`Sequence[int]`): Prompts of the trace by index, in the order of their arrival.
        drafters (`str` or `Sequence[str]`):
            Names in the trace, or `"lookup"`, which drafts from the text for real; several are mixed.
        num_rows (`int`): N. Without `refill`, as many as requests.
        capacity (`int`): C.
        depth (`int`): K.
        selector ([`DraftSelector`] or a list of them, *optional*): By default [`TetrisSelector`].
        refill (`bool`, *optional*, defaults to `True`):
            Whether a row that ends makes room for the next request at once, as in `generate_batch`; else the batch is
            closed, as in `generate`.
        max_new_tokens (`int`, *optional*): Shorter texts than those of the trace.
        steer (`Callable`, *optional*): After each step, C and K of the next one. By default they stay.

    Raises:
        `ValueError`: If the requests of a closed batch are not N.
    """
    if not refill and len(requests) != num_rows:
        raise ValueError(f"A closed batch has one request a row: got {len(requests)} requests and {num_rows} rows.")
    limit = min(max_new_tokens or trace.text.shape[1], trace.text.shape[1])
    ends = trace.ends.clamp(max=limit)
    lengths_of = torch.tensor([len(prompt) for prompt in trace.prompts])
    width = int(lengths_of[list(requests)].max()) + limit
    rows = Rows(torch.zeros(num_rows, 1, dtype=torch.long), torch.zeros(num_rows, dtype=torch.long), width, 0)
    rows.finished.fill_(True)
    serves = torch.zeros(num_rows, dtype=torch.long)  # the prompt of the trace in each row
    number = torch.zeros(num_rows, dtype=torch.long)  # the request in each row

    def place(rows: Rows, live: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        text = serves[live]
        return text, rows.length[live] - lengths_of[text] - 1

    drafter = _drafter(trace, [drafters] if isinstance(drafters, str) else drafters, place)
    drafter.begin(None, rows, int(max(trace.text.max(), *(int(p.max()) for p in trace.prompts))) + 1, None)
    selectors = DraftSelectorList.of(selector)
    pending = deque(enumerate(requests))
    took = torch.zeros(len(requests), 2, dtype=torch.long)
    steps: list[list[int]] = []
    windows: list[int] = []
    next_text = coming(trace.text, trace.text.shape[1])  # (P, M - 1, M), a view: as deep as anybody drafts
    while True:
        while pending and bool(rows.finished.any()):
            free = rows.finished.nonzero()[:, 0][: len(pending)]
            arrived = [pending.popleft() for _ in range(len(free))]
            number[free] = torch.tensor([order for order, _ in arrived])
            serves[free] = torch.tensor([prompt for _, prompt in arrived])
            _admit(rows, free, [trace.prompts[prompt] for _, prompt in arrived], trace.text[serves[free]], limit)
            rows.finished[free] = ends[serves[free]] == 1
            took[number[free]] = len(steps)
        live = rows.live()
        if len(live) == 0:
            break
        text, done = place(rows, live)  # (R,) each
        deepest = min(depth, int(rows.room(live).max()))
        draft = drafter.propose(rows, live, deepest) if deepest else Draft.empty(live)
        if not refill and selectors.needs_remaining:
            draft = replace(draft, remaining=rows.remaining[live])
        stands = leading_matches(draft.tokens, next_text[text, done][:, : draft.depth], draft.lengths)  # (R,)
        for one in selectors:
            if isinstance(one, Foresight):
                one.stands = torch.minimum(stands, ends[text] - done - 1)
        lengths = selectors(draft, capacity)
        num_accepted = torch.minimum(lengths, stands)
        kept = torch.minimum(num_accepted + 1, ends[text] - done - 1)
        rows.commit(live, kept, done + 1 + kept == ends[text])
        none = torch.zeros_like(live)
        verification = Verification(live, draft, lengths, num_accepted, None, none)
        drafter.observe(rows, verification)
        selectors.observe(verification)
        accepted = torch.minimum(num_accepted, kept)
        steps.append([len(live), int(lengths.sum()), int(accepted.sum()), int((kept > num_accepted).sum())])
        windows.append(int(lengths.max()))
        took[number[live], 1] = len(steps)
        if steer is not None:
            capacity, depth = steer(rows, verification)
    drafter.end()
    counts = torch.tensor(steps, dtype=torch.long).reshape(-1, 4)
    return Replayed(counts, torch.tensor(windows, dtype=torch.long), took, num_rows)


def _drafter(trace: Trace, names: Sequence[str], place: Callable[[Rows, torch.Tensor], Any]) -> Drafter:
    made: list[Drafter] = [
        tetris_hf.PromptLookupDrafter() if name == LOOKUP else TraceDrafter(trace, name, place) for name in names
    ]
    return made[0] if len(made) == 1 else MixedDrafter(made)


def _admit(rows: Rows, free: torch.Tensor, prompts: list[torch.Tensor], text: torch.Tensor, limit: int) -> None:
    """Put prompts and their whole texts into rows, of which the prompt and one token are committed."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    tokens = torch.zeros(len(prompts), int(lengths.max()) + limit, dtype=torch.long)  # (R, W)
    for index, prompt in enumerate(prompts):
        tokens[index, : len(prompt) + limit] = torch.cat([prompt, text[index, :limit]])
    rows.tokens[free, : tokens.shape[1]] = tokens
    rows.padding[free] = 0
    rows.length[free], rows.max_length[free] = lengths + 1, lengths + limit
