"""What was found out before, up to a number of things."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Memory(Generic[T]):
    """Values by key. What was not used for longest goes when it is full.

    Safe to use from several threads at once.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[bytes, T] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, key: bytes, value: T) -> None:
        """Keep a value, in place of what was kept before."""
        with self._lock:
            self._kept[key] = value
            self._kept.move_to_end(key)
            if len(self._kept) > self._capacity:
                self._kept.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Keep nothing under this key."""
        with self._lock:
            self._kept.pop(key, None)

    def get(self, key: bytes) -> T | None:
        """What was kept under this key, if it still is."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)
