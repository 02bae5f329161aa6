"""Batched speculative decoding for transformers' `generate`. This folder is a Hub `custom_generate/` as it stands."""

from .assistant_drafter import AssistantDrafter
from .decoding import TetrisDecoderOnlyOutput, TetrisDecoding
from .drafting import Draft, Drafter, Verification
from .generate import disable, enable, generate
from .selection import DraftSelector, DraftSelectorList, FixedWindowSelector, TetrisSelector
from .stats import TetrisStats


__all__ = [
    "AssistantDrafter",
    "Draft",
    "DraftSelector",
    "DraftSelectorList",
    "Drafter",
    "FixedWindowSelector",
    "TetrisDecoderOnlyOutput",
    "TetrisDecoding",
    "TetrisSelector",
    "TetrisStats",
    "Verification",
    "disable",
    "enable",
    "generate",
]
