"""A job: prompts on their way through one batch of the engine to records.

Knows prompts, answers and records. Does not know how a batch is decoded: that is [`iterate_batch`].
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, StopStringCriteria
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..generation import RequestOutput, iterate_batch
from .encoding import Encoder
from .errors import FAILURE, CommandError, PromptError
from .prompts import PromptFile
from .records import Record, RecordFile, error_record
from .sharding import Ranks
from .summary import Summary


class Job:
    """
    Prompts on their way to records.

    Args:
        model (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        encoder ([`Encoder`]): From prompts to tokens.
        settings (`dict`): Arguments of [`iterate_batch`]; a `tetris_capacity` of `None` stands for one per row.
        output ([`RecordFile`]): Where records go.
        ranks ([`Ranks`]): Who else serves the same prompts.
        args (`argparse.Namespace`): Options of the command.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        encoder: Encoder,
        settings: dict[str, Any],
        output: RecordFile,
        ranks: Ranks,
        args: argparse.Namespace,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.settings = settings
        self.output = output
        self.ranks = ranks
        self.args = args
        self.summary = Summary()
        self._waiting: dict[int, str | int] = {}  # ids of prompts that the engine has, by their place among these

    def run(self, prompts: PromptFile) -> None:
        """
        Serve those prompts that have no record yet.

        Raises:
            `CommandError`: If the engine refuses a setting, before anything is written; or if memory runs out.
        """
        places = [place for place, name in enumerate(prompts.ids) if name not in self.output.done]
        settings = self._settings(min(self.args.batch_size, len(places)))
        self._start, self._had = time.perf_counter(), len(self.output.done)
        self._bar = tqdm(
            total=len(prompts),
            initial=self._had,
            unit="prompt",
            disable=self.args.quiet or self.ranks.rank > 0,
            file=sys.stderr,
        )
        try:
            with self._bar:
                for number, answer in iterate_batch(self.model, self._requests(prompts, places), **settings):
                    self._write(self._record(self._waiting.pop(number), answer))
        except KeyboardInterrupt:
            done = f"interrupted: {len(self.output.done)} of {len(prompts)} prompts have their record"
            tell(self.args, done + ("" if self.args.output == "-" else "; --resume goes on"))
            raise
        except torch.OutOfMemoryError as error:
            message = str(error).splitlines()[0]
            raise CommandError(
                f"out of memory: {message} What is written stays, --resume goes on.", FAILURE
            ) from error
        summary, seconds = self.summary, time.perf_counter() - self._start
        tell(
            self.args,
            f"{summary.records} records, {summary.finish_reasons['error']} of them errors; "
            f"{summary.completion_tokens} tokens, {summary.completion_tokens / seconds:.1f} a second; "
            f"{summary.mean_accepted or 1:.2f} tokens per row and step",
        )

    def _settings(self, batch_size: int) -> dict[str, Any]:
        """Arguments of [`iterate_batch`], tried out on no prompts at all: what it refuses is refused here."""
        capacity = self.settings["tetris_capacity"]
        settings = {
            **self.settings,
            "tetris_capacity": batch_size if capacity is None else capacity,
            "batch_size": batch_size,
            "max_new_tokens": self.args.max_new_tokens,
            "num_return_sequences": 1,
            "seed": self.args.seed if self.args.do_sample else None,
            "progress_bar": False,
        }
        if self.args.stop:
            try:
                settings["stopping_criteria"] = [StopStringCriteria(self.tokenizer, self.args.stop)]
            except ValueError as error:
                raise CommandError(f"--stop cannot be used with this tokenizer: {error}.") from error
        try:
            list(iterate_batch(self.model, [], **settings))
        except ValueError as error:
            raise CommandError(
                f"the target with its generation config, or its assistant, cannot serve a job: {error}"
            ) from error
        return settings

    def _requests(self, prompts: PromptFile, places: list[int]) -> Iterator[dict[str, Any]]:
        """Prompts as the engine takes them, each when it asks for one. What has no tokens gets its record here."""
        number = 0
        for place in self.ranks.take(places):
            prompt = prompts[place]
            try:
                request: dict[str, Any] = {"input_ids": self.encoder(prompt)}
            except PromptError as error:
                self._write(error_record(prompt.id, str(error)))
                continue
            if prompt.max_new_tokens is not None:
                request["max_new_tokens"] = prompt.max_new_tokens
            if self.args.do_sample:
                # By the place in the file, not among what is served now: a resumed job has the draws of a whole one.
                request["seed"] = (self.args.seed << 32) + place
            self._waiting[number] = prompt.id
            number += 1
            yield request

    def _record(self, name: str | int, answer: RequestOutput) -> Record:
        if answer.error is not None:
            return error_record(name, answer.error)
        tokens = answer.generated_tokens
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        stopped = any(stop in text for stop in self.args.stop or ())  # perhaps with the last token that it may have
        return {
            "id": name,
            "text": text,
            "finish_reason": "stop" if stopped else answer.finish_reason,
            "prompt_tokens": len(answer.prompt_ids),
            "completion_tokens": len(tokens),
            "token_ids": tokens,
            "steps": answer.steps,
            "verified": answer.verified,
            "accepted": answer.accepted,
        }

    def _write(self, record: Record) -> None:
        self.output.write(record)
        self.summary.add(record)
        of_all = self.ranks.count(1)
        self._bar.update(1 if self.ranks.world_size == 1 else self._had + of_all - self._bar.n)
        speed = self.summary.completion_tokens / (time.perf_counter() - self._start)
        self._bar.set_postfix_str(
            f"{speed:.0f} tokens a second, {self.summary.mean_accepted or 1:.2f} per row and step", refresh=False
        )


def tell(args: argparse.Namespace, message: str) -> None:
    """A word about the job on standard error, unless `--quiet`."""
    if not args.quiet:
        print(message, file=sys.stderr)
