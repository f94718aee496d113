"""Both ends of a transfer of weights, without a model, for processes that a test can kill."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from laurel.distributed.rendezvous import Place, store_of
from laurel.engines.engine_worker import EngineWorker
from laurel.engines.weight_broadcast import Meeting, WeightLink, send
from laurel.errors import BroadcastError, EngineError
from laurel.types import Generated, GenerationRequest, Weights


def every_kind(seed: int) -> dict[str, Tensor]:
    """Tensors of all sorts, some larger than a bucket of 1 KB."""
    torch.manual_seed(seed)
    whole = torch.randn(24, 24)
    return {
        "small": torch.randn(3),
        "half": torch.randn(5, 3).bfloat16(),
        "odd": torch.randn(7).half(),
        "number": torch.randn(()),
        "empty": torch.zeros(0, 4),
        "large": torch.randn(64, 33),
        "turned": whole.T,
        "row": whole[3],
        "counts": torch.arange(seed, seed + 9),
        "flags": torch.tensor([True, False, True]),
        "last": torch.randn(2, 2).bfloat16(),
    }


class Giving:
    """What of a `LearnerWorker` gives weights away; its tensors are those of `every_kind`."""

    def __init__(self, place: Place, *, host: str | None = None, takes_port: bool = False) -> None:
        self._link = WeightLink(place)
        self._host = host
        self._other = socket.socket() if takes_port else None
        self._seed = 0

    def pid(self) -> int:
        return os.getpid()

    def host(self) -> str:
        return self._host or self._link.host

    def learn(self, seed: int) -> None:
        self._seed = seed

    def invite(self, address: str, size: int, patience: float) -> int:
        if self._other is None:
            return self._link.invite(address, size, patience)
        self._other.bind((address, 0))  # somebody else got it first
        self._other.listen()
        port = int(self._other.getsockname()[1])
        place = Place(role="policy", world_size=size, master_port=port)
        store_of(place, timeout=timedelta(seconds=patience))
        return port

    def send_weights(self, meeting: Meeting, changing_only: bool, num_bytes: int) -> str | None:
        try:
            send(self._link.group(meeting), of(self._seed, changing_only), max_bytes=num_bytes)
        except BroadcastError as error:
            self._link.close()
            return str(error)
        return None


def of(seed: int, changing_only: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The weights, or those of them that change."""
    tensors = every_kind(seed)
    chosen = ("half", "large") if changing_only else tensors
    return iter([(name, tensors[name]) for name in chosen])


class Keeping:
    """An engine that keeps what it was given, and draws nothing."""

    def __init__(self) -> None:
        self.weight_version = 0
        self.kept: dict[str, Tensor] = {}
        self.came: list[str] = []
        self.fate: tuple[int, int] | None = None
        """At which tensor a signal comes, and which."""
        self.refuses: str | None = None
        self._has_all = False

    async def update_weights(self, weights: Weights) -> None:
        await asyncio.to_thread(self._take, weights)

    def _take(self, weights: Weights) -> None:
        changing = weights.changing if self._has_all else None
        self.came = []
        for number, (name, tensor) in enumerate((changing or weights.tensors)()):
            if self.fate is not None and number == self.fate[0]:
                os.kill(os.getpid(), self.fate[1])
            if name == self.refuses:
                raise EngineError(f"it has no {name}")
            self.kept[name] = tensor.clone()
            self.came.append(name)
        self.weight_version, self._has_all = weights.version, True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        raise EngineError("it draws nothing")
        yield

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    def close(self) -> None: ...


class KeepingWorker(EngineWorker):
    """Tells what its engine keeps, and lets a test decide what becomes of it."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, Keeping)

    def pid(self) -> int:
        return os.getpid()

    def kept(self) -> tuple[int, list[str], dict[str, Tensor]]:
        engine: Any = self._engine
        return engine.weight_version, engine.came, engine.kept

    def expect(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self._engine, name, value)
