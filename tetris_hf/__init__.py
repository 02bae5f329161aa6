"""Exact, fast, batched speculative decoding inside Hugging Face transformers."""

from .generation import (
    AssistantDrafter,
    Draft,
    Drafter,
    DraftSelector,
    DraftSelectorList,
    FixedWindowSelector,
    PromptLookupDrafter,
    RowStreamer,
    RowTextStreamer,
    TetrisDecoderOnlyOutput,
    TetrisDecoding,
    TetrisSelector,
    TetrisStats,
    disable,
    enable,
)
from .models import LayerSkipAssistant


__version__ = "0.1.0"

__all__ = [
    "AssistantDrafter",
    "Draft",
    "DraftSelector",
    "DraftSelectorList",
    "Drafter",
    "FixedWindowSelector",
    "LayerSkipAssistant",
    "PromptLookupDrafter",
    "RowStreamer",
    "RowTextStreamer",
    "TetrisDecoderOnlyOutput",
    "TetrisDecoding",
    "TetrisSelector",
    "TetrisStats",
    "disable",
    "enable",
]
