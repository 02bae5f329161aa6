"""Any causal LM as a drafter, run over the whole batch at once.

Knows its own model and cache. Does not know what the target thinks of its tokens.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from .drafting import Draft, Drafter, Verification
from .model_support import check_model, check_vocabularies, rope_limit
from .packed_model import PackedModel
from .packing import Packing
from .processing import LogitsProcessing
from .rejection import sample
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

    def __init__(self, model: PreTrainedModel, temperature: float | None = None):
        if temperature is not None and not temperature > 0:
            raise ValueError(f"`temperature` must be positive, got {temperature}. For greedy drafts use a small one.")
        self.model = model
        self.temperature = temperature
        self._packed: PackedModel | None = None

    @property
    def models(self) -> list[PreTrainedModel]:
        return [self.model]

    def check(self, target: PreTrainedModel) -> None:
        check_model(self.model, "assistant_model")
        check_vocabularies(target, self.model)

    def begin(self, target: PreTrainedModel, rows: Rows, vocab_size: int, processing: LogitsProcessing) -> None:
        limits = (
            getattr(self.model.config.get_text_config(), "max_position_embeddings", None),
            rope_limit(self.model),
        )
        self._context = min([rows.max_length, *(limit for limit in limits if limit is not None)])
        self._packed = PackedModel(self.model, rows.num_rows, rows.prompt_width, self._context)
        self._processing = processing
        self._vocab_size = vocab_size
        self._num_embeddings = self.model.get_input_embeddings().weight.shape[0]
        # Tokens of each row whose keys and values the cache holds. What is committed later than that is fed first.
        self._cached = torch.zeros_like(rows.length)

    def propose(self, rows: Rows, live: torch.Tensor, depth: int) -> Draft:
        """
        See [`Drafter.propose`]. One forward per draft token; the first one also takes in what was committed since.
        """
        processing = self._processing
        text_length = rows.text_length(live)
        # A row whose next draft would lie past this model's context drafts nothing and goes on.
        lengths = torch.minimum(rows.room(live), self._context + 1 - text_length).clamp(0, depth)  # (R,)
        depth = int(lengths.max())
        tokens = live.new_zeros(len(live), depth)
        probabilities = torch.zeros(len(live), depth, device=live.device)
        expectations = torch.zeros_like(probabilities)
        q = torch.zeros(len(live), depth, self._vocab_size, device=live.device) if processing.do_sample else None
        for place in range(depth):
            if place == 0:
                # Two tokens per row at least: if all drafts and the bonus token were accepted, the last draft is new
                # to the cache. Two at most, after the first round: so the shape does not depend on what was accepted.
                first = torch.minimum(self._cached[live], text_length - 2).clamp(min=0)
                counts = (text_length - first) * (lengths > 0)
            else:
                first = text_length + place - 1
                counts = (lengths > place).long()
            logits = self._fit(self._forward(rows, live, first, counts))  # (R, V)
            # A row that drafts no deeper is shown some prefix; its scores are not read.
            scores = processing(logits, live, (rows.length[live] + place).clamp(max=rows.max_length))
            distribution = (scores if self.temperature is None else scores / self.temperature).softmax(-1)
            if q is None:
                drawn = distribution.argmax(-1)
            else:
                q[:, place] = distribution
                drawn = sample(distribution)
            tokens[:, place] = drawn
            probabilities[:, place] = distribution.gather(1, drawn[:, None])[:, 0]
            expectations[:, place] = distribution.amax(-1)
            rows.write(live, tokens, (lengths > place) * (place + 1))
        self._cached[live] = torch.where(lengths > 0, text_length + lengths - 1, self._cached[live])
        return Draft(tokens, lengths, probabilities, expectations, q)

    def observe(self, rows: Rows, verification: Verification) -> None:
        """The cache holds drafts; from the first one that did not become text on, it holds something else."""
        live, num_accepted = verification.live, verification.num_accepted
        before = rows.text_length(live) - 1 - num_accepted
        kept = before + torch.minimum(num_accepted, verification.lengths)
        self._cached[live] = torch.minimum(self._cached[live], kept)

    def _forward(self, rows: Rows, live: torch.Tensor, first: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """
        Feed `counts[i]` tokens of row `live[i]` from position `first[i]` on; logits at the last of each. `(R, V)`.
        """
        all_counts = torch.zeros_like(rows.length).index_copy_(0, live, counts)
        all_first = torch.zeros_like(rows.length).index_copy_(0, live, first)
        packing = Packing.fitting(all_counts, all_first)
        # The target may say what this model has no embedding for; it then reads another token, and drafts the worse.
        tokens = rows.read(packing.rows.clamp(min=0), packing.positions).clamp(max=self._num_embeddings - 1)
        assert self._packed is not None, "`begin` comes first"
        return self._packed.forward(tokens, packing, keep=packing.last[live]).logits

    def _fit(self, logits: torch.Tensor) -> torch.Tensor:
        """Bring the logits to the target's width: padded vocabularies of one tokenizer may differ. `(R, V)`."""
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocab_size]

    def end(self) -> None:
        self._packed = None

    @property
    def num_forwards(self) -> int:
        return self._packed.num_forwards if self._packed is not None else 0
