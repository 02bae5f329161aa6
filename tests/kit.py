"""The tiny kit of every test: models and batches small enough to build in milliseconds, and the two oracles.

The oracles are stock `generate` on the same padded batch, and stock `generate` on each row alone.
"""

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from tetris_hf import Draft, Drafter, TetrisDecoding


VOCABULARY = 64
LENGTHS = (3, 7, 12)

# Untied output embeddings and a wide initializer: tied or narrow, random models repeat the last token for ever.
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

# Windows are shorter than the texts of the tests.
ZOO: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 8},
    # Eager: the SDPA path of older transformers (5.17) leaves the soft cap out without a word.
    "gemma2": {
        "head_dim": 8,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "attn_implementation": "eager",
    },
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 8,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    # Multi-head latent attention: keys of width 16, values of width 12.
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    # Attention sinks, alternating windows, mixture of experts.
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def tiny(model_type: str = "llama", seed: int = 3, **overrides: Any) -> PreTrainedModel:
    """A random model of 20 to 50 thousand weights."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **{**TINY, **ZOO.get(model_type, {}), **overrides})
    return AutoModelForCausalLM.from_config(config).eval()


def near(model: PreTrainedModel, noise: float = 0.02, seed: int = 5) -> PreTrainedModel:
    """A copy with noise on every weight: some of its drafts are accepted, some rejected."""
    torch.manual_seed(seed)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in copied.parameters():
            weight.mul_(1 + noise * torch.randn_like(weight))
    return copied


def markov(table: torch.Tensor) -> LlamaForCausalLM:
    """
    A real Llama whose next token depends on the last one alone, by `table`: row t holds the distribution after t.

    Its only layer adds nothing (its output projections are zero), the embeddings are one-hot, and the output
    embeddings hold the logarithms.
    """
    size = table.shape[0]
    width = -(-size // 8) * 8
    config = LlamaConfig(
        **{**TINY, "vocab_size": size, "hidden_size": width, "intermediate_size": 8, "num_hidden_layers": 1},
        rms_norm_eps=0.0,
    )
    config.update({"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": width})
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size, width))
        model.lm_head.weight.zero_()
        # The norm of a one-hot vector is sqrt(width) at its place.
        model.lm_head.weight[:, :size] = table.log().clamp(min=-1e4).T / width**0.5
    return model


def ragged(lengths: tuple[int, ...] = LENGTHS, vocabulary: int = VOCABULARY, seed: int = 1) -> dict[str, torch.Tensor]:
    """Left-padded prompts of unequal lengths with their mask. Ids 0 and 1 are special and stay out of them."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(2, vocabulary, (len(lengths), width), generator=generator)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def row(batch: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    """One row of a batch, alone and without padding."""
    text = batch["attention_mask"][index].bool()
    return {name: tensor[index : index + 1, text] for name, tensor in batch.items()}


def plain(model: PreTrainedModel, batch: dict[str, torch.Tensor], **kwargs: Any) -> torch.Tensor:
    """Stock `generate` on the padded batch."""
    return model.generate(**batch, **{"do_sample": False, "max_new_tokens": 20, **kwargs})


def alone(model: PreTrainedModel, batch: dict[str, torch.Tensor], **kwargs: Any) -> list[list[int]]:
    """What stock `generate` adds to each row on its own."""
    texts = []
    for index in range(len(batch["input_ids"])):
        prompt = row(batch, index)
        texts.append(plain(model, prompt, **kwargs)[0, prompt["input_ids"].shape[1] :].tolist())
    return texts


def speculate(
    model: PreTrainedModel,
    batch: dict[str, torch.Tensor],
    assistant: Any,
    capacity: int = 6,
    depth: int | None = None,
    selector: Any = None,
    **kwargs: Any,
) -> Any:
    """The library on the padded batch: sequences and `tetris_stats`."""
    decoding = TetrisDecoding(assistant, capacity, num_assistant_tokens=depth, selector=selector)
    settings = {"do_sample": False, "max_new_tokens": 20, "return_dict_in_generate": True, **kwargs}
    return model.generate(**batch, **settings, custom_generate=decoding)


@contextmanager
def counted_tokens(model: PreTrainedModel) -> Iterator[list[int]]:
    """Tokens that reach the embeddings of `model` within this context, one number per forward."""
    seen: list[int] = []
    handle = model.get_input_embeddings().register_forward_hook(lambda _, args, __: seen.append(args[0].numel()))
    try:
        yield seen
    finally:
        handle.remove()


class ScriptedDrafter(Drafter):
    """
    Proposes what a script says: the known continuation of each row, altered where asked.

    Args:
        continuations: The tokens that each row will get.
        wrong: Rows in which every draft is one id too high, so that the target rejects it.
        confidence: Probability that is claimed for every draft, one number or one per row.
        silent: Rows that draft nothing.
    """

    def __init__(
        self,
        continuations: list[list[int]],
        wrong: tuple[int, ...] = (),
        confidence: float | list[float] = 0.5,
        silent: tuple[int, ...] = (),
        vocabulary: int = VOCABULARY,
    ):
        self.continuations = continuations
        self.wrong = wrong
        self.silent = silent
        self.confidence = torch.as_tensor(confidence).expand(len(continuations))
        self.vocabulary = vocabulary
        self.asked: list[list[int]] = []  # live rows of every step
        self.verifications: list[Any] = []

    def propose(self, rows: Any, live: torch.Tensor, depth: int) -> Draft:
        self.asked.append(live.tolist())
        tokens = torch.zeros(len(live), depth, dtype=torch.long)
        lengths = torch.zeros(len(live), dtype=torch.long)
        for place, index in enumerate(live.tolist()):
            done = int(rows.length[index]) - rows.prompt_width
            coming = torch.tensor(self.continuations[index][done : done + depth], dtype=torch.long)
            if index in self.wrong:
                coming = (coming + 1) % self.vocabulary
            if index not in self.silent:
                lengths[place] = min(len(coming), int(rows.room(live)[place]))
            tokens[place, : len(coming)] = coming
        chances = self.confidence[live, None].expand(len(live), depth).clone()
        return Draft(tokens, lengths, chances, chances)

    def observe(self, rows: Any, verification: Any) -> None:
        self.verifications.append(verification)


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="the compiler of small functions needs c++")
compiled_or_not = pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])


def interpret(check: str) -> None:
    """
    Run a script that checks Triton kernels in Triton's interpreter and prints "equal" at its end. In a process of its
    own: the interpreter must be switched on before Triton is imported.
    """
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", check], env=environment, capture_output=True, text=True)
    triton = tuple(map(int, version("triton").split(".")[:2]))
    if triton < (3, 7) and "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("the interpreter of this Triton (3.6 and older) does not run with this NumPy (2.4 and newer)")
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stderr
