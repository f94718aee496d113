"""The device, threads and random generators of this process."""

from __future__ import annotations

import ctypes
import os
import random

import numpy as np
import torch

from laurel.config.yaml_tree import THREADS
from laurel.errors import ConfigError, setting_of
from laurel.sandbox.limits import available_cores
from laurel.workers.bounds import bound_count


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
