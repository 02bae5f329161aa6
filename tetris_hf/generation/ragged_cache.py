"""The key/value cache of a batch whose rows have unequal lengths and no gaps.

Knows about slots, rows and lengths. Does not know about tokens, drafts or acceptance: whoever writes decides where,
and a rejected draft is simply overwritten when its position comes again.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from .fusing import fused


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, `num_slots` slots and one spare slot that swallows what must not be kept."""

    is_compileable = False
    is_croppable = False

    def __init__(self, cache: RaggedCache):
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """
        Allocate from the first states seen: multi-head latent attention has other widths for keys than for values.
        """
        self.keys, self.values = (
            states.new_zeros(states.shape[1], self.cache.num_slots + 1, states.shape[3])  # (heads, N * L + 1, width)
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Write the states of T packed tokens to their slots.

        Args:
            key_states (`torch.Tensor` of shape `(1, heads, T, width)`): New keys.
            value_states (`torch.Tensor` of shape `(1, heads, T, width)`): New values.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Views of the whole cache, each of shape `(1, heads, N * L, width)`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = self.cache.slots.to(key_states.device)
        for stored, states in ((self.keys, key_states), (self.values, value_states)):
            stored.index_copy_(1, slots, states[0].to(stored.dtype))
        return self.keys[None, :, :-1], self.values[None, :, :-1]  # (1, heads, N * L, width)

    def grow(self, num_rows: int, old_length: int, new_length: int) -> None:
        """Copy `num_rows` rows of `old_length` slots into rows of `new_length` slots."""
        if not self.is_initialized:
            return
        grown = []
        for stored in (self.keys, self.values):
            heads, _, width = stored.shape
            wider = stored.new_zeros(heads, num_rows * new_length + 1, width)
            rows = wider[:, :-1].unflatten(1, (num_rows, new_length))  # (heads, N, L, width), a view
            rows[:, :, :old_length] = stored[:, :-1].unflatten(1, (num_rows, old_length))
            grown.append(wider)
        self.keys, self.values = grown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask spans all slots; which of them a token may see is decided on positions, not on slots."""
        return self.cache.num_slots, 0

    def get_seq_length(self) -> int:
        """Rows are of unequal length: there is no one past length, and positions are always given to the model."""
        return 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.is_initialized = False


class RaggedCache(Cache):
    """
    A cache of `num_rows` rows in which the token at position `t` of row `i` lives in slot `i * length + t`; or, with
    `num_slots`, in slot `firsts[i] + t` of a pool, where rows take as many slots as their text needs ([`assign`]).

    Nothing is ever moved to bring rows into line: a row has no gaps, so slot order is position order (sliding windows
    count right), and a rejected draft token needs no rollback, because the next token with that position replaces it.

    Args:
        num_rows (`int`): Rows N.
        length (`int`): Slots per row at the start.
        max_length (`int`): Slots per row at most.
        block_size (`int`, *optional*, defaults to 128): Rows grow by at least this many slots at a time.
        num_slots (`int`, *optional*): Slots of the pool. Rows do not grow then.
        device (`torch.device`, *optional*): Where it is decided which slots a row of a pool has.
    """

    def __init__(
        self,
        num_rows: int,
        length: int,
        max_length: int,
        block_size: int = 128,
        num_slots: int | None = None,
        device: torch.device | None = None,
    ):
        super().__init__(layers=[])
        self.num_rows = num_rows
        self.max_length = max_length
        self.block_size = block_size
        self.length = min(max_length, -(-length // block_size) * block_size)
        self.slots: torch.Tensor = torch.empty(0, dtype=torch.long)
        self.pool_size = num_slots
        # Of rows at equal distances, which only `reserve` changes: a step need not work them out again.
        self._firsts = torch.arange(num_rows, device=device) * self.length
        if num_slots is not None:
            self.length = max_length
            self._firsts, self._sizes = torch.zeros(2, num_rows, dtype=torch.long, device=device)
            self.share()

    @property
    def num_slots(self) -> int:
        return self.num_rows * self.length if self.pool_size is None else self.pool_size

    def firsts(self, device: torch.device) -> torch.Tensor:
        """First slot of each row. `torch.LongTensor` of shape `(N,)`."""
        firsts: torch.Tensor = self._firsts.to(device)
        return firsts

    def share(self) -> None:
        """Give all rows of a pool equal parts of it."""
        if self.pool_size is None:
            return
        size = min(self.max_length, self.pool_size // self.num_rows)
        self._firsts.copy_(torch.arange(self.num_rows, device=self._firsts.device) * size)
        self._sizes.fill_(size)

    def assign(self, rows: torch.Tensor, firsts: torch.Tensor, sizes: torch.Tensor) -> None:
        """
        Give rows of a pool other slots, all of shape `(R,)`. A row of size 0 keeps nothing.

        Args:
            rows (`torch.LongTensor`): Rows.
            firsts (`torch.LongTensor`): First slot of each.
            sizes (`torch.LongTensor`): Slots of each.
        """
        self._firsts[rows], self._sizes[rows] = firsts, sizes

    def reserve(self, length: int) -> None:
        """
        Make room for rows of `length` tokens.

        Grows by half of what is there, at least one block and at most to `max_length`, so that the copies of a long
        generation add up to a small multiple of the final size.

        Args:
            length (`int`): Slots that each row must have.

        Raises:
            `ValueError`: If `length` is over `max_length`.
        """
        if length <= self.length:
            return
        if length > self.max_length:
            raise ValueError(f"`length` ({length}) must be at most `max_length` ({self.max_length}).")
        wanted = max(length, self.length + max(self.block_size, self.length // 2))
        new_length = min(self.max_length, -(-wanted // self.block_size) * self.block_size)
        for layer in self.layers:
            layer.grow(self.num_rows, self.length, new_length)
        self.length = new_length
        self._firsts = torch.arange(self.num_rows, device=self._firsts.device) * new_length

    def slots_of(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """
        Slots of tokens; a position below zero or past the row's end goes to the spare slot.

        Args:
            rows (`torch.LongTensor` of shape `(T,)`): Row of each token.
            positions (`torch.LongTensor` of shape `(T,)`): Its position in that row.

        Returns:
            `torch.LongTensor` of shape `(T,)`.
        """
        if self.pool_size is None:
            return _slots(rows, positions, self.num_rows, self.length)
        return _pool_slots(rows, positions, self._firsts, self._sizes, self.pool_size)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See [`RaggedLayer.update`]. Layers appear as they are met; one that shares another's states stays empty."""
        while len(self.layers) <= layer_idx:
            self.layers.append(RaggedLayer(self))
        layer: RaggedLayer = self.layers[layer_idx]
        return layer.update(key_states, value_states)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.num_slots, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes allocated for keys and values."""
        return sum(
            stored.numel() * stored.element_size()
            for layer in self.layers
            if layer.is_initialized
            for stored in (layer.keys, layer.values)
        )


@fused
def _slots(rows: torch.Tensor, positions: torch.Tensor, num_rows: int, length: int) -> torch.Tensor:
    inside = (positions >= 0) & (positions < length)
    return torch.where(inside, rows * length + positions, num_rows * length)


@fused
def _pool_slots(
    rows: torch.Tensor, positions: torch.Tensor, firsts: torch.Tensor, sizes: torch.Tensor, num_slots: int
) -> torch.Tensor:
    inside = (positions >= 0) & (positions < sizes[rows])
    return torch.where(inside, firsts[rows] + positions, num_slots)
