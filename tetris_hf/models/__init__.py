"""Draft models that are made from the target itself or trained for it."""

from .layer_skip import LayerChoice, LayerSkipAssistant, choose_layers
from .medusa import MedusaConfig, MedusaHeads
from .medusa_drafter import MedusaDrafter
from .shallow import ShallowAssistant


__all__ = [
    "LayerChoice",
    "LayerSkipAssistant",
    "MedusaConfig",
    "MedusaDrafter",
    "MedusaHeads",
    "ShallowAssistant",
    "choose_layers",
]
