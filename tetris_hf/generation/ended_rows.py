"""Rows of a job that have ended: found out and read off the device while the next step runs.

Knows requests and the rows that serve them. Does not know why a row ends.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import torch

from .cuda_graph import LateCopies
from .request import Request, RequestOutput
from .speculation import Speculation


class EndedRows:
    """
    Tells which rows have ended, and what they say. Where steps are captured, the host hears of both when the next step
    is under way, and so never keeps the device waiting.

    Args:
        speculation ([`Speculation`], *optional*): The steps; without, there is nothing to tell.
    """

    def __init__(self, speculation: Speculation | None = None):
        self._speculation = speculation
        late = speculation is not None and speculation.captured is not None
        self._finished, self._texts = LateCopies(late), LateCopies(late)
        self._requests: deque[list[tuple[Request, tuple[float, float]]]] = deque()
        self._seen = self._steps = 0
        self._since: dict[int, tuple[int, float]] = {}  # step and time of admission
        self._ends = set(speculation.committer.stopping.eos_token_ids.tolist()) if speculation is not None else set()

    def admitted(self, rows: list[int]) -> None:
        """A new request begins in each of `rows`: what is heard of earlier steps is not about it."""
        self._since.update(dict.fromkeys(rows, (self._steps, time.perf_counter())))

    def look(self, running: dict[int, Request]) -> list[tuple[int, Request]]:
        """
        Called after every step: rows that are found to have ended, and what they served. They are taken out of
        `running`, and their texts are on their way.
        """
        assert self._speculation is not None
        rows, stats = self._speculation.rows, self._speculation.stats
        self._finished.put(rows.finished)
        self._steps += 1
        finished = self._finished.get()
        if finished is None:
            return []
        ended = [row for row in finished.nonzero()[:, 0].tolist() if row in running]
        ended = [row for row in ended if self._seen >= self._since[row][0]]
        self._seen += 1
        if ended:
            at = torch.tensor(ended).to(rows.length.device, non_blocking=True)
            counts = torch.stack(
                [rows.length[at], stats.live_steps[at], stats.verified[at].sum(1), stats.accepted[at].sum(1)], dim=1
            )  # (E, 4)
            self._texts.put(torch.cat([counts, rows.tokens[at]], dim=1))
            now = time.perf_counter()
            self._requests.append([(running[row], (self._since[row][1], now)) for row in ended])
        return [(row, running.pop(row)) for row in ended]

    def outputs(self, rest: bool = False) -> Iterator[tuple[Request, RequestOutput]]:
        """
        What has arrived.

        Args:
            rest (`bool`, *optional*, defaults to `False`): Whether to wait for all that is on its way.
        """
        while (texts := self._texts.get(rest)) is not None:
            for (request, lifespan), (length, steps, verified, accepted, *columns) in zip(
                self._requests.popleft(), texts.tolist(), strict=True
            ):
                tokens = columns[:length]
                stopped = length < request.max_length or tokens[-1] in self._ends
                yield (
                    request,
                    RequestOutput(
                        request_id=request.request_id,
                        prompt_ids=request.prompt_ids,
                        generated_tokens=tokens[len(request.prompt_ids) :],
                        finish_reason="stop" if stopped else "length",
                        steps=steps,
                        verified=verified,
                        accepted=accepted,
                        lifespan=lifespan,
                    ),
                )
