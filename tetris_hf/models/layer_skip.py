"""A draft model for nothing: the target itself with some of its decoder layers left out.

Knows how a model is built and which of its layers may go. Does not know how drafts are made or verified.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ..generation.compiled_layers import INDEX_NAMES


# What transformers makes for the target when it first needs it: hooks that record outputs, a compiled `__call__`.
_MADE_ON_FIRST_USE = ("_output_capturing_hooks_installed", "_compiled_call")
# Config attributes that, when set, tie layers to each other or to their number.
_TIES = ("num_kv_shared_layers", "hidden_size_per_layer_input", "is_heterogeneous")


def LayerSkipAssistant(model: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """
    A causal LM that shares every weight of `model` and runs only the decoder layers in `layers`.

    The result has the class of `model` and is used like any other: call it, `generate` with it, pass it as
    `assistant_model`. Its parameters and buffers are the very tensors of `model`; its modules, `config` and
    `generation_config` are its own, with the layers renumbered from 0, so that a stock cache fits. Forward hooks and
    methods that were replaced on `model` (a bound `generate`) do not come along. Put `model` on its device and in its
    dtype first: tensors that it replaces later are not followed.

    Args:
        model (`PreTrainedModel`): A decoder-only model whose decoder layers are one `nn.ModuleList`. Nothing of it is
            changed.
        layers (`Sequence[int]`): Indices of the layers to run, strictly increasing.

    Returns:
        `PreTrainedModel`: The assistant.

    Raises:
        ValueError: If `layers` is empty, not strictly increasing or out of range; if `model` is an encoder-decoder, or
            its decoder layers are not one list or are tied to each other; if a `forward` in it was replaced by a
            function that runs its own modules.
    """
    stack = _decoder_layers(model)
    kept = [int(index) for index in layers]
    if not kept or not all(0 <= index < len(stack) for index in kept):
        raise ValueError(f"`layers` must name at least one of the decoder layers 0 to {len(stack) - 1}, got {kept}.")
    if kept != sorted(set(kept)):
        raise ValueError(f"`layers` must be strictly increasing, got {kept}. Pass {sorted(set(kept))}.")

    # A deep copy that shares tensors: whatever refers to a module or a config (device hooks of accelerate, bound
    # methods) then refers to the copy, which shallow copies would not achieve.
    memo: dict[int, Any] = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    memo |= _left_behind(model)
    assistant = copy.deepcopy(model, memo)
    for module in assistant.modules():
        for name in (*_replaced_methods(module), *_MADE_ON_FIRST_USE):
            vars(module).pop(name, None)

    own_stack = memo[id(stack)]
    for index in reversed(range(len(stack))):
        if index not in kept:
            del own_stack[index]
    for position, (index, layer) in enumerate(zip(kept, own_stack, strict=True)):
        for module in layer.modules():
            for name in INDEX_NAMES:
                if vars(module).get(name) == index:
                    setattr(module, name, position)
    _keep_layers(assistant.config.get_text_config(decoder=True), kept)
    return assistant


@dataclass(frozen=True)
class LayerChoice:
    """
    What [`choose_layers`] found.

    Attributes:
        layers (`tuple[int, ...]`): The layers that remain, increasing.
        removed (`tuple[int, ...]`): The layers that were left out, in the order in which they went.
        agreement (`tuple[float, ...]`): After each removal, the fraction of the target's own greedy tokens that the
            remaining layers predict.
    """

    layers: tuple[int, ...]
    removed: tuple[int, ...]
    agreement: tuple[float, ...]

    def layers_at(self, num_layers: int) -> tuple[int, ...]:
        """The layers that remained when `num_layers` were left: one search answers for every depth above its own."""
        total = len(self.layers) + len(self.removed)
        if not len(self.layers) <= num_layers <= total:
            raise ValueError(f"`num_layers` must be in [{len(self.layers)}, {total}], got {num_layers}.")
        return tuple(sorted(self.layers + self.removed[total - num_layers :]))


@torch.no_grad()
def choose_layers(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    num_layers: int,
    max_new_tokens: int = 64,
    progress: Callable[[int, float], None] | None = None,
) -> LayerChoice:
    """
    Find the layers for a [`LayerSkipAssistant`] by measurement.

    The target answers the prompts greedily, once. Then layers go one at a time, each time the one without which the
    rest still predicts most of those answers (of equals, the one that keeps them most probable). With L layers this
    takes about `(L ** 2 - num_layers ** 2) / 2` forwards over prompts and answers, of half the remaining depth each.

    Args:
        model (`PreTrainedModel`): The target, as for [`LayerSkipAssistant`]. Nothing of it is changed.
        input_ids (`torch.LongTensor` of shape `(batch_size, sequence_length)`): A few left-padded prompts of the kind
            to be answered.
        attention_mask (`torch.LongTensor` of shape `(batch_size, sequence_length)`, *optional*): 0 on padding. Without
            it nothing is padding.
        num_layers (`int`): Layers to keep.
        max_new_tokens (`int`, *optional*, defaults to 64): Length of the answers.
        progress (`Callable[[int, float], None]`, *optional*): Called after each removal with the number of layers left
            and their agreement.

    Returns:
        `LayerChoice`: The layers, and the agreement after each removal.

    Raises:
        ValueError: If `num_layers` is out of range, if `attention_mask` pads on the right, or if `model` is not one
            for [`LayerSkipAssistant`].
    """
    kept = list(range(len(_decoder_layers(model))))
    if not 1 <= num_layers <= len(kept):
        raise ValueError(f"`num_layers` must be in [1, {len(kept)}], the layers of `model`, got {num_layers}.")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if not attention_mask[:, -1].all():
        raise ValueError("`attention_mask` ends in 0. Pad on the left: `tokenizer(..., padding_side='left')`.")

    answers = _Answers.of(model, input_ids, attention_mask, max_new_tokens)
    removed: list[int] = []
    agreement: list[float] = []
    while len(kept) > num_layers:
        entering: list[torch.Tensor] = []  # hidden states as they enter each kept layer
        answers.score(model, kept, lambda _, args, states=entering: states.append(args[0]))
        scores = []
        for candidate in range(len(kept)):
            # What enters the candidate is what its removal hands to the layer after it; those before need no second
            # run. Only after the last layer there is none to hand it to, and the others run from the embeddings.
            last = candidate == len(kept) - 1
            rest, state = (kept[:-1], entering[0]) if last else (kept[candidate + 1 :], entering[candidate])
            scores.append(answers.score(model, rest, _enter_first(state)))
        least_missed = max(range(len(kept)), key=scores.__getitem__)
        removed.append(kept.pop(least_missed))
        agreement.append(scores[least_missed][0])
        if progress is not None:
            progress(len(kept), agreement[-1])
    return LayerChoice(layers=tuple(kept), removed=tuple(removed), agreement=tuple(agreement))


@dataclass(frozen=True)
class _Answers:
    """
    The target's own greedy answers to N prompts, G tokens long, and what a model must be fed to predict them.

    Attributes:
        inputs (`dict[str, Any]`): Arguments of one forward over prompts and answers.
        tokens (`torch.LongTensor` of shape `(N, G)`): The answers.
        valid (`torch.BoolTensor` of shape `(N, G)`): False after the end of an answer.
    """

    inputs: dict[str, Any]
    tokens: torch.Tensor
    valid: torch.Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor, max_new_tokens: int) -> _Answers:
        """Let `model` answer, whatever sampling or penalties its `generation_config` asks for."""
        target = LayerSkipAssistant(model, range(len(_decoder_layers(model)))).eval()
        ends = target.generation_config.eos_token_id
        target.generation_config = GenerationConfig(max_new_tokens=max_new_tokens, eos_token_id=ends, pad_token_id=0)
        sequences = target.generate(input_ids, attention_mask=mask)  # (N, T + G)
        tokens = sequences[:, input_ids.shape[1] :]  # (N, G)
        ended = torch.zeros_like(tokens)
        if ends is not None:
            ended = torch.isin(tokens, torch.as_tensor(ends, device=tokens.device)).long()

        mask = torch.cat([mask, torch.ones_like(tokens)], dim=1)[:, :-1]  # (N, T + G - 1)
        inputs = {
            "input_ids": sequences[:, :-1],
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "logits_to_keep": tokens.shape[1],
            "use_cache": False,
        }
        known = inspect.signature(type(model).forward).parameters  # models with ALiBi take no positions
        inputs = {name: value for name, value in inputs.items() if name in known}
        return cls(inputs=inputs, tokens=tokens, valid=ended.cumsum(1) - ended == 0)

    def score(self, model: PreTrainedModel, layers: Sequence[int], hook: Callable[..., Any]) -> tuple[float, float]:
        """Agreement and mean log-probability of the answers under `layers`, each of which `hook` enters first."""
        assistant = LayerSkipAssistant(model, layers).eval()
        for layer in _decoder_layers(assistant):
            layer.register_forward_pre_hook(hook)
        logits = assistant(**self.inputs).logits[:, -self.tokens.shape[1] :].float()  # (N, G, V)
        agrees = logits.argmax(-1) == self.tokens  # (N, G)
        of_answers = logits.gather(-1, self.tokens.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)  # (N, G)
        return agrees[self.valid].float().mean().item(), of_answers[self.valid].mean().item()


def _enter_first(state: torch.Tensor) -> Callable[..., Any]:
    """A forward pre-hook for all layers that replaces what enters the first of them."""
    pending = [state]
    return lambda _, args: (pending.pop(), *args[1:]) if pending else None


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The one list that holds all decoder layers of `model`."""
    config = model.config.get_text_config(decoder=True)
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"`model` is an encoder-decoder, {name}. Pass a decoder-only model.")
    for tie in _TIES:
        if value := getattr(config, tie, None):
            raise ValueError(f"`model` cannot skip layers, they are tied: `config.{tie}={value}`. Use another draft.")
    depth = config.num_hidden_layers
    outermost: dict[str, nn.ModuleList] = {}  # a list inside a list holds parts of one layer, experts for example
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in outermost):
            outermost[path] = module
    found = [path for path, modules in outermost.items() if len(modules) == depth]
    if len(found) != 1:
        raise ValueError(
            f"`model` must have one list of `config.num_hidden_layers={depth}` decoder layers, and {name} has "
            f"{len(found)}{': ' * bool(found)}{', '.join(found)}. Use another draft."
        )
    return outermost[found[0]]


