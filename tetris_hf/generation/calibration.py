"""How often a draft that looks so sure does stand: learned while decoding, by place.

Knows estimates and outcomes. Does not know models; works for any drafter and needs no training beforehand.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import cached_file

from .draft import Draft, Verification, judged, survival
from .fusing import fused


CALIBRATION_NAME = "acceptance_calibration.json"


class AcceptanceCalibration:
    """
    Turns a drafter's estimates into chances of acceptance, `sigmoid(slope * logit(estimate) + shift)`, with a slope
    and a shift for each place that follow what was accepted (online logistic regression; begins as the identity).

    The map is monotone and the same for all rows of a step, it is fed the estimates a selector may see, and it changes
    between steps only: a selector that was exact stays exact (`docs/algorithm.md`).

    Args:
        max_depth (`int`, *optional*, defaults to 16): Places with a map of their own; deeper ones share the last.
        rate (`float`, *optional*, defaults to 0.1): Step of the regression.

    Raises:
        `ValueError`: If `max_depth` is under 1 or `rate` is not positive.
    """

    def __init__(self, max_depth: int = 16, rate: float = 0.1):
        if max_depth < 1:
            raise ValueError(f"`max_depth` must be at least 1, got {max_depth}.")
        if not rate > 0:
            raise ValueError(f"`rate` must be positive, got {rate}.")
        self.max_depth = max_depth
        self.rate = rate
        self.slope, self.shift = torch.ones(max_depth), torch.zeros(max_depth)

    def __call__(self, estimates: torch.Tensor) -> torch.Tensor:
        """
        Args:
            estimates (`torch.FloatTensor` of shape `(R, K)`): `probabilities` or `expectations` of a [`Draft`].

        Returns:
            `torch.FloatTensor` of shape `(R, K)`: Chances.
        """
        self._move_to(estimates.device)
        return _chances(estimates, self.slope, self.shift)

    def calibrated(self, draft: Draft) -> Draft:
        """The draft with chances in the place of its estimates."""
        return replace(draft, probabilities=self(draft.probabilities), expectations=self(draft.expectations))

    def prefix_scores(self, draft: Draft, predictable: bool = True) -> torch.Tensor:
        """[`Draft.prefix_scores`] of the draft with chances in the place of its estimates, `(R, K)`."""
        self._move_to(draft.probabilities.device)
        estimates = draft.probabilities, draft.expectations, draft.lengths
        return _scores(*estimates, self.slope, self.shift, predictable)

    def observe(self, verification: Verification) -> None:
        """
        Learn from the drafts that were judged: verified, and not behind a rejected one.

        Args:
            verification ([`Verification`]): What the target said.
        """
        draft = verification.draft
        if draft.depth == 0:
            return
        self._move_to(draft.expectations.device)
        outcome = draft.expectations, verification.lengths, verification.num_accepted
        _learn(*outcome, self.slope, self.shift, self.rate)

    def reset(self) -> None:
        """Back to the identity."""
        self.slope.fill_(1.0)
        self.shift.zero_()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What was learned, to be stored beside heads or an assistant."""
        return {"slope": self.slope.clone(), "shift": self.shift.clone()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what [`state_dict`] gave."""
        for name in ("slope", "shift"):
            if state[name].shape != getattr(self, name).shape:
                raise ValueError(
                    f"`{name}` has shape {tuple(state[name].shape)}, this calibration {(self.max_depth,)}: make it "
                    f"with `max_depth={state[name].shape[0]}`."
                )
            getattr(self, name).copy_(state[name])

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """
        Store what was learned beside the heads or the assistant it was learned for.

        Args:
            save_directory (`str` or `os.PathLike`): Folder of their weights; made if it is missing.
        """
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        learned = {name: values.tolist() for name, values in self.state_dict().items()}
        (folder / CALIBRATION_NAME).write_text(json.dumps({"rate": self.rate, **learned}, indent=2) + "\n")

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> AcceptanceCalibration:
        """
        The calibration that is stored beside heads or an assistant.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`): Their folder, or repository on the Hub.
            kwargs: As of `transformers.utils.cached_file`: `revision`, `token`, `cache_dir`.

        Raises:
            `OSError`: If there is none.
        """
        file = cached_file(pretrained_model_name_or_path, CALIBRATION_NAME, **kwargs)
        stored = json.loads(Path(file).read_text())
        calibration = cls(max_depth=len(stored["slope"]), rate=stored["rate"])
        calibration.load_state_dict({name: torch.tensor(stored[name]) for name in ("slope", "shift")})
        return calibration

    def _move_to(self, device: torch.device) -> None:
        if self.slope.device != device:
            self.slope, self.shift = self.slope.to(device), self.shift.to(device)


def _logit(estimates: torch.Tensor) -> torch.Tensor:
    return estimates.float().clamp(1e-4, 1 - 1e-4).logit()


def _places(estimates: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """Whose map each place takes, `(K,)`."""
    return torch.arange(estimates.shape[1], device=estimates.device).clamp(max=len(slope) - 1)


def _chances(estimates: torch.Tensor, slope: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    places = _places(estimates, slope)
    return torch.sigmoid(slope[places] * _logit(estimates) + shift[places])


@fused
def _scores(
    probabilities: torch.Tensor,
    expectations: torch.Tensor,
    lengths: torch.Tensor,
    slope: torch.Tensor,
    shift: torch.Tensor,
    predictable: bool,
) -> torch.Tensor:
    chances = _chances(probabilities, slope, shift), _chances(expectations, slope, shift)
    return survival(*chances, lengths, predictable)


@fused
def _learn(
    expectations: torch.Tensor,
    lengths: torch.Tensor,
    num_accepted: torch.Tensor,
    slope: torch.Tensor,
    shift: torch.Tensor,
    rate: float,
) -> None:
    """One step of the regression, in place, on estimates of shape `(R, K)`."""
    reached, stood = judged(lengths, num_accepted, expectations.shape[1])  # (R, K) each
    logit = _logit(expectations)
    error = (stood.float() - _chances(expectations, slope, shift)) * reached  # (R, K)
    # A place that few rows reach moves by less: one draft would otherwise weigh as much as a whole batch of them.
    count = reached.sum(0).clamp(min=8)
    # A logit of 8 pulls 64 times as hard as one of 1: divided by its square, as Newton's step would be.
    scale = 1 + (logit.square() * reached).sum(0) / count  # (K,)
    moves = torch.stack([rate * (error * logit).sum(0) / count / scale, rate * error.sum(0) / count])  # (2, K)
    places = torch.arange(len(slope), device=slope.device)  # (max_depth,)
    own = _places(expectations, slope)[:, None] == places  # (K, max_depth)
    moves = (moves[:, :, None] * own).sum(1)  # (2, max_depth)
    slope.copy_((slope + moves[0]).clamp(min=0.05))  # monotone
    shift.add_(moves[1])
