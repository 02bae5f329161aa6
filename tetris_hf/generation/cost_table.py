"""What a step costs, by C and K, from a few timed steps: kept on disk, corrected while decoding.

Knows seconds and packed sizes. Does not know what a step gains, nor how it is timed.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from transformers.utils import logging

from .cost_key import hashed


logger = logging.get_logger(__name__)

# Of the file format. Tables of another version are measured anew.
_VERSION = 1
# How fast corrections follow what is seen, and the largest step of one (a window that the machine spent elsewhere).
_RATE, _LARGEST = 0.25, 0.2
# Share of its own correction that a setting keeps from window to window while others run.
_KEPT = 0.99


class CostTable:
    """
    Seconds of a step, `verify(N + C) + K * place`, for one N, one pair of models and one machine. `verify` is
    monotone, linear between what was timed and beyond it; what is timed with drafts says nothing about C = 0, and
    conversely, because drafting has a cost of its own at any C.

    Args:
        num_rows (`int`): N.
        points (`Mapping[tuple[int, int], float]`): Timed seconds by (C, K): (0, 0) and at least one with drafts.

    Raises:
        `ValueError`: If one of those is missing, or a time is not positive.
    """

    def __init__(self, num_rows: int, points: Mapping[tuple[int, int], float]):
        if (0, 0) not in points or len(points) < 2:
            raise ValueError(f"`points` must hold (0, 0) and one setting with drafts, got {sorted(points)}.")
        if not all(math.isfinite(seconds) and seconds > 0 for seconds in points.values()):
            raise ValueError(f"`points` must hold positive seconds, got {dict(points)}.")
        self.num_rows = num_rows
        self.points = dict(points)
        self.place_seconds = _slope(points)
        groups: dict[int, list[float]] = {}
        for (capacity, depth), seconds in sorted(points.items()):
            groups.setdefault(capacity, []).append(seconds - depth * self.place_seconds)
        self._without = points[0, 0]
        self._sizes = [capacity for capacity in groups if capacity > 0]
        self._verify = _monotone([sum(groups[capacity]) / len(groups[capacity]) for capacity in self._sizes])
        self._ratio: float | None = None
        self._own: dict[tuple[int, int], float] = {}
        self._seen: dict[tuple[int, int], int] = {}

    @staticmethod
    def settings_to_time(num_rows: int, max_depth: int = 6) -> list[tuple[int, int]]:
        """About five (C, K) that tell the rest: two depths at one C for the cost of a place, three C for verifying."""
        wanted = [(0, 0), (num_rows, 1), (num_rows, min(3, max_depth)), (2 * num_rows, 2), (4 * num_rows, 4)]
        if max_depth == 1:
            wanted.append((-(-num_rows // 2), 1))
        return sorted({(capacity, depth) for capacity, depth in wanted if depth <= max_depth})

    @classmethod
    def measure(
        cls,
        time_step: Callable[[int, int], float],
        num_rows: int,
        settings: Iterable[tuple[int, int]] | None = None,
    ) -> CostTable:
        """
        Args:
            time_step (`Callable[[int, int], float]`): Seconds of a step with C and K.
            num_rows (`int`): N.
            settings (`Iterable[tuple[int, int]]`, *optional*): (C, K) to time, by default [`settings_to_time`].
        """
        settings = cls.settings_to_time(num_rows) if settings is None else settings
        return cls(num_rows, {(capacity, depth): time_step(capacity, depth) for capacity, depth in settings})

    @classmethod
    def cached(
        cls,
        key: Mapping[str, Any],
        time_step: Callable[[int, int], float],
        num_rows: int,
        settings: Iterable[tuple[int, int]] | None = None,
    ) -> CostTable:
        """The table on disk under `key` ([`cost_key`]), or else one that is measured now and put there."""
        table = cls.load(key)
        if table is None:
            table = cls.measure(time_step, num_rows, settings)
            table.save(key)
        return table

    @classmethod
    def load(cls, key: Mapping[str, Any]) -> CostTable | None:
        """The table on disk under `key`; `None` if there is none, or what is there is no such table."""
        try:
            found = json.loads(_path(key).read_text(encoding="utf-8"))
            if found["version"] != _VERSION or found["key"] != json.loads(_text(key)):
                return None
            return cls(int(found["num_rows"]), {(int(c), int(k)): float(s) for c, k, s in found["points"]})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def save(self, key: Mapping[str, Any]) -> None:
        """Put what was timed on disk, whole or not at all. A disk that cannot be written to is no error."""
        points = [[capacity, depth, seconds] for (capacity, depth), seconds in sorted(self.points.items())]
        content = {"version": _VERSION, "key": key, "num_rows": self.num_rows, "points": points}
        path, written = _path(key), None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=path.parent, suffix=".part", delete=False, encoding="utf-8"
            ) as file:
                written = file.name
                json.dump(content, file, indent=1)
            os.replace(written, path)
        except OSError as error:
            logger.info(f"The cost table is not kept for later processes: {error}")
            if written is not None:
                Path(written).unlink(missing_ok=True)

    def step_seconds(self, capacity: int, depth: int) -> float:
        """
        Args:
            capacity (`int`): C.
            depth (`int`): K.

        Returns:
            `float`: Seconds of a step, as timed and as corrected since ([`refine`]).
        """
        return self._timed(capacity, depth) * (self._ratio or 1.0) * self._own.get((capacity, depth), 1.0)

    def refine(self, capacity: int, depth: int, seconds: float) -> None:
        """
        Learn from steps that ran. What a setting's first windows are off by is taken for an error of the table there;
        what comes later, for a change of the machine or of the texts, which all settings share.

        Args:
            capacity (`int`): C.
            depth (`int`): K.
            seconds (`float`): Mean seconds of a step, of one window of steps.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            return
        setting = (capacity, depth)
        if self._ratio is None:
            # A large error is a table of another day, which is off everywhere; of a small one, half is this setting's.
            ratio = seconds / self._timed(capacity, depth)
            self._ratio = ratio * math.exp(-_bounded(math.log(ratio)) / 2)
        error = _bounded(math.log(seconds / self.step_seconds(capacity, depth)))
        seen = self._seen[setting] = self._seen.get(setting, 0) + 1
        self._own = {one: ratio**_KEPT if one != setting else ratio for one, ratio in self._own.items()}
        self._own[setting] = self._own.get(setting, 1.0) * math.exp(error * max(0.5 / seen, 0.05))
        self._ratio *= math.exp(error * _RATE)

    def _timed(self, capacity: int, depth: int) -> float:
        """What the timed points say."""
        if capacity == 0:
            return self._without
        return max(self._without, _on_line(self._sizes, self._verify, capacity) + depth * self.place_seconds)


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


