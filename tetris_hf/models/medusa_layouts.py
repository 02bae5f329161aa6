"""Published checkpoints of Medusa heads, read into the layout of [`MedusaHeads`].

Layouts are told apart by the names and shapes of their tensors, since their configurations say little:

- FasterDecoding's `medusa_lm_head`: `{head}.{block}.linear.weight` and `.bias`; with output matrices of their own also
  `{head}.{num_blocks}.weight`.
- vLLM's: `blocks.{head}.layers.{block}.weight`, perhaps `.bias`; `lm_heads.{head}.weight`.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.utils import cached_file


# Looked for in this order: safetensors before pickles.
_FILES = ("medusa_lm_head.safetensors", "model.safetensors", "medusa_lm_head.pt", "pytorch_model.bin")
_HUB_ARGUMENTS = ("revision", "subfolder", "token", "cache_dir", "local_files_only", "force_download")
# A name is a block's weight, a block's bias or an output matrix, behind what wrappers put before it.
_BLOCKS = (
    re.compile(r"(?:medusa_heads?\.)?(?P<head>\d+)\.(?P<block>\d+)\.linear\.(?P<kind>weight|bias)"),
    re.compile(r"(?:medusa_heads\.)?blocks\.(?P<head>\d+)\.layers\.(?P<block>\d+)\.(?P<kind>weight|bias)"),
)
_OUTPUTS = (
    re.compile(r"(?:medusa_heads?\.)?(?P<head>\d+)\.(?P<block>\d+)\.weight"),
    re.compile(r"(?:medusa_heads\.)?lm_heads\.(?P<head>\d+)\.weight"),
)
_KNOWN = (
    "FasterDecoding's Medusa (`0.0.linear.weight`, ..., `0.1.weight`) and vLLM's (`blocks.0.layers.0.weight`, ..., "
    "`lm_heads.0.weight`)"
)


def read_published(
    name_or_path: str | os.PathLike[str], **kwargs: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]] | None:
    """
    Read a published checkpoint.

    Args:
        name_or_path (`str` or `os.PathLike`): A folder or a Hub repository.
        kwargs: Arguments of `from_pretrained`, of which those that say where to look are used.

    Returns:
        `tuple[dict[str, Any], dict[str, torch.Tensor]]`, *optional*: Arguments of [`MedusaConfig`] and a state dict of
        [`MedusaHeads`]. `None` if the checkpoint is one that [`MedusaHeads`] stored itself, or there is none.

    Raises:
        `ValueError`: If the checkpoint is in no layout that is known.
    """
    where = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    where |= {"_raise_exceptions_for_missing_entries": False}
    config_file = cached_file(name_or_path, "config.json", **where)
    config = {}
    if config_file is not None:
        with open(config_file, encoding="utf-8") as file:
            config = json.load(file)
    if "MedusaHeads" in (config.get("architectures") or ()):
        return None
    found = (cached_file(name_or_path, name, **where) for name in _FILES)
    path = next((path for path in found if path is not None), None)
    if path is None:
        return None
    if path.endswith(".safetensors"):
        return from_published(load_file(path), config)
    return from_published(torch.load(path, map_location="cpu", weights_only=True), config)


def from_published(
    tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """
    Convert a published checkpoint.

    Args:
        tensors (`dict[str, torch.Tensor]`): Its tensors by name.
        config (`dict[str, Any]`): Its `config.json`, which may be empty.

    Returns:
        `tuple[dict[str, Any], dict[str, torch.Tensor]]`: As [`read_published`].

    Raises:
        `ValueError`: If the tensors are in no layout that is known.
    """
    if "token_map" in tensors:
        raise ValueError("The Medusa checkpoint has a truncated vocabulary (`token_map`), which is not supported.")
    layouts = zip(_BLOCKS, _OUTPUTS, strict=True)
    layout = next((names for names in layouts if any(names[0].fullmatch(name) for name in tensors)), None)
    if layout is None:
        raise ValueError(f"The checkpoint holds no Medusa heads: it has {_some(tensors)}. Known layouts are {_KNOWN}.")
    blocks_named, outputs_named = layout

    blocks: dict[tuple[int, int, str], torch.Tensor] = {}
    outputs: dict[int, torch.Tensor] = {}
    output_places = set()
    unknown = []
    for name, tensor in tensors.items():
        if match := blocks_named.fullmatch(name):
            blocks[int(match["head"]), int(match["block"]), match["kind"]] = tensor
        elif match := outputs_named.fullmatch(name):
            outputs[int(match["head"])] = tensor
            output_places.add(match.groupdict().get("block"))
        elif name != "lm_head.weight":  # the target's own output matrix, which some copy along
            unknown.append(name)
    num_heads, num_layers = 1 + max(key[0] for key in blocks), 1 + max(key[1] for key in blocks)
    if unknown or not output_places <= {None, str(num_layers)}:
        raise ValueError(
            f"The Medusa checkpoint has tensors of unknown meaning: {_some(unknown or tensors)}. Known layouts are "
            f"{_KNOWN}."
        )
    # One output matrix where the configuration says that there is none: again a copy of the target's.
    own_outputs = bool(outputs) and not config.get("original_lm_head", False)
    hidden_size = blocks[max(blocks)].shape[-1]
    vocab_size = outputs[0].shape[0] if 0 in outputs else config.get("vocab_size")
    kinds = sorted({key[2] for key in blocks})

    def stack(kind: str, *shape: int) -> torch.Tensor:
        rows = [[blocks.get((head, layer, kind)) for head in range(num_heads)] for layer in range(num_layers)]
        return torch.stack([_stack(row, f"{kind} of block {layer}", shape) for layer, row in enumerate(rows)])

    weights = {"weight": stack("weight", hidden_size, hidden_size)}  # (layers, heads, hidden_size, hidden_size)
    if "bias" in kinds:
        weights["bias"] = stack("bias", hidden_size)
    if own_outputs:
        rows = [outputs.get(head) for head in range(num_heads)]
        weights["output"] = _stack(rows, "output matrix", (vocab_size, hidden_size))
    sizes = {
        "hidden_size": hidden_size,
        "vocab_size": vocab_size,
        "medusa_num_heads": num_heads,
        "medusa_num_layers": num_layers,
        "medusa_fc_bias": "bias" in kinds,
        "original_lm_head": not own_outputs,
        "base_model_name_or_path": config.get("base_model_name_or_path"),
    }
    return sizes, weights


def _stack(tensors: list[torch.Tensor | None], what: str, shape: tuple[Any, ...]) -> torch.Tensor:
    """All heads' tensors of one kind, checked."""
    for head, tensor in enumerate(tensors):
        if tensor is None or tensor.shape != shape:
            got = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}"
            raise ValueError(f"The Medusa checkpoint is damaged: the {what} of head {head} {got}, expected {shape}.")
    return torch.stack([tensor for tensor in tensors if tensor is not None])


def _some(names: Any) -> str:
    """A few names, for a message."""
    names = sorted(names)
    return ", ".join(f"`{name}`" for name in names[:4]) + (", ..." if len(names) > 4 else "")
