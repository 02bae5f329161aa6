"""Exact, fast, batched speculative decoding inside Hugging Face transformers."""

from .generation import (
    AssistantDrafter,
    Draft,
    Drafter,
    DraftSelector,
    DraftSelectorList,
    FixedWindowSelector,
    MixedDrafter,
    PromptLookupDrafter,
    RowStreamer,
    RowTextStreamer,
    TetrisDecoderOnlyOutput,
    TetrisDecoding,
    TetrisSelector,
    TetrisStats,
    Verification,
    disable,
    enable,
    release_graphs,
)
from .models import (
    LayerChoice,
    LayerSkipAssistant,
    MedusaConfig,
    MedusaDrafter,
    MedusaHeads,
    ShallowAssistant,
    choose_layers,
)


__version__ = "0.1.0"

__all__ = [
    "AssistantDrafter",
    "Draft",
    "DraftSelector",
    "DraftSelectorList",
    "Drafter",
    "FixedWindowSelector",
    "LayerChoice",
    "LayerSkipAssistant",
    "MedusaConfig",
    "MedusaDrafter",
    "MedusaHeads",
    "MixedDrafter",
    "PromptLookupDrafter",
    "RowStreamer",
    "RowTextStreamer",
    "ShallowAssistant",
    "TetrisDecoderOnlyOutput",
    "TetrisDecoding",
    "TetrisSelector",
    "TetrisStats",
    "Verification",
    "choose_layers",
    "disable",
    "enable",
    "release_graphs",
]
