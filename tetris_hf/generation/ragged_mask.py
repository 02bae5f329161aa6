"""What each packed token may see: the model's own mask rule together with the packing it is asked about.

Knows positions, rows and transformers' mask functions (causal, sliding, chunked, ...). Does not know queries or keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from .fusing import fused
from .packing import Packing


@dataclass
class PackedForward:
    """
    One forward over packed tokens, as the attention layers see it.

    Attributes:
        packing (`Packing`): Rows and positions of the tokens.
        firsts (`torch.LongTensor` of shape `(N,)`): First slot of each row in the cache.
        num_slots (`int`, *optional*):
            Slots in all, if rows may lie anywhere; else they lie side by side, equally long.
        any_rule (`bool`): Whether some attention layer reads [`RaggedMask.allowed`], as far as is known.
        masks (`list[RaggedMask]`): Mask rules that the model asked for.
        num_attended (`int`): Attention layers that came here.
    """

    packing: Packing
    firsts: torch.Tensor
    num_slots: int | None = None
    any_rule: bool = False
    masks: list[RaggedMask] = field(default_factory=list)
    num_attended: int = 0


_forward: ContextVar[PackedForward] = ContextVar("packed_forward")


@contextmanager
def packed_as(forward: PackedForward) -> Iterator[PackedForward]:
    """Within this context, the tokens that a model sees are packed in this way."""
    token = _forward.set(forward)
    try:
        yield forward
    finally:
        _forward.reset(token)


def current_forward() -> PackedForward:
    """The forward under way."""
    return _forward.get()


@dataclass
class AttentionPlan:
    """
    What an attention layer needs to know besides its own states, as plain tensors and numbers: a layer that is
    compiled reads it like any argument.

    Attributes:
        num_rows (`int`): N.
        max_count (`int`): An upper bound of the packed tokens of a row.
        max_length (`int`): An upper bound of a row's length.
        window (`int`, *optional*): See [`RaggedMask.window`].
        starts (`torch.IntTensor` of shape `(N + 2,)`):
            Packed index of each row's first token; then of the filler's, as if it were one more row; then T.
        slots (`torch.IntTensor` of shape `(N + 2,)`): First slot of each row; the filler has none.
        lengths (`torch.IntTensor` of shape `(N + 1,)`): Slots of each row in use; 0 for the filler.
        padded_index (`torch.LongTensor` of shape `(N, max_count)`, *optional*): See [`Packing.padded_index`].
        packed_index (`torch.LongTensor` of shape `(T,)`, *optional*): See [`Packing.packed_index`].
        allowed (`torch.BoolTensor` of shape `(N, 1, max_count, max_length)`, *optional*): See [`RaggedMask.allowed`].
        key_index (`torch.LongTensor` of shape `(N, max_length)`, *optional*):
            Slots of each row's positions, if rows may lie anywhere.
    """

    num_rows: int
    max_count: int
    max_length: int
    window: int | None
    starts: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    padded_index: torch.Tensor | None = None
    packed_index: torch.Tensor | None = None
    allowed: torch.Tensor | None = None
    key_index: torch.Tensor | None = None


class RaggedMask:
    """
    A model's mask rule together with the packing it is asked about; stands where a mask tensor would.

    It is no tensor on purpose: a model that computes with the mask itself, and would read packed indices as positions,
    fails here at once and never gives a wrong answer.

    Args:
        packing (`Packing`): Rows and positions of the packed tokens.
        firsts (`torch.LongTensor` of shape `(N,)`): First slot of each row in the cache.
        mask_function (`Callable`):
            transformers' rule `(batch_idx, head_idx, q_idx, kv_idx) -> bool`. In a cache without gaps a slot's index
            in its row is a position, so the rule is right on (query positions, slots) for every kind of layer.
        local_size (`int`, *optional*): The window or chunk size, if the rule has one.
        num_slots (`int`, *optional*): As of [`PackedForward`].
    """

    def __init__(
        self,
        packing: Packing,
        firsts: torch.Tensor,
        mask_function: Callable[..., Any],
        local_size: int | None = None,
        num_slots: int | None = None,
    ):
        self.packing = packing
        self.firsts, self.num_slots = firsts, num_slots
        self.mask_function = mask_function
        self.local_size = local_size
        self._plans: dict[torch.device, AttentionPlan] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._is_no_tensor()

    def _is_no_tensor(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("The model computes with masks of its own, which packed rows cannot serve.")

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._is_no_tensor(None)  # type: ignore[arg-type]

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = __invert__ = _is_no_tensor
    __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __len__ = __getitem__ = __setitem__ = _is_no_tensor

    def to(self, *args: Any, **kwargs: Any) -> RaggedMask:
        """Itself: device hooks of accelerate move every argument of a layer, and plans are made for each device."""
        if any(isinstance(wanted, torch.dtype) for wanted in (*args, *kwargs.values())):
            self._is_no_tensor()
        return self

    @property
    def window(self) -> int | None:
        """
        -1 if the rule is causal, w if a token sees itself and the w - 1 before it, `None` for any other rule.
        """
        if self.mask_function is causal_mask_function:
            return -1
        if self.local_size is None:
            return None
        # A sliding window and a chunk come with the same arguments: ask the rule itself, around its edges.
        size, zero = self.local_size, torch.zeros(1, 1, dtype=torch.long)
        queries = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 3 * size + 1])[:, None]
        keys = torch.arange(3 * size + 3)[None]
        sliding = (keys <= queries) & (keys > queries - size)
        return size if torch.equal(self.mask_function(zero, zero, queries, keys), sliding) else None

    def plan(self, device: torch.device, for_any_rule: bool = False) -> AttentionPlan:
        """
        What attention layers on `device` need. The last three fields only if they are asked for: they can be large.
        """
        packing = self.packing
        if device not in self._plans:
            starts, slots, lengths = (
                bounds.to(device)
                for bounds in _bounds(packing.counts, packing.lengths, packing.num_tokens, self.firsts)
            )
            sizes = packing.num_rows, packing.max_count, packing.max_length, self.window
            self._plans[device] = AttentionPlan(*sizes, starts, slots, lengths)
        plan = self._plans[device]
        if for_any_rule and plan.allowed is None:
            plan.padded_index, plan.packed_index = packing.padded_index.to(device), packing.packed_index.to(device)
            plan.allowed = self.allowed().to(device)
            if self.num_slots is not None:
                positions = torch.arange(packing.max_length, device=self.firsts.device)
                plan.key_index = (self.firsts[:, None] + positions).clamp(max=self.num_slots - 1).to(device)
        return plan

    def allowed(self) -> torch.Tensor:
        """
        What each token may see, with the queries of a row padded to `max_count`.

        Returns:
            `torch.BoolTensor` of shape `(N, 1, max_count, max_length)`. A padding query sees what the last token of
            its row sees, so that no softmax runs over nothing.
        """
        packing = self.packing
        positions = packing.pad(packing.positions)[:, None, :, None].clamp(min=0)  # (N, 1, max_count, 1)
        slots = torch.arange(packing.max_length, device=positions.device)[None, None, None]
        zero = torch.zeros((1, 1, 1, 1), dtype=torch.long, device=positions.device)
        rule: torch.Tensor = self.mask_function(zero, zero, positions, slots)  # (N, 1, max_count, max_length)
        # Slots past the row's newest token hold what an earlier step wrote and lost.
        written = slots <= positions.amax(2, keepdim=True)
        # A row that takes no part has no position; slot 0 keeps its (unread) result finite.
        absent = packing.counts.eq(0)[:, None, None, None] & slots.eq(0)
        return (rule & written) | absent


@fused
def _bounds(
    counts: torch.Tensor, lengths: torch.Tensor, num_tokens: int, firsts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`starts`, `slots` and `lengths` of an [`AttentionPlan`]."""
    ends = counts.cumsum(0)
    return (
        torch.cat([ends[:1] * 0, ends, ends[:1] * 0 + num_tokens]).int(),
        torch.cat([firsts, firsts[-1:], firsts[-1:]]).int(),
        torch.nn.functional.pad(lengths, (0, 1)).int(),
    )


def ragged_mask(mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> RaggedMask:
    """The mask interface: transformers asks once per kind of layer and hands the result to the attention function."""
    attention_mask = kwargs.get("attention_mask")
    # None was passed. Some models then make one of ones, which says nothing; any other would go unheard. While a graph
    # is captured nothing can be asked; the same forward ran before, and was asked then.
    capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    if attention_mask is not None and not capturing and not attention_mask.all():
        raise NotImplementedError("The model masks tokens by a rule of its own, which packed rows cannot follow.")
    if mask_function is bidirectional_mask_function:
        raise NotImplementedError("The model attends to later tokens, so drafts cannot be verified at once.")
    forward = current_forward()
    forward.masks.append(
        RaggedMask(forward.packing, forward.firsts, mask_function, kwargs.get("local_size"), forward.num_slots)
    )
    return forward.masks[-1]
