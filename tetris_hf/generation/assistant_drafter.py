"""Any causal LM as a drafter, run over the whole batch at once.

Knows its own model and cache. Does not know what the target thinks of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from .assistant_positions import add_feed, forget, newest, of_all, places, remember, stopped, within_context
from .cuda_graph import only_if
from .draft import Draft, GrowingDraft, Verification, entropy, most_probable
from .drafter import Drafter
from .fingerprint import of_model
from .model_support import check_model, check_vocabularies, text_limit
from .packed_model import PackedModel
from .packing import Packing
from .processing import LogitsProcessing
from .rejection import exponential_noise, sample
from .rows import Rows


class AssistantDrafter(Drafter):
    """
    Drafts with a smaller causal LM that shares the target's tokenizer (Leviathan et al., 2023).

    Args:
        model (`PreTrainedModel`): The assistant. It is called, never changed.
        temperature (`float`, *optional*):
            When sampling, drafts are drawn at this temperature on top of the target's processors: below 1 they agree
            more often with a target that is surer than its assistant. Text is exact at any: q is what was drawn from.

    Raises:
        `ValueError`: If `temperature` is not positive.
    """

    is_capturable = True

    def __init__(self, model: PreTrainedModel, temperature: float | None = None):
        if temperature is not None and not temperature > 0:
            raise ValueError(f"`temperature` must be positive, got {temperature}. For greedy drafts use a small one.")
        self.model = model
        self.temperature = temperature
        self._packed: PackedModel | None = None

    @property
    def models(self) -> list[PreTrainedModel]:
        return [self.model]

    @property
    def packed_models(self) -> list[PackedModel]:
        return [self._packed] if self._packed is not None else []

    def fingerprint(self) -> Hashable:
        return type(self), id(self.model), of_model(self.model), self.temperature, self.keeps_entropies

    def check(self, target: PreTrainedModel) -> None:
        check_model(self.model, "assistant_model")
        check_vocabularies(target, self.model)

    def begin(self, target: PreTrainedModel, rows: Rows, vocab_size: int, processing: LogitsProcessing) -> None:
        limit = text_limit(self.model)
        self._context = rows.width if limit is None else min(rows.width, limit)
        self._processing = processing
        self._vocab_size = vocab_size
        self._num_embeddings = self.model.get_input_embeddings().weight.shape[0]
        # The target may say what this model has no embedding for; it then reads another token, and drafts the worse.
        self._strange_tokens = target.get_input_embeddings().weight.shape[0] > self._num_embeddings
        if self._packed is None:
            length = self._context if rows.fixed_shapes else rows.prompt_width
            self._packed = PackedModel(self.model, rows.num_rows, length, self._context)
            # Tokens of each row whose keys and values the cache holds. What is committed later is fed first.
            self._cached = torch.zeros_like(rows.length)

    def admit(self, rows: Rows, live: torch.Tensor) -> None:
        """See [`Drafter.admit`]. One forward over the new prompts."""
        lengths = rows.text_length(live).clamp(max=self._context)
        self._cached[live] = lengths
        self._forward(rows, live, torch.zeros_like(lengths), lengths)

    def await_prompts(self, rows: Rows, live: torch.Tensor) -> None:
        """
        See [`Drafter.await_prompts`]. With fixed shapes, the first forward of each step takes in what the target does
        in that step, so that the host need not wait for sizes; else the one of a row's first draft takes in all.
        """
        self._cached[live] = 0

    def propose(self, rows: Rows, live: torch.Tensor, depth: int) -> Draft:
        """
        See [`Drafter.propose`]. One forward per draft token; the first one also takes in what was committed since.
        """
        assert self._packed is not None, "`begin` comes first"
        text_length = rows.text_length(live)
        # A row whose next draft would lie past this model's context drafts nothing and goes on.
        lengths = within_context(rows.room(live), text_length, self._context, depth)  # (R,)
        if not rows.fixed_shapes:
            depth = int(lengths.max())
        columns, written, following, one_more = places(
            rows.length, rows.max_length, text_length, lengths, live, depth, rows.width
        )  # (K, R) each
        drafted = GrowingDraft()
        # The only one that is large: kept once.
        q = torch.empty(len(live), depth, self._vocab_size, device=live.device) if self._processing.do_sample else None
        for place in range(depth):
            asks = self.wants_deeper if place >= self.sure_depth else None
            wanted = True if asks is None else asks(drafted.draft(lengths))
            if wanted is False:
                lengths = lengths.clamp(max=place)
                break
            if place == 0:
                # If all drafts and the bonus token were accepted, the last draft is new to the cache as well. Two
                # tokens in any case: so the shape does not depend on what was accepted. Tokens that another drafter
                # proposed are new, every one of them.
                first, counts = newest(self._cached, text_length, lengths, live)
            else:
                first, counts = following[place], one_more[place]
            most = 1 if place > 0 else depth + 1 if self.shares_rows else 2
            feed = self.feed if place == 0 else 0
            own_q = None if q is None else q[:, place]
            draw = partial(self._draw, rows, live, (first, counts, most, feed), columns[place], written[place], own_q)
            if isinstance(wanted, torch.Tensor):
                lengths = stopped(lengths, wanted, place, self._packed.num_skipped)
                drafted.add(*self._draw_if(wanted, draw, live, own_q))
            else:
                drafted.add(*draw())
        remember(self._cached, text_length, lengths, live)
        return drafted.draft(lengths, q)

    def _draw(
        self,
        rows: Rows,
        live: torch.Tensor,
        fed: tuple[torch.Tensor, torch.Tensor, int, int],
        prefix: torch.Tensor,
        written: torch.Tensor,
        q: torch.Tensor | None,
        noise: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        One place of a draft, by one forward: its tokens, probabilities, expectations and entropies, `(R,)` each, and
        its distributions in `q`, of shape `(R, V)`. Tokens are written to the columns `written`.
        """
        logits = self._fit(self._forward(rows, live, *fed))  # (R, V)
        scores = self._processing(logits, live, prefix)
        if self.temperature is not None:
            scores = scores / self.temperature
        if q is None:
            probability, drawn = most_probable(self._processing.with_noise(scores, live, prefix))
            expectation = probability
        else:
            q.copy_(scores.softmax(-1))
            drawn = sample(q, noise)
            probability, expectation = q.gather(1, drawn[:, None])[:, 0], q.amax(-1)
        rows.tokens[live, written] = drawn
        return drawn, probability, expectation, entropy(scores) if self.keeps_entropies else None

    def _draw_if(
        self, wanted: torch.Tensor, draw: Callable[..., tuple[Any, ...]], live: torch.Tensor, q: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """What `draw` says of a place if it is `wanted`, else zeros, which the lengths of the draft do not reach."""
        noise = None if q is None else exponential_noise(q.zero_())
        token, chances = torch.zeros_like(live), torch.zeros(3, len(live), device=live.device)
        kept = token, *chances[: 3 if self.keeps_entropies else 2].unbind()

        def body() -> None:
            for one, found in zip(kept, draw(noise=noise), strict=False):
                one.copy_(found)

        only_if(wanted, body)
        return kept

    def observe(self, rows: Rows, verification: Verification) -> None:
        """The cache holds drafts; from the first one that did not become text on, it holds something else."""
        live, num_accepted = verification.live, verification.num_accepted
        if verification.draft.depth == 0:  # the prompts, or a step without drafts: nothing was fed
            return
        forget(self._cached, rows.text_length(live), num_accepted, verification.lengths, live)

    def _forward(
        self,
        rows: Rows,
        live: torch.Tensor,
        first: torch.Tensor,
        counts: torch.Tensor,
        most: int | None = None,
        feed: int = 0,
    ) -> torch.Tensor:
        """
        Feed `counts[i]` tokens of row `live[i]` from position `first[i]` on; logits at the last of each. `(R, V)`.
        With fixed shapes, room for `most` tokens of every row, and for `feed` of the prompts that rows wait for.
        """
        everyone = len(live) == rows.num_rows
        all_counts, all_first = (counts, first) if everyone else of_all(counts, first, live, rows.length)
        assert self._packed is not None, "`begin` comes first"
        if rows.fixed_shapes and most is not None:
            if feed > 0:
                add_feed(all_counts, all_first, self._cached, *rows.next_feed(feed), self._context)
            num_tokens = most * rows.num_rows + feed
            packing = Packing.of(all_counts, all_first, num_tokens, max(most, feed), self._context)
        else:
            packing = Packing.fitting(all_counts, all_first)
        tokens = rows.read(packing.rows, packing.positions)  # (T,)
        if self._strange_tokens:
            tokens = tokens.clamp(max=self._num_embeddings - 1)
        keep = packing.last if everyone else packing.last[live]  # (R,)
        return self._packed.forward(tokens, packing, keep=keep, recurring=most is not None).logits

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Bring the logits to the target's width: padded vocabularies of one tokenizer may differ. `(R, V)`."""
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocab_size]

    def end(self) -> None:
        self._packed = None
