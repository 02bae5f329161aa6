"""Figures and JSON lines of the scripts beside this file."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from records import append

from paper.traces import Trace


def arguments(description: str | None, needs_trace: bool = True) -> argparse.ArgumentParser:
    """The arguments that all figures share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=needs_trace, help="from record.py")
    parser.add_argument("--drafter", nargs="+", default=["shallow"], help="names in the trace, or lookup; mixed")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--per-row", type=int, default=4, help="requests of a trial for every row")
    parser.add_argument("--out", type=Path, help="JSON lines, added at the end of the file")
    parser.add_argument("--figure", type=Path, help="PNG (matplotlib)")
    return parser


def write(path: Path | None, trace: Trace, figure: str, records: Iterable[dict[str, Any]]) -> None:
    """Add records to a file of JSON lines, with the label of the paper's figure and how the trace was recorded."""
    for record in records:
        append({"figure": figure, **record, "trace": trace.about}, path)


def axes_for(titles: Sequence[str], columns: int = 3) -> tuple[Any, list[Any]]:
    """
    A figure with one drawing for each title.

    Raises:
        `SystemExit`: If matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--figure needs matplotlib, which is missing. Run `pip install matplotlib`.") from None
    columns = min(columns, len(titles))
    lines = -(-len(titles) // columns)
    figure = Figure(figsize=(4.2 * columns, 3.2 * lines), layout="constrained")
    axes = list(figure.subplots(lines, columns, squeeze=False).flat)
    for one, title in zip(axes, titles, strict=False):
        one.set_title(title, fontsize=10)
        one.grid(alpha=0.3)
    for one in axes[len(titles) :]:
        one.set_visible(False)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    """Write a PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    print(path)
