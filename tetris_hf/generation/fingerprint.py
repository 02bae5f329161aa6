"""Whether two calls would run the same thing: what a captured step depends on, in one hashable value.

Knows modules, tensors' addresses and plain settings. Does not know what they are for.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def of_model(model: nn.Module) -> Hashable:
    """
    Changes when a replay would no longer do what a call does: a tensor that has moved (`to`, new `data`), a module
    that was put in, wrapped or switched (adapters, `train`), a hook. Values of weights may change in place.
    """
    return tuple(
        (
            type(module),
            tuple(_address(parameter) for parameter in module._parameters.values() if parameter is not None),
            tuple(buffer.data_ptr() for buffer in module._buffers.values() if buffer is not None),
            tuple(map(id, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))),
            id(vars(module).get("forward")),
            settings(module),
        )
        for module in model.modules()
    )


def _address(tensor: torch.Tensor) -> int:
    """Of a split weight (`DTensor`), where this process's part lies: the whole has no memory."""
    return int(getattr(tensor, "_local_tensor", tensor).data_ptr())


def settings(value: Any) -> tuple[Hashable, ...]:
    """Attributes that are plain values, or lists of such."""
    return tuple(
        (name, tuple(held) if isinstance(held, list | tuple) else held)
        for name, held in vars(value).items()
        if all(isinstance(one, _PLAIN) for one in (held if isinstance(held, list | tuple) else [held]))
    )


def of_object(value: Any) -> Hashable:
    """An object whose attributes are all plain values is known by them, any other by itself."""
    if isinstance(value, _PLAIN):
        return value
    known = settings(value) if hasattr(value, "__dict__") else ()
    return (type(value), known) if len(known) == len(getattr(value, "__dict__", "?")) else id(value)
