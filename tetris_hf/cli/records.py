"""Records of a job: one JSON line a prompt, appended as they come, picked up again after any interruption.

Knows the format of a record and the file. Does not know how text is made.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from .errors import FAILURE, CommandError


Record = dict[str, Any]

# What is counted for each completion: tokens, steps of its row, and draft tokens in these.
COUNTS = ("prompt_tokens", "completion_tokens", "steps", "verified", "accepted")


def error_record(prompt_id: str | int, message: str) -> Record:
    """What stands in the place of a completion if a prompt cannot be served."""
    return {"id": prompt_id, "finish_reason": "error", "error": message}


class RecordFile:
    """
    Appends records to a file or to standard output, each in one write, so that only the last line can be torn.

    Args:
        path (`str`): A file, or `-` for standard output.
        resume (`bool`): Whether records that are there already count as done.

    Attributes:
        done (`set`): Ids that need no completion any more. Error records count as done.

    Raises:
        `CommandError`: If the file has records and is not to be resumed, or it holds something else.
    """

    def __init__(self, path: str, resume: bool):
        self.done: set[str | int] = set()
        if path == "-":
            if resume:
                raise CommandError("--resume needs a file to go on with: add --output FILE.")
            self._file: BinaryIO = sys.stdout.buffer
            return
        file = Path(path)
        if resume and file.exists():
            end = 0
            for record, its_end in each_record(file):
                self.done.add(record["id"])
                end = its_end
            if end < file.stat().st_size:
                os.truncate(file, end)  # the last line is torn: its prompt is served again
        elif file.exists() and file.stat().st_size:
            raise CommandError(f"`{path}` has records already: add --resume to go on with it, or remove it.")
        try:
            self._file = open(file, "ab")
        except OSError as error:
            raise CommandError(f"`{path}` cannot be written: {error.strerror}.") from error

    def check(self, ids: set[str | int]) -> None:
        """
        Args:
            ids (`set`): Those of the job's prompts.

        Raises:
            `CommandError`: If the file has records of another job.
        """
        if foreign := self.done - ids:
            raise CommandError(
                f"the output has a record with the id {json.dumps(min(foreign, key=str))}, which no prompt has: it "
                "belongs to another job. Choose another --output."
            )

    def write(self, record: Record) -> None:
        """Append a record and hand it to the system."""
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.done.add(record["id"])

    def close(self) -> None:
        """Close the file; standard output stays open."""
        if self._file is not sys.stdout.buffer:
            self._file.close()


def each_record(file: Path) -> Iterator[tuple[Record, int]]:
    """
    What a job has written so far, record by record: the file may be larger than memory.

    Args:
        file (`Path`): JSON lines.

    Returns:
        `Iterator[tuple[dict, int]]`: The records, and where in the file each ends. A torn last line is left out.

    Raises:
        `CommandError`: If a line that was written to its end is no record.
    """
    try:
        with open(file, "rb") as lines:
            end = 0
            for number, line in enumerate(lines, start=1):
                if not line.endswith(b"\n"):
                    return
                end += len(line)
                yield _record(line, number, file), end
    except OSError as error:
        raise CommandError(f"`{file}` cannot be read: {error.strerror}.") from error


def _record(line: bytes, number: int, file: Path) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict) or "finish_reason" not in record or "id" not in record:
        raise CommandError(f"line {number} of `{file}` is no record of `tetris-hf generate`.", FAILURE)
    return record
