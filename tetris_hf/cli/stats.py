"""`tetris-hf stats`: how finished jobs ended, and what was verified and accepted in them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .options import add_debugging
from .records import each_record
from .summary import Summary


def add_parser(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "stats",
        help="sum up what `generate` wrote",
        description="Sums up the records that `tetris-hf generate` wrote: how completions ended, their tokens, VSR "
        "(accepted / verified), TER ((accepted + bonus) / (verified + rows)) and tokens per row and step.",
    )
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORDS", help="files of JSON lines")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_debugging(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """
    Print the summary.

    Raises:
        `CommandError`: If a file cannot be read or holds something else. A torn last line is left out.
    """
    summary = Summary.of(record for file in args.records for record, _ in each_record(file))
    if args.json:
        print(json.dumps(summary.as_dict()))
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(summary.finish_reasons.items()))
    rows = [
        ("records", f"{summary.records}" + (f" ({reasons})" if reasons else "")),
        ("prompt tokens", f"{summary.prompt_tokens}"),
        ("completion tokens", f"{summary.completion_tokens}"),
        ("steps of all rows", f"{summary.steps}"),
        ("draft tokens verified", f"{summary.verified}"),
        ("draft tokens accepted", f"{summary.accepted}"),
        ("VSR, accepted / verified", _number(summary.vsr)),
        ("TER, (accepted + bonus) / (verified + rows)", _number(summary.ter)),
        ("mean tokens per row and step", _number(summary.mean_accepted)),
    ]
    for name, value in rows:
        print(f"{name:<46}{value}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
