"""What `generate` returns besides tokens: scores, logits and hidden states, one entry per generated column.

Knows columns of the padded batch and packed indices. Does not know how the tokens were chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from .draft import Verification
from .packed_model import PackedOutput
from .rows import Rows
from .stats import TetrisStats


@dataclass
class TetrisDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """
    What `generate` returns with `return_dict_in_generate=True`.

    `sequences`, `scores`, `logits` and `hidden_states` are those of plain `generate`. Where a row has ended, plain
    `generate` goes on feeding it padding; here its entries are 0. `attentions` and `cache` are always `None`.

    Args:
        tetris_stats ([`TetrisStats`]): Counts of this call.
    """

    tetris_stats: TetrisStats | None = None


class OutputRecorder:
    """
    Gathers, from packed forwards in which rows advance by unequal numbers of tokens, one tensor per column for all
    rows.

    Args:
        generation_config (`GenerationConfig`): Says what is wanted.
        rows (`Rows`): The batch.
    """

    def __init__(self, generation_config: GenerationConfig, rows: Rows):
        wanted = bool(generation_config.return_dict_in_generate)
        self.rows = rows
        self._scores: list[torch.Tensor] | None = [] if wanted and generation_config.output_scores else None
        self._logits: list[torch.Tensor] | None = [] if wanted and generation_config.output_logits else None
        self.wants_hidden_states = wanted and bool(generation_config.output_hidden_states)
        self._hidden_states: list[list[torch.Tensor]] = []  # layers, then columns
        self.wants_any = self._scores is not None or self._logits is not None or self.wants_hidden_states

    def record(
        self, verification: Verification, kept: torch.Tensor, output: PackedOutput, scores: torch.Tensor
    ) -> None:
        """
        Keep what gave the tokens that are about to be committed.

        Args:
            verification ([`Verification`]): Where each row's distributions start in the packed order.
            kept (`torch.LongTensor` of shape `(R,)`): Tokens about to be committed.
            output ([`PackedOutput`]): The target's forward.
            scores (`torch.FloatTensor` of shape `(T, V)`): Its processed scores.
        """
        if not self.wants_any:
            return
        rows = self.rows
        places = torch.arange(int(kept.max()), device=kept.device)
        chosen = places < kept[:, None]  # (R, J)
        row = verification.live[:, None].expand_as(chosen)[chosen]  # (n,)
        column = (rows.length[verification.live, None] - rows.prompt_width + places)[chosen]
        index = (verification.starts[:, None] + places)[chosen]
        if self._scores is not None:
            self._place(self._scores, row, column, scores[index])
        if self._logits is not None:
            self._place(self._logits, row, column, output.logits[index])
        if self.wants_hidden_states:
            self._place_hidden_states(row, column, index, output)

    def _place(
        self, columns: list[torch.Tensor], row: torch.Tensor, column: torch.Tensor, values: torch.Tensor
    ) -> None:
        """
        Put `values[n]`, one per token, into row `row[n]` of column `column[n]`; columns appear as they are reached.
        """
        while len(columns) <= int(column.max()):
            columns.append(values.new_zeros(self.rows.num_rows, *values.shape[1:]))
        for reached in column.unique().tolist():
            at = column == reached
            columns[reached][row[at].to(values.device)] = values[at.to(values.device)]

    def _place_hidden_states(
        self, row: torch.Tensor, column: torch.Tensor, index: torch.Tensor, output: PackedOutput
    ) -> None:
        layers = output.all_hidden_states
        assert layers is not None, "the target was not asked for hidden states"
        if not self._hidden_states:
            # The first column of plain `generate` holds the states of the whole prompt.
            packing, width = output.packing, self.rows.prompt_width
            place = self.rows.padding[packing.rows] + packing.positions
            for states in layers:
                prompt = states.new_zeros(self.rows.num_rows, width, states.shape[-1])  # (N, width, hidden_size)
                prompt[packing.rows.to(states.device), place.to(states.device)] = states
                self._hidden_states.append([prompt])
            return
        for columns, states in zip(self._hidden_states, layers, strict=True):
            self._place(columns, row, column, states[index.to(states.device), None])

    def _forget_what_was_cut(self) -> None:
        """A row may have been cut back to a column that it had passed."""
        rows = self.rows
        width = int(rows.length.max()) - rows.prompt_width
        for columns in (self._scores or [], self._logits or [], *self._hidden_states):
            del columns[width:]
            for index, values in enumerate(columns[1:], start=1):  # every row has a first token
                values[(rows.length <= rows.prompt_width + index).to(values.device)] = 0

    def finish(self, stats: TetrisStats) -> TetrisDecoderOnlyOutput:
        """Everything in the form of plain `generate`."""
        self._forget_what_was_cut()
        return TetrisDecoderOnlyOutput(
            sequences=self.rows.sequences(),
            scores=None if self._scores is None else tuple(self._scores),
            logits=None if self._logits is None else tuple(self._logits),
            hidden_states=tuple(zip(*self._hidden_states, strict=True)) if self.wants_hidden_states else None,
            tetris_stats=stats,
        )
