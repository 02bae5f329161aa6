"""Batched speculative decoding as a decoding method of `generate`.

Knows what a user may ask and checks it before the first forward. Does not know how a step goes: that is `Speculation`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from .assistant_drafter import AssistantDrafter
from .auto_capacity import MAX_DEPTH, ROOM, AutoCapacity, controller_for
from .committer import Committer
from .cuda_graph import on_one_gpu
from .drafter import Drafter
from .mixed_drafter import MixedDrafter
from .model_support import check_length, check_model, text_limit
from .outputs import OutputRecorder, TetrisDecoderOnlyOutput
from .packed_model import PackedModel, packed_attention, room_for_tokens
from .processing import LogitsProcessing
from .rows import Rows
from .seeded_noise import row_seeds
from .selection import DraftSelector, DraftSelectorList, TetrisSelector
from .speculation import Speculation
from .stats import TetrisStats
from .step_cache import prepared
from .stopping import RowStopping
from .streaming import RowStreamer, as_row_streamer
from .tensor_parallel import Lead
from .validation import check_capacity, check_depth, check_positions, check_request, padding_of


class TetrisDecoding:
    """
    Batched speculative decoding as a decoding method: `model.generate(**inputs, custom_generate=TetrisDecoding(...))`.

    In every step each live row drafts K tokens, the `capacity` most promising of all rows are verified in one forward
    of the target, and each row keeps what was accepted plus one token of the target. Greedy text is that of plain
    `generate` (token for token in float32); sampled text has exactly the target's distribution.

    Args:
        assistant (`PreTrainedModel`, [`Drafter`] or a list of them, *optional*):
            Who drafts: any causal LM with the target's tokenizer, a drafter, or several of them, mixed per row
            ([`MixedDrafter`]). `None` decodes without drafts.
        capacity (`int` or `"auto"`):
            C, draft tokens verified per step over the whole batch (paper, section 3.2). `"auto"` chooses C and K
            between steps, for most tokens per second, from what drafts promise, what was accepted and what steps cost.
        num_assistant_tokens (`int`, *optional*):
            K, draft tokens proposed per row and step. By default what the call or the assistant's generation config
            says, else `C // N + 1`; beyond C nothing is drafted. With `"auto"` the largest K, by default 6.
        selector ([`DraftSelector`] or a list of them, *optional*):
            Which drafts are verified, by default [`TetrisSelector`], with `capacity="auto"` slow rows first.
        streamer ([`RowStreamer`] or `BaseStreamer`, *optional*):
            Receives tokens as they are committed; a stock streamer for one row only.
        seed (`int` or `Sequence[int]`, *optional*):
            When sampling, each row's text becomes a function of its prompt and its seed alone (one seed for all rows,
            from which each gets its own by its number, or one per row), with drafts or without, in any batch
            ([`gumbel_noise`]). By default draws come from torch's generator.

    Raises:
        `ValueError`: If an argument is out of range, or the assistant is neither a causal LM nor a [`Drafter`].

    Examples:

    ```python
    >>> decoding = TetrisDecoding(assistant, capacity=64)
    >>> model.generate(**tokenizer(prompts, padding=True, return_tensors="pt"), custom_generate=decoding)
    ```
    """

    def __init__(
        self,
        assistant: PreTrainedModel | Drafter | Sequence[PreTrainedModel | Drafter] | None,
        capacity: int | str,
        num_assistant_tokens: int | None = None,
        selector: DraftSelector | Iterable[DraftSelector] | None = None,
        streamer: RowStreamer | BaseStreamer | None = None,
        seed: int | Sequence[int] | None = None,
    ):
        self.capacity = check_capacity(capacity, "capacity")
        self.num_assistant_tokens = check_depth(num_assistant_tokens)
        if selector is None and self.capacity == "auto":  # which is to be fast, whatever it verifies
            selector = TetrisSelector(slowest_first=True)
        self.selectors = DraftSelectorList.of(selector)
        self.streamer = streamer
        self.seed = seed
        self.drafter = _as_drafter(assistant)
        if self.capacity == "auto" and self.drafter is None:
            raise ValueError('`capacity="auto"` needs somebody to draft: pass an assistant, or `capacity=0`.')

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        num_assistant_tokens: int | None = None,
        **model_kwargs: Any,
    ) -> TetrisDecoderOnlyOutput | torch.Tensor:
        """
        The decoding method that `generate` calls with everything prepared. Not called by users.

        Args:
            model (`PreTrainedModel`): The target.
            input_ids (`torch.LongTensor` of shape `(N, prompt_width)`): Left-padded prompts.
            logits_processor (`LogitsProcessorList`): Processors of plain `generate`.
            stopping_criteria (`StoppingCriteriaList`): Criteria of plain `generate`.
            generation_config (`GenerationConfig`): Settings of plain `generate`.
            num_assistant_tokens (`int`, *optional*): K for this call.
            model_kwargs: What plain `generate` would pass to the model.

        Returns:
            [`TetrisDecoderOnlyOutput`] or `torch.LongTensor` of shape `(N, width)`: Prompts and right-padded
            continuations.

        Raises:
            `ValueError`: If something is asked that cannot be done exactly.
        """
        self.check(model, input_ids, logits_processor, generation_config, model_kwargs)
        pad_token_id = _first(generation_config._pad_token_tensor)
        padding = padding_of(input_ids, model_kwargs.get("attention_mask"), pad_token_id)
        check_positions(model_kwargs.get("position_ids"), padding, input_ids.shape[1])
        max_length = generation_config.max_length
        check_length(model, max_length - int(padding.min()))
        Lead(model).check_same(torch.cat([input_ids, padding[:, None]], dim=1), "prompts")
        fresh = self.speculation(
            model, input_ids, padding, max_length, logits_processor, stopping_criteria, generation_config,
            num_assistant_tokens,
        )  # fmt: skip
        if self.streamer is not None:
            fresh.committer.streamer = as_row_streamer(self.streamer, input_ids)
        with self.prepared(fresh, generation_config) as speculation:
            speculation.restart(fresh, input_ids, padding, max_length)
            speculation.run()
            stats = speculation.stats.clone()
        if not generation_config.return_dict_in_generate:
            return speculation.rows.sequences()
        return speculation.committer.recorder.finish(stats)

    def check(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        """
        Everything that can be said before the prompts are looked at.

        Raises:
            `ValueError`: If something is asked that cannot be done exactly.
        """
        check_model(model, "model")
        if self.capacity == "auto" and Lead(model).group is not None:
            raise ValueError(
                '`tetris_capacity="auto"` decides by clocks, and `model` is split over processes whose clocks differ: '
                "pass a number."
            )
        check_request(input_ids, generation_config, logits_processor, model_kwargs)
        if self.drafter is not None:
            self.drafter.check(model)
            self.drafter.keeps_entropies = self.selectors.needs_entropies
        if generation_config.do_sample and self.seed is None:  # with seeds, no selector can bias
            for selector in self.selectors:
                selector.check_sampling()

    def speculation(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        padding: torch.Tensor,
        max_length: int,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        num_assistant_tokens: int | None = None,
        pools: bool = False,
    ) -> Speculation:
        """
        What a batch needs, put together. Arguments as those of a call; `padding` of shape `(N,)`. With `pools`, and
        where memory does not suffice for all rows at full width, rows share a pool of slots.
        """
        depth = self._depth(len(input_ids), check_depth(num_assistant_tokens), generation_config)
        capacity = len(input_ids) * depth if self.capacity == "auto" else int(self.capacity)
        pad_token_id = _first(generation_config._pad_token_tensor)
        width = -(-max_length // 128) * 128  # few widths, so that captured steps serve
        lead = Lead(model)
        sizes = [len(input_ids), capacity, depth, max_length, int(generation_config.do_sample)]
        lead.check_same(
            torch.tensor(sizes, device=input_ids.device), "settings (rows, capacity, depth, length, sampling)"
        )
        room, pool_size = room_for_tokens(model), None
        if room is not None and len(input_ids) * width > room >= width and pools and lead.group is None:
            pool_size = room // 128 * 128
        fixed = lead.all_agree(
            not generation_config.disable_compile
            and on_one_gpu(input_ids.device, *self._models(model))
            and (room is None or len(input_ids) * width <= room or pool_size is not None),
            input_ids.device,
        )
        room_to_time = min(ROOM, text_limit(model) or ROOM) if self.capacity == "auto" else 0
        rows = Rows(
            input_ids,
            padding,
            max_length,
            pad_token_id if pad_token_id is not None else 0,
            width=width if fixed else max(max_length, room_to_time),
            fixed_shapes=fixed,
        )
        if self.seed is not None:
            rows.seeds.copy_(row_seeds(self.seed, rows.num_rows))
        recorder = OutputRecorder(generation_config, rows)
        target = PackedModel(
            model,
            num_rows=rows.num_rows,
            length=rows.width if fixed else rows.prompt_width + depth + 1,
            max_length=rows.width,
            keep_hidden_states=self.drafter is not None and self.drafter.needs_hidden_states,
            keep_all_hidden_states=recorder.wants_hidden_states,
            pool_size=pool_size if fixed else None,
        )
        speculation = Speculation(
            target=target,
            drafter=self.drafter,
            rows=rows,
            processing=LogitsProcessing(logits_processor, rows, generation_config.do_sample, self.seed is not None),
            selectors=self.selectors,
            committer=Committer(rows, RowStopping(stopping_criteria, input_ids.device), recorder),
            capacity=capacity,
            depth=depth,
            stats=TetrisStats.zeros(rows.num_rows, depth, capacity, input_ids.device),
        )
        if self.capacity == "auto":
            speculation.auto = AutoCapacity(controller_for(speculation, depth))
        return speculation

    @contextmanager
    def prepared(self, fresh: Speculation, generation_config: GenerationConfig) -> Iterator[Speculation]:
        """Within this context, models serve packed tokens, and what is given is ready to run ([`step_cache`])."""
        with packed_attention(*self._models(fresh.target.model)):
            with prepared(fresh, generation_config.compile_config) as speculation:
                yield speculation

    def _models(self, model: PreTrainedModel) -> list[PreTrainedModel]:
        return [model, *(self.drafter.models if self.drafter is not None else [])]

    def _depth(self, num_rows: int, call: int | None, generation_config: GenerationConfig) -> int:
        """K: the call's, this object's, the assistant's, else one more than an even share of the budget."""
        assistant = getattr(getattr(self.drafter, "model", None), "generation_config", None)
        in_config = generation_config.num_assistant_tokens
        if in_config == GenerationConfig()._get_default_generation_params().get("num_assistant_tokens"):
            in_config = None  # filled in by `generate`, asked for by nobody
        for depth in (call, self.num_assistant_tokens, in_config, getattr(assistant, "num_assistant_tokens", None)):
            if depth is not None:
                return int(depth)
        return MAX_DEPTH if self.capacity == "auto" else int(self.capacity) // num_rows + 1


def _as_drafter(assistant: Any) -> Drafter | None:
    """
    The drafter for what the user gave. A model may bring its own, as Medusa heads do, by a method `as_drafter`;
    several in a list are mixed.
    """
    if assistant is None or isinstance(assistant, Drafter):
        return assistant
    if isinstance(assistant, list | tuple):
        return MixedDrafter([drafter for one in assistant if (drafter := _as_drafter(one)) is not None])
    if hasattr(assistant, "as_drafter"):
        own: Drafter = assistant.as_drafter()
        return own
    if not isinstance(assistant, PreTrainedModel):
        raise ValueError(
            f"`assistant_model` must be a causal LM or a `Drafter`, got {type(assistant).__name__}: load it with "
            "`AutoModelForCausalLM.from_pretrained`."
        )
    return AssistantDrafter(assistant)


def _first(token_ids: torch.Tensor | None) -> int | None:
    return None if token_ids is None else int(token_ids.flatten()[0])
