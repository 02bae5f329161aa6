"""Medusa heads as a drafter: every draft of a step from one batched product, without a forward of any model.

Knows which hidden state belongs to a row's newest token. Does not know how heads are built or stored.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ..generation.draft import Draft, Verification, entropy, most_probable
from ..generation.drafter import Drafter
from ..generation.fingerprint import of_model
from ..generation.processing import LogitsProcessing
from ..generation.rows import Rows


if TYPE_CHECKING:
    from .medusa import MedusaHeads


class MedusaDrafter(Drafter):
    """
    Drafts with Medusa heads (Cai et al., 2024), the most probable token of each head (TETRIS paper, appendix C.5).

    The heads read the hidden state that the target's own forward left behind, and perhaps the token that was chosen
    from it, so a draft costs one small product.
    Tokens are not sampled: any score is exact then, and a token's is its probability under its head.

    Args:
        heads ([`MedusaHeads`]): The heads. They are called, never changed.
    """

    needs_hidden_states = True
    is_capturable = True

    def __init__(self, heads: MedusaHeads):
        self.heads = heads
        self._states: torch.Tensor | None = None

    def check(self, target: PreTrainedModel) -> None:
        config = self.heads.config
        lm_head = target.get_output_embeddings()
        name = f"the model ({type(target).__name__})"
        if lm_head is None:
            raise ValueError(f"`assistant_model` has Medusa heads, and {name} has no output embeddings for them.")
        width = getattr(lm_head, "in_features", lm_head.weight.shape[-1])
        if config.hidden_size != width:
            raise ValueError(
                f"`assistant_model` has Medusa heads for hidden states of width {config.hidden_size}, and those of "
                f"{name} are {width} wide: pass heads that were trained for it."
            )
        vocab_size = target.config.get_text_config(decoder=True).vocab_size
        if config.vocab_size not in (None, vocab_size):
            raise ValueError(
                f"`assistant_model` has Medusa heads for a vocabulary of {config.vocab_size} tokens, and {name} has "
                f"{vocab_size}: pass heads that were trained for it."
            )
        embeddings = target.get_input_embeddings()
        if config.medusa_reads_next_token and embeddings.weight.shape[-1] != config.hidden_size:
            raise ValueError(
                f"`assistant_model` has Medusa heads that read embeddings of width {config.hidden_size}, and those of "
                f"{name} are {embeddings.weight.shape[-1]} wide: pass heads with `medusa_reads_next_token=False`."
            )

    def fingerprint(self) -> Hashable:
        return type(self), id(self.heads), of_model(self.heads), self.keeps_entropies

    def begin(self, target: PreTrainedModel, rows: Rows, vocab_size: int, processing: LogitsProcessing) -> None:
        self._lm_head = target.get_output_embeddings()
        self._embeddings = target.get_input_embeddings() if self.heads.config.medusa_reads_next_token else None
        self._vocab_size = vocab_size
        self._processing = processing.for_drafts(history=False)

    def observe(self, rows: Rows, verification: Verification) -> None:
        """Keep, for each row, the hidden state that gave its newest token."""
        hidden_states = verification.hidden_states
        assert hidden_states is not None, "`needs_hidden_states` asks for them"
        # A row that has ended may start behind the last state.
        newest = (verification.starts + verification.num_accepted).clamp(max=len(hidden_states) - 1)  # (R,)
        newest = newest.to(hidden_states.device)
        if self._states is None:
            self._states = hidden_states.new_zeros(rows.num_rows, hidden_states.shape[-1])
        self._states[verification.live.to(hidden_states.device)] = hidden_states[newest]

    def propose(self, rows: Rows, live: torch.Tensor, depth: int) -> Draft:
        """See [`Drafter.propose`]. As many tokens as there are heads, at most."""
        assert self._states is not None, "`observe` comes first"
        depth = min(depth, self.heads.config.medusa_num_heads)
        states = self._states[live.to(self._states.device)]  # (R, hidden_size)
        next_embeds = None
        if self._embeddings is not None:
            newest = rows.tokens[live, rows.length[live] - 1]  # (R,)
            next_embeds = self._embeddings(newest).to(states.device)
        logits = self.heads(states, self._lm_head, num_heads=depth, next_embeds=next_embeds)
        scores = logits[..., : self._vocab_size]  # (R, K, V)
        if self._processing.seeded:
            scores = self._noisy(scores.float(), rows, live)
        probabilities, tokens = (best.to(live.device) for best in most_probable(scores))  # (R, K)
        entropies = entropy(scores.float()).to(live.device) if self.keeps_entropies else None
        # The token is a function of the distribution: its probability tells nothing that the distribution does not.
        lengths = rows.room(live).clamp(max=depth)
        return Draft(tokens, lengths, probabilities, probabilities, entropies=entropies)

    def _noisy(self, scores: torch.Tensor, rows: Rows, live: torch.Tensor) -> torch.Tensor:
        """Scores as the target will take the maximum of, `(R, K, V)`."""
        depth = scores.shape[1]
        columns = (rows.length[live, None] + torch.arange(depth, device=live.device)).flatten()  # (R * K,)
        owners = live.repeat_interleave(depth)
        flat = self._processing(scores.flatten(0, 1).to(live.device), owners, columns)
        noisy: torch.Tensor = self._processing.with_noise(flat, owners, columns)
        return noisy.reshape(len(live), depth, -1)

    def end(self) -> None:
        self._states = self._lm_head = self._embeddings = None
