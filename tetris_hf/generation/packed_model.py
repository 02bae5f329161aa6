"""A causal LM together with its ragged cache: packed tokens in, logits out.

Knows how to call a transformers model without touching it. Does not know what the tokens are for: prompts, drafts and
verification are all the same forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.utils import logging

from .compiled_layers import compiled_layers
from .cuda_graph import CannotCapture, CudaGraph
from .packing import Packing
from .ragged_attention import ragged_attention
from .ragged_cache import RaggedCache
from .ragged_mask import PackedForward, packed_as, ragged_mask


logger = logging.get_logger(__name__)

# The name that a model's config carries during a call. It is this module's own, so that an installed package and a
# copy of this folder loaded from the Hub can serve side by side in one process.
ATTENTION_NAME = f"tetris_ragged:{__name__}"

AttentionInterface.register(ATTENTION_NAME, ragged_attention)
AttentionMaskInterface.register(ATTENTION_NAME, ragged_mask)

# Newest first. The argument was renamed within the 5.2x line.
_CACHE_ARGUMENTS = ("cache", "past_key_values")


def cache_argument(model: PreTrainedModel) -> str:
    """Name under which `model.forward` takes its cache, or an empty string if it takes none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in _CACHE_ARGUMENTS if name in parameters), "")


def attention_configs(model: PreTrainedModel) -> list[Any]:
    """Every config object that some module of `model` reads its attention implementation from."""
    found = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


def input_device(model: PreTrainedModel) -> torch.device:
    """Where `model` takes its tokens: where its embeddings lie, or where accelerate brings them to compute."""
    embeddings = model.get_input_embeddings()
    brought_to = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return torch.device(brought_to) if brought_to is not None else embeddings.weight.device


def room_for_tokens(model: PreTrainedModel) -> int | None:
    """
    Tokens whose keys and values leave a fifth of the free memory of the model's GPU; `None` on another device. By what
    usual configurations say; a model that stores less, as with latent attention, is taken for larger.
    """
    device = input_device(model)
    if device.type != "cuda":
        return None
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", 1)
    width = getattr(config, "head_dim", None) or config.hidden_size // getattr(config, "num_attention_heads", 1)
    size = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    free = (
        torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    )
    return int(0.8 * free / size)