def _keep_layers(config: PreTrainedConfig, layers: list[int]) -> None:
    """Make `config` describe a model of these layers: its depth, and every list with one entry a layer."""
    depth, types = config.num_hidden_layers, getattr(config, "layer_types", None)
    config.num_hidden_layers = len(layers)
    for name, value in list(vars(config).items()):
        per_layer = isinstance(value, list | tuple) and len(value) == depth
        if per_layer and name != "architectures" and not name.endswith("_token_id"):
            setattr(config, name, type(value)(value[index] for index in layers))
    if types is not None and list(config.layer_types) != [types[index] for index in layers]:
        # Computed from a period, as Jamba does: caches would be made for other layers than these.
        raise ValueError(
            f"`layers` must follow the pattern from which {type(config).__name__} computes `layer_types`, "
            f"{list(config.layer_types)}, got {layers}."
        )


def _replaced_methods(module: nn.Module) -> list[str]:
    """Names of methods that were replaced on this instance; for `forward` see [`_left_behind`]."""
    own = type(module)
    return [name for name in vars(module) if name != "forward" and inspect.isfunction(getattr(own, name, None))]


def _left_behind(model: PreTrainedModel) -> dict[int, Any]:
    """
    Entries of a `deepcopy` memo for what must not be copied: forward hooks, which serve the target, and replaced
    methods, which may hold on to anything.

    Raises:
        ValueError: If a `forward` was replaced by a function that would run the target's modules.
    """
    memo: dict[int, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith(("_forward_", "_backward_")) and isinstance(value, dict):
                memo[id(value)] = type(value)()
        memo |= {id(value): value for value in map(vars(module).get, _replaced_methods(module))}
        # Methods and partials follow their module into the copy, a plain function cannot: around a module without
        # children it computes the same thing, around another it would run the target's modules.
        if isinstance(vars(module).get("forward"), FunctionType) and next(module.children(), None) is not None:
            raise ValueError(
                f"`forward` of `{path or type(model).__name__}` has been replaced by a function that is bound to "
                "`model`. Make the assistant first, and compile or wrap the model after that."
            )
    return memo
