"""The loss of self-distillation: how far a student's distributions are from the target's, over a large vocabulary.

Knows hidden states and one output matrix, which both share and which is not trained. Does not know models.
"""

import torch
from torch import nn


def divergence(
    student: torch.Tensor, target: torch.Tensor, matrix: torch.Tensor, weights: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For M places: weighted sum of KL(p | q), its gradient by `student` `(M, hidden_size)`, agreement `(M,)`."""
    q_logits = (student @ matrix.T).float()  # (M, V)
    p_logits = (target @ matrix.T).float()
    agree = q_logits.argmax(-1) == p_logits.argmax(-1)
    log_q, log_p = q_logits.log_softmax(-1), (p_logits / temperature).log_softmax(-1)
    p = log_p.exp()
    loss = ((p * (log_p - log_q)).sum(-1) * weights).sum()
    gradient = ((log_q.exp() - p) * weights[:, None]).to(matrix.dtype) @ matrix
    return loss, gradient, agree


class Distillation(torch.autograd.Function):
    """
    KL divergence from the target's distributions, in slices: M distributions over a vocabulary do not fit in memory,
    nor do their gradients, and the output matrix is not trained.
    """

    slice_size = 4096
    divergence = staticmethod(divergence)
    is_compiled = False

    @classmethod
    def compile(cls) -> None:
        """Several times faster on a GPU, after some seconds at the first use."""
        cls.divergence = staticmethod(torch.compile(divergence, dynamic=False))
        cls.is_compiled = True

    @staticmethod
    def forward(ctx, student, target, matrix, weights, temperature):  # type: ignore[no-untyped-def]
        loss = torch.zeros((), device=student.device)
        gradients, agreements = [], []
        for first in range(0, len(student), Distillation.slice_size):
            parts = [x[first : first + Distillation.slice_size] for x in (student, target, weights)]
            size = len(parts[0])
            # All slices of one size: what is compiled is compiled once. Filled-up places weigh nothing.
            missing = Distillation.slice_size - size if Distillation.is_compiled else 0
            s, t = (nn.functional.pad(x, (0, 0, 0, missing)).to(matrix.dtype) for x in parts[:2])
            w = nn.functional.pad(parts[2], (0, missing))
            part, gradient, agree = Distillation.divergence(s, t, matrix, w, temperature)
            loss += part
            gradients.append(gradient[:size])
            agreements.append(agree[:size])
        ctx.save_for_backward(torch.cat(gradients).to(student.dtype))
        agreement = torch.cat(agreements)
        ctx.mark_non_differentiable(agreement)
        return loss, agreement

    @staticmethod
    def backward(ctx, gradient, _):  # type: ignore[no-untyped-def]
        return ctx.saved_tensors[0] * gradient, None, None, None, None
