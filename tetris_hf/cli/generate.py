"""`tetris-hf generate`: prompts in, completions out, as JSON lines; nothing is lost when it is interrupted."""

from __future__ import annotations

import argparse
from typing import Any

from . import options
from .encoding import Encoder, read_template
from .errors import CommandError
from .job import Job, tell
from .loading import load_drafter, load_target
from .prompts import PromptFile
from .sharding import Ranks


DESCRIPTION = """\
Completes any number of prompts; --batch-size of them are decoded at once, and one that ends makes room for the next.
Each gets a record, one JSON line, when it ends:

  {"id": ..., "text": ..., "finish_reason": "stop" | "length", "prompt_tokens": ..., "completion_tokens": ...,
   "token_ids": [...], "steps": ..., "verified": ..., "accepted": ...}

A prompt that cannot be served gets {"id": ..., "finish_reason": "error", "error": ...}, and the job goes on.
--resume goes on with a job after any interruption and gives the text of an undisturbed one, also when it samples.

  tetris-hf generate prompts.jsonl --model M --assistant A --chat --output answers.jsonl
  tetris-hf generate prompts.jsonl --model M --assistant A --chat --output answers.jsonl --resume
  echo "The capital of France is" | tetris-hf generate --model M --assistant lookup --max-new-tokens 20
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
        type=options.capacity,
        metavar="C",
        help="draft tokens verified per step over the whole batch (default: one per prompt in it; 0 without drafts); "
        "`auto` chooses C and K as it goes. `tetris-hf bench` suggests a number",
    )
    group.add_argument(
        "--num-assistant-tokens",
        type=options.positive,
        metavar="K",
        help="draft tokens proposed per prompt and step (default: the assistant's own, else C // N + 1); with "
        "`auto` the most (default: 6)",
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
    ranks = Ranks.of_environment(args.device)
    if ranks.world_size > 1 and args.prompts == "-":
        raise CommandError(f"{ranks.world_size} processes cannot share standard input: name a file of prompts.")
    with PromptFile(args.prompts, args.format, args.prompt_key) as prompts:
        output = ranks.open(args.output, args.resume)
        try:
            output.check(set(prompts.ids))
            if len(output.done) == len(prompts):
                tell(args, f"all {len(prompts)} prompts have their record already")
            else:
                model, tokenizer = load_target(args)
                encoder = Encoder(tokenizer, args.chat, template)
                encoder.check(prompts.has_chats)
                settings = {
                    **sampling,
                    "assistant_model": load_drafter(args.assistant, model, args),
                    "tetris_capacity": args.capacity if args.assistant else 0,
                    "num_assistant_tokens": args.num_assistant_tokens,
                }
                Job(model, tokenizer, encoder, settings, output, ranks, args).run(prompts)
        finally:
            output.close()
        ranks.finish(prompts.ids)
