"""Prompts from a file or from standard input, one a line.

Knows the formats and the tokenizer. Does not know models.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from .errors import CommandError, PromptError


@dataclass(frozen=True)
class Prompt:
    """
    One line of the input.

    Attributes:
        id (`str` or `int`): Given in the line, else the number of the line, counted from 1.
        content (`str` or `list[dict]`): A text, or the messages of a chat.
        error (`str`, *optional*): Why it cannot be served, if that is seen from the line alone.
    """

    id: str | int
    content: str | list[dict[str, Any]] = ""
    error: str | None = None


def read_prompts(source: str, format: str = "auto", key: str = "prompt") -> list[Prompt]:
    """
    Read all prompts. Lines that hold nothing are skipped; a line that cannot be read is a prompt with an error.

    Args:
        source (`str`): A file, or `-` for standard input.
        format (`str`, *optional*, defaults to `"auto"`): `"jsonl"`, `"text"`, or by the file's name or first line.
        key (`str`, *optional*, defaults to `"prompt"`): Where the text is in an object.

    Raises:
        `CommandError`: If there is no such file, it holds no prompt, or two prompts have the same id.
    """
    try:
        content = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
    except OSError as error:
        raise CommandError(f"the prompts `{source}` cannot be read: {error.strerror}.") from error
    lines = [(number, line.strip()) for number, line in enumerate(content.split(b"\n"), start=1)]
    lines = [(number, line) for number, line in lines if line.removeprefix(b"\xef\xbb\xbf")]
    if not lines:
        raise CommandError(f"`{source}` holds no prompts: put one in each line.")
    if format == "auto":
        by_name = {".jsonl": "jsonl", ".ndjson": "jsonl", ".txt": "text"}.get(Path(source).suffix)
        format = by_name or ("jsonl" if lines[0][1].removeprefix(b"\xef\xbb\xbf").startswith(b"{") else "text")
    prompts = [_prompt(number, line, format == "jsonl", key) for number, line in lines]
    _check_ids(prompts, [number for number, _ in lines])
    return prompts


def read_template(file: str | None) -> str | None:
    """
    A chat template.

    Args:
        file (`str`, *optional*): A Jinja file.

    Raises:
        `CommandError`: If it cannot be read.
    """
    if file is None:
        return None
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--chat-template {file} cannot be read: {error.strerror}.") from error


def _prompt(number: int, line: bytes, is_json: bool, key: str) -> Prompt:
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Prompt(number, error=f"line {number} is not UTF-8: {error.reason}")
    if not is_json:
        return Prompt(number, text)
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        return Prompt(number, error=f"line {number} is not JSON: {error}")
    if not isinstance(record, dict):
        return Prompt(number, error=f"line {number} is not an object with `{key}` or `messages`")
    name = record.get("id", number)
    if isinstance(name, bool) or not isinstance(name, str | int):
        return Prompt(number, error=f"`id` in line {number} must be a text or an integer, got {json.dumps(name)}")
    if (key in record) == ("messages" in record):
        return Prompt(name, error=f"the prompt needs either `{key}` or `messages`, it has {sorted(record)}")
    if key in record:
        if not isinstance(record[key], str):
            return Prompt(name, error=f"`{key}` must be a text, got {json.dumps(record[key])[:80]}")
        return Prompt(name, record[key])
    messages = record["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        return Prompt(name, error="`messages` must be a list of objects with `role` and `content`")
    return Prompt(name, messages)


def _check_ids(prompts: list[Prompt], numbers: list[int]) -> None:
    seen: dict[str | int, int] = {}
    for prompt, number in zip(prompts, numbers, strict=True):
        if prompt.id in seen:
            raise CommandError(
                f"lines {seen[prompt.id]} and {number} both have the id {json.dumps(prompt.id)}: ids must differ, a "
                "line without one is called by its number."
            )
        seen[prompt.id] = number


class Encoder:
    """
    From prompts to token ids.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The target's tokenizer.
        chat (`bool`): Whether plain texts are sent through the chat template.
        template (`str`, *optional*): A template in place of the tokenizer's own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat: bool, template: str | None = None):
        self.tokenizer = tokenizer
        self.chat = chat
        self.template = template

    def check(self, prompts: list[Prompt]) -> None:
        """
        Raises:
            `CommandError`: If a template is needed and there is none.
        """
        wanted = self.chat or any(not isinstance(prompt.content, str) for prompt in prompts)
        if wanted and self.template is None and self.tokenizer.chat_template is None:
            raise CommandError("the tokenizer has no chat template: pass one with --chat-template FILE.")

    def __call__(self, prompt: Prompt) -> list[int]:
        """
        Raises:
            `PromptError`: If the prompt cannot be served.
        """
        if prompt.error is not None:
            raise PromptError(prompt.error)
        messages = prompt.content
        if isinstance(messages, str):
            if not messages:
                raise PromptError("the prompt is empty")
            if not self.chat:
                return self._tokens(messages, add_special_tokens=True)
            messages = [{"role": "user", "content": messages}]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program: it may raise anything about messages it does not like
            raise PromptError(f"the chat template refuses the messages: {error}") from error
        return self._tokens(text, add_special_tokens=False)

    def _tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        tokens = list(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids)
        if not tokens:
            raise PromptError("the prompt is empty")
        return tokens
