"""Small functions of tensors, compiled where a step is captured: dozens of tiny kernels then become a few.

Knows the compiler. Does not know what the functions compute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

import torch


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_fusing: ContextVar[bool] = ContextVar("fusing", default=False)


@contextmanager
def any_size() -> Iterator[None]:
    """
    Within this context, what is compiled takes tensors of almost any size. By default, two sizes that happen to be
    equal would be taken for one, and few versions of a function would be allowed.
    """
    own_sizes = torch.fx.experimental._config.patch(use_duck_shape=False)  # type: ignore[attr-defined]
    with torch._dynamo.config.patch(recompile_limit=64), own_sizes:
        yield


@contextmanager
def fusing(wanted: bool = True) -> Iterator[None]:
    """Within this context, functions decorated with [`fused`] run compiled."""
    token = _fusing.set(wanted)
    try:
        with any_size() if wanted else nullcontext():
            yield
    finally:
        _fusing.reset(token)


def fused(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """
    Compile a function where it is called within [`fusing`]; elsewhere, a compilation would cost more than it saves.
    Its arguments must be tensors and numbers. Sizes may change from call to call.
    """

    @functools.cache
    def compiled() -> Callable[Parameters, Result]:
        return torch.compile(function, dynamic=True, fullgraph=True)  # imports the compiler

    @functools.wraps(function)
    def either(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return (compiled() if _fusing.get() else function)(*args, **kwargs)

    return either
