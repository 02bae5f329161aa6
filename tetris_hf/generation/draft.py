"""What a drafter proposes, and what became of it.

Knows tokens, chances and outcomes. Does not know who proposed them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .fusing import fused


# Tokens that a row may be ahead of the slowest one of a closed batch until its drafts count e times less. Over replays
# of recorded text, 1 to 4 shorten batches alike, 8 and more less (`docs/choosing_c.md`).
_LEAD = 2.0


@dataclass(frozen=True)
class Draft:
    """
    Tokens proposed for R live rows, K deep.

    Attributes:
        tokens (`torch.LongTensor` of shape `(R, K)`): Proposed tokens.
        lengths (`torch.LongTensor` of shape `(R,)`): How many of them are real; 0 where a row has no proposal.
        probabilities (`torch.FloatTensor` of shape `(R, K)`):
            Estimated chance that each token is accepted, given that those before it are. May look at the token.
        expectations (`torch.FloatTensor` of shape `(R, K)`):
            The same from the *distribution* at that place alone, blind to the token drawn from it. Equals
            `probabilities` where the token is a function of the distribution.
        q (`torch.FloatTensor` of shape `(R, K, V)`, *optional*):
            The float32 distributions that the tokens were sampled from, after all draft processors. `None` if the
            tokens were not sampled: q is then one at the token.
        entropies (`torch.FloatTensor` of shape `(R, K)`, *optional*):
            Entropy in nats of the distribution at each place, if [`~Drafter.keeps_entropies`]; 0 for a copy.
        remaining (`torch.LongTensor` of shape `(R,)`, *optional*):
            Tokens that each row may still get. The loop adds it for selectors that ask, where rows that end are not
            replaced.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    probabilities: torch.Tensor
    expectations: torch.Tensor
    q: torch.Tensor | None = None
    entropies: torch.Tensor | None = None
    remaining: torch.Tensor | None = None

    @classmethod
    def empty(cls, live: torch.Tensor) -> Draft:
        """No draft tokens for the rows `live`: a step that adds one token to each."""
        tokens = live.new_zeros(len(live), 0)
        scores = torch.zeros(len(live), 0, device=live.device)
        return cls(tokens, torch.zeros_like(live), scores, scores)

    @property
    def depth(self) -> int:
        """K."""
        return self.tokens.shape[1]

    def prefix_scores(self, predictable: bool = True) -> torch.Tensor:
        """
        Estimated chance that a row is accepted up to and including each place: the running product of `probabilities`.

        Args:
            predictable (`bool`, *optional*, defaults to `True`):
                Whether the last factor is blind to the token that the score decides about (`docs/algorithm.md`). Only
                then is the output exact when sampling. `False` gives the score of the TETRIS paper (section 4.1).

        Returns:
            `torch.FloatTensor` of shape `(R, K)`, non-increasing along K; -inf where there is no draft token.
        """
        return _prefix_scores(self.probabilities, self.expectations, self.lengths, predictable)

    def urgency(self) -> torch.Tensor:
        """
        How much a token of each row brings the end of a closed batch nearer: 1 in the row with the most `remaining`,
        e times less for every two tokens that a row is ahead of it. 1 everywhere if rows that end are replaced.

        Returns:
            `torch.FloatTensor` of shape `(R,)`, in (0, 1].
        """
        return torch.ones_like(self.probabilities[:, 0]) if self.remaining is None else _urgency(self.remaining)


class GrowingDraft:
    """A [`Draft`] that is being made, place by place."""

    def __init__(self) -> None:
        self._found: list[tuple[torch.Tensor, ...]] = []

    def add(self, *found: torch.Tensor | None) -> None:
        """Tokens, probabilities, expectations and, if they are wanted, entropies of the next place, `(R,)` each."""
        self._found.append(tuple(one for one in found if one is not None))

    def draft(self, lengths: torch.Tensor, q: torch.Tensor | None = None) -> Draft:
        """What there is so far, with lengths of shape `(R,)`; of q, of shape `(R, K, V)`, the first places."""
        if not self._found:
            return Draft.empty(lengths)
        stacked = [torch.stack(some, 1) for some in zip(*self._found, strict=True)]
        tokens, probabilities, expectations, *entropies = stacked  # (R, K)
        q = None if q is None else q[:, : tokens.shape[1]]
        return Draft(tokens, lengths, probabilities, expectations, q, *entropies)


