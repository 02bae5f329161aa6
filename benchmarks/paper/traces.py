"""What a target says and what drafters propose at every place of it, recorded once and replayed under any selector.

Greedy text is the same under every selector, and what an assistant or heads propose is a function of the committed
text alone: so one record serves every selector, batch size, capacity and depth. Knows tensors and a file. Runs no
model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file


@dataclass(frozen=True)
class Drafted:
    """
    What one drafter proposed at every place of P texts of M tokens.

    Attributes:
        tokens (`torch.IntTensor` of shape `(P, M - 1, K)`):
            At `[i, t]` the drafts after the first t + 1 tokens of text i, which stand as far as they equal
            `text[i, t + 1 :]`.
        lengths (`torch.IntTensor` of shape `(P, M - 1)`): How many of them are real.
        probabilities (`torch.FloatTensor` of shape `(P, M - 1, K)`): The drafter's own, float32.
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    probabilities: torch.Tensor


@dataclass(frozen=True)
class Trace:
    """
    P prompts with the target's greedy text and what drafters proposed along it.

    Attributes:
        sets (`list[str]`): The set that each prompt is from.
        prompts (`list[torch.LongTensor]`): Token ids of each prompt, without padding.
        text (`torch.LongTensor` of shape `(P, M)`): What the target says, also after its end token.
        ends (`torch.LongTensor` of shape `(P,)`): Tokens of each text up to and including its end token, M at most.
        drafts (`dict[str, Drafted]`): By the name of the drafter.
        about (`dict[str, Any]`): How it was recorded.
    """

    sets: list[str]
    prompts: list[torch.Tensor]
    text: torch.Tensor
    ends: torch.Tensor
    drafts: dict[str, Drafted]
    about: dict[str, Any]

    def of(self, name: str) -> list[int]:
        """
        The prompts of a set, by index; `"all"` for those of every set.

        Raises:
            `ValueError`: If there is no such set.
        """
        found = [index for index, its_set in enumerate(self.sets) if name in ("all", its_set)]
        if not found:
            raise ValueError(f"The trace has no prompts of {name!r}: choose among {sorted(set(self.sets))}.")
        return found

    def stands(self, drafter: str) -> torch.Tensor:
        """How many of the drafts at every place equal the text, had all been verified. Shape `(P, M - 1)`."""
        drafted = self.drafts[drafter]
        depth = drafted.tokens.shape[2]
        return leading_matches(drafted.tokens.long(), coming(self.text, depth), drafted.lengths)

    def save(self, path: Path) -> None:
        """Write one safetensors file."""
        tensors = {
            "prompts": _small(torch.cat(self.prompts)),
            "prompt_lengths": torch.tensor([len(prompt) for prompt in self.prompts], dtype=torch.int32),
            "text": _small(self.text),
            "ends": self.ends.int(),
        }
        for name, drafted in self.drafts.items():
            deepest = int(drafted.lengths.max())  # heads are fewer than what an assistant may draft
            tensors[f"{name}.tokens"] = _small(drafted.tokens[..., :deepest])
            tensors[f"{name}.lengths"] = drafted.lengths.to(torch.uint8)
            tensors[f"{name}.probabilities"] = drafted.probabilities[..., :deepest].contiguous()
        metadata = {"sets": json.dumps(self.sets), "drafters": json.dumps([*self.drafts])}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={**metadata, "about": json.dumps(self.about)})

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what [`~Trace.save`] wrote."""
        with safe_open(path, framework="pt") as file:
            metadata = {name: json.loads(value) for name, value in file.metadata().items()}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a handle, not a dict)
        return cls(
            metadata["sets"],
            list(tensors["prompts"].long().split(tensors["prompt_lengths"].tolist())),
            tensors["text"].long(),
            tensors["ends"].long(),
            {
                name: Drafted(
                    tensors[f"{name}.tokens"].int(), tensors[f"{name}.lengths"].int(), tensors[f"{name}.probabilities"]
                )
                for name in metadata["drafters"]
            },
            metadata["about"],
        )


def _small(tokens: torch.Tensor) -> torch.Tensor:
    """In two bytes where the vocabulary allows."""
    return tokens.contiguous().to(torch.uint16 if int(tokens.max()) < 2**16 else torch.int32)


def coming(text: torch.Tensor, depth: int) -> torch.Tensor:
    """The `depth` tokens after each place but the last; -1 behind the end. `(P, M)` to `(P, M - 1, depth)`."""
    padded = torch.nn.functional.pad(text, (0, depth - 1), value=-1)  # (P, M + depth - 1)
    return padded[:, 1:].unfold(1, depth, 1)


def leading_matches(tokens: torch.Tensor, text: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """How many of the first `lengths` drafts equal the text before one does not. `(..., K)` twice to `(...)`."""
    places = torch.arange(tokens.shape[-1], device=tokens.device)
    return ((tokens == text) & (places < lengths[..., None])).long().cumprod(-1).sum(-1)
