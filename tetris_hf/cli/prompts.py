"""Prompts from a file or from standard input, one a line.

Knows the formats. Does not know tokens or models.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from .errors import CommandError


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Prompt:
    """
    One line of the input.

    Attributes:
        id (`str` or `int`): Given in the line, else the number of the line, counted from 1.
        content (`str` or `list[dict]`): A text, or the messages of a chat.
        error (`str`, *optional*): Why it cannot be served, if that is seen from the line alone.
        max_new_tokens (`int`, *optional*): Of its completion, where the line says so.
    """

    id: str | int
    content: str | list[dict[str, Any]] = ""
    error: str | None = None
    max_new_tokens: int | None = None


class PromptFile:
    """
    The prompts of a file, which may be larger than memory: it is read through once for their ids, and each prompt once
    more when it is asked for. Lines that hold nothing are skipped; one that cannot be read is a prompt with an error.

    Args:
        source (`str`): A file, or `-` for standard input, which is put into a temporary file first.
        format (`str`, *optional*, defaults to `"auto"`): `"jsonl"`, `"text"`, or by the file's name or first line.
        key (`str`, *optional*, defaults to `"prompt"`): Where the text is in an object.

    Attributes:
        ids (`list[str | int]`): Of all prompts.
        has_chats (`bool`): Whether some of them are chats.

    Raises:
        `CommandError`: If there is no such file, it holds no prompt, or two prompts have the same id.
    """

    def __init__(self, source: str, format: str = "auto", key: str = "prompt"):
        self.ids: list[str | int] = []
        self.has_chats = False
        self._key = key
        self._starts, self._numbers = array("q"), array("q")  # where lines begin, and their numbers
        try:
            self._file = _open(source)
            self._index(source, format)
        except OSError as error:
            raise CommandError(f"the prompts `{source}` cannot be read: {error.strerror}.") from error
        if not self.ids:
            raise CommandError(f"`{source}` holds no prompts: put one in each line.")

    def __enter__(self) -> PromptFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, place: int) -> Prompt:
        self._file.seek(self._starts[place])
        return self._prompt(self._numbers[place], self._file.readline().strip())

    def __iter__(self) -> Iterator[Prompt]:
        return (self[place] for place in range(len(self)))

    def _index(self, source: str, format: str) -> None:
        """Find out where prompts begin and what they are called."""
        lines: dict[str | int, int] = {}
        start = 0
        for number, line in enumerate(self._file, start=1):
            here, start = start, start + len(line)
            if not (line := line.strip()).removeprefix(_BYTE_ORDER_MARK):
                continue
            if not self.ids:
                by_name = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text"}.get(Path(source).suffix)
                looks_like = "jsonl" if line.removeprefix(_BYTE_ORDER_MARK).startswith(b"{") else "text"
                self._is_json = (format if format != "auto" else by_name or looks_like) == "jsonl"
            prompt = self._prompt(number, line)
            if prompt.id in lines:
                raise CommandError(
                    f"lines {lines[prompt.id]} and {number} both have the id {json.dumps(prompt.id)}: ids must "
                    "differ, a line without one is called by its number."
                )
            lines[prompt.id] = number
            self.ids.append(prompt.id)
            self.has_chats |= not isinstance(prompt.content, str)
            self._starts.append(here)
            self._numbers.append(number)

    def _prompt(self, number: int, line: bytes) -> Prompt:
        """What a line says."""
        try:
            text = line.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return Prompt(number, error=f"line {number} is not UTF-8: {error.reason}")
        if not self._is_json:
            return Prompt(number, text)
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            return Prompt(number, error=f"line {number} is not JSON: {error}")
        key = self._key
        if not isinstance(record, dict):
            return Prompt(number, error=f"line {number} is not an object with `{key}` or `messages`")
        name = record.get("id", number)
        if isinstance(name, bool) or not isinstance(name, str | int):
            return Prompt(number, error=f"`id` in line {number} must be a text or an integer, got {json.dumps(name)}")
        if (key in record) == ("messages" in record):
            return Prompt(name, error=f"the prompt needs either `{key}` or `messages`, it has {sorted(record)}")
        new = record.get("max_new_tokens")
        if new is not None and (isinstance(new, bool) or not isinstance(new, int) or new < 1):
            return Prompt(name, error=f"`max_new_tokens` must be an integer of at least 1, got {json.dumps(new)}")
        if key in record:
            if not isinstance(record[key], str):
                return Prompt(name, error=f"`{key}` must be a text, got {json.dumps(record[key])[:80]}")
            return Prompt(name, record[key], max_new_tokens=new)
        messages = record["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            return Prompt(name, error="`messages` must be a list of objects with `role` and `content`")
        return Prompt(name, messages, max_new_tokens=new)


def _open(source: str) -> IO[bytes]:
    """A file in which one can go back; what comes from a pipe is put into one that vanishes when it is closed."""
    if source == "-":
        pipe: IO[bytes] = sys.stdin.buffer
    elif (pipe := open(source, "rb")).seekable():
        return pipe
    kept = tempfile.TemporaryFile()
    shutil.copyfileobj(pipe, kept)
    kept.seek(0)
    return kept
