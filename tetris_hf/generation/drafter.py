"""What a drafter is: the protocol between whoever proposes tokens and the loop that verifies them.

Knows when a drafter is called and what it may rely on. Does not know how any particular one comes by its proposals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable

import torch
from transformers import PreTrainedModel

from .draft import Draft, Verification
from .packed_model import PackedModel
from .processing import LogitsProcessing
from .rows import Rows


class Drafter(ABC):
    """
    Proposes draft tokens for the rows of a batch. Subclass it to bring a drafter of your own.

    A drafter lives through any number of calls of `generate`; what belongs to one call is made in [`~Drafter.begin`]
    and dropped in [`~Drafter.end`]. The text is exact whatever a drafter proposes; only the speed depends on it.

    Attributes:
        needs_hidden_states (`bool`): Whether [`Verification`] is to hold the target's hidden states.
        is_capturable (`bool`):
            Whether `propose` and `observe` may be captured in a CUDA graph with the rest of a step: if
            `rows.fixed_shapes`, they never wait for the device, make no shape depend on values, propose `depth` deep
            and keep what they know from step to step in the same tensors, changed in place. `begin` may then be called
            again without an `end`, for a new batch in the same `rows`.
        shares_rows (`bool`):
            Whether other drafters propose for the same rows, so that a row may gain more tokens in a step than this
            drafter proposed for it. [`MixedDrafter`] sets it.
        keeps_entropies (`bool`): Whether drafts are to hold `entropies`, which a selector reads. Set for each call.
        feed (`int`):
            Prompt tokens of rows that wait for them ([`~Drafter.await_prompts`]) which the target takes in with this
            step at most. Set while `propose` runs; which tokens these are, `rows.next_feed(feed)` tells.
        wants_deeper (`Callable[[Draft], bool | torch.Tensor]`, *optional*):
            Set while `propose` runs: tells of what was drafted so far (whose `lengths` say how deep each row can go)
            whether a deeper place could still be selected. A drafter that pays for each place may stop there. In a
            step that is captured it tells it by a tensor of shape `()`, or is not set: every place has to be captured,
            and `only_if` leaves out in a replay what is not wanted.
        sure_depth (`int`): Places that are drafted without asking. Set with `wants_deeper`.
    """

    needs_hidden_states: bool = False
    is_capturable: bool = False
    shares_rows: bool = False
    keeps_entropies: bool = False
    feed: int = 0
    wants_deeper: Callable[[Draft], bool | torch.Tensor] | None = None
    sure_depth: int = 1

    @property
    def models(self) -> list[PreTrainedModel]:
        """Models that the drafter runs over packed tokens."""
        return []

    @property
    def packed_models(self) -> list[PackedModel]:
        """Those models with their caches, between `begin` and `end`."""
        return []

    def fingerprint(self) -> Hashable:
        """What a captured step depends on: another drafter of the same fingerprint may take this one's place."""
        return id(self)

    def check(self, target: PreTrainedModel) -> None:  # noqa: B027
        """
        Called before the first forward.

        Args:
            target (`PreTrainedModel`): The model to draft for.

        Raises:
            `ValueError`: If this drafter cannot serve it.
        """

    def begin(  # noqa: B027
        self, target: PreTrainedModel, rows: Rows, vocab_size: int, processing: LogitsProcessing
    ) -> None:
        """
        Start a call, after the first forward of the target.

        Args:
            target (`PreTrainedModel`): The model to draft for. It may be read, not changed.
            rows (`Rows`): The batch.
            vocab_size (`int`): V, the width of the target's logits. No token at or above it may be proposed.
            processing (`LogitsProcessing`): Turns the drafter's logits into scores as the target's are turned.
        """

    def admit(self, rows: Rows, live: torch.Tensor) -> None:  # noqa: B027
        """
        New prompts are in `rows`, not yet followed by a token: all of them after `begin`, later those that take the
        place of rows that have ended.

        Args:
            rows (`Rows`): The batch.
            live (`torch.LongTensor` of shape `(R,)`): The rows with a new prompt.
        """

    def await_prompts(self, rows: Rows, live: torch.Tensor) -> None:
        """
        As `admit`, while other rows run: the target computes these prompts by and by, and their rows draft nothing
        until it has. A drafter with a cache of its own may do the same in `propose`; by default it is `admit`ted to.

        Args:
            rows (`Rows`): The batch.
            live (`torch.LongTensor` of shape `(R,)`): The rows with a new prompt.
        """
        self.admit(rows, live)

    @abstractmethod
    def propose(self, rows: Rows, live: torch.Tensor, depth: int) -> Draft:
        """
        Propose up to `depth` tokens for each live row.

        Args:
            rows (`Rows`): The batch; committed tokens may be read, the scratch behind them may be written.
            live (`torch.LongTensor` of shape `(R,)`): Rows that take part, in increasing order.
            depth (`int`): K, at least 1.

        Returns:
            [`Draft`]: Of depth `depth` at most; no row longer than `rows.room(live)`.
        """

    def observe(self, rows: Rows, verification: Verification) -> None:  # noqa: B027
        """
        Called after every commit, and after `admit` for the prompts' own forward.

        Args:
            rows (`Rows`): The batch, with the new tokens committed.
            verification ([`Verification`]): What the target said.
        """

    def end(self) -> None:  # noqa: B027
        """End the call, also after an error: free what it made."""
