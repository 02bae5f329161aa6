"""Captured steps kept from call to call, so that only the first call of a kind pays for the capture.

Knows who may use a captured step again. Does not know how one is captured.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from .captured_steps import CapturedSteps
from .cuda_graph import CannotCapture, can_branch
from .fingerprint import of_model, of_object
from .speculation import Speculation
from .tensor_parallel import group_of


logger = logging.get_logger(__name__)

# Each holds a key/value cache: one for full batches, one for the last, smaller one.
MAX_KEPT = 2

_kept: WeakKeyDictionary[PreTrainedModel, list[tuple[Hashable, Speculation]]] = WeakKeyDictionary()
# Models that were found to wait for the device in their forward, or whose layers the compiler refused.
_uncaptured: WeakSet[PreTrainedModel] = WeakSet()
_uncompiled: WeakSet[PreTrainedModel] = WeakSet()


@contextmanager
def prepared(fresh: Speculation, compile_config: Any = None) -> Iterator[Speculation]:
    """
    What a call is to run: `fresh`, or a kept one that does the same and has its step captured already. If the call
    ends well, it is kept for the next one.

    Args:
        fresh ([`Speculation`]): What the call wants. With fixed shapes, its step is captured: as a whole, or, where
            something in it looks at more than the scores, each forward by itself.
        compile_config (`CompileConfig`, *optional*): How layers are to be compiled.
    """
    model = fresh.target.model
    key = _key(fresh, compile_config)
    kept = _take(model, key, fresh.rows.width) if fresh.rows.fixed_shapes else None
    speculation = fresh if kept is None else kept
    try:
        if kept is None:
            _make_room(model, _users(fresh))
            if fresh.rows.fixed_shapes:
                _capture(fresh, compile_config)
            if fresh.auto is not None:
                fresh.auto.prepare(fresh)
            key = _key(fresh, compile_config)  # a first forward may leave something on a model
        yield speculation
    except BaseException:
        _end(speculation)
        raise
    if speculation.rows.fixed_shapes:
        _keep(model, key, speculation)
    else:
        _end(speculation)


def release_graphs(model: PreTrainedModel | None = None) -> None:
    """
    Free the CUDA graphs and key/value caches that are kept for the next call of `generate`.

    Args:
        model (`PreTrainedModel`, *optional*): The target whose graphs to free; by default of all.
    """
    for its_model in list(_kept) if model is None else [model]:
        for _, speculation in _kept.pop(its_model, []):
            _end(speculation)


def _is_whole(speculation: Speculation) -> bool:
    """Whether a step can be captured as one."""
    return (
        speculation.processing.fingerprint() is not None
        and speculation.committer.stopping.fingerprint() is not None
        and not speculation.committer.recorder.wants_any
        and (speculation.drafter is None or speculation.drafter.is_capturable)
        and all(getattr(selector, "is_capturable", False) for selector in speculation.selectors)
    )


def _key(speculation: Speculation, compile_config: Any) -> Hashable:
    """All that a captured step depends on but the number of its columns."""
    whole = _is_whole(speculation)
    return (
        whole,
        (speculation.processing.fingerprint(), speculation.committer.stopping.fingerprint()) if whole else None,
        speculation.rows.num_rows,
        speculation.target.cache.pool_size,
        speculation.rows.pad_token_id,
        tuple(speculation.sizes()),
        id(speculation.auto.controller) if speculation.auto is not None else None,
        speculation.target.keep_hidden_states,
        speculation.target.keep_all_hidden_states,
        of_model(speculation.target.model),
        speculation.drafter.fingerprint() if speculation.drafter is not None else None,
        tuple(map(of_object, speculation.selectors)),
        of_object(compile_config),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.get_float32_matmul_precision(),
    )


def _capture(speculation: Speculation, compile_config: Any) -> None:
    """Prepare for replays as far as the model allows, and say so where it does not."""
    model = speculation.target.model
    speculation.compile_config = compile_config
    speculation.compiles = model not in _uncompiled
    if model not in _uncaptured and not _is_whole(speculation):
        speculation.captures_forwards = True
        return
    # Not where K is chosen by what deeper places would bring, and not where other processes wait for every forward.
    branches = speculation.auto is None and group_of(model) is None and can_branch(speculation.rows.tokens.device)
    while model not in _uncaptured:
        speculation.branches = branches
        try:
            speculation.captured = CapturedSteps(speculation)
            return
        except CannotCapture as error:
            _end(speculation)
            if speculation.compiles:
                _uncompiled.add(model)
                speculation.compiles = False
                logger.warning(f"The layers of {type(model).__name__} run without being compiled: {error}")
            else:
                _uncaptured.add(model)
                logger.warning(f"Steps of {type(model).__name__} run without a CUDA graph: {error}")
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not branches:
                raise
            _end(speculation)
            branches = False
            logger.warning(f"Steps of {type(model).__name__} draft every place: {error}")
    speculation.compiles = speculation.branches = speculation.rows.fixed_shapes = False


def _take(model: PreTrainedModel, key: Hashable, width: int) -> Speculation | None:
    """A kept step that does what is wanted, taken out: only a call that ends well puts it back."""
    found = [
        (speculation.rows.width, index)
        for index, (its_key, speculation) in enumerate(_kept.get(model, ()))
        if its_key == key and width <= speculation.rows.width <= 2 * width
    ]
    if not found:
        return None
    _, speculation = _kept[model].pop(min(found)[1])
    speculation.target.model = model
    return speculation


def _keep(model: PreTrainedModel, key: Hashable, speculation: Speculation) -> None:
    """Put a step back, without a reference to the model that would keep it alive."""
    if any(drafting is model for drafting in (speculation.drafter.models if speculation.drafter is not None else ())):
        return _end(speculation)  # a model that drafts for itself
    speculation.target.model = None
    speculation.committer.streamer = None
    steps = _kept.setdefault(model, [])
    steps.append((key, speculation))
    while len(steps) > MAX_KEPT:
        _end(steps.pop(0)[1])


def _make_room(model: PreTrainedModel, users: Iterable[Any]) -> None:
    """
    Before a new step is made for `model`: drop the oldest kept one if there are too many, and all that work with one
    of the objects `users`, which can serve one step at a time.
    """
    shared = {id(user) for user in users}
    for its_model, steps in list(_kept.items()):
        for entry in list(steps):
            if shared & {id(user) for user in _users(entry[1])} or (its_model is model and len(steps) >= MAX_KEPT):
                steps.remove(entry)
                _end(entry[1])


def _users(speculation: Speculation) -> list[Any]:
    """Objects of the caller's that hold tensors of this batch, and so can work for one batch at a time."""
    drafters = getattr(speculation.drafter, "drafters", [speculation.drafter])
    return [*drafters, *(selector for selector in speculation.selectors if isinstance(of_object(selector), int))]


def _end(speculation: Speculation) -> None:
    if speculation.drafter is not None:
        speculation.drafter.end()
