"""Weights from the learner's ranks to engines that can read their memory.

On CPUs it is memory without a name that the kernel keeps as long as somebody has it open (Linux);
on GPUs it is CUDA's own sharing between processes (IPC), for engines on a GPU that a rank of the
learner has too. Nothing is sent but where a bucket lies, and nothing is left when a process dies.
"""

from __future__ import annotations

import importlib
import inspect
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from laurel.errors import BroadcastError
from laurel.generation.weights.buckets import Bucket, Entry, Parcel, part_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBucket:
    """A bucket in another process's memory. It is there until that process is asked for the
    second one after it."""

    lender: tuple[int, int] | None
    """Process and descriptor of memory on the CPU."""
    handle: tuple[Any, ...] | None
    """What torch makes of memory on a GPU (`torch.multiprocessing.reductions`)."""
    table: list[Entry]
    num_bytes: int


class Reach(NamedTuple):
    """Processes with the same name can read each other's memory."""

    name: str | None
    why_not: str = ""
    """Nobody can read it, and this is why."""


def reach_of(device: str) -> Reach:
    """Of this process.

    Args:
        device: `cpu` or `cuda`: where the memory is.
    """
    if device == "cuda":
        return Reach(str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not hasattr(os, "memfd_create") or not boot.exists():
        return Reach(None, "memory is shared like this on Linux alone")
    return Reach(f"{boot.read_text().strip()} {os.readlink('/proc/self/ns/pid')}")


class Lender:
    """One rank's side: buckets one after the other, two in its memory at a time.

    Every rank makes the same buckets, as each gathers every weight; who lends none keeps none.
    """

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], *, max_bytes: int, device: str | None
    ) -> None:
        """Begin at the first weight.

        Args:
            weights: On any device. They are copied one by one as they come.
            max_bytes: Size of a bucket; a larger tensor is one by itself.
            device: `cpu` or `cuda`: where buckets lie; None: this rank lends none.
        """
        self._weights = iter(weights)
        self._device = device
        self._memories = [_Memory(device), _Memory(device)]
        self._parcels = [Parcel(memory.had, max_bytes=max_bytes) for memory in self._memories]
        self._left: list[tuple[str, Tensor]] = []
        self._reason: str | None = None

    def next(self) -> SharedBucket | str | None:
        """The next bucket; None: there is no more, or this rank lends none; else why it cannot.

        The one before it stays what it is, that before the last does not.
        """
        self._parcels.reverse()
        self._memories.reverse()
        parcel = self._parcels[0]
        parcel.clear()
        left, self._left = self._left, []
        for name, tensor in chain(left, self._weights):
            if not parcel.has_room(tensor):
                self._left = [(name, tensor)]
                break
            try:
                parcel.add(name, tensor)
            except (OSError, RuntimeError) as error:  # the other ranks go on gathering
                self._reason = f"a bucket cannot be had in shared memory: {error}"
                self._lend_none()
                parcel.add(name, tensor)
        if self._reason is not None:
            return self._reason
        if self._device is None or parcel.is_empty:
            return None
        return self._memories[0].told(parcel)

    def _lend_none(self) -> None:
        self._device = None
        for parcel in self._parcels:
            parcel.keep_none()

    def close(self) -> None:
        """Let go of the memory. Idempotent."""
        self._lend_none()
        for memory in self._memories:
            memory.close()


class _Memory:
    """What one parcel is filled into."""

    def __init__(self, device: str | None) -> None:
        self._device = device
        self._descriptor = -1

    def had(self, num_bytes: int) -> Tensor | None:
        """So much memory, instead of what was had before."""
        self.close()
        if self._device is None:
            return None
        if self._device == "cuda":
            return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        self._descriptor = os.memfd_create("laurel-weights")
        # Asked for at once: memory that is not there would else end the process when it is written.
        os.posix_fallocate(self._descriptor, 0, num_bytes)
        return torch.frombuffer(mmap.mmap(self._descriptor, num_bytes), dtype=torch.uint8)

    def told(self, parcel: Parcel) -> SharedBucket:
        """Where a parcel lies, for others."""
        values = parcel.values
        if self._device == "cpu":
            return SharedBucket(
                lender=(os.getpid(), self._descriptor),
                handle=None,
                table=parcel.table,
                num_bytes=values.numel(),
            )
        reductions: Any = importlib.import_module("torch.multiprocessing.reductions")
        torch.cuda.current_stream().synchronize()
        _, handle = reductions.reduce_tensor(values)
        return SharedBucket(
            lender=None, handle=handle, table=parcel.table, num_bytes=values.numel()
        )

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def borrowed(shared: SharedBucket) -> Bucket:
    """A copy of the bucket, in memory of this process.

    Raises:
        BroadcastError: Its memory cannot be read from here.
    """
    try:
        values = _from_gpu(shared) if shared.handle is not None else _from_cpu(shared)
    except (OSError, ValueError, RuntimeError) as error:
        raise BroadcastError(
            f"the learner's memory cannot be read: {type(error).__name__}: {error}"
        ) from error
    return [part_of(values, entry) for entry in shared.table]


def _from_cpu(shared: SharedBucket) -> Tensor:
    if shared.num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    assert shared.lender is not None
    process, descriptor = shared.lender
    there = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mmap.mmap(there, shared.num_bytes, access=mmap.ACCESS_READ) as mapped:
            return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8).copy())
    finally:
        os.close(there)


def _from_gpu(shared: SharedBucket) -> Tensor:
    rebuild: Any = importlib.import_module("torch.multiprocessing.reductions").rebuild_cuda_tensor
    assert shared.handle is not None
    names = inspect.signature(rebuild).parameters
    handle = dict(zip(names, shared.handle, strict=True))
    # The same GPU may have another number here: each process counts those that it sees.
    handle["storage_device"] = torch.cuda.current_device()
    copied: Tensor = rebuild(**handle).clone()
    torch.cuda.current_stream().synchronize()
    return copied
