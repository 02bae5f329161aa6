"""The door for any number of prompts: `generate_batch(model, inputs, ...)`.

Knows what a user may hand over and wants back. Does not decode: that is `BatchJob`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import replace
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from .batch_job import BatchJob
from .decoding import TetrisDecoding
from .packed_model import input_device
from .request import Request, RequestOutput, as_request
from .seeded_noise import row_seeds
from .validation import check_count


def generate_batch(
    model: PreTrainedModel,
    inputs: Iterable[Any],
    assistant_model: Any = None,
    tetris_capacity: int | str = 0,
    batch_size: int = 32,
    num_assistant_tokens: int | None = None,
    tetris_selector: Any = None,
    progress_bar: bool = True,
    seed: int | None = None,
    **kwargs: Any,
) -> list[RequestOutput]:
    """
    Generate for any number of prompts. Rows that end are refilled at once, so that the batch stays full.

    Args:
        model (`PreTrainedModel`): The target.
        inputs (`Iterable`):
            Prompts: lists of token ids, or mappings with `input_ids` and perhaps `max_new_tokens`, `request_id` and
            `seed` (in the place of the one that follows from `seed` and the prompt's place); a `datasets.Dataset` with
            these columns, or any iterable.
        assistant_model (`PreTrainedModel`, [`Drafter`] or a list of them, *optional*): Who drafts.
        tetris_capacity (`int` or `"auto"`, *optional*, defaults to 0):
            C, draft tokens verified per step over all rows; `"auto"` chooses C and K as it goes.
        batch_size (`int`, *optional*, defaults to 32): N, rows that run at the same time. Halved when memory runs out.
        num_assistant_tokens (`int`, *optional*): K, draft tokens proposed per row and step.
        tetris_selector ([`DraftSelector`] or a list of them, *optional*): Which drafts are verified.
        progress_bar (`bool`, *optional*, defaults to `True`): Whether progress is shown.
        seed (`int`, *optional*):
            When sampling, each answer becomes a function of its prompt, this number and its place alone, whatever runs
            beside it ([`TetrisDecoding`]). By default draws come from torch's generator: then only the job as a whole
            is reproducible.
        kwargs: As for `model.generate`: `generation_config`, `max_new_tokens`, `do_sample`, `num_return_sequences`.

    Returns:
        `list[RequestOutput]`: In the order of the inputs; `num_return_sequences` of them for each, side by side. A
        prompt that cannot be served has an `error`, and the others go on.

    Raises:
        `ValueError`: If something is asked that cannot be done exactly.

    Examples:

    ```python
    >>> prompts = tokenizer(texts)["input_ids"]
    >>> outputs = tetris_hf.generate_batch(model, prompts, draft, tetris_capacity=64, max_new_tokens=256)
    >>> tokenizer.decode(outputs[0].generated_tokens)
    ```
    """
    answers = iterate_batch(
        model,
        inputs,
        assistant_model,
        tetris_capacity,
        batch_size,
        num_assistant_tokens,
        tetris_selector,
        progress_bar,
        seed,
        **kwargs,
    )
    return [output for _, output in sorted(answers, key=lambda answer: answer[0])]


@torch.no_grad()
def iterate_batch(
    model: PreTrainedModel,
    inputs: Iterable[Any],
    assistant_model: Any = None,
    tetris_capacity: int | str = 0,
    batch_size: int = 32,
    num_assistant_tokens: int | None = None,
    tetris_selector: Any = None,
    progress_bar: bool = True,
    seed: int | None = None,
    **kwargs: Any,
) -> Iterator[tuple[int, RequestOutput]]:
    """
    As [`generate_batch`], but each answer when it is there. Inputs are read as they are needed.

    Returns:
        `Iterator[tuple[int, RequestOutput]]`: The place of the answer among all, and the answer.
    """
    batch_size = check_count(batch_size, "batch_size")
    decoding = TetrisDecoding(assistant_model, tetris_capacity, num_assistant_tokens, tetris_selector, seed=seed)
    job, generation_config = _prepared(model, decoding, batch_size, kwargs)
    copies = generation_config.num_return_sequences or 1
    vocab_size = model.get_input_embeddings().weight.shape[0]
    refused: list[tuple[int, RequestOutput]] = []

    def requests() -> Iterator[Request]:
        for place, given in enumerate(inputs):
            try:
                request = as_request(given, place, generation_config, model, vocab_size)
                if request.seed is not None and seed is None:
                    raise ValueError("A prompt has a `seed`, and the job has none: pass `seed` to the job as well.")
            except (ValueError, TypeError, KeyError) as error:
                name = str(given.get("request_id", place)) if isinstance(given, dict) else str(place)
                failed = RequestOutput(name, [], error=str(error))
                refused.extend((place * copies + copy, failed) for copy in range(copies))
                continue
            for copy in range(copies):
                order = place * copies + copy
                yield replace(request, order=order, seed=_seed(seed, request, order, copy))

    def failures() -> Iterator[tuple[int, RequestOutput]]:
        while refused:
            bar.update()
            yield refused.pop(0)

    total = len(inputs) * copies if isinstance(inputs, Sized) else None
    with tqdm(total=total, unit="request", disable=not progress_bar) as bar:
        tokens = accepted = verified = 0
        for request, output in job.run(requests()):
            tokens += len(output.generated_tokens)
            accepted, verified = accepted + output.accepted, verified + output.verified
            bar.update()
            speed = tokens / max(bar.format_dict["elapsed"], 1e-9)
            shown = {"tokens": tokens, "tok/s": f"{speed:.0f}", "accepted": f"{accepted / max(1, verified):.2f}"}
            bar.set_postfix(shown, refresh=False)
            yield request.order, output
            yield from failures()
        yield from failures()


def _seed(seed: int | None, request: Request, order: int, copy: int) -> int:
    """Of an answer's draws: from the seed that came with the prompt and the copy, else the job's and the place."""
    if seed is None:
        return 0
    return int(row_seeds(seed, 1, order) if request.seed is None else row_seeds(request.seed, 1, copy))


def _prepared(
    model: PreTrainedModel, decoding: TetrisDecoding, batch_size: int, kwargs: dict[str, Any]
) -> tuple[BatchJob, Any]:
    """What plain `generate` makes of the settings: it prepares a batch, which is then not decoded."""
    prepared: list[Any] = []

    def keep(
        model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **more: Any
    ) -> Any:
        for name in ("attention_mask", "position_ids"):
            more.pop(name, None)
        decoding.check(model, input_ids, logits_processor, generation_config, more)
        prepared.extend([logits_processor, stopping_criteria, generation_config])
        return input_ids

    one = torch.ones(1, 1, dtype=torch.long, device=input_device(model))
    asked = kwargs.pop("num_return_sequences", None)
    model.generate(one, attention_mask=one, custom_generate=keep, **kwargs)
    processors, criteria, generation_config = prepared
    if asked not in (None, 1) and not generation_config.do_sample:
        raise ValueError(
            f"`num_return_sequences` ({asked}) needs `do_sample=True`: greedy answers would all be the same."
        )
    if asked is not None:
        generation_config.num_return_sequences = asked
    if (
        kwargs.get("max_new_tokens") is None
        and generation_config.max_new_tokens is None
        and "max_length" not in kwargs
    ):
        generation_config.max_new_tokens = generation_config.max_length - 1
    return BatchJob(decoding, model, batch_size, processors, criteria, generation_config), generation_config
