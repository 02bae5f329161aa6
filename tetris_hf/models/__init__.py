"""Draft models that are made from the target itself."""

from .layer_skip import LayerChoice, LayerSkipAssistant, choose_layers


__all__ = ["LayerChoice", "LayerSkipAssistant", "choose_layers"]