def _path(key: Mapping[str, Any]) -> Path:
    return Path(constants.HF_HOME) / "tetris_hf" / "costs" / f"{hashed(_text(key))}.json"


def _bounded(error: float) -> float:
    return min(max(error, -_LARGEST), _LARGEST)


def _slope(points: Mapping[tuple[int, int], float]) -> float:
    """Seconds of a place: least squares over settings of equal C, each C with a level of its own; at least 0."""
    above = below = 0.0
    for _, group in itertools.groupby(sorted(points), key=lambda setting: setting[0]):
        settings = list(group)
        depth = sum(depth for _, depth in settings) / len(settings)
        above += sum((setting[1] - depth) * points[setting] for setting in settings)
        below += sum((setting[1] - depth) ** 2 for setting in settings)
    return max(0.0, above / below) if below else 0.0


def _monotone(values: list[float]) -> list[float]:
    """The nearest non-decreasing values (least squares, pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, number = pools.pop()
            mean, count = (before * number + mean * count) / (number + count), number + count
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def _on_line(places: list[int], values: list[float], place: int) -> float:
    """The piecewise line through the points; its first and last pieces go on beyond them."""
    if len(places) == 1:
        return values[0]
    left = min(max(sum(one <= place for one in places) - 1, 0), len(places) - 2)
    share = (place - places[left]) / (places[left + 1] - places[left])
    return values[left] + share * (values[left + 1] - values[left])
