"""Options that several commands share, and their groups in `--help`."""

from __future__ import annotations

import argparse
from typing import Any

from .errors import CommandError


def positive(text: str) -> int:
    """An integer of at least 1."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def not_negative(text: str) -> int:
    """An integer of at least 0."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {number}")
    return number


def capacity(text: str) -> int | str:
    """C: an integer of at least 0, or `auto`."""
    if text == "auto":
        return text
    if not text.lstrip("+-").isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, or `auto`, got {text!r}")
    return not_negative(text)


def seed(text: str) -> int:
    """An integer of at least 0 that leaves room in 64 bits for the place of a prompt."""
    if (number := not_negative(text)) >= 2**31:
        raise argparse.ArgumentTypeError(f"must be below {2**31}, got {number}")
    return number


def above_zero(text: str) -> float:
    """A number above 0."""
    if not (number := float(text)) > 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return number


def share(text: str) -> float:
    """A number above 0 and at most 1."""
    if not 0 < (number := float(text)) <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, got {text}")
    return number


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Where prompts come from and how they become tokens."""
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "prompts",
        nargs="?",
        default="-",
        metavar="PROMPTS",
        help="file of prompts, `-` for standard input (default). JSON lines: an object with `prompt`, a text, or "
        "`messages`, a chat, and perhaps `id`; other keys are ignored. Text: a prompt in each line",
    )
    group.add_argument(
        "--format",
        choices=["auto", "jsonl", "text"],
        default="auto",
        help="auto (default): by the name's end, .jsonl or .txt, else JSON lines if the first line begins with {",
    )
    group.add_argument("--prompt-key", default="prompt", metavar="KEY", help="key of the text (default: prompt)")
    group.add_argument(
        "--chat", action="store_true", help="send plain prompts through the chat template as a message of the user"
    )
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja file in place of the tokenizer's own template")


def add_models(parser: argparse.ArgumentParser) -> None:
    """The target, who drafts, where and in which precision."""
    group = parser.add_argument_group("models")
    group.add_argument("--model", required=True, metavar="NAME", help="target: a folder or a Hub id")
    group.add_argument(
        "--assistant",
        action="append",
        metavar="NAME",
        help="who drafts: folder or Hub id of a causal LM with the target's tokenizer, of Medusa heads or of a "
        "shallow assistant; `lookup`, copies from the text itself; `layers:0,1,5-9`, those layers of the target. "
        "Given several times, they are mixed. Without it nothing is drafted",
    )
    group.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16", "float16"],
        default="auto",
        help="auto (default): as the weights are stored. Identity with plain `generate` is promised in float32",
    )
    group.add_argument(
        "--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ...; `auto` spreads the target over all (default: cuda)"
    )
    group.add_argument("--revision", metavar="NAME", help="revision of the target on the Hub")
    group.add_argument("--gguf-file", metavar="NAME", help="file with the target's weights, if they are in GGUF")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the models")


def add_decoding(parser: argparse.ArgumentParser, batch_size: int, max_new_tokens: int) -> None:
    """Sizes of the batch and of the text, and how tokens are chosen."""
    group = parser.add_argument_group("decoding")
    group.add_argument(
        "--batch-size",
        type=positive,
        default=batch_size,
        metavar="N",
        help=f"prompts decoded at once (default: {batch_size})",
    )
    group.add_argument(
        "--max-new-tokens",
        type=positive,
        default=max_new_tokens,
        metavar="T",
        help=f"tokens of a completion (default: {max_new_tokens})",
    )
    group.add_argument(
        "--do-sample", action="store_true", help="sample; by default the best token is taken each time (greedy)"
    )
    group.add_argument("--temperature", type=above_zero, metavar="X", help="with --do-sample")
    group.add_argument("--top-p", type=share, metavar="X", help="with --do-sample")
    group.add_argument("--top-k", type=not_negative, metavar="N", help="with --do-sample; 0 for all tokens")
    group.add_argument("--seed", type=seed, default=0, metavar="N", help="of sampling (default: 0)")


def add_debugging(parser: argparse.ArgumentParser) -> None:
    """What helps to report an error."""
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")


def sampling_settings(args: argparse.Namespace) -> dict[str, Any]:
    """
    Arguments of `generate` that say how tokens are chosen.

    Raises:
        `CommandError`: If a setting of sampling is given without `--do-sample`.
    """
    chosen = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k")}
    given = {name: value for name, value in chosen.items() if value is not None}
    if given and not args.do_sample:
        option = "--" + next(iter(given)).replace("_", "-")
        raise CommandError(f"{option} says how to sample: add --do-sample, or leave it out for greedy text.")
    return {"do_sample": args.do_sample, **given}
