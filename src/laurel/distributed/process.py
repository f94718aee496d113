"""This process: its device, its threads, its random generators."""

from __future__ import annotations

import ctypes
import random

import numpy as np
import torch

from laurel.config.schema import ClusterConfig
from laurel.distributed.limits import available_cores
from laurel.errors import ConfigError, setting_of


def prepare(config: ClusterConfig, *, seed: int) -> torch.device:
    """Choose the device, set the threads and seed every generator.

    Raises:
        ConfigError: A GPU is asked for and there is none.
    """
    device = choose_device(config.device)
    torch.set_num_threads(config.cpu_threads or available_cores())
    seed_everything(seed)
    return device


def choose_device(choice: str) -> torch.device:
    """The device that `cluster.device` means here."""
    if choice == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if choice == "cuda" and not torch.cuda.is_available():
        asked = setting_of("cluster.device", "cuda")
        raise ConfigError(f"{asked}: torch sees no GPU here; set it to auto or cpu")
    return torch.device(choice)


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def give_back_freed_memory() -> None:
    """Have blocks of 2 MiB and more go back to the system as soon as they are freed.

    glibc else learns to keep blocks of up to 32 MiB. The layers that ranks gather, and what gloo
    sends them in, are of such sizes and cut its heap to pieces: a rank would hold twice what it
    uses (`benchmarks/parallelism.py`). Where the C library is another one, nothing happens.
    """
    map_from = -3  # M_MMAP_THRESHOLD of malloc.h; once it is set, nothing is learned any more
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(map_from, 2 * 2**20)