def survival(
    probabilities: torch.Tensor, expectations: torch.Tensor, lengths: torch.Tensor, predictable: bool
) -> torch.Tensor:
    """[`Draft.prefix_scores`] of its tensors. K is small: place by place, a compiler makes one kernel of it."""
    if probabilities.shape[1] == 0:
        return probabilities
    reached = torch.ones_like(probabilities[:, 0])  # (R,)
    scores: list[torch.Tensor] = []
    for place in range(probabilities.shape[1]):
        score = reached * (expectations if predictable else probabilities)[:, place]
        scores.append(torch.minimum(scores[-1], score) if scores else score)
        reached = reached * probabilities[:, place]
    places = torch.arange(len(scores), device=probabilities.device)
    return torch.stack(scores, 1).masked_fill(places >= lengths[:, None], -torch.inf)  # (R, K)


def judged(lengths: torch.Tensor, num_accepted: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which drafts were judged, verified and behind none that was rejected, and which of those stood; `(R, depth)`."""
    places = torch.arange(depth, device=lengths.device)
    reached = (places < lengths[:, None]) & (places <= num_accepted[:, None])
    return reached, reached & (places < num_accepted[:, None])


@fused
def _urgency(remaining: torch.Tensor) -> torch.Tensor:
    return torch.exp((remaining - remaining.max()) / _LEAD).clamp(min=1e-20)


@fused
def _prefix_scores(
    probabilities: torch.Tensor, expectations: torch.Tensor, lengths: torch.Tensor, predictable: bool
) -> torch.Tensor:
    return survival(probabilities, expectations, lengths, predictable)


@dataclass(frozen=True)
class Verification:
    """
    What the target said about a draft; shown to drafters and selectors that learn or that read hidden states.

    Attributes:
        live (`torch.LongTensor` of shape `(R,)`): Rows that took part.
        draft ([`Draft`]): What was proposed; empty for the prompts' own forward.
        lengths (`torch.LongTensor` of shape `(R,)`): Draft tokens verified in each row.
        num_accepted (`torch.LongTensor` of shape `(R,)`):
            Those that were accepted, before the cut at the end of a row.
        hidden_states (`torch.Tensor` of shape `(T, hidden_size)`, *optional*):
            Inputs of the target's output embeddings at the packed tokens, if [`~Drafter.needs_hidden_states`].
        starts (`torch.LongTensor` of shape `(R,)`):
            Packed index of each row's first token. The state that gave row i's newest token is at
            `starts[i] + num_accepted[i]`; those of the other tokens committed with it come before it.
    """

    live: torch.Tensor
    draft: Draft
    lengths: torch.Tensor
    num_accepted: torch.Tensor
    hidden_states: torch.Tensor | None
    starts: torch.Tensor


@fused
def most_probable(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Probability, in float32, and index of the most probable token of the distributions that scores of shape `(..., V)`
    stand for. Both of shape `(...)`. Compiled, neither the scores in float32 nor their softmax is ever stored.
    """
    scores = scores.float()
    highest, token = scores.max(-1)
    return (highest - scores.logsumexp(-1)).exp(), token


def entropy(scores: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of the distribution that scores of shape `(..., V)` stand for. Shape `(...)`."""
    logarithms = scores.log_softmax(-1)
    # Where a processor has ruled a token out, its share is 0 times minus infinity.
    return -(logarithms.exp() * logarithms.clamp(min=torch.finfo(scores.dtype).min)).sum(-1)
