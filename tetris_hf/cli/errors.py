"""Errors that end a command with a message instead of a traceback, and the exit codes of `tetris-hf`."""

from __future__ import annotations


OK = 0
FAILURE = 1
USAGE = 2
INTERRUPTED = 130


class CommandError(Exception):
    """
    Ends the command.

    Args:
        message (`str`): What is wrong and how to mend it.
        code (`int`, *optional*, defaults to 2): The exit code: 2 for what was asked, 1 for what went wrong.
    """

    def __init__(self, message: str, code: int = USAGE):
        super().__init__(message)
        self.code = code


class PromptError(Exception):
    """A prompt that cannot be served. It becomes an error record, and the job goes on."""
