"""A small Llama-type model with a big one's cost: embedded in a wide model of the same class that computes the same.

Real text, real acceptance of drafts and a 7 B or 30 B model's time, without a big model's weights. How it works:

- The residual stream keeps the small model's values in its first dimensions and exact zeros in all others: embeddings
  and output projections (`o_proj`, `down_proj`) are zero there.
- An RMSNorm over H dimensions of which h are not zero sees a mean square h / H as large: its weights are multiplied by
  sqrt(h / H) and its epsilon by h / H.
- Attention heads keep their width, and as many query heads share a key head as before, so that the first ones are the
  small model's. What surplus heads and surplus MLP units compute meets zero columns of the output projections.
- Surplus layers add zeros.
- Every weight that only meets zeros is random, so that values are as large as an initialised model's.

Logits are equal up to rounding. In half precision a norm's scaled weights are rounded once more, unless H / h is a
power of 4. Zeros cost what other numbers cost as far as memory and instructions go; they can leave a card's clock
higher in forwards of many tokens that are bound by power.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from tetris_hf import MedusaConfig, MedusaHeads


# Sizes of what SmolLM2-135M (heads of 64, three query heads to a key head, vocabulary 49,152) is embedded in.
SIZES: dict[str, dict[str, int]] = {
    "7b": {  # 6.91 billion parameters
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 48,
        "num_key_value_heads": 16,
        "intermediate_size": 14336,
    },
    "7b-split": {  # 6.87 billion; its heads divide its width, as transformers wants of a configuration that it stores
        "hidden_size": 4608,
        "num_hidden_layers": 32,
        "num_attention_heads": 48,
        "num_key_value_heads": 16,
        "intermediate_size": 12288,
    },
    "30b": {  # 30.1 billion
        "hidden_size": 6144,
        "num_hidden_layers": 60,
        "num_attention_heads": 96,
        "num_key_value_heads": 32,
        "intermediate_size": 21504,
    },
}
# Modules whose output goes into the residual stream: zero wherever the small model has nothing.
_WRITES_TO_STREAM = ("embed_tokens", "o_proj", "down_proj")


@torch.no_grad()
def scale_target(
    model: PreTrainedModel,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    intermediate_size: int,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """
    A model of the given sizes with the function of `model`. It is allocated and filled on `device`, nowhere else.

    Args:
        model (`LlamaForCausalLM`): The small model, not changed.
        hidden_size (`int`): H, at least that of `model`.
        num_hidden_layers (`int`): At least those of `model`.
        num_attention_heads (`int`): At least those of `model`, and in the same ratio to the key heads.
        num_key_value_heads (`int`): At least those of `model`.
        intermediate_size (`int`): At least that of `model`.
        dtype (`torch.dtype`, *optional*): By default that of `model`.
        device (`torch.device` or `str`, *optional*): By default that of `model`.
        seed (`int`, *optional*, defaults to 0): Of the random weights.

    Returns:
        `LlamaForCausalLM`: In evaluation mode, with the generation config of `model`, tied as `model` is.

    Raises:
        `ValueError`: If `model` is not a plain, unquantized Llama, or a size is too small for it.
    """
    _check_class(model)
    small = model.config
    sizes = {
        "hidden_size": hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": num_attention_heads,
        "num_key_value_heads": num_key_value_heads,
        "intermediate_size": intermediate_size,
    }
    _check_sizes(small, sizes)
    config = copy.deepcopy(small)
    config.update(sizes)
    config.head_dim = model.model.layers[0].self_attn.head_dim
    config.rms_norm_eps = small.rms_norm_eps * small.hidden_size / hidden_size
    dtype, device = dtype or model.dtype, torch.device(device or model.device)
    with torch.device("meta"):
        wide = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=small._attn_implementation)
    wide = wide.to_empty(device=device)
    wide.tie_weights()  # memory of its own undid it
    with torch.device(device):  # the frequencies are computed, not stored: their memory is empty now
        wide.model.rotary_emb = type(model.model.rotary_emb)(wide.config)

    generator = torch.Generator(device=device).manual_seed(seed)
    theirs = dict(model.named_parameters())
    for name, parameter in wide.named_parameters():
        _fill(name, parameter, theirs.get(name), small.hidden_size, hidden_size, generator)
    wide.generation_config = copy.deepcopy(model.generation_config)
    return wide.eval()


def scale_heads(heads: MedusaHeads, hidden_size: int, seed: int = 0) -> MedusaHeads:
    """
    Medusa heads for a scaled target: the same logits through its output embeddings.

    A block `x + SiLU(W x + b)` adds SiLU(0) = 0 where rows of W and b are zero, so the dimensions that the target
    keeps at zero stay there. The embedding of the next token is scaled to a mean square of 1 over more dimensions,
    which its weights make good.

    Args:
        heads ([`MedusaHeads`]): Heads of the small target, not changed.
        hidden_size (`int`): That of the scaled target.
        seed (`int`, *optional*, defaults to 0): Of the random weights.

    Returns:
        [`MedusaHeads`]: On the device and in the dtype of `heads`.

    Raises:
        `ValueError`: If the heads have output matrices of their own, or `hidden_size` is less than theirs.
    """
    small = heads.config
    if not small.original_lm_head:
        raise ValueError(
            "`heads` have output matrices of their own, which would stay small: pass heads with "
            "`original_lm_head=True`."
        )
    if hidden_size < small.hidden_size:
        raise ValueError(f"`hidden_size` must be at least that of the heads, {small.hidden_size}, got {hidden_size}.")
    config = MedusaConfig(**{**small.to_dict(), "hidden_size": hidden_size})
    with torch.device(heads.device):
        wide = MedusaHeads(config).to(heads.dtype)
    generator = torch.Generator(device=heads.device).manual_seed(seed)
    h = small.hidden_size
    with torch.no_grad():
        rms = (h / hidden_size) ** 0.5
        for weight, small_weight, scale in (
            (wide.weight, heads.weight, 1.0),
            (wide.token_weight, heads.token_weight, rms),
        ):
            if weight is not None:
                rows = weight[:, :, :h]  # (layers, heads, h, H)
                rows.normal_(std=h**-0.5, generator=generator)
                rows[..., :h] = small_weight * scale
        if wide.bias is not None:
            wide.bias[..., :h] = heads.bias
    return wide.eval()


def _fill(
    name: str,
    parameter: torch.Tensor,
    small: torch.Tensor | None,
    small_hidden: int,
    hidden: int,
    generator: torch.Generator,
) -> None:
    """Write one parameter: the small model's in the corner, what belongs around it elsewhere."""
    module = name.split(".")[-2]
    if module.endswith("norm"):
        parameter.fill_(1.0)
        if small is not None:
            parameter[:small_hidden] = small.float().to(parameter.device) * (small_hidden / hidden) ** 0.5
        return
    if module in _WRITES_TO_STREAM:
        parameter.zero_()
    else:
        # What is normed has a variance near 1 in the small model's dimensions: products with it have it too.
        parameter.normal_(std=small_hidden**-0.5, generator=generator)
    if small is not None:
        parameter[tuple(slice(size) for size in small.shape)] = small.to(parameter.device)


def _check_class(model: Any) -> None:
    if type(model) is not LlamaForCausalLM:
        raise ValueError(
            f"`model` must be a plain `LlamaForCausalLM`, got {type(model).__name__}: other classes normalise or mix "
            "dimensions in ways that zeros around a small model would change."
        )
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(
                f"`model` is quantized (`{name}` is {parameter.dtype}): load it without a quantization config."
            )


def _check_sizes(small: PreTrainedConfig, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size < getattr(small, name):
            raise ValueError(f"`{name}` must be at least that of `model`, {getattr(small, name)}, got {size}.")
    heads, key_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    group = small.num_attention_heads // small.num_key_value_heads
    if heads != group * key_heads:
        raise ValueError(
            f"`num_attention_heads` must be {group} times `num_key_value_heads`, as in `model`, got {heads} and "
            f"{key_heads}: pass {group * key_heads} or change `num_key_value_heads`."
        )
