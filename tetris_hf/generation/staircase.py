"""The picture that gave TETRIS its name: how far each row of the batch was drafted, verified and accepted.

Knows lengths of rows. Does not know where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Staircase:
    """
    One bar per row: what was accepted, what else was verified, what else was drafted (TETRIS paper, Fig. 1).

    Printed, it is text for a terminal; [`plot`] draws it.

    Attributes:
        title (`str`): What the picture shows.
        rows (`list[int]`): Index of each row in the batch.
        drafted (`list[float]`): Draft tokens of each row, in one step or as a mean over steps.
        verified (`list[float]`): Those of them that were selected; at most `drafted`.
        accepted (`list[float]`): Those that were accepted; at most `verified`.
    """

    title: str
    rows: list[int]
    drafted: list[float]
    verified: list[float]
    accepted: list[float]

    def text(self, cell: int = 4) -> str:
        """
        Bars of characters: `#` accepted, `=` verified in vain, `.` drafted only.

        Args:
            cell (`int`, *optional*, defaults to 4): Characters per draft token.

        Raises:
            `ValueError`: If `cell` is under 1.
        """
        if cell < 1:
            raise ValueError(f"`cell` must be at least 1, got {cell}.")
        lines = [f"{self.title}  (# accepted, = verified in vain, . drafted only; {cell} characters a token)"]
        for row, *lengths in zip(self.rows, self.accepted, self.verified, self.drafted, strict=True):
            accepted, verified, drafted = (round(cell * length) for length in lengths)
            bar = "#" * accepted + "=" * (verified - accepted) + "." * (drafted - verified)
            lines.append(f"{row:>5} |{bar}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()

    def plot(self, axes: Any = None) -> Any:
        """
        Draw the bars, the first row on top.

        Args:
            axes (`matplotlib.axes.Axes`, *optional*): Where; by default on a new figure.

        Returns:
            `matplotlib.axes.Axes`: What was drawn on; `axes.figure.savefig(...)` keeps it.

        Raises:
            `ImportError`: If matplotlib is missing.
        """
        if axes is None:
            # In a `try`, because the Hub loader refuses a folder whose plain imports are not installed.
            try:
                from matplotlib import pyplot
            except ImportError as error:
                raise ImportError("`plot` needs matplotlib: `pip install tetris-hf[plots]`.") from error
            axes = pyplot.subplots(figsize=(4.5, 1.2 + 0.16 * len(self.rows)))[1]
        places = range(len(self.rows))
        for lengths, colour, label in (
            (self.drafted, "#dddddd", "drafted only"),
            (self.verified, "#e8a33d", "verified in vain"),
            (self.accepted, "#3b7dd8", "accepted"),
        ):
            axes.barh(places, lengths, height=1.0, color=colour, label=label, edgecolor="white", linewidth=0.5)
        deepest = int(max(self.drafted, default=0)) + 1
        for place in range(1, deepest):
            axes.axvline(place, color="white", linewidth=0.8)
        axes.set(title=self.title, xlabel="draft tokens", ylabel="row", yticks=list(places), yticklabels=self.rows)
        axes.set_xticks(range(deepest + 1))
        axes.set_xlim(0, max(1, max(self.drafted, default=0)))
        axes.margins(y=0)
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=6)
        # Below the axes: inside, it would hide rows.
        axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -2.2 / (2 + 0.5 * len(self.rows))), ncols=3)
        return axes
