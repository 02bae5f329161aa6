"""The drafters in `assets/`, by name, for SmolLM2-135M-Instruct."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

import tetris_hf


ASSETS = Path(__file__).parent.parent / "assets"
NAMES = ("shallow", "medusa")


def shipped_drafter(name: str, model: PreTrainedModel) -> Any:
    """
    What `assistant_model` takes.

    Args:
        name (`str`): One of `NAMES`.
        model (`PreTrainedModel`): The target.
    """
    if name == "medusa":
        return tetris_hf.MedusaHeads.from_pretrained(ASSETS / "smollm2-135m-medusa").float()
    return tetris_hf.ShallowAssistant.from_pretrained(ASSETS / "smollm2-135m-shallow", target=model)
