"""The doors: `enable()` and then `model.generate(..., tetris_capacity=C)`, or this folder as a Hub `custom_generate`.

Knows `generate`'s arguments and which of them it would lose on the way to a decoding method. Decodes nothing itself.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria

from .decoding import TetrisDecoding
from .drafter import Drafter
from .model_support import check_synced_gpus
from .prompt_lookup_drafter import PromptLookupDrafter
from .validation import check_capacity, check_depth


# Marks a `generate` of ours, and holds what it stands in for.
_STANDS_FOR = "_tetris_stands_for"
_ABSENT = object()


def enable(model: PreTrainedModel | None = None) -> None:
    """
    Teach `generate` the arguments `tetris_capacity`, `tetris_selector` and `tetris_seed`. Without them it is what it
    was.

    Args:
        model (`PreTrainedModel`, *optional*): The one model to enable; by default all models, present and future.

    Examples:

    ```python
    >>> tetris_hf.enable()
    >>> model.generate(**batch, assistant_model=draft, tetris_capacity=64)
    ```
    """
    if model is None:
        if not hasattr(GenerationMixin.generate, _STANDS_FOR):
            GenerationMixin.generate = _door(GenerationMixin.generate)
        return
    before = vars(model).get("generate", _ABSENT)
    if hasattr(before, _STANDS_FOR):
        return
    # Of the instance: a model whose repository brings its own `generate` has one here, and plain calls must reach it.
    plain = type(model).generate if before is _ABSENT else _ignoring_self(before)
    door = _door(plain, preparing=type(model).generate)
    setattr(door, _STANDS_FOR, before)
    model.generate = types.MethodType(door, model)


def disable(model: PreTrainedModel | None = None) -> None:
    """
    Undo [`enable`]. Nothing happens if it was not enabled.

    Args:
        model (`PreTrainedModel`, *optional*): The one model that was enabled; by default all models at once.
    """
    if model is None:
        plain = getattr(GenerationMixin.generate, _STANDS_FOR, None)
        if plain is not None:
            GenerationMixin.generate = plain
        return
    before = getattr(vars(model).get("generate"), _STANDS_FOR, None)
    if before is _ABSENT:
        del model.generate
    elif before is not None:
        model.generate = before


def generate(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    *,
    assistant_model: Any = None,
    tetris_capacity: int | str | None = None,
    tetris_selector: Any = None,
    tetris_seed: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Any:
    """
    Generate with batched speculative decoding: the function that a Hub `custom_generate` folder must have.

    Args:
        model (`PreTrainedModel`): The target.
        inputs (`torch.LongTensor` of shape `(N, prompt_width)`, *optional*): Left-padded prompts.
        assistant_model (`PreTrainedModel` or [`Drafter`], *optional*): Who drafts.
        tetris_capacity (`int` or `"auto"`, *optional*):
            C, draft tokens verified per step over the whole batch. 0 decodes without drafts, `"auto"` chooses C and K
            as it goes, `None` is plain `generate`.
        tetris_selector ([`DraftSelector`] or a list of them, *optional*): Which drafts are verified.
        tetris_seed (`int` or `Sequence[int]`, *optional*):
            Makes each row's sampled text a function of its prompt and its seed alone ([`TetrisDecoding`]).
        kwargs: Every other argument of `generate`; `num_assistant_tokens` is K, the draft tokens per row and step.

    Returns:
        What plain `generate` returns; with `return_dict_in_generate=True` also `tetris_stats`.

    Raises:
        `ValueError`: Before the first forward, if something is asked that cannot be done exactly.
    """
    kwargs.update(
        assistant_model=assistant_model,
        tetris_capacity=tetris_capacity,
        tetris_selector=tetris_selector,
        tetris_seed=tetris_seed,
    )
    return _dispatch(GenerationMixin.generate, GenerationMixin.generate, model, (inputs,), kwargs)


def _door(plain: Callable[..., Any], preparing: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """A `generate` that takes `tetris_capacity` and hands everything else to `plain`."""

    @functools.wraps(plain)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return _dispatch(plain, preparing or plain, self, args, kwargs)

    setattr(generate, _STANDS_FOR, plain)
    return generate


def _ignoring_self(bound: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(bound)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    return generate


def _dispatch(
    plain: Callable[..., Any],
    preparing: Callable[..., Any],
    model: PreTrainedModel,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """
    Plain `generate` without a capacity; else `preparing`, a `generate` that prepares the inputs for our decoding.
    """
    if isinstance(kwargs.get("custom_generate"), str):
        return plain(model, *args, **kwargs)  # a Hub folder knows its own arguments
    capacity, kwargs = _take(kwargs, "tetris_capacity")
    if capacity is None:  # tools that hand on nothing but a config (TRL) put it there
        capacity = getattr(model.generation_config, "tetris_capacity", None)
    seed, kwargs = _take(kwargs, "tetris_seed")
    if seed is None:
        seed = getattr(model.generation_config, "tetris_seed", None)
    selector = kwargs.pop("tetris_selector", None)
    if capacity is None:
        if selector is not None:
            raise ValueError("`tetris_selector` needs a budget to spend: pass `tetris_capacity` as well.")
        if seed is not None:
            raise ValueError(
                "`tetris_seed` needs `tetris_capacity`: plain `generate` draws from torch's generator; "
                "`tetris_capacity=0` decodes without drafts."
            )
        return plain(model, *args, **kwargs)

    check_capacity(capacity)
    # Arguments may be positional; a decoding method gets only some of them, so those it needs are taken out here.
    bound = inspect.signature(GenerationMixin.generate).bind(model, *args, **kwargs).arguments
    bound.pop("self")
    kwargs = bound | bound.pop("kwargs", {})
    assistant, streamer = kwargs.pop("assistant_model", None), kwargs.pop("streamer", None)
    tokenizer, assistant_tokenizer = kwargs.pop("tokenizer", None), kwargs.pop("assistant_tokenizer", None)
    check_synced_gpus(kwargs.pop("synced_gpus", None), model)
    if kwargs.pop("custom_generate", None) is not None:
        raise ValueError("`custom_generate` and `tetris_capacity` are two decoding methods: pass one of them.")
    if assistant_tokenizer is not None:
        raise ValueError(
            "`assistant_tokenizer` is not supported with `tetris_capacity`: the assistant must share the model's "
            "tokenizer."
        )
    kwargs = _with_stop_strings(kwargs, tokenizer)
    # `generate` fills in a default for who asked for nothing: what was asked is only seen here.
    depth, kwargs = _take(kwargs, "num_assistant_tokens")
    kwargs["num_assistant_tokens"] = depth
    lookup, kwargs = _take(kwargs, "prompt_lookup_num_tokens")
    if lookup is not None:
        assistant, kwargs = _with_prompt_lookup(assistant, lookup, kwargs)
    if assistant is None and capacity != 0:
        raise ValueError(
            f"`tetris_capacity={capacity!r}` needs somebody to draft: pass `assistant_model` or "
            "`prompt_lookup_num_tokens`, or `tetris_capacity=0` to decode without drafts."
        )
    decoding = TetrisDecoding(assistant, capacity, selector=selector, streamer=streamer, seed=seed)
    return preparing(model, **kwargs, custom_generate=decoding)


def _with_prompt_lookup(assistant: Any, depth: int, kwargs: dict[str, Any]) -> tuple[Drafter, dict[str, Any]]:
    """Stock `generate`'s arguments for prompt lookup, as a drafter and K."""
    if assistant is not None:
        raise ValueError("`prompt_lookup_num_tokens` and `assistant_model` are two drafters: pass one of them.")
    size, kwargs = _take(kwargs, "max_matching_ngram_size")
    drafter = PromptLookupDrafter() if size is None else PromptLookupDrafter(size)
    return drafter, {**kwargs, "num_assistant_tokens": check_depth(depth, "prompt_lookup_num_tokens")}


def _take(kwargs: dict[str, Any], name: str) -> tuple[Any, dict[str, Any]]:
    """A setting of `generate`, given by itself or in `generation_config`, and the arguments without it."""
    config: GenerationConfig | None = kwargs.get("generation_config")
    value = kwargs.get(name)
    kwargs = {key: given for key, given in kwargs.items() if key != name}
    if getattr(config, name, None) is not None:
        value = getattr(config, name) if value is None else value
        kwargs["generation_config"] = copy.deepcopy(config)
        setattr(kwargs["generation_config"], name, None)
    return value, kwargs


def _with_stop_strings(kwargs: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """`generate` gives a decoding method no tokenizer, so stop strings become a criterion here."""
    stop_strings, kwargs = _take(kwargs, "stop_strings")
    if stop_strings is None:
        return kwargs
    if tokenizer is None:
        raise ValueError("`stop_strings` needs the model's tokenizer: pass `tokenizer` to `generate` as well.")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings))
    return {**kwargs, "stopping_criteria": criteria}
