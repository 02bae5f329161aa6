"""The entry point: from `argv` to a command and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from transformers.utils import logging

import tetris_hf

from . import bench, generate, stats
from .errors import FAILURE, INTERRUPTED, OK, CommandError


DESCRIPTION = """\
Batched speculative decoding with Hugging Face transformers: exact text, several tokens per forward of the target.

  tetris-hf generate prompts.jsonl --model M --assistant A --output answers.jsonl
  tetris-hf bench prompts.jsonl --model M --assistant A --batch-size 16
  tetris-hf stats answers.jsonl
"""
EPILOG = """\
exit codes: 0 done, 1 something failed, 2 wrong usage, 130 interrupted.
`tetris-hf COMMAND --help` explains a command.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands."""
    parser = argparse.ArgumentParser(
        prog="tetris-hf", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"tetris-hf {tetris_hf.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, bench, stats):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command.

    Args:
        argv (`Sequence[str]`, *optional*): Arguments without the program's name; by default those of the process.

    Returns:
        `int`: 0 if it is done, 1 if something failed, 2 for wrong usage, 130 if it was interrupted.
    """
    try:
        args = build_parser().parse_args(argv)
    except SystemExit as leaving:  # argparse has printed the help, the version or what is wrong
        return int(leaving.code or OK)
    logging.set_verbosity_error()
    if getattr(args, "quiet", False):
        logging.disable_progress_bar()
    try:
        args.run(args)
        sys.stdout.flush()
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has left. The stream is closed again at exit, which must not raise once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILURE
    except CommandError as error:
        return _complain(args, error, error.code)
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        if getattr(args, "traceback", False):
            raise
        return _complain(args, error, FAILURE)


def _complain(args: argparse.Namespace, error: Exception, code: int) -> int:
    print(f"tetris-hf {args.command}: error: {error}", file=sys.stderr)
    return code
