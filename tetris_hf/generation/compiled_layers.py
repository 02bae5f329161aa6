"""Decoder layers compiled one by one: a single compilation serves all layers of a kind.

Knows modules and the compiler. Does not know what the layers compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from .fusing import any_size
from .ragged_cache import RaggedCache
from .ragged_mask import RaggedMask, current_forward


# Attributes by which a module finds its own place in the cache.
INDEX_NAMES = ("layer_idx", "layer_id")
# What `compile_config` may say that would put a CUDA graph around every layer, inside the one around the step.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


@contextmanager
def compiled_layers(*models: PreTrainedModel, compile_config: Any = None) -> Iterator[None]:
    """
    Within this context, the decoder layers of `models` run compiled. They are as before at the end, whatever happens;
    what was compiled stays known to torch, so that the next time costs nothing.

    A layer is handed its own part of the cache and the plan of its mask in the place of the whole ones: so its number
    plays no part in the compilation, and neither does the number of packed tokens.

    Args:
        models (`PreTrainedModel`): Models that run over packed tokens. Layers whose `forward` somebody has replaced
            (device hooks of accelerate, say) are left alone.
        compile_config (`CompileConfig`, *optional*): What `generation_config.compile_config` says.
    """
    settings = {"backend": getattr(compile_config, "backend", None) or "inductor"}
    if options := getattr(compile_config, "options", None):
        settings["options"] = options
    elif mode := getattr(compile_config, "mode", None):
        settings["mode"] = _WITHOUT_GRAPHS.get(mode, mode)
    changed: list[nn.Module] = []
    with any_size():
        try:
            for layer in {id(layer): layer for model in models for layer in _layers(model)}.values():
                changed.append(layer)
                layer.forward = _forward(layer, settings)
            yield
        finally:
            for layer in changed:
                vars(layer).pop("forward", None)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a model that can be compiled."""
    return [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer)
        and "forward" not in vars(module)
        and _index(module) is not None
    ]


def _index(layer: nn.Module) -> int | None:
    """The layer's number in the cache."""
    for module in layer.modules():
        for name in INDEX_NAMES:
            if isinstance(index := getattr(module, name, None), int):
                return index
    return None


def _forward(layer: nn.Module, settings: dict[str, Any]) -> Any:
    """What stands in for `layer.forward`."""
    index = _index(layer)
    # Of the class, so that all layers of a kind are calls of one function. `dynamic`: of any number of tokens.
    compiled = torch.compile(type(layer).forward, dynamic=True, fullgraph=True, **settings)

    def own_part(argument: Any) -> Any:
        if isinstance(argument, RaggedCache):
            return argument.layers[index]
        if isinstance(argument, RaggedMask):
            return argument.plan(argument.packing.rows.device, for_any_rule=current_forward().any_rule)
        return argument

    def forward(*args: Any, **kwargs: Any) -> Any:
        return compiled(layer, *map(own_part, args), **{name: own_part(given) for name, given in kwargs.items()})

    return forward
