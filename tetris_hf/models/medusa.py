"""Medusa heads: small networks that predict, from one hidden state of the target, the tokens after the next.

Knows the heads and how they are stored. Does not know generation; that is [`MedusaDrafter`]'s.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .medusa_drafter import MedusaDrafter
from .medusa_layouts import read_published


class MedusaConfig(PreTrainedConfig):
    """
    Configuration of [`MedusaHeads`].

    Args:
        hidden_size (`int`, *optional*, defaults to 4096): Width of the target's last hidden states.
        vocab_size (`int`, *optional*):
            Width of the target's logits. Heads without output matrices of their own need not know it.
        medusa_num_heads (`int`, *optional*, defaults to 4): Heads: tokens predicted after the next one.
        medusa_num_layers (`int`, *optional*, defaults to 1): Residual blocks of each head.
        medusa_fc_bias (`bool`, *optional*, defaults to `True`): Whether the blocks have biases.
        original_lm_head (`bool`, *optional*, defaults to `True`):
            Whether the heads end in the target's output embeddings, which are then not stored with them. `False` gives
            each head an output matrix of its own.
        medusa_reads_next_token (`bool`, *optional*, defaults to `False`):
            Whether the heads also read the input embedding of the token that the target chose from the hidden state,
            in every block. Published Medusa heads do not; the idea is Hydra's (Ankner et al., 2024), but no head waits
            for the one before it.
        base_model_name_or_path (`str`, *optional*): The target that the heads were trained for.
    """

    model_type = "medusa"

    def __init__(
        self,
        hidden_size: int = 4096,
        vocab_size: int | None = None,
        medusa_num_heads: int = 4,
        medusa_num_layers: int = 1,
        medusa_fc_bias: bool = True,
        original_lm_head: bool = True,
        medusa_reads_next_token: bool = False,
        base_model_name_or_path: str | None = None,
        **kwargs: Any,
    ):
        if medusa_num_heads < 1:
            raise ValueError(f"`medusa_num_heads` must be at least 1, got {medusa_num_heads}.")
        if not original_lm_head and vocab_size is None:
            raise ValueError("`vocab_size` must be given for heads with output matrices of their own.")
        self.hidden_size = hidden_size
        self.vocab_size = vocab_size
        self.medusa_num_heads = medusa_num_heads
        self.medusa_num_layers = medusa_num_layers
        self.medusa_fc_bias = medusa_fc_bias
        self.original_lm_head = original_lm_head
        self.medusa_reads_next_token = medusa_reads_next_token
        self.base_model_name_or_path = base_model_name_or_path
        super().__init__(**kwargs)


class MedusaHeads(PreTrainedModel):
    """
    Medusa heads for a target (Cai et al., 2024), used as its assistant: `generate(..., assistant_model=heads)`.

    From the hidden state of a token, the target predicts the next one and head k, counted from 0, the one k + 1 places
    after that. A head is `medusa_num_layers` blocks `x + SiLU(W x + b)`, which start as the identity, and an output
    matrix. Heads that read the next token have blocks `x + SiLU(W x + U e + b)`, where e is its input embedding,
    scaled to a mean square of 1. The weights of all heads are stacked, so that one batched product serves them all.

    Args:
        config ([`MedusaConfig`]): Sizes.

    Examples:

    ```python
    >>> heads = MedusaHeads.from_pretrained("assets/smollm2-135m-medusa")
    >>> model.generate(**batch, assistant_model=heads, tetris_capacity=64)
    ```
    """

    config_class = MedusaConfig
    base_model_prefix = "medusa"

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        layers, heads, hidden = config.medusa_num_layers, config.medusa_num_heads, config.hidden_size
        self.weight = nn.Parameter(torch.empty(layers, heads, hidden, hidden))
        self.bias = nn.Parameter(torch.empty(layers, heads, hidden)) if config.medusa_fc_bias else None
        reads = config.medusa_reads_next_token
        self.token_weight = nn.Parameter(torch.empty(layers, heads, hidden, hidden)) if reads else None
        own_outputs = torch.empty(0 if config.original_lm_head else heads, config.vocab_size or 0, hidden)
        self.output = None if config.original_lm_head else nn.Parameter(own_outputs)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            # Zeros, so that every block starts as the identity.
            nn.init.zeros_(self.weight)
            for parameter in (self.bias, self.token_weight):
                if parameter is not None:
                    nn.init.zeros_(parameter)
            if self.output is not None:
                nn.init.normal_(self.output, std=0.02)

    def features(
        self, hidden_states: torch.Tensor, num_heads: int | None = None, next_embeds: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        What enters the output matrices.

        Args:
            hidden_states (`torch.Tensor` of shape `(R, hidden_size)`): Inputs of the target's output embeddings.
            num_heads (`int`, *optional*): How many of the first heads are wanted; by default all.
            next_embeds (`torch.Tensor` of shape `(R, hidden_size)`, *optional*):
                Input embeddings of the tokens chosen from these states, if the heads read them.

        Returns:
            `torch.Tensor` of shape `(num_heads, R, hidden_size)`.

        Raises:
            `ValueError`: If the heads read the next token and `next_embeds` is missing.
        """
        num_heads = self.config.medusa_num_heads if num_heads is None else num_heads
        embeds = None if self.token_weight is None else _scaled(next_embeds, self.weight)  # (R, hidden_size)
        x = hidden_states.to(self.weight).expand(num_heads, *hidden_states.shape)  # (num_heads, R, hidden_size)
        for layer in range(self.config.medusa_num_layers):
            inner = torch.bmm(x, self.weight[layer, :num_heads].transpose(1, 2))
            if self.token_weight is not None and embeds is not None:
                # The first heads of one layer lie side by side; those of all layers do not, and would be copied.
                told = embeds @ self.token_weight[layer, :num_heads].flatten(0, 1).T  # (R, num_heads * hidden_size)
                inner = inner + told.unflatten(1, (num_heads, -1)).transpose(0, 1)
            if self.bias is not None:
                inner = inner + self.bias[layer, :num_heads, None]
            x = x + nn.functional.silu(inner)
        return x

    def forward(
        self,
        hidden_states: torch.Tensor,
        lm_head: nn.Module | None = None,
        num_heads: int | None = None,
        next_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states (`torch.Tensor` of shape `(R, hidden_size)`): Inputs of the target's output embeddings.
            lm_head (`nn.Module`, *optional*): The target's output embeddings, if the heads have none of their own.
            num_heads (`int`, *optional*): How many of the first heads are wanted; by default all.
            next_embeds (`torch.Tensor` of shape `(R, hidden_size)`, *optional*):
                Input embeddings of the tokens chosen from these states, if the heads read them.

        Returns:
            `torch.Tensor` of shape `(R, num_heads, vocab_size)`: Logits.

        Raises:
            `ValueError`: If the heads need `lm_head` or `next_embeds` and it is missing.
        """
        features = self.features(hidden_states, num_heads, next_embeds)  # (num_heads, R, hidden_size)
        if self.output is not None:
            logits = torch.bmm(features, self.output[: len(features)].transpose(1, 2))
        elif lm_head is not None:
            logits = lm_head(features.to(hidden_states))
        else:
            raise ValueError("These heads end in the target's output embeddings: pass them as `lm_head`.")
        return logits.transpose(0, 1)

    def as_drafter(self) -> MedusaDrafter:
        """The drafter that `generate` uses when it gets these heads as `assistant_model`."""
        return MedusaDrafter(self)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *model_args: Any, **kwargs: Any
    ) -> MedusaHeads:
        """
        Load heads that `save_pretrained` stored, or a published checkpoint: `medusa_lm_head` of FasterDecoding's
        Medusa with or without output matrices, as a pickle or as safetensors, and the layout that vLLM reads.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): A folder or a Hub repository.
            model_args: As in [`PreTrainedModel.from_pretrained`].
            kwargs:
                As in [`PreTrainedModel.from_pretrained`]. Published layouts take `dtype` and what says where on the
                Hub to look (`revision`, `subfolder`, `token`, `cache_dir`, `local_files_only`, `force_download`).

        Raises:
            `ValueError`: If a checkpoint is in none of these layouts.
        """
        published = None if "config" in kwargs else read_published(pretrained_model_name_or_path, **kwargs)
        if published is None:
            heads: MedusaHeads = super().from_pretrained(pretrained_model_name_or_path, *model_args, **kwargs)
            return heads
        sizes, weights = published
        heads = cls(MedusaConfig(**sizes))
        heads.load_state_dict(weights)
        dtype = kwargs.get("dtype")
        heads.to(weights["weight"].dtype if dtype in (None, "auto") else dtype).eval()
        return heads


def _scaled(next_embeds: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
    """As large whatever the target's embeddings are, so that U learns at W's pace; of the kind of `weight`."""
    if next_embeds is None:
        raise ValueError("These heads read the next token: pass its input embeddings as `next_embeds`.")
    return nn.functional.rms_norm(next_embeds.to(weight), next_embeds.shape[-1:], eps=1e-6)
