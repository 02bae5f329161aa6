"""Logits processors at packed positions: each position is shown its own row's prefix, as plain `generate` shows it.

Knows transformers' processors and what each of them looks at. Does not know drafts or acceptance.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    TopPLogitsWarper,
)

from .fingerprint import of_object
from .rows import Rows
from .seeded_noise import gumbel_noise
from .top_p_kernel import keep_top_p, kernel_serves


def _named(*names: str) -> frozenset[type]:
    """Those of `names` that this version of transformers has."""
    return frozenset(found for name in names if (found := getattr(logits_process, name, None)) is not None)


# Look at the scores alone, one position at a time.
HISTORY_FREE = _named(
    "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "LogitNormalization",
    "InfNanRemoveLogitsProcessor", "SuppressTokensLogitsProcessor",
)  # fmt: skip

# Look at a row's own prefix as well, but not at other rows.
ROW_WISE = _named(
    "MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor", "RepetitionPenaltyLogitsProcessor",
    "NoRepeatNGramLogitsProcessor", "SequenceBiasLogitsProcessor", "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor",
    "ExponentialDecayLengthPenalty", "PrefixConstrainedLogitsProcessor",
)  # fmt: skip


def _is_row_wise(processor: LogitsProcessor) -> bool:
    # The repetition penalty may carry one number per row of the whole batch.
    per_row = isinstance(getattr(processor, "prompt_ignore_length", None), torch.Tensor)
    return type(processor) in ROW_WISE and not per_row


def _numbered(processor: LogitsProcessor, rows: list[int]) -> LogitsProcessor:
    """The processor for a batch of these rows alone: a user's `prefix_allowed_tokens_fn` is told row numbers."""
    if not isinstance(processor, PrefixConstrainedLogitsProcessor):
        return processor
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda index, prefix: allowed(rows[index], prefix), num_beams=1)


class LogitsProcessing:
    """
    Applies a list of logits processors to packed positions.

    A processor sees `input_ids` of one width, so positions are taken one width at a time; those that do not look at
    `input_ids` take all positions at once.

    Args:
        processors (`LogitsProcessorList`): What plain `generate` would apply, in its order.
        rows (`Rows`): The batch whose prefixes are shown.
        do_sample (`bool`): Whether scores are sampled from, or their maximum taken.
        seeded (`bool`, *optional*, defaults to `False`):
            Whether draws come from `rows.seeds`, each text's own, instead of torch's generator.
    """

    def __init__(
        self,
        processors: LogitsProcessorList | list[LogitsProcessor],
        rows: Rows,
        do_sample: bool,
        seeded: bool = False,
    ):
        self.processors = list(processors)
        self.rows = rows
        # With noise of its own at each place, a sampled text is the greedy one of the noisy scores.
        self.seeded = seeded and do_sample
        self.do_sample = do_sample and not seeded

    @property
    def needs_history(self) -> bool:
        """Whether some processor looks at more than the scores."""
        return any(type(processor) not in HISTORY_FREE for processor in self.processors)

    def fingerprint(self) -> Hashable:
        """Equal for lists that do the same; `None` if it cannot be told, or depends on more than the scores."""
        known = [of_object(processor) for processor in self.processors]
        return (
            None
            if self.needs_history or any(isinstance(one, int) for one in known)
            else (*known, self.do_sample, self.seeded)
        )

    def for_drafts(self, history: bool = True) -> LogitsProcessing:
        """
        The part worth its price on drafts. Any q is exact, so a processor that would have to be shown the whole batch
        for every draft position is left to the verification.

        Args:
            history (`bool`, *optional*, defaults to `True`): Whether to keep those that look at a row's prefix.
        """
        worth = HISTORY_FREE | ROW_WISE if history else HISTORY_FREE
        kept = [processor for processor in self.processors if type(processor) in worth]
        return LogitsProcessing(kept, self.rows, self.do_sample or self.seeded, self.seeded)

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """
        Args:
            logits (`torch.FloatTensor` of shape `(M, V)`): Raw logits.
            rows (`torch.LongTensor` of shape `(M,)`): Row of each position; -1 for filler, which gets any scores.
            columns (`torch.LongTensor` of shape `(M,)`):
                Width of the prefix that each position continues. Tokens up to there must be written in `self.rows`.

        Returns:
            `torch.FloatTensor` of shape `(M, V)`: Processed scores.
        """
        scores = logits
        for processor in self.processors:
            if type(processor) is TopPLogitsWarper and kernel_serves(scores, processor.min_tokens_to_keep):
                scores = keep_top_p(scores, processor.top_p, processor.filter_value)
            elif type(processor) in HISTORY_FREE:
                scores = processor(None, scores)
            else:
                scores = self._by_width(processor, scores, rows, columns)
        return scores

    def with_noise(self, scores: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """
        Processed scores as the maximum is to be taken of: if `seeded`, with the noise of each place in its text.
        Shapes as in a call.
        """
        if not self.seeded:
            return scores
        rows = rows.clamp(min=0)
        return scores + gumbel_noise(self.rows.seeds[rows], columns - self.rows.padding[rows], scores.shape[1])

    def _by_width(
        self, processor: LogitsProcessor, scores: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> torch.Tensor:
        processed = scores.clone()
        for width in columns.unique().tolist():
            chosen = ((columns == width) & (rows >= 0)).nonzero()[:, 0]  # (m,)
            if len(chosen) == 0:  # filler
                continue
            if _is_row_wise(processor):
                of_rows = _numbered(processor, rows[chosen].tolist())
                processed[chosen] = of_rows(self.rows.prefix(width, rows[chosen]), scores[chosen].clone())
            else:
                # It may look at other rows or at row numbers: show the batch whole, in order, others as if finished.
                everyone = scores.new_zeros(self.rows.num_rows, scores.shape[1])  # (N, V)
                everyone[rows[chosen]] = scores[chosen]
                processed[chosen] = processor(self.rows.shown(width, rows[chosen]), everyone)[rows[chosen]]
        return processed
