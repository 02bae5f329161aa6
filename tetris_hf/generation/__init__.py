"""Batched speculative decoding for transformers' `generate`. This folder is a Hub `custom_generate/` as it stands."""

from .assistant_drafter import AssistantDrafter
from .calibration import AcceptanceCalibration
from .decoding import TetrisDecoding
from .draft import Draft, Verification
from .drafter import Drafter
from .generate import disable, enable, generate
from .generate_batch import generate_batch, iterate_batch
from .mixed_drafter import MixedDrafter
from .oracle_selector import OracleSelector
from .outputs import TetrisDecoderOnlyOutput
from .prompt_lookup_drafter import PromptLookupDrafter
from .request import RequestOutput
from .selection import DraftSelector, DraftSelectorList, FixedWindowSelector, TetrisSelector
from .selectors import ConfidenceThresholdSelector, DynamicWindowSelector, EntropySelector, UnionSelector
from .staircase import Staircase
from .stats import TetrisStats
from .step_cache import release_graphs
from .step_history import StepHistory
from .streaming import RowStreamer, RowTextStreamer


__all__ = [
    "AcceptanceCalibration",
    "AssistantDrafter",
    "ConfidenceThresholdSelector",
    "Draft",
    "DraftSelector",
    "DraftSelectorList",
    "Drafter",
    "DynamicWindowSelector",
    "EntropySelector",
    "FixedWindowSelector",
    "MixedDrafter",
    "OracleSelector",
    "PromptLookupDrafter",
    "RequestOutput",
    "RowStreamer",
    "RowTextStreamer",
    "Staircase",
    "StepHistory",
    "TetrisDecoderOnlyOutput",
    "TetrisDecoding",
    "TetrisSelector",
    "TetrisStats",
    "UnionSelector",
    "Verification",
    "disable",
    "enable",
    "generate",
    "generate_batch",
    "iterate_batch",
    "release_graphs",
]
