"""`tetris-hf stats`: what was drafted, verified and accepted in finished jobs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .options import add_debugging
from .records import read_records
from .summary import Summary


def add_parser(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "stats",
        help="sum up what `generate` wrote",
        description="Sums up the records that `tetris-hf generate` wrote: how completions ended, the acceptance by "
        "draft position, VSR (accepted / verified), TER ((accepted + bonus) / (verified + rows)) and tokens per step.",
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
    summary = Summary.of(record for file in args.records for record in read_records(file)[0])
    if args.json:
        print(json.dumps(summary.as_dict()))
        return
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(summary.finish_reasons.items()))
    rows = [
        ("records", f"{summary.records}" + (f" ({reasons})" if reasons else "")),
        ("prompt tokens", f"{summary.prompt_tokens}"),
        ("completion tokens", f"{summary.completion_tokens}"),
        ("steps of all rows", f"{summary.steps}"),
        ("VSR, accepted / verified", _number(summary.vsr)),
        ("TER, (accepted + bonus) / (verified + rows)", _number(summary.ter)),
        ("mean tokens per row and step", _number(summary.mean_accepted)),
    ]
    for name, value in rows:
        print(f"{name:<46}{value}")
    if summary.drafted:
        print(f"\n{'draft position':>15} {'drafted':>10} {'verified':>10} {'accepted':>10} {'rate':>6}")
        columns = zip(summary.drafted, summary.verified, summary.accepted, summary.acceptance, strict=True)
        for place, (drafted, verified, accepted, rate) in enumerate(columns, start=1):
            print(f"{place:>15} {drafted:>10} {verified:>10} {accepted:>10} {_number(rate):>6}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
