"""Weights in buckets, on their way to engines in other processes.

Neither side holds more than two buckets at a time, besides the model itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laurel.errors import BroadcastError, EngineError
from laurel.types import Weights


class PackedTensor(NamedTuple):
    """A tensor's name, dtype, shape and values as bytes, which any process can unpack.

    It holds only the tensor's own values; a pickled tensor would include its whole storage.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: npt.NDArray[np.uint8] | Tensor
    """The tensor's bytes in order, as uint8: a numpy array, or a torch tensor where they are on a
    GPU."""


Bucket = list[PackedTensor]


def pack_tensor(name: str, tensor: Tensor) -> PackedTensor:
    """Pack a tensor's values on the CPU, without a copy if it is contiguous and already there."""
    values = bytes_of(tensor.detach().to("cpu")).numpy()
    return PackedTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), values)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, as uint8 [bytes] on the same device.

    The bytes of a contiguous tensor are not copied.
    """
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def unpack(packed: PackedTensor) -> Tensor:
    """Return the tensor that was packed, as a view of the packed bytes where they are writable."""
    dtype: torch.dtype = getattr(torch, packed.dtype)
    values = packed.values
    if isinstance(values, Tensor):
        return values.view(dtype).reshape(packed.shape)
    if not values.size:
        return torch.empty(packed.shape, dtype=dtype)
    values = values if values.flags.writeable else values.copy()
    return torch.from_numpy(values).view(dtype).reshape(packed.shape)


def buckets_of(tensors: Iterable[tuple[str, Tensor]], *, max_bytes: int) -> Iterator[Bucket]:
    """Yield named tensors, in order, in buckets of at most `max_bytes` each.

    A tensor larger than that gets a bucket of its own.
    """
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(pack_tensor(name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


class TensorEntry(NamedTuple):
    """A tensor's name, dtype, shape and place (first byte, number of bytes) in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


def unpack_tensor(values: Tensor, entry: TensorEntry) -> PackedTensor:
    """Return one tensor of a received bucket, as a view of the bucket's bytes.

    Args:
        values: uint8 [bytes]: the values of all tensors of the bucket.

    Raises:
        BroadcastError: The bucket has too few bytes.
    """
    part = values[entry.start : entry.start + entry.num_bytes]
    if part.numel() < entry.num_bytes:
        raise BroadcastError(f"of {entry.name} came {part.numel()} of {entry.num_bytes} bytes")
    return PackedTensor(
        entry.name, entry.dtype, tuple(entry.shape), part if part.is_cuda else part.numpy()
    )


class WeightStream:
    """A stream of weights that one thread fills bucket by bucket while another reads them.

    `put` blocks until the previous bucket has been read.
    """

    def __init__(self, version: int, *, changing_only: bool = False) -> None:
        """Make an empty stream.

        Args:
            changing_only: Whether only the weights that training changes will be sent.
        """
        self.weights = Weights(version=version, tensors=self._tensors)
        if changing_only:
            self.weights = Weights(version=version, tensors=_absent, changing=self._tensors)
        self._changed = threading.Condition()
        # All below is guarded by `_changed`.
        self._bucket: Bucket | None = None
        self._is_complete = False
        self._has_reader = True
        self._failure: EngineError | None = None
        self._num_put = self._num_repeated = 0

    def repeat(self) -> None:
        """Prepare for all buckets to be put again from the first; tensors put before are skipped.

        The bucket boundaries may differ, but the tensors must be the same, in the same order.
        """
        with self._changed:
            self._num_repeated, self._num_put = max(self._num_repeated, self._num_put), 0

    def put(self, bucket: Bucket) -> None:
        """Pass a bucket to the reader; drop it if the reader has left."""
        with self._changed:
            known = min(self._num_repeated - self._num_put, len(bucket))
            self._num_put += len(bucket)
            if (bucket := bucket[max(known, 0) :]) == []:
                return
            self._changed.wait_for(lambda: self._bucket is None or not self._has_reader)
            self._bucket = bucket if self._has_reader else None
            self._changed.notify_all()

    def complete(self) -> None:
        """Mark the end of the stream: all buckets were put."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def cut(self, failure: EngineError) -> None:
        """End the stream early; the reader gets the failure as an exception."""
        with self._changed:
            self._failure = self._failure or failure
            self._has_reader = False
            self._changed.notify_all()

    def leave(self) -> None:
        """Mark the reader as gone, so that `put` no longer blocks."""
        with self._changed:
            self._has_reader = False
            self._bucket = None
            self._changed.notify_all()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        while (bucket := self._next()) is not None:
            for packed in bucket:
                yield packed.name, unpack(packed)

    def _next(self) -> Bucket | None:
        with self._changed:
            self._changed.wait_for(lambda: self._bucket or self._is_complete or self._failure)
            if self._failure is not None:
                raise self._failure
            bucket, self._bucket = self._bucket, None
            self._changed.notify_all()
            return bucket


def _absent() -> Iterator[tuple[str, Tensor]]:
    raise EngineError("weights came without those that do not change, which this engine never had")
