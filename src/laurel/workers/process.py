"""The device, threads and random generators of this process."""

from __future__ import annotations

import ctypes
import os
import random
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from laurel.config.yaml_tree import THREADS
from laurel.errors import BroadcastError, ConfigError, setting_of
from laurel.sandbox.limits import available_cores
from laurel.workers.bounds import bound_count
from laurel.workers.rendezvous import LOOPBACK, RankPlace


def prepare(device: str, *, cpu_threads: int | None, seed: int) -> torch.device:
    """Choose the device, set the threads and seed every generator.

    Args:
        device: Choice as in `cluster.device`.
        cpu_threads: Threads of torch on CPU; None is one per core that this process may use.

    Raises:
        ConfigError: A GPU is asked for and there is none, or too many threads for this machine.
    """
    chosen = choose_device(device)
    if cpu_threads is not None:
        bound_count("cluster.cpu_threads", cpu_threads, THREADS)
    torch.set_num_threads(cpu_threads or available_cores())
    seed_everything(seed)
    return chosen


def choose_device(choice: str) -> torch.device:
    """Choose the device that `cluster.device` means on this machine."""
    if choice == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if choice == "cuda" and not torch.cuda.is_available():
        asked = setting_of("cluster.device", "cuda")
        raise ConfigError(f"{asked}: torch sees no GPU here; set it to auto or cpu")
    return torch.device(choice)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def give_back_freed_memory() -> None:
    """Make glibc return blocks of 2 MiB and more to the system as soon as they are freed.

    Otherwise glibc learns to keep blocks of up to 32 MiB. The layers that ranks gather, and gloo's
    buffers, are of such sizes and fragment its heap: a rank would hold twice what it uses
    (`benchmarks/parallelism.py`). Where the C library is another one, or MALLOC_MMAP_THRESHOLD_
    says another size, nothing happens.
    """
    map_from = -3  # M_MMAP_THRESHOLD of malloc.h; once it is set, nothing is learned any more
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(map_from, 2 * 2**20)


def trim_heap() -> None:
    """Return to the system what is free in glibc's heap now, between what is in use, too.

    A pass over tokens of another number needs blocks of other sizes, which do not fit into those
    that the pass before has freed. Unlike `give_back_freed_memory` it costs nothing within a pass.
    Where the C library is another one, nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


# A group of processes of which the first tells and the others hear, beside all other groups.
#
# torch's own groups have every rank of a program, once and for all. This one has those that join:
# one rank of a learner and engines that come and go. It belongs to nobody's `init_process_group`.


class BroadcastGroup:
    """A broadcast group of processes that have met. After an error it is closed."""

    def __init__(
        self, place: RankPlace, store: Any, device: torch.device, *, patience: float
    ) -> None:
        """Join the group and wait for the others.

        Args:
            place: In this group; rank 0 tells.
            device: Device of the tensors: gloo broadcasts those on a CPU, NCCL those on GPUs. A
                GPU can be of one member only.
            patience: Seconds for the others to come, and for each broadcast.

        Raises:
            BroadcastError: They did not come.
        """
        self.place = place
        self.device = device
        self.limit = timedelta(seconds=patience)
        """Longest duration of one broadcast."""
        self._store = store
        self._group: Any = None
        try:
            self._group = self._nccl() if device.type == "cuda" else self._gloo()
        except RuntimeError as error:
            raise BroadcastError(
                f"the processes did not meet: {torch_error_text(error)}"
            ) from error

    def _gloo(self) -> Any:
        kind: Any = dist.ProcessGroupGloo
        options = kind._Options()
        options._timeout = self.limit
        # Only who is asked can reach it: on one machine nobody from outside.
        is_near = self.place.master_address == LOOPBACK
        address = LOOPBACK if is_near else self.place.host
        options._devices = [kind.create_device(hostname=address)]
        return kind(self._store, self.place.rank, self.place.world_size, options)

    def _nccl(self) -> Any:
        # NCCL itself waits for the others without end, so those who do not come are missed here.
        ranks = [f"rank {rank} is here" for rank in range(self.place.world_size)]
        self._store.set(ranks[self.place.rank], "")
        self._store.wait(ranks, self.limit)
        kind: Any = dist.ProcessGroupNCCL
        # Its own limit, which ends the whole process, stays the long one that torch gives it.
        return kind(self._store, self.place.rank, self.place.world_size, kind.Options())

    def start(self, tensor: Tensor) -> PendingBroadcast:
        """Begin to send or receive one contiguous tensor on the group's device, without waiting.

        It may not be touched before `PendingBroadcast.wait` returns.

        Raises:
            BroadcastError: Somebody is gone.
        """
        if self._group is None:
            raise BroadcastError("its group is closed")
        options: Any = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self.limit
        try:
            return PendingBroadcast(self, self._group.broadcast([tensor], options))
        except RuntimeError as error:
            raise self.broken(error) from error

    def broken(self, error: RuntimeError) -> BroadcastError:
        """Close the group, so that no other member waits for this one, and make the error."""
        self.close()
        return BroadcastError(torch_error_text(error))

    def close(self) -> None:
        """Leave the group. Pending broadcasts of others fail. Idempotent."""
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()  # what hangs on the GPU hangs for ever


class PendingBroadcast:
    """A broadcast in progress."""

    def __init__(self, group: BroadcastGroup, work: Any) -> None:
        """Wrap `work`, torch's handle of a broadcast of this group."""
        self._group, self._work = group, work

    def wait(self) -> None:
        """Wait until the tensor may be read, or written, again.

        Raises:
            BroadcastError: A rank is gone or did not answer in time.
        """
        try:
            self._work.wait(self._group.limit)
        except RuntimeError as error:
            raise self._group.broken(error) from error


def torch_error_text(error: RuntimeError) -> str:
    """Shorten an error of torch to its text, without source locations."""
    line = str(error).partition("\n")[0]
    return line.rpartition("] ")[2] if line.startswith("[/") else line
