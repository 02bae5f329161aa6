"""Under which name the costs of steps are kept: everything that they depend on, the same in every process.

Knows models, drafters and machines. Knows no costs.
"""

from __future__ import annotations

import hashlib
import json
import platform
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from .drafter import Drafter


def cost_key(model: PreTrainedModel, drafter: Drafter | None, num_rows: int, mode: str) -> dict[str, Any]:
    """
    What a step's cost depends on, the same in every process.

    Args:
        model (`PreTrainedModel`): The target.
        drafter ([`Drafter`], *optional*): Who drafts; known by classes and sizes.
        num_rows (`int`): N.
        mode (`str`): How steps run: eager, compiled, captured.

    Returns:
        `dict[str, Any]`: Of plain values, for [`CostTable.cached`].
    """
    device = model.device
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} {device.type}"
    return {
        "model": _known_by(model),
        "drafter": _drafter_known_by(drafter),
        "device": machine,
        "threads": None if device.type == "cuda" else torch.get_num_threads(),
        "dtype": str(model.dtype),
        "num_rows": num_rows,
        "mode": mode,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _known_by(module: nn.Module) -> list[Any]:
    """Class, number of weights and a hash of the config, without what a call sets in it (a leading underscore)."""
    config: Any = getattr(module, "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else {}
    plain = {name: value for name, value in config.items() if not name.startswith("_")}
    text = json.dumps(plain, sort_keys=True, default=str)
    return [type(module).__name__, sum(weight.numel() for weight in module.parameters()), hashed(text)]


def _drafter_known_by(drafter: Drafter | None) -> list[Any] | None:
    if drafter is None:
        return None
    modules = [value for name, value in vars(drafter).items() if isinstance(value, nn.Module) and name[0] != "_"]
    parts = [_drafter_known_by(part) for part in getattr(drafter, "drafters", ())]
    return [type(drafter).__name__, *map(_known_by, modules), *parts]


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]
