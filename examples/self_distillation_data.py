"""The target's own answers, as data for self-distillation.

Two rounds: first the target writes prompts and passages, then it answers those and the prompts that are made of
templates. Answers are partly greedy and partly sampled, and end where the target ends them.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Dataset, load_from_disk
from self_distillation_prompts import DATA, documentation, fill, make_openings, make_prompts
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel

from tetris_hf import iterate_batch


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of [`load_answers`]."""
    add = parser.add_argument
    add("--data", type=Path, help="folder of the answers: read if it exists, else written; by default in --output")
    add("--num_prompts", type=int, default=400, help="made of templates")
    add("--num_written", type=int, default=100, help="prompts, and a third as many passages, that the target writes")
    add("--documentation", nargs="*", default=["transformers"], help="packages whose docstrings serve as passages")
    add(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0, 0, 0.7, 1],
        help="of equal shares of the prompts; 0: greedy",
    )
    add("--max_prompt_tokens", type=int, default=768)
    add("--max_new_tokens", type=int, default=64)
    add("--generation_batch", type=int, default=32)
    add(
        "--generate_with",
        choices=("tetris", "stock"),
        default="tetris",
        help="this library without drafts, whose rows are refilled as they end, or plain `generate`",
    )


def load_answers(
    args: argparse.Namespace, accelerator: Accelerator, target: PreTrainedModel, tokenizer: AutoTokenizer | None
) -> Dataset:
    """
    Read the answers, or let the target give them, shared among all processes.

    Args:
        args (`argparse.Namespace`): Of [`add_data_arguments`].
        accelerator (`Accelerator`): The processes.
        target (`PreTrainedModel`): Answers.
        tokenizer (`AutoTokenizer`, *optional*): Its tokenizer; without one, prompts are random tokens.

    Returns:
        `Dataset`: Columns `input_ids`, prompt and answer, and `prompt_length`.
    """
    folder = args.data or args.output / "answers"
    if not folder.exists():
        writer = Writer(args, accelerator, target)
        prompts = random_prompts(args, target) if tokenizer is None else write_prompts(args, writer, tokenizer)
        pairs = writer.answer(prompts, "answers")
        if accelerator.is_main_process:
            columns = {"input_ids": [p + a for p, a in pairs], "prompt_length": [len(p) for p, _ in pairs]}
            Dataset.from_dict(columns).save_to_disk(folder)
        accelerator.wait_for_everyone()
    data = load_from_disk(folder)
    tokens = sum(len(row) for row in data["input_ids"]) if len(data) < 5000 else "many"
    accelerator.print(f"{len(data)} answers, {tokens} tokens with their prompts, from {folder}")
    return data


def random_prompts(args: argparse.Namespace, target: PreTrainedModel) -> list[list[int]]:
    """Prompts for a target without a tokenizer."""
    rng = random.Random(args.seed)
    vocabulary = range(2, target.config.vocab_size)
    return [rng.choices(vocabulary, k=rng.randint(4, 24)) for _ in range(args.num_prompts)]


