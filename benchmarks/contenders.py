"""How each contender of `throughput.py` generates: stock ways and this library's, by their public calls.

Knows calls and what they give. Knows no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from settings import Setting
from transformers import CompileConfig, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.generation.continuous_batching.utils import WorkloadHints

import tetris_hf


# Assisted decoding serves one row at a time, at a pace that does not depend on N: so many rows show it.
ASSISTED_ROWS = 4
# Continuous batching runs in a thread of its own; one that is silent for so long is taken for dead.
SILENCE_SECONDS = 60


@dataclass
class Output:
    """
    What a contender gave for all batches.

    Args:
        rows (`list[torch.LongTensor]`): New tokens of each row, padding after the end included.
        stock_steps (`int`, *optional*): Forwards after the prompts', of stock contenders that tell them.
        stats (`list[TetrisStats]`): One per batch, of this library.
    """

    rows: list[torch.Tensor] = field(default_factory=list)
    stock_steps: int | None = None
    stats: list[tetris_hf.TetrisStats] = field(default_factory=list)

    def texts(self, eos_token_ids: set[int]) -> list[list[int]]:
        """New tokens of each row, up to and including its end token."""
        texts = []
        for row in self.rows:
            tokens = row.tolist()
            end = next((place for place, token in enumerate(tokens) if token in eos_token_ids), len(tokens))
            texts.append(tokens[: end + 1])
        return texts

    def steps(self) -> int | None:
        """Forwards of the target after the prompts', where they can be counted."""
        return sum(stats.steps for stats in self.stats) if self.stats else self.stock_steps

    def merged_stats(self) -> tetris_hf.TetrisStats | None:
        """The counts of all batches as those of one, or `None`."""
        if not self.stats:
            return None
        tensors = {
            name: torch.cat([getattr(stats, name) for stats in self.stats])
            for name in ("drafted", "verified", "accepted", "bonus", "live_steps")
        }
        counts = {
            name: sum(getattr(stats, name) for stats in self.stats)
            for name in ("target_forwards", "target_tokens", "draft_forwards")
        }
        stages = self.stats[0].seconds
        seconds = {stage: sum(stats.seconds.get(stage, 0.0) for stats in self.stats) for stage in stages}
        return replace(self.stats[0], **tensors, **counts, seconds=seconds)