@contextmanager
def packed_attention(*models: PreTrainedModel) -> Iterator[None]:
    """
    Within this context, the attention layers of `models` serve packed tokens. Their configs are put back at the end,
    whatever happens. A config shared by several models, as with a layer-skipping assistant, is handled once.
    """
    configs = {id(config): config for model in models for config in attention_configs(model)}
    # The internal attribute, because the public setter also walks into the configs of unrelated sub-models.
    before = {key: config._attn_implementation_internal for key, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation_internal = ATTENTION_NAME
        yield
    finally:
        for key, config in configs.items():
            config._attn_implementation_internal = before[key]


@dataclass(frozen=True)
class PackedOutput:
    """
    What a model says about packed tokens.

    Attributes:
        packing (`Packing`): The tokens.
        logits (`torch.FloatTensor` of shape `(M, V)`): Logits in float32 of all tokens, M = T, or of those asked for.
        hidden_states (`torch.Tensor` of shape `(M, hidden_size)`, *optional*): Inputs of the output embeddings.
        all_hidden_states (`tuple[torch.Tensor, ...]`, *optional*):
            Of all T tokens, the embeddings and the output of every layer, each of shape `(T, hidden_size)`.
    """

    packing: Packing
    logits: torch.Tensor
    hidden_states: torch.Tensor | None = None
    all_hidden_states: tuple[torch.Tensor, ...] | None = None


class PackedModel:
    """
    A model and the cache of its N rows.

    Args:
        model (`PreTrainedModel`): A decoder-only model; it is called, never changed.
        num_rows (`int`): Rows N.
        length (`int`): Tokens per row to make room for at once.
        max_length (`int`): Tokens per row at most.
        keep_hidden_states (`bool`, *optional*, defaults to `False`): Whether outputs hold `hidden_states`.
        keep_all_hidden_states (`bool`, *optional*, defaults to `False`): Whether outputs hold `all_hidden_states`.
        pool_size (`int`, *optional*): Slots of the cache, if rows share a pool ([`RaggedCache`]).

    Attributes:
        num_forwards (`int`): Forwards so far, in captured steps those that may be left out included.
        num_tokens (`int`): Places for tokens in them.
        num_skipped (`torch.LongTensor` of shape `()`): Of those forwards, the ones that were left out.
        compiles (`bool`): Whether forwards of recurring shape run the model's layers compiled.
        captures (`bool`): Whether each forward of recurring shape is captured in a CUDA graph of its own.
        compile_config (`CompileConfig`, *optional*): How to compile.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        num_rows: int,
        length: int,
        max_length: int,
        keep_hidden_states: bool = False,
        keep_all_hidden_states: bool = False,
        pool_size: int | None = None,
    ):
        self.model = model
        self.keep_hidden_states = keep_hidden_states
        self.keep_all_hidden_states = keep_all_hidden_states
        self.num_forwards = 0
        self.num_tokens = 0
        self.num_skipped = torch.zeros((), dtype=torch.long, device=input_device(model))
        self.compiles = self.captures = False
        self.compile_config: Any = None
        self._graphs: dict[tuple[int, int, bool], CudaGraph[PackedOutput]] = {}
        self._checked = self._any_rule = False
        self._cache_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._device = input_device(model)
        self.cache = RaggedCache(num_rows, length, max_length, num_slots=pool_size, device=self._device)

    def forward(
        self, input_ids: torch.Tensor, packing: Packing, keep: torch.Tensor | None = None, recurring: bool = False
    ) -> PackedOutput:
        """
        One forward of the model over packed tokens; their keys and values go into the cache.

        Args:
            input_ids (`torch.LongTensor` of shape `(T,)`): The packed tokens.
            packing (`Packing`): Their rows and positions.
            keep (`torch.LongTensor` of shape `(M,)`, *optional*):
                Packed indices whose logits are wanted; by default all.
            recurring (`bool`, *optional*, defaults to `False`):
                Whether these shapes come again in every step, which makes them worth preparing for.

        Returns:
            [`PackedOutput`]: Its logits on the device of `input_ids`. If `captures`, its tensors last until the next
            forward of this shape.
        """
        self.num_forwards += 1
        self.num_tokens += packing.num_tokens
        if not recurring:
            return self._forward(input_ids, packing, keep)
        if self.captures:
            try:
                return self._replay(input_ids, packing, keep)
            except CannotCapture as error:
                self.compiles = self.captures = False
                logger.warning(f"Forwards of {type(self.model).__name__} run without a CUDA graph: {error}")
        return self._recurring(input_ids, packing, keep)

    def _recurring(self, input_ids: torch.Tensor, packing: Packing, keep: torch.Tensor | None) -> PackedOutput:
        with compiled_layers(self.model, compile_config=self.compile_config) if self.compiles else nullcontext():
            return self._forward(input_ids, packing, keep)

    def _forward(self, input_ids: torch.Tensor, packing: Packing, keep: torch.Tensor | None) -> PackedOutput:
        self.cache.reserve(packing.max_length)
        self.cache.slots = self.cache.slots_of(packing.rows, packing.positions)
        model_kwargs: dict[str, Any] = {
            "input_ids": input_ids[None].to(self._device),
            "position_ids": packing.position_ids[None].to(self._device),
            "attention_mask": None,
            "use_cache": True,
            "return_dict": True,
            self._cache_argument: self.cache,
        }
        if keep is not None and self._keeps_logits:
            model_kwargs["logits_to_keep"] = keep.to(self._device)
        if self.keep_all_hidden_states:
            model_kwargs["output_hidden_states"] = True
        firsts = self.cache.firsts(packing.counts.device)
        forward = PackedForward(packing, firsts, self.cache.pool_size, self._any_rule)
        with packed_as(forward), self._last_hidden_states() as hidden_states:
            outputs = self.model(**model_kwargs)
            logits = outputs.logits[0]
        if not self._checked:
            self._check(forward)
            self._checked, self._any_rule = True, forward.any_rule
        hidden = hidden_states[-1][0] if hidden_states else None
        if keep is not None and not self._keeps_logits:
            logits = logits[keep.to(logits.device)]
            hidden = hidden[keep.to(hidden.device)] if hidden is not None else None
        return PackedOutput(
            packing=packing,
            logits=logits.to(device=input_ids.device, dtype=torch.float32),  # (M, V)
            hidden_states=hidden,
            all_hidden_states=tuple(states[0] for states in outputs.hidden_states)
            if self.keep_all_hidden_states
            else None,
        )

    def _replay(self, input_ids: torch.Tensor, packing: Packing, keep: torch.Tensor | None) -> PackedOutput:
        """The forward as a CUDA graph, captured when its shape first comes."""
        given = [input_ids, packing.counts, packing.lengths - packing.counts, *([] if keep is None else [keep])]

        def captured(
            input_ids: torch.Tensor, counts: torch.Tensor, first: torch.Tensor, keep: torch.Tensor | None = None
        ) -> PackedOutput:
            own = Packing.of(counts, first, packing.num_tokens, packing.max_count, packing.max_length)
            return self._recurring(input_ids, own, keep)

        shape = (packing.num_tokens, packing.max_count, keep is None)
        if shape not in self._graphs:
            self._graphs[shape] = CudaGraph(captured, *given)
        return self._graphs[shape](*given)

    def _check(self, forward: PackedForward) -> None:
        """
        Whether the model's first forward went as its class promises; checked before any of its logits is used.

        Raises:
            `NotImplementedError`: If attention went past us, or a window is kept by the cache alone, not by the mask.
        """
        name = type(self.model).__name__
        if forward.num_attended < sum(layer.is_initialized for layer in self.cache.layers) or not self.cache.layers:
            raise NotImplementedError(
                f"{name} does not attend through transformers' attention interface in all layers."
            )
        stock_layers = DynamicCache(config=self.model.config.get_text_config(decoder=True)).layers
        if any(getattr(layer, "is_sliding", False) for layer in stock_layers):
            if all(mask.local_size is None for mask in forward.masks):
                raise NotImplementedError(f"{name} has sliding layers, but its masks know of no window.")

    @contextmanager
    def _last_hidden_states(self) -> Iterator[list[torch.Tensor]]:
        """
        What enters the output embeddings within this context. `output_hidden_states=True` would keep those of every
        layer and every prompt token as well.
        """
        seen: list[torch.Tensor] = []
        if not self.keep_hidden_states:
            yield seen
            return
        head = self.model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
        try:
            yield seen
        finally:
            handle.remove()
