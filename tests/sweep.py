"""Every causal-LM class of transformers, tiny and random, against stock `generate`: equal, refused, or not built here.

    python tests/sweep.py                # prints docs/supported_models.md
    python tests/sweep.py llama mamba    # verdicts on some model types

Written for the newest transformers that is supported; a class that this file cannot build is not a verdict on it.
"""

import sys
from pathlib import Path
from typing import Any


sys.path.insert(0, str(Path(__file__).parent))

import kit
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tetris_hf import TetrisDecoding


MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

# Every size that some config has a name for. Only names that a config has are set.
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "d_model": 32,
    "n_embd": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_layers": 2,
    "decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "n_positions": 128,
    "n_ctx": 128,
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
    "sliding_window": 8,
    "attention_chunk_size": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 99,
    "laurel_rank": 4,
    "num_kv_shared_layers": 0,
    "initializer_range": 0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Multi-head latent attention has its own widths, and as many key/value heads as heads.
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
# Encoders by default, which stock `generate` runs with a warning and without a cache.
ENCODERS = (
    "bert",
    "bert-generation",
    "big_bird",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
# What a type needs besides.
OWN: dict[str, dict[str, Any]] = {
    **dict.fromkeys(ENCODERS, {"is_decoder": True}),
    # Its recurrence over layers blows rounding up: with wide weights stock `generate` differs from itself, too.
    "hrm_text": {"initializer_range": 0.1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "dbrx": {"n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "dots1": {"head_dim": 8, "n_shared_experts": 1},
    # Hybrids: enough layers that one of them attends.
    **dict.fromkeys(
        (
            "bailing_hybrid",
            "jamba",
            "kimi_linear",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
            "qwen3_5_text",
            "qwen3_next",
            "qwen4_exp",
            "qwen4_exp_text",
            "recurrent_gemma",
            "cohere_compass_text",
            "inkling2_text",
            "inkling2_loop_text",
            "lfm2_moe",
        ),
        {"num_hidden_layers": 8},
    ),
    "mamba2": {"head_dim": 16, "num_heads": 4, "expand": 2},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"]},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"]},
}
UNSET = {
    # The head's width is not theirs to choose.
    "falcon": ("head_dim",),
    "xlstm": ("head_dim",),
}


class NotBuilt(Exception):
    """This file does not know how to build such a model, or stock `generate` does not run it."""


def build(model_type: str) -> PreTrainedModel:
    """A tiny random model of a type."""
    try:
        config = _config(model_type)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
        if size > 100_000_000:
            raise NotBuilt(f"still {size / 1e6:.0f} million weights with these sizes")
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config).eval()
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model


def _config(model_type: str) -> PreTrainedConfig:
    default = AutoConfig.for_model(model_type)
    text = default.get_text_config(decoder=True)
    latent = LATENT if hasattr(text, "kv_lora_rank") else {}
    wanted = {**SIZES, **latent, **OWN.get(model_type, {})}
    if latent:
        wanted.pop("head_dim")
    unset = UNSET.get(model_type, ())
    sizes = {name: value for name, value in wanted.items() if _has(text, name) and name not in unset}
    if text is default:
        return AutoConfig.for_model(model_type, **sizes)
    name = next(name for name in default.sub_configs if getattr(default, name) is text)
    return AutoConfig.for_model(model_type, **{name: sizes})


def _has(config: PreTrainedConfig, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # a per-layer attribute refuses to be read for all layers at once
        return False


def verdict(model_type: str) -> tuple[str, str]:
    """
    "equal", "refused", "not built", or what must never be: "wrong", "crash". With a reason.

    A ragged left-padded batch of three prompts, a near assistant, two draft tokens verified per row and step of four
    proposed, in float32, longer than every window.
    """
    try:
        model = build(model_type)
        batch = kit.ragged()
        settings = {"max_new_tokens": 24, "do_sample": False}
        try:
            plain = model.generate(**batch, **settings)
        except Exception as error:
            raise NotBuilt(f"stock generate: {type(error).__name__}: {error}") from error
    except NotBuilt as error:
        return "not built", str(error)
    decoding = TetrisDecoding(kit.near(model), capacity=6, num_assistant_tokens=4)
    try:
        ours = model.generate(**batch, **settings, custom_generate=decoding)
    except (ValueError, NotImplementedError) as error:
        return "refused", str(error)
    except Exception as error:
        return "crash", f"{type(error).__name__}: {error}"
    return ("equal" if torch.equal(ours, plain) else "wrong"), ""


REASONS = {
    "cannot be cut back per row": "recurrent, hybrid or indexed layers: no cache of keys and values alone",
    "computes attention or positions by itself": "computes attention or positions by itself",
    "attends to later tokens": "attends to later tokens",
    "masks of its own": "computes with attention masks itself",
    "know of no window": "its window is kept by the stock cache alone",
}


def main() -> None:
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found: dict[str, list[tuple[str, str]]] = {}
    for model_type in sys.argv[1:] or MODEL_TYPES:
        name, reason = verdict(model_type)
        found.setdefault(name, []).append((model_type, reason))
        print(f"{name:10} {model_type:28} {reason[:150]!r}", file=sys.stderr, flush=True)
    if sys.argv[1:]:
        return
    equal, refused, not_built = (found.get(name, []) for name in ("equal", "refused", "not built"))
    print("# Supported models\n")
    print(
        f"Made by `python tests/sweep.py` with transformers {transformers.__version__} and torch {torch.__version__}: "
        f"all {len(MODEL_TYPES)} causal-LM types, tiny random weights in float32, a ragged left-padded batch, a near "
        "assistant, fewer tokens verified than drafted, texts longer than every window. A type is *equal* if the text "
        "is token for token that of stock `generate`, and *refused* if it raises an error before any text.\n"
    )
    print(f"## Equal ({len(equal)})\n\n" + ", ".join(f"`{name}`" for name, _ in sorted(equal)) + "\n")
    print(f"## Refused ({len(refused)})\n\n| type | why |\n| --- | --- |")
    for model_type, reason in sorted(refused):
        print(f"| `{model_type}` | {next((text for key, text in REASONS.items() if key in reason), reason)} |")
    print(f"\n## Not tried ({len(not_built)})\n")
    print("The common small sizes of the sweep do not build these, or stock `generate` does not run them alone:\n")
    print(", ".join(f"`{name}`" for name, _ in sorted(not_built)))


if __name__ == "__main__":
    main()
