"""From names on the command line to a target, its tokenizer and a drafter."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from ..generation import PromptLookupDrafter
from ..models import LayerSkipAssistant, MedusaHeads, ShallowAssistant
from .errors import CommandError


def load_target(args: argparse.Namespace) -> tuple[PreTrainedModel, Tokenizer]:
    """
    The target and its tokenizer.

    Args:
        args (`argparse.Namespace`): With the options of [`options.add_models`].

    Raises:
        `OSError`, `ValueError`: As `from_pretrained` raises them.
    """
    where = {"revision": args.revision, "trust_remote_code": args.trust_remote_code}
    where |= {"gguf_file": args.gguf_file} if args.gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left", **where)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "auto":
        where["device_map"] = "auto"
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, **where).eval()
    if device != "auto":
        try:
            model = model.to(device)
        except (RuntimeError, AssertionError) as error:
            raise CommandError(f"--device {device} cannot be used: {str(error).splitlines()[0]}") from error
    config = model.generation_config
    if config.eos_token_id is None:
        config.eos_token_id = tokenizer.eos_token_id
    if config.pad_token_id is None:
        # Never read as text: the attention mask marks it.
        known = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        config.pad_token_id = next(token for token in known if token is not None)
    return model, tokenizer


def load_drafter(names: list[str] | None, target: PreTrainedModel, args: argparse.Namespace) -> Any:
    """
    Who drafts: what `generate` takes as `assistant_model`.

    Args:
        names (`list[str]`, *optional*): As given with `--assistant`.
        target (`PreTrainedModel`): The model to draft for.
        args (`argparse.Namespace`): With the options of [`options.add_models`].

    Raises:
        `CommandError`: If a name cannot be understood.
        `OSError`, `ValueError`: As `from_pretrained` raises them.
    """
    drafters = [_drafter(name, target, args) for name in names or ()]
    return drafters[0] if len(drafters) == 1 else drafters or None


def _drafter(name: str, target: PreTrainedModel, args: argparse.Namespace) -> Any:
    if name == "lookup":
        return PromptLookupDrafter()
    if name.startswith("layers:"):
        return LayerSkipAssistant(target, layers_named(name.removeprefix("layers:")))
    config, _ = PreTrainedConfig.get_config_dict(name)
    if "shallow_layers" in config:
        return ShallowAssistant.from_pretrained(name, target=target)
    is_published_medusa = Path(name).is_dir() and any(Path(name).glob("medusa_lm_head.*"))
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config or is_published_medusa:
        return MedusaHeads.from_pretrained(name, dtype=target.dtype).to(target.device)
    assistant = AutoModelForCausalLM.from_pretrained(
        name, dtype=target.dtype, trust_remote_code=args.trust_remote_code
    )
    return assistant.to(target.device).eval()


def layers_named(text: str) -> list[int]:
    """
    Layers from `0,1,5-9`.

    Raises:
        `CommandError`: If it is written in another way.
    """
    layers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if found is None:
            raise CommandError(f"--assistant layers:{text} must list layers as in layers:0,1,5-9.")
        first, last = int(found[1]), int(found[2] or found[1])
        layers.extend(range(first, last + 1))
    return layers
