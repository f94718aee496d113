"""Workers for the tests of worker groups. They import neither Ray nor a group."""

import os
import time
from contextlib import suppress

import psutil

from laurel.errors import ConfigError
from laurel.workers.rendezvous import join, leave


class Worker:
    """Does as it is told."""

    def __init__(self, place, offset=0, *, scale=1, marker=None):
        self.place = place
        self.offset = offset
        self.scale = scale
        self.marker = marker
        self.log = []

    def where(self):
        return self.place.role, self.place.rank, self.place.world_size

    def compute(self, value, *, extra=0):
        return (value + self.offset + extra) * self.scale + self.place.rank

    def note(self, word):
        self.log.append(word)
        return list(self.log)

    def first_of(self, array):
        return float(array[0])

    def fail(self, rank, text):
        if self.place.rank == rank:
            raise ValueError(text)
        return "fine"

    def fail_as_a_user_would(self):
        raise ConfigError("policy.model_name: no such model")

    def leave_the_process(self):
        raise SystemExit(3)

    def unpicklable(self):
        return lambda: None

    def pid(self):
        return os.getpid()

    def environment(self):
        return dict(os.environ)

    def sleep(self, rank, seconds):
        if self.place.rank == rank:
            time.sleep(seconds)
        return self.place.rank

    def wait_for(self, rank, path):
        while self.place.rank == rank and not os.path.exists(path):
            time.sleep(0.01)
        return self.place.rank

    def shutdown(self):
        if self.marker is not None:
            with open(f"{self.marker}-{self.place.rank}", "a", encoding="utf-8") as file:
                file.write("closed\n")


def agents_and_others():
    """Of the processes below this one, Ray's two agents, when they are there, and the others."""
    while True:
        agents, others = [], []
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
                is_agent = "Agent" in " ".join(child.cmdline()[:1])
                (agents if is_agent else others).append(child.pid)
        if len(agents) == 2:
            return agents, others
        time.sleep(0.05)


class CountingPickles:
    """A sequence that knows how often it has been made ready to travel."""

    def __init__(self, values):
        self.values = values
        self.num_pickles = 0

    def __getitem__(self, index):
        return self.values[index]

    def __reduce__(self):
        self.num_pickles += 1
        return CountingPickles, (self.values,)


class Broken:
    """Cannot be made."""

    def __init__(self, place):
        raise ConfigError(f"rank {place.rank} has no model")


class Summing:
    """A rank of torch.distributed."""

    def __init__(self, place):
        import torch

        torch.set_num_threads(1)
        self.place = place
        join(place)

    def pid(self):
        return os.getpid()

    def total(self, value):
        import torch
        import torch.distributed as dist

        tensor_K = torch.tensor([value * (self.place.rank + 1)])
        dist.all_reduce(tensor_K)
        return tensor_K.item(), dist.get_rank(), dist.get_world_size()

    def raise_or_sum(self, rank):
        if self.place.rank == rank:
            raise ValueError("out of memory, say")
        return self.total(1.0)

    def sleep_or_sum(self, rank):
        if self.place.rank == rank:
            time.sleep(60)
        return self.total(1.0)

    def shutdown(self):
        leave()
