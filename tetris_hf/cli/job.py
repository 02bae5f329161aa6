"""A job: prompts on their way to records, batch by batch.

Knows the target, batches and records. Does not know where any of them come from.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from .batching import Request, batches_of, left_padded
from .errors import PromptError
from .loading import text_limit
from .prompts import Encoder, Prompt
from .records import Record, RecordFile, error_record
from .summary import Summary


WINDOW = 16  # batches that are sorted by length together


class Job:
    """
    Prompts on their way to records.

    Args:
        model (`PreTrainedModel`): The target.
        tokenizer (`PreTrainedTokenizerBase`): Its tokenizer.
        encoder ([`Encoder`]): From prompts to tokens.
        settings (`dict`): Arguments of `generate`; a `tetris_capacity` of `None` stands for one per row.
        output ([`RecordFile`]): Where records go.
        args (`argparse.Namespace`): Options of the command.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        encoder: Encoder,
        settings: dict[str, Any],
        output: RecordFile,
        args: argparse.Namespace,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.encoder = encoder
        self.settings = settings
        self.output = output
        self.args = args
        self.most_rows = args.batch_size  # fewer once memory has run out
        self.summary = Summary()

    def run(self, prompts: list[Prompt]) -> None:
        """Serve those prompts that have no record yet."""
        start = time.perf_counter()
        self.bar = tqdm(
            total=len(prompts),
            initial=len(self.output.done),
            unit="prompt",
            disable=self.args.quiet,
            file=sys.stderr,
        )
        try:
            with self.bar:
                batches = batches_of(self._servable(prompts), self.args.batch_size, WINDOW)
                for index, batch in enumerate(batches):
                    # A batch is run again whole if any record is missing: its text may depend on all of its rows in
                    # half precision, and its random draws do.
                    if any(request.id not in self.output.done for request in batch):
                        torch.manual_seed(random.Random(f"{self.args.seed}/{index}").getrandbits(63))
                        for record in self._serve(batch):
                            self._write(record)
        except KeyboardInterrupt:
            done = f"interrupted: {len(self.output.done)} of {len(prompts)} prompts have their record"
            tell(self.args, done + ("" if self.args.output == "-" else "; --resume goes on"))
            raise
        seconds = time.perf_counter() - start
        summary = self.summary
        tell(
            self.args,
            f"{summary.records} records, {summary.finish_reasons['error']} of them errors; "
            f"{summary.completion_tokens} tokens, {summary.completion_tokens / seconds:.1f} a second; "
            f"{summary.mean_accepted or 1:.2f} tokens per row and step",
        )

    def _servable(self, prompts: list[Prompt]) -> Iterator[Request]:
        """Prompts as tokens. Those that cannot be served get their record here."""
        limit = text_limit(self.model)
        for prompt in prompts:
            try:
                tokens = self.encoder(prompt)
                if limit is not None and len(tokens) + self.args.max_new_tokens > limit:
                    raise PromptError(
                        f"the prompt has {len(tokens)} tokens, and with {self.args.max_new_tokens} new ones it would "
                        f"exceed the {limit} of the model: shorten it, or lower --max-new-tokens"
                    )
            except PromptError as error:
                self._write(error_record(prompt.id, str(error)))
            else:
                yield Request(prompt.id, tokens)

    def _serve(self, batch: list[Request]) -> list[Record]:
        """Records of a batch, in halves as long as memory does not suffice."""
        if len(batch) > self.most_rows:
            parts = [batch[start : start + self.most_rows] for start in range(0, len(batch), self.most_rows)]
            return [record for part in parts for record in self._serve(part)]
        try:
            return self._decode(batch)
        except torch.OutOfMemoryError as error:
            message = str(error).splitlines()[0]
        # Outside of `except`, where the error would hold on to the frames, and they to the memory.
        torch.cuda.empty_cache()
        if len(batch) == 1:
            return [error_record(batch[0].id, f"out of memory: {message}")]
        self.most_rows = -(-len(batch) // 2)
        return self._serve(batch)

    def _decode(self, batch: list[Request]) -> list[Record]:
        pad = self.model.generation_config.pad_token_id
        inputs = left_padded([request.tokens for request in batch], pad, self.model.device)
        capacity = self.settings["tetris_capacity"]
        sizes = {"tetris_capacity": len(batch) if capacity is None else capacity, "return_dict_in_generate": True}
        output = self.model.generate(**inputs, **{**self.settings, **sizes})
        stats = output.tetris_stats
        # Each token of a completion is the one that the prompt gave, an accepted draft, or a bonus.
        lengths = (1 + stats.accepted.sum(1) + stats.bonus).tolist()
        completions = output.sequences[:, inputs["input_ids"].shape[1] :].tolist()
        drafted, verified, accepted = stats.drafted.tolist(), stats.verified.tolist(), stats.accepted.tolist()
        bonus, steps = stats.bonus.tolist(), stats.live_steps.tolist()
        records = []
        for row, request in enumerate(batch):
            tokens = completions[row][: lengths[row]]
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            counts = {"drafted": drafted[row], "verified": verified[row], "accepted": accepted[row]}
            records.append(
                {
                    "id": request.id,
                    "text": text,
                    "finish_reason": self._finish_reason(tokens, text),
                    "prompt_tokens": len(request.tokens),
                    "completion_tokens": len(tokens),
                    "token_ids": tokens,
                    "counts": {**counts, "bonus": bonus[row], "steps": steps[row]},
                }
            )
        return records

    def _finish_reason(self, tokens: list[int], text: str) -> str:
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        ended = len(tokens) < self.args.max_new_tokens or tokens[-1] in ends
        return "stop" if ended or any(stop in text for stop in self.args.stop or ()) else "length"

    def _write(self, record: Record) -> None:
        if record["id"] in self.output.done:
            return
        self.output.write(record)
        self.summary.add(record)
        self.bar.update()
        if self.summary.mean_accepted is not None:
            self.bar.set_postfix_str(f"{self.summary.mean_accepted:.2f} tokens per row and step", refresh=False)


def tell(args: argparse.Namespace, message: str) -> None:
    """A word about the job on standard error, unless `--quiet`."""
    if not args.quiet:
        print(message, file=sys.stderr)
