"""A shallow assistant: a few decoder layers of the target's own kind, trained, between the target's embeddings.

Knows which weights are the assistant's own and which the target's. Does not know how it is trained or how it drafts.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME, cached_file

from ..generation.tensor_parallel import group_of
from .layer_skip import LayerSkipAssistant, _decoder_layers


# In `config.json` of a stored assistant: the layers of the target that its own began as.
_BEGAN_AS = "shallow_layers"
# What must be equal in the configurations of a stored assistant and of its target.
_SIZES = ("model_type", "hidden_size", "vocab_size")


class ShallowAssistant:
    """
    Makes, stores and loads assistants of a few decoder layers. It has no instances: what it returns is an ordinary
    causal LM of the target's class, used like any other as `assistant_model`.

    The decoder layers and the final norm are the assistant's own. The embeddings on both ends are the very tensors of
    the target: neither stored nor copied, and the target is not changed. Put the target on its device and in its dtype
    first.

    Examples:

    ```python
    >>> assistant = ShallowAssistant.from_pretrained("assets/smollm2-135m-shallow", target=model)
    >>> model.generate(**batch, assistant_model=assistant, tetris_capacity=64)
    ```
    """

    @staticmethod
    def from_target(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
        """
        An assistant to be trained, which begins as a copy of some of the target's layers.

        Args:
            target (`PreTrainedModel`): A decoder-only model, as for [`LayerSkipAssistant`].
            layers (`Sequence[int]`): Indices of the layers to begin as, strictly increasing.

        Returns:
            `PreTrainedModel`: The assistant.

        Raises:
            `ValueError`: If the target's layers are quantized or split over processes, or [`LayerSkipAssistant`]
                refuses it or the layers.
        """
        if group_of(target) is not None:
            raise ValueError(
                "`target` is split over processes (tensor parallelism): train the assistant with a whole target; what "
                "is stored then can be loaded for a split one."
            )
        assistant = LayerSkipAssistant(target, layers)
        own = ShallowAssistant.own_parameters(assistant)
        for name, parameter in own.items():
            if not parameter.is_floating_point():
                raise ValueError(
                    f"`target` is quantized (`{name}` is {parameter.dtype}): its layers cannot be trained. Load it "
                    "without a quantization config."
                )
        _replace(assistant, {name: parameter.detach().clone() for name, parameter in own.items()})
        setattr(assistant.config, _BEGAN_AS, [int(layer) for layer in layers])
        return assistant

    @staticmethod
    def own_parameters(assistant: PreTrainedModel) -> dict[str, nn.Parameter]:
        """
        The assistant's own parameters, those to train and to store: of its decoder layers and its final norm.

        Args:
            assistant (`PreTrainedModel`): What [`from_target`] or [`from_pretrained`] returned.

        Returns:
            `dict[str, nn.Parameter]`: By name.
        """
        stack = _decoder_layers(assistant)
        paths = {id(module): path for path, module in assistant.named_modules()}
        decoder = assistant.get_submodule(paths[id(stack)].rpartition(".")[0])
        own = [stack]
        for module in decoder.children():
            # A norm has vectors only, embeddings have a matrix.
            parameters = list(module.parameters())
            if parameters and all(parameter.dim() == 1 for parameter in parameters):
                own.append(module)
        return {
            f"{paths[id(module)]}.{name}": parameter for module in own for name, parameter in module.named_parameters()
        }

    @staticmethod
    def save_pretrained(assistant: PreTrainedModel, save_directory: str | os.PathLike[str]) -> None:
        """
        Store the assistant's own weights and its configuration.

        Args:
            assistant (`PreTrainedModel`): What [`from_target`] or [`from_pretrained`] returned.
            save_directory (`str` or `os.PathLike`): A folder, made if it is missing.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(assistant.config)
        if hasattr(config, "quantization_config"):  # the target's, as is its name
            del config.quantization_config
        own = ShallowAssistant.own_parameters(assistant)
        config.dtype = next(iter(own.values())).dtype
        config.save_pretrained(folder)
        weights = {name: parameter.detach().contiguous() for name, parameter in own.items()}
        save_file(weights, folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    @staticmethod
    def from_pretrained(
        pretrained_model_name_or_path: str | os.PathLike[str], target: PreTrainedModel, **kwargs: Any
    ) -> PreTrainedModel:
        """
        Load an assistant for `target`. Its own weights take the dtype and device of the target's embeddings.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): A folder or a Hub repository.
            target (`PreTrainedModel`): The model that the assistant was trained for; it may be quantized.
            kwargs: Where to look on the Hub (`revision`, `subfolder`, `token`, `cache_dir`, `local_files_only`).

        Returns:
            `PreTrainedModel`: The assistant.

        Raises:
            `ValueError`: If the folder holds no such assistant, or one for another target.
        """
        config = AutoConfig.from_pretrained(pretrained_model_name_or_path, **kwargs)
        layers = getattr(config, _BEGAN_AS, None)
        stored_in = f"`{pretrained_model_name_or_path}`"
        if layers is None:
            raise ValueError(
                f"{stored_in} is no shallow assistant, its configuration has no `{_BEGAN_AS}`. Load an ordinary model "
                "with `AutoModelForCausalLM.from_pretrained`."
            )
        for size in _SIZES:
            its, wanted = (getattr(c.get_text_config(decoder=True), size) for c in (config, target.config))
            if its != wanted:
                raise ValueError(
                    f"{stored_in} was trained for another target: its `{size}` is {its!r}, that of `target` "
                    f"({type(target).__name__}) is {wanted!r}."
                )
        assistant = LayerSkipAssistant(target, layers)
        file = cached_file(pretrained_model_name_or_path, SAFE_WEIGHTS_NAME, **kwargs)
        stored, expected = load_file(file), ShallowAssistant.own_parameters(assistant)
        if different := sorted(stored.keys() ^ expected.keys()):
            raise ValueError(f"{stored_in} is damaged: `{different[0]}` is missing or too much.")
        embeddings = target.get_input_embeddings().weight
        _replace(assistant, {name: weight.to(embeddings) for name, weight in stored.items()})
        setattr(assistant.config, _BEGAN_AS, layers)
        return assistant.eval()


def _replace(assistant: PreTrainedModel, weights: dict[str, torch.Tensor]) -> None:
    """Give `assistant` parameters of its own in place of the target's."""
    for name, weight in weights.items():
        path, _, leaf = name.rpartition(".")
        owner = assistant.get_submodule(path)
        if isinstance(owner, nn.Linear) and type(owner) is not nn.Linear:  # a quantized layer of the target
            owner = nn.Linear(owner.in_features, owner.out_features, bias=owner.bias is not None, device="meta")
            assistant.set_submodule(path, owner)
        if isinstance(vars(owner).get("forward"), FunctionType):
            del owner.forward  # of a split target (tensor parallelism): it would run the target's weights
        setattr(owner, leaf, nn.Parameter(weight))
