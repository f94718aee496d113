"""The device, threads and random generators of a process, and the counts that its machine carries.

A command checks counts before it loads anything else, so torch is imported where it is used.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from laurel.config.plugged import fields_in
from laurel.config.yaml_tree import THREADS, OfMachine, Section
from laurel.errors import ConfigError, counted, setting_of
from laurel.sandbox.limits import available_cores

if TYPE_CHECKING:
    import torch

PER_CORE = {"threads": 16, "processes": 16, "calls": 1024}
"""How many of each a core may carry; more would only wait, or take the machine down."""


def prepare(device: str, *, cpu_threads: int | None, seed: int) -> torch.device:
    """Choose the device, set the threads and seed every generator.

    Args:
        device: Choice as in `cluster.device`.
        cpu_threads: Threads of torch on CPU; None is what `threads_of_each` says.

    Raises:
        ConfigError: A GPU is asked for and there is none, or too many threads for this machine.
    """
    import torch

    chosen = choose_device(device)
    if cpu_threads is not None:
        bound_count("cluster.cpu_threads", cpu_threads, THREADS)
    torch.set_num_threads(cpu_threads or threads_of_each())
    seed_everything(seed)
    return chosen


def threads_of_each(processes: int = 1) -> int:
    """Return how many threads torch uses on a CPU in each of several processes of a machine.

    Each has its share of the cores that this process may use, unless OMP_NUM_THREADS, which torch
    reads itself, says another number.
    """
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if said.isdecimal() and int(said) > 0:
        return int(said)
    return max(1, available_cores() // processes)


def choose_device(choice: str) -> torch.device:
    """Choose the device that `cluster.device` means on this machine."""
    import torch

    if choice == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if choice == "cuda" and not torch.cuda.is_available():
        asked = setting_of("cluster.device", "cuda")
        raise ConfigError(f"{asked}: torch sees no GPU here; set it to auto or cpu")
    return torch.device(choice)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch."""
    import numpy as np
    import torch

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


# Counts of threads, processes and calls, which the machine bounds.


def bound_count(key: str, count: int, bound: OfMachine) -> None:
    """Check that this machine can carry a count.

    Raises:
        ConfigError: It cannot; the message has the key, and the largest count.
    """
    if count <= PER_CORE[bound.what]:  # one core carries them
        return
    cores = available_cores()
    most = PER_CORE[bound.what] * cores
    if count > most:
        raise ConfigError(
            f"{setting_of(key, count)}: this process may use {counted(cores, 'core')}, on which at "
            f"most {most} {bound.what} are started; lower it"
        )


def check_counts(config: Section) -> None:
    """Check every count of a configuration that this machine has to carry.

    Raises:
        ConfigError: One of them is too large.
    """
    for key, count, bound in counts_in(config):
        if not bound.is_lowered:
            bound_count(key, count, bound)


def counts_in(config: Section, path: str = "") -> Iterator[tuple[str, int, OfMachine]]:
    """Yield the counts that are marked with `OfMachine`, by dotted key, and their marks."""
    for name, field in fields_in(config).items():
        value, here = getattr(config, name), f"{path}{name}"
        bound = next((one for one in field.metadata if isinstance(one, OfMachine)), None)
        if bound is not None and value is not None:
            yield here, value, bound
        if isinstance(value, Section):
            yield from counts_in(value, f"{here}.")
        elif isinstance(value, dict | list):
            for key, one in value.items() if isinstance(value, dict) else enumerate(value):
                behind = f".{key}." if isinstance(value, dict) else f"[{key}]."
                if isinstance(one, Section):
                    yield from counts_in(one, f"{here}{behind}")