class Bench:
    """
    A target, prompts and drafters, ready to be run by any contender.

    Args:
        model (`PreTrainedModel`): The target.
        batches (`list[dict[str, torch.Tensor]]`): Padded prompts, served one batch after the other.
        drafters (`dict[str, Any]`): What `assistant_model` takes, by name.
        max_new_tokens (`int`): Length of every answer, unless an end token comes first.
        sample (`bool`): Temperature 1 and top-p 0.9 instead of greedy.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        batches: list[dict[str, torch.Tensor]],
        drafters: dict[str, Any],
        max_new_tokens: int,
        sample: bool,
    ):
        self.model = model
        self.batches = batches
        self.drafters = drafters
        self.kwargs: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": sample}
        if sample:
            self.kwargs |= {"temperature": 1.0, "top_p": 0.9, "top_k": 0}

    @contextmanager
    def opened(self, setting: Setting) -> Iterator[Callable[[], Output]]:
        """A function that generates for all batches, for as long as the context lasts. `tetris_hf` is enabled."""
        if setting.contender == "batch":
            with self._continuous_batching() as serve:
                yield serve
            return
        calls = {"dynamic": self._stock, "static": self._static, "assisted": self._assisted}
        call = calls.get(setting.contender, self._ours)
        yield lambda: call(setting)

    def _generate(self, batch: dict[str, torch.Tensor], output: Output, **kwargs: Any) -> Any:
        """One call of `generate`, whose rows are added to `output`."""
        result = self.model.generate(**batch, **self.kwargs, **kwargs, return_dict_in_generate=True)
        output.rows.extend(result.sequences[:, batch["input_ids"].shape[1] :])
        return result

    def _stock(self, setting: Setting, **kwargs: Any) -> Output:
        output = Output(stock_steps=0)
        for batch in self.batches:
            result = self._generate(batch, output, **kwargs)
            # The prompts' forward gives the first token.
            output.stock_steps += result.sequences.shape[1] - batch["input_ids"].shape[1] - 1
        return output

    def _static(self, setting: Setting) -> Output:
        kwargs: dict[str, Any] = {"cache_implementation": "static"}
        if self.model.device.type == "cuda":
            # Else the second batch size in one process would get a graph with symbolic sizes, which is slower.
            kwargs["compile_config"] = CompileConfig(dynamic=False)
        return self._stock(setting, **kwargs)

    def _assisted(self, setting: Setting) -> Output:
        output = Output()
        if setting.drafter == "lookup":
            kwargs: dict[str, Any] = {"prompt_lookup_num_tokens": setting.depth}
        else:
            kwargs = {"assistant_model": self.drafters[setting.drafter]}
        for row in range(min(ASSISTED_ROWS, len(self.batches[0]["input_ids"]))):
            text = self.batches[0]["attention_mask"][row].bool()
            self._generate(
                {name: part[row : row + 1, text] for name, part in self.batches[0].items()}, output, **kwargs
            )
        return output

    def _ours(self, setting: Setting) -> Output:
        output = Output()
        kwargs: dict[str, Any] = {"tetris_capacity": setting.capacity}
        if setting.contender == "auto":
            kwargs = {"tetris_capacity": "auto", "assistant_model": self.drafters[setting.drafter]}
        elif setting.drafter is not None:
            selector = (
                tetris_hf.FixedWindowSelector(setting.depth)
                if setting.contender == "fixed"
                else tetris_hf.TetrisSelector(slowest_first=setting.contender == "slowest")
            )
            kwargs |= {
                "assistant_model": self.drafters[setting.drafter],
                "num_assistant_tokens": setting.depth,
                "tetris_selector": selector,
            }
        for batch in self.batches:
            output.stats.append(self._generate(batch, output, **kwargs).tetris_stats)
        return output

    @contextmanager
    def _continuous_batching(self) -> Iterator[Callable[[], Output]]:
        """One manager for the warm-up and all timed calls, as a server would keep it."""
        config = GenerationConfig.from_dict({**self.model.generation_config.to_dict(), **self.kwargs})
        attention = self.model.config._attn_implementation
        num_rows, width = self.batches[0]["input_ids"].shape
        manager = self.model.continuous_batching_context_manager(
            generation_config=config,
            # Shared blocks would let the repeats find the prompts in the cache.
            continuous_batching_config=ContinuousBatchingConfig(allow_block_sharing=False),
            workload_hints=WorkloadHints(width, self.kwargs["max_new_tokens"], num_rows),
            timeout=SILENCE_SECONDS,
        )
        try:
            with manager as running:
                yield lambda: self._served(running)
        finally:
            self.model.set_attn_implementation(attention)

    def _served(self, manager: Any) -> Output:
        output = Output()
        for batch in self.batches:
            prompts = [
                ids[mask.bool()].tolist()
                for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
            ]
            requests = manager.add_requests(prompts, max_new_tokens=self.kwargs["max_new_tokens"])
            answers = {}
            while len(answers) < len(requests):
                result = manager.get_result(timeout=SILENCE_SECONDS)
                if result is None and not manager.is_running():
                    raise RuntimeError("continuous batching stopped")
                if result is None:
                    raise TimeoutError(f"continuous batching gave no result within {SILENCE_SECONDS} s")
                if result.error is not None:
                    raise RuntimeError(result.error)
                if result.is_finished():
                    answers[result.request_id] = torch.tensor(result.generated_tokens)
            output.rows += [answers[request] for request in requests]
        return output
