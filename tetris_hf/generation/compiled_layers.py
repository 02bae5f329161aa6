"""Decoder layers compiled one by one, and the small modules beside them: a single compilation serves all of a kind.

Knows modules and the compiler. Does not know what the layers compute.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging

from .fusing import any_size
from .ragged_cache import RaggedCache
from .ragged_mask import RaggedMask, current_forward


# Attributes by which a module finds its own place in the cache.
INDEX_NAMES = ("layer_idx", "layer_id")
# What `compile_config` may say that would put a CUDA graph around every layer, inside the one around the step.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
# Kinds of small modules that the compiler refused.
_refused: set[type[nn.Module]] = set()

logger = logging.get_logger(__name__)


@contextmanager
def compiled_layers(*models: PreTrainedModel, compile_config: Any = None) -> Iterator[None]:
    """
    Within this context, the decoder layers of `models` run compiled, and so do the small modules beside them (final
    norm, rotary embedding), each of which is some ten tiny kernels otherwise. All are as before at the end, whatever
    happens; what was compiled stays known to torch, so that the next time costs nothing.

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
            for model in models:
                layers = _layers(model)  # none, if the model comes twice
                standing_in = [(layer, _forward(layer, settings)) for layer in layers]
                standing_in += [(module, _forgiving(module, settings)) for module in _beside(layers, model)]
                for module, forward in standing_in:
                    changed.append(module)
                    module.forward = forward
            yield
        finally:
            for module in changed:
                vars(module).pop("forward", None)


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers of a model that can be compiled."""
    return [
        module
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer)
        and "forward" not in vars(module)
        and _index(module) is not None
    ]


def _beside(layers: list[nn.Module], model: PreTrainedModel) -> list[nn.Module]:
    """Modules of transformers' own without parts or matrices, next to some of the `layers` of a model."""
    numbers = {*map(id, layers)}
    holders = [
        module
        for module in model.modules()
        if any(isinstance(part, nn.ModuleList) and numbers & {*map(id, part)} for part in module.children())
    ]
    return [
        part
        for holder in holders
        for part in holder.children()
        if type(part).__module__.startswith("transformers.")
        and "forward" not in vars(part)
        and not any(True for _ in part.children())
        and all(parameter.dim() < 2 for parameter in part.parameters())
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


def _forgiving(module: nn.Module, settings: dict[str, Any]) -> Any:
    """What stands in for `module.forward`, and leaves it as it is if the compiler fails: little is lost then."""
    compiled = torch.compile(_own_forward, dynamic=True, **settings)

    def forward(*args: Any, **kwargs: Any) -> Any:
        kind = type(module)
        if kind not in _refused:
            try:
                return compiled(module, *args, **kwargs)
            except TorchDynamoException as error:
                _refused.add(kind)
                logger.warning(f"{kind.__name__} runs without being compiled: {str(error).strip().splitlines()[0]}")
        return _own_forward(module, *args, **kwargs)

    return forward


def _own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a module's class. The compiler looks into what this calls, but not into a decorator of torch."""
    return type(module).forward(module, *args, **kwargs)
