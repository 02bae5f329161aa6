"""Records of a benchmark as JSON lines, kept as soon as they are there.

Knows one record. Does not know what was measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def append(record: dict[str, Any], path: Path | None) -> None:
    """Add a record at the end of a file, if there is one to be written."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def report(record: dict[str, Any], path: Path | None) -> None:
    """Print a record, but for what all of its run share, and [`append`] it."""
    print(json.dumps({key: value for key, value in record.items() if key != "run"}), flush=True)
    append(record, path)
