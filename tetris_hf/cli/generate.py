"""`tetris-hf generate`: prompts in, completions out, as JSON lines; nothing is lost when it is interrupted."""

from __future__ import annotations

import argparse
from typing import Any

from . import options
from .errors import CommandError
from .job import Job, tell
from .loading import load_drafter, load_target
from .prompts import Encoder, read_prompts, read_template
from .records import RecordFile


DESCRIPTION = """\
Completes any number of prompts. A record is one JSON line:

  {"id": ..., "text": ..., "finish_reason": "stop" | "length", "prompt_tokens": ..., "completion_tokens": ...,
   "token_ids": [...], "counts": {"drafted": [...], "verified": [...], "accepted": [...], "bonus": ..., "steps": ...}}

A prompt that cannot be served gets {"id": ..., "finish_reason": "error", "error": ...}, and the job goes on. Records
come batch by batch; batches are the same in every run of a job, so a resumed job gives the text of an undisturbed one,
also when it samples.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "generate",
        help="complete prompts from a file or standard input",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_prompts(parser)
    options.add_models(parser)
    options.add_decoding(parser, batch_size=16, max_new_tokens=256)
    group = parser.add_argument_group("speculation")
    group.add_argument(
        "--capacity",
        type=options.not_negative,
        metavar="C",
        help="draft tokens verified per step over the whole batch (default: one per prompt in it; 0 without drafts). "
        "`tetris-hf bench` suggests one",
    )
    group.add_argument(
        "--num-assistant-tokens",
        type=options.positive,
        metavar="K",
        help="draft tokens proposed per prompt and step (default: the assistant's own, else ceil(C / N) + 2)",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--output", default="-", metavar="FILE", help="where records go (default: standard output)")
    group.add_argument(
        "--resume", action="store_true", help="go on with the job that wrote --output: what has a record is skipped"
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="end a completion after this text; repeatable")
    group.add_argument("--quiet", action="store_true", help="no progress bar and no summary")
    options.add_debugging(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    """
    Serve all prompts.

    Raises:
        `CommandError`: If what was asked cannot be done.
    """
    sampling = options.sampling_settings(args)
    if args.capacity and not args.assistant:
        raise CommandError(f"--capacity {args.capacity} needs somebody to draft: add --assistant NAME.")
    template = read_template(args.chat_template)
    prompts = read_prompts(args.prompts, args.format, args.prompt_key)
    output = RecordFile(args.output, args.resume)
    try:
        output.check({prompt.id for prompt in prompts})
        if len(output.done) == len(prompts):
            return tell(args, f"all {len(prompts)} prompts have their record already")
        model, tokenizer = load_target(args)
        encoder = Encoder(tokenizer, args.chat, template)
        encoder.check(prompts)
        settings = {
            **sampling,
            "max_new_tokens": args.max_new_tokens,
            "assistant_model": load_drafter(args.assistant, model, args),
            "tetris_capacity": args.capacity if args.assistant else 0,
            "num_assistant_tokens": args.num_assistant_tokens,
            **({"stop_strings": args.stop, "tokenizer": tokenizer} if args.stop else {}),
        }
        Job(model, tokenizer, encoder, settings, output, args).run(prompts)
    finally:
        output.close()
