"""Memory for keys and values: sequences of about the same length side by side in one tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Shelf:
    """Keys and values of sequences of at most `length` tokens, slot by slot without gaps."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.owners: list[int] = []
        """Whose the slots are. When one leaves, the last takes its slot."""
        self._slots: dict[int, int] = {}
        self._capacity = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all layers."""
        return sum(t.nbytes for pair in self._layers.values() for t in pair)

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """What the used slots hold of one layer, made at the first call.

        Args:
            index: Number of the layer.
            key: `[..., H_kv, D]`, of the dtype and on the device to use.
            value: `[..., H_kv, D_v]`, likewise.

        Returns:
            Views `[slots, H_kv, length, D]` and `[slots, H_kv, length, D_v]`.
        """
        if index not in self._layers:
            # Zeros: what a mask hides is still multiplied, by 0, and must be finite.
            self._layers[index] = (self._empty(key), self._empty(value))
        keys, values = self._layers[index]
        return keys[: len(self.owners)], values[: len(self.owners)]

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros((self._capacity, like.shape[-2], self.length, like.shape[-1]))

    def add(self, owners: Sequence[int]) -> None:
        """Give each a slot after those in use."""
        for owner in owners:
            self._slots[owner] = len(self.owners)
            self.owners.append(owner)
        if len(self.owners) > self._capacity:
            self._resize(max(len(self.owners), 2 * self._capacity))

    def remove(self, owner: int) -> None:
        """Free a slot, and memory when most of it is free."""
        slot, last = self._slots.pop(owner), self.owners.pop()
        if last != owner:
            self.owners[slot] = last
            self._slots[last] = slot
            for pair in self._layers.values():
                for tensor in pair:
                    tensor[slot] = tensor[len(self.owners)]
        if not self.owners:
            self._layers.clear()
            self._capacity = 0
        elif 4 * len(self.owners) <= self._capacity:
            self._resize(2 * len(self.owners))

    def slot(self, owner: int) -> int:
        """Where a sequence lies."""
        return self._slots[owner]

    def take(self, other: Shelf, owners: Sequence[int]) -> None:
        """Copy what another, shorter shelf holds of sequences that have slots on both."""
        theirs = torch.tensor([other.slot(owner) for owner in owners])
        mine = torch.tensor([self.slot(owner) for owner in owners])
        for index, (keys, values) in other._layers.items():
            places = mine.to(keys.device)
            sources = theirs.to(keys.device)
            own = self.layer(index, keys[0].transpose(0, 1), values[0].transpose(0, 1))
            for target, source in zip(own, (keys, values), strict=True):
                target[places, :, : other.length] = source[sources]

    def _resize(self, capacity: int) -> None:
        used = min(len(self.owners), self._capacity)
        self._capacity = capacity
        for index, pair in self._layers.items():
            resized = []
            for tensor in pair:
                larger = tensor.new_zeros((capacity, *tensor.shape[1:]))
                larger[:used] = tensor[:used]
                resized.append(larger)
            self._layers[index] = (resized[0], resized[1])