def write_prompts(args: argparse.Namespace, writer: "Writer", tokenizer: Any) -> list[list[int]]:
    """Tokenized prompts: those that the target writes, and those made of templates around its passages."""
    rng = random.Random(args.seed)
    before, after = chat_frame(tokenizer)

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []  # a tokenizer refuses none

    def decode(answers: list[list[int]]) -> list[str]:
        return [text.strip() for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]

    openings = make_openings(args.num_written, args.seed)
    # A prompt begins with a few words of ours, which the target completes as if it were the user.
    beginnings = encode([before + opening for opening in openings])
    opening_of = {tuple(ids): opening for ids, opening in zip(beginnings, openings, strict=True)}
    written = writer.answer(beginnings, "prompts", temperatures=[0.7, 0.85, 1])
    texts = decode([text for _, text in written])
    asked = [opening_of[tuple(ids)] + text for (ids, _), text in zip(written, texts, strict=True)]
    requests = [fill(rng.choice(DATA["templates"]["writing"]), rng) for _ in range(args.num_written // 3)]
    passages = decode([a for _, a in writer.answer(encode([before + r + after for r in requests]), "passages")])
    # A passage that is long, as those that people ask about are, takes two of the target's.
    passages += [f"{one}\n{two}" for one, two in zip(passages[::2], passages[1::2], strict=False)]
    passages = [passage for passage in passages if len(passage.split()) >= 20]
    passages += documentation(args.documentation)
    made = [prompt for _, prompt in make_prompts(args.num_prompts, passages, args.seed)]
    texts = list(dict.fromkeys(made + [text for text in asked if len(text.split()) >= 3]))
    ids = encode([before + text + after for text in texts])
    return [prompt for prompt in ids if len(prompt) <= args.max_prompt_tokens]


def chat_frame(tokenizer: Any) -> tuple[str, str]:
    """What the chat template puts before and after a prompt; nothing, if there is no template."""
    if tokenizer.chat_template is None:
        return "", "\n"
    framed = tokenizer.apply_chat_template(
        [{"role": "user", "content": "\0"}], add_generation_prompt=True, tokenize=False
    )
    before, _, after = framed.partition("\0")
    return before, after


class Writer:
    """
    Lets the target write, each process its share.

    Args:
        args (`argparse.Namespace`): Of [`add_data_arguments`].
        accelerator (`Accelerator`): The processes.
        target (`PreTrainedModel`): Writes.
    """

    def __init__(self, args: argparse.Namespace, accelerator: Accelerator, target: PreTrainedModel):
        self.args, self.accelerator, self.target = args, accelerator, target

    def answer(
        self, prompts: list[list[int]], what: str, temperatures: list[float] | None = None
    ) -> list[tuple[list[int], list[int]]]:
        """Prompts and the target's continuations, end token included, in any order; the same in all processes."""
        process, processes = self.accelerator.process_index, self.accelerator.num_processes
        temperatures = temperatures or self.args.temperatures
        # The longest first, so that all others fit the rows made for them; temperatures in turn, over all lengths.
        prompts = sorted(prompts, key=len, reverse=True)[process::processes]
        write = self._refilled if self.args.generate_with == "tetris" else self._in_groups
        pairs = []
        for place, temperature in enumerate(temperatures):
            share = prompts[place :: len(temperatures)]
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
            sampling = {"max_new_tokens": self.args.max_new_tokens, "do_sample": False} | sampling
            title = f"{what}, temperature {temperature}"
            bar = tqdm(total=len(share), desc=title, disable=not self.accelerator.is_main_process)
            for pair in write(share, sampling):
                pairs.append(pair)
                bar.update()
            bar.close()
        everything = gather_object(pairs)
        return broadcast_object_list([everything])[0] if processes > 1 else everything

    def _refilled(self, prompts: list[list[int]], sampling: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
        """By this library without drafts: a row that ends makes room for the next prompt."""
        rows = {"batch_size": self.args.generation_batch, "progress_bar": False}
        for _, output in iterate_batch(self.target, prompts, **rows, **sampling):
            if output.error:
                raise RuntimeError(output.error)
            yield output.prompt_ids, output.generated_tokens

    @torch.no_grad()
    def _in_groups(self, prompts: list[list[int]], sampling: dict[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
        """By plain `generate`, batch after batch."""
        config = self.target.generation_config
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        pad = config.pad_token_id if config.pad_token_id is not None else ends[0] or 0
        size = self.args.generation_batch
        for group in (prompts[first : first + size] for first in range(0, len(prompts), size)):
            width = max(map(len, group))
            ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in group])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in group])
            output = self.target.generate(
                ids.to(self.target.device),
                attention_mask=mask.to(self.target.device),
                pad_token_id=pad,
                **sampling,
            )
            for prompt, answer in zip(group, output[:, width:].tolist(), strict=True):
                end = next((place for place, token in enumerate(answer) if token in ends), len(answer))
                yield prompt, answer[: end + 1]
