"""Both ends of a transfer of weights, without a model, for processes that a test can kill."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from laurel.errors import EngineError
from laurel.generation.engine_worker import EngineWorker
from laurel.generation.weights.broadcast import Meeting, WeightLink, broadcast_tensors, received
from laurel.generation.weights.buckets import unpack
from laurel.generation.weights.handles import Chunk, GpuHandle, OpenedMemory, SharedMemory
from laurel.generation.weights.held import HeldDtype
from laurel.training.learner_group import WeightExporter
from laurel.types import Generated, GenerationRequest, Weights
from laurel.workers.rendezvous import LOOPBACK, RankPlace, store_of


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


def in_shared_memory(block: Tensor) -> GpuHandle:
    """A handle of memory of the host, which stands in for that of a GPU."""
    path = f"/proc/{os.getpid()}/fd/{os.memfd_create('block')}"
    os.truncate(path, block.numel())
    block.set_(torch.from_file(path, shared=True, size=block.numel(), dtype=torch.uint8))
    return GpuHandle(block.numel(), path.encode(), block.numel(), 0, b"", 0, b"", False)


def from_shared_memory(handle: GpuHandle, device: int) -> Tensor:
    """What `in_shared_memory` has shared, in another process."""
    path = handle.memory.decode()
    return torch.from_file(path, shared=True, size=handle.num_bytes, dtype=torch.uint8)


def shared_blocks() -> int:
    """How many blocks of shared memory this process has open, its own and those of others."""
    return Path("/proc/self/maps").read_text().count("/memfd:block")


def one_gpu() -> dict[str, torch.device]:
    return {"GPU-1": torch.device("cpu")}


class Giving(WeightExporter):
    """What of a `LearnerWorker` gives weights away; its tensors are those of `every_kind`."""

    def __init__(
        self, place: RankPlace, *, host: str | None = None, takes_port: bool = False
    ) -> None:
        super().__init__(place)
        self._host = host
        self._other = socket.socket() if takes_port else None
        self._seed = 0

    def pid(self) -> int:
        return os.getpid()

    def host(self) -> str:
        return self._host or super().host()

    def shared_memory(self, num_bytes: int) -> SharedMemory:
        return SharedMemory(one_gpu(), num_bytes=num_bytes, share=in_shared_memory)

    def shared_blocks(self) -> int:
        return shared_blocks()

    def learn(self, seed: int) -> None:
        self._seed = seed

    def invite(self, address: str, size: int, patience: float) -> int:
        if self._other is None:
            return super().invite(address, size, patience)
        self._other.bind((address, 0))  # somebody else got it first
        self._other.listen()
        port = int(self._other.getsockname()[1])
        place = RankPlace(role="policy", world_size=size, master_port=port)
        store_of(place, timeout=timedelta(seconds=patience))
        return port

    def named_weights(self, changing_only: bool) -> Iterator[tuple[str, Tensor]]:
        return of(self._seed, changing_only)


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
        self.held_dtype: HeldDtype | None = None
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

    def end_conversations(self, names: Sequence[str]) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    def close(self) -> None: ...


class KeepingWorker(EngineWorker):
    """Tells what its engine keeps, and lets a test decide what becomes of it."""

    def __init__(self, place: RankPlace) -> None:
        super().__init__(place, Keeping)
        self._opened = OpenedMemory(visible=one_gpu, open_handle=from_shared_memory)

    def see_no_gpu(self) -> None:
        self._opened = OpenedMemory(visible=dict, open_handle=from_shared_memory)

    def shared_blocks(self) -> int:
        return shared_blocks()

    def pid(self) -> int:
        return os.getpid()

    def kept(self) -> tuple[int, list[str], dict[str, Tensor]]:
        engine: Any = self._engine
        return engine.weight_version, engine.came, engine.kept

    def expect(self, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self._engine, name, value)


class GivingOnGpu(Giving):
    """Shares memory of the GPU itself."""

    def shared_memory(self, num_bytes: int) -> SharedMemory:
        return WeightExporter.shared_memory(self, num_bytes)

    def allocated(self) -> int:
        torch.cuda.ipc_collect()
        return torch.cuda.memory_allocated()


class OpeningOnGpu:
    """Opens memory of the GPU."""

    def __init__(self, place: RankPlace) -> None:
        self._opened = OpenedMemory()

    def copied(self, chunk: Chunk) -> dict[str, Tensor]:
        return {part.name: unpack(part).cpu() for part in self._opened.copy(chunk)}

    def close(self) -> None:
        self._opened.close()


def told(device: str) -> list[tuple[str, Tensor]]:
    """What the second of two processes hears from the first; on GPUs each has its own."""
    rank = dist.get_rank()
    if device == "cuda":
        torch.cuda.set_device(rank)
    link = WeightLink(RankPlace(role="weights"))
    ports = [link.invite(LOOPBACK, 2, 60.0) if rank == 0 else 0]
    dist.broadcast_object_list(ports)
    meeting = Meeting(
        number=0, rank=rank, size=2, address=LOOPBACK, port=ports[0], device=device, patience=60.0
    )
    group = link.group(meeting)
    assert link.group(meeting) is group
    if rank == 0:
        broadcast_tensors(group, of(1), max_bytes=1024)
        return []
    parts = [part for bucket in received(group) for part in bucket]
    assert all(unpack(part).device.type == device for part in parts)
    return [(part.name, unpack(part).cpu()) for part in parts]
