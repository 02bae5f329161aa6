"""A target split over processes: its ranks must take the same decisions, or they wait for each other for ever.

Knows process groups. Does not know what is decided.

The logits of a target that transformers has split (`tp_plan`) are the same on all ranks, bit for bit: what they add up
comes from collectives. What each rank computes for itself need not be: an assistant's kernels may be tuned to other
tiles on another card, and random draws follow each process's own generator. So the first rank leads: its drafts, its
selection and what it accepts go to all others, three small messages a step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def group_of(model: nn.Module) -> Any:
    """
    Args:
        model (`nn.Module`): A target.

    Returns:
        `torch.distributed.ProcessGroup`, *optional*: The processes over which its weights are split; `None` if it is
        whole.

    Raises:
        `ValueError`: If it is split in another way than by tensor parallelism alone.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    from torch.distributed.tensor import DTensor

    mesh = next((weight.device_mesh for weight in model.parameters() if isinstance(weight, DTensor)), None)
    if mesh is None or mesh.size() == 1:
        return None
    if mesh.ndim > 1:
        raise ValueError(
            f"`model` is split over a mesh of {mesh.ndim} dimensions, {tuple(mesh.shape)}. `tetris_capacity` serves "
            "tensor parallelism alone: load it with `DistributedConfig(tp_size=WORLD_SIZE)`, or leave out "
            "`tetris_capacity`."
        )
    return mesh.get_group()


class Lead:
    """
    What the ranks of a split target have in common; for a whole target nothing happens.

    Args:
        model (`nn.Module`): The target.
    """

    def __init__(self, model: nn.Module):
        self.group = group_of(model)

    def __call__(self, *tensors: torch.Tensor) -> None:
        """
        Overwrite integers with those of the first rank, in one message. Can be captured in a CUDA graph.

        Args:
            tensors (`torch.LongTensor`): Of the same shapes on all ranks; changed in place.
        """
        if self.group is None:
            return
        message = torch.cat([tensor.flatten() for tensor in tensors])
        torch.distributed.broadcast(message, group=self.group, group_src=0)
        for tensor, part in zip(tensors, message.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def all_agree(self, flag: bool, device: torch.device) -> bool:
        """Whether `flag` is true on all ranks."""
        if self.group is None:
            return flag
        votes = torch.tensor([int(flag)], device=device)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=self.group)
        return bool(votes)

    def check_same(self, given: torch.Tensor, what: str) -> None:
        """
        Args:
            given (`torch.LongTensor`): What this rank was given, of any shape.
            what (`str`): Its name, for the message.

        Raises:
            `ValueError`: On all ranks, if one of them was given something else.
        """
        if self.group is None:
            return
        # A polynomial of the shape and all values, wrapping around: the same for the same tensor, on any device.
        values = torch.cat([given.new_tensor([given.dim(), *given.shape]), given.flatten()]).long()
        digest = ((values + 1) * torch.full_like(values, _BASE).cumprod(0)).sum()
        extremes = torch.stack([digest, -digest])
        torch.distributed.all_reduce(extremes, torch.distributed.ReduceOp.MAX, group=self.group)
        if bool(extremes[0] != -extremes[1]):
            raise ValueError(
                f"`model` is split over {torch.distributed.get_world_size(self.group)} processes, which were given "
                f"different {what}. Give all of them the same, in the same order; to serve different prompts, load a "
                "whole model in each process."
            )


_BASE = 6364136223846793005  # odd, so that its powers never vanish modulo 2 ** 64
