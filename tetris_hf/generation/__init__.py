"""Batched speculative decoding for transformers' `generate`. This folder is a Hub `custom_generate/` as it stands."""

from .assistant_drafter import AssistantDrafter
from .batch_job import RequestOutput
from .decoding import TetrisDecoding
from .drafting import Draft, Drafter, Verification
from .generate import disable, enable, generate
from .generate_batch import generate_batch, iterate_batch
from .mixed_drafter import MixedDrafter
from .outputs import TetrisDecoderOnlyOutput
from .prompt_lookup_drafter import PromptLookupDrafter
from .selection import DraftSelector, DraftSelectorList, FixedWindowSelector, TetrisSelector
from .stats import TetrisStats
from .step_cache import release_graphs
from .streaming import RowStreamer, RowTextStreamer


__all__ = [
    "AssistantDrafter",
    "Draft",
    "DraftSelector",
    "DraftSelectorList",
    "Drafter",
    "FixedWindowSelector",
    "MixedDrafter",
    "PromptLookupDrafter",
    "RequestOutput",
    "RowStreamer",
    "RowTextStreamer",
    "TetrisDecoderOnlyOutput",
    "TetrisDecoding",
    "TetrisSelector",
    "TetrisStats",
    "Verification",
    "disable",
    "enable",
    "generate",
    "generate_batch",
    "iterate_batch",
    "release_graphs",
]
