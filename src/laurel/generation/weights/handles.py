"""Weights in GPU memory that other processes open by handles (CUDA IPC), without the host.

A handle is good on the GPU of its memory alone, and while its process keeps the memory. The values
of a chunk lie one behind the other, as vLLM's `ipc` engine for weight transfer reads them. No GPU
has run this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from laurel.errors import BroadcastError
from laurel.generation.weights.buckets import Bucket, TensorEntry, bytes_of, unpack_tensor

CHUNK_BYTES = 256 << 20
"""Bytes of weights that lie in shared memory at a time; a larger weight has more for itself."""


class GpuHandle(NamedTuple):
    """What opens a block of bytes on a GPU in another process: plain values, nothing pickled."""

    num_bytes: int
    memory: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    waits_for_event: bool

    def arguments(self, device: int) -> tuple[Any, ...]:
        """Return the arguments of torch's `rebuild_cuda_tensor`, which vLLM expects as a handle.

        Args:
            device: The number of the block's GPU in the process that opens it.
        """
        return (
            torch.Tensor,
            torch.Size([self.num_bytes]),
            (1,),
            0,
            torch.storage.TypedStorage,
            torch.uint8,
            device,
            self.memory,
            self.storage_bytes,
            self.storage_offset,
            False,
            self.counter,
            self.counter_offset,
            self.event,
            self.waits_for_event,
        )


def handle_of(block: Tensor) -> GpuHandle:
    """Return a handle of a block of uint8 on a GPU."""
    reduce: Any = reductions.reduce_tensor
    _, found = reduce(block)
    handle = GpuHandle(block.numel(), *found[7:10], *found[11:])
    # Torch would hold the memory until it has been opened and closed once, for ever where nobody
    # opens it. Here its owner knows when it has been read.
    storage: Any = torch.UntypedStorage
    storage._release_ipc_counter(handle.counter, handle.counter_offset)
    return handle


def opened(handle: GpuHandle, device: int) -> Tensor:
    """Return the memory that another process shares, as uint8 on the GPU of this number."""
    rebuild: Any = reductions.rebuild_cuda_tensor
    block: Tensor = rebuild(*handle.arguments(device))
    return block


def visible_gpus() -> dict[str, torch.device]:
    """Return the GPUs of this process, each by an identifier that all processes share."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return {gpu_of(device): device for device in devices}


def gpu_of(device: torch.device) -> str:
    """Return the identifier (UUID) of a GPU."""
    return str(torch.cuda.get_device_properties(device).uuid)


class Chunk(NamedTuple):
    """Weights in shared memory, and its handle on each GPU, by the GPU's identifier."""

    entries: list[TensorEntry]
    handles: dict[str, GpuHandle]


class OpenedMemory:
    """Copies chunks out of memory that other processes share."""

    def __init__(
        self,
        *,
        visible: Callable[[], Mapping[str, torch.device]] = visible_gpus,
        open_handle: Callable[[GpuHandle, int], Tensor] = opened,
    ) -> None:
        self._visible = visible
        self._open = open_handle
        self._last: tuple[GpuHandle, Tensor] | None = None
        """The memory that is open, which serves all chunks of a handle."""

    def copy(self, chunk: Chunk) -> Bucket:
        """Copy a chunk, of which its process may then write the next one.

        Raises:
            BroadcastError: None of the chunk's GPUs is one of this process.
        """
        here = self._visible()
        gpu = next((gpu for gpu in chunk.handles if gpu in here), None)
        if gpu is None:
            raise BroadcastError(
                "no process of the learner shares a GPU with this engine: its handles are of "
                f"{', '.join(chunk.handles)}, and here is {', '.join(here) or 'no GPU'}"
            )
        handle = GpuHandle(*chunk.handles[gpu])
        if self._last is None or self._last[0] != handle:
            self.close()
            self._last = handle, self._open(handle, here[gpu].index or 0)
        end = chunk.entries[-1].start + chunk.entries[-1].num_bytes
        values = self._last[1][:end].clone()
        if values.is_cuda:
            torch.cuda.current_stream(values.device).synchronize()
        return [unpack_tensor(values, TensorEntry(*entry)) for entry in chunk.entries]

    def close(self) -> None:
        """Give the memory back to the process that shares it."""
        self._last = None


class SharedMemory:
    """A block of memory on each of several GPUs, filled with one chunk of weights at a time."""

    def __init__(
        self,
        gpus: Mapping[str, torch.device],
        *,
        num_bytes: int = CHUNK_BYTES,
        share: Callable[[Tensor], GpuHandle] = handle_of,
    ) -> None:
        """Allocate nothing yet.

        Args:
            gpus: The device of each GPU in this process, by the GPU's identifier.
            num_bytes: Size of a block; it grows where one weight is larger.
        """
        self._gpus = dict(gpus)
        self._num_bytes = num_bytes
        self._share = share
        self._blocks: dict[str, Tensor] = {}
        self._handles: dict[str, GpuHandle] = {}

    def _allocate(self, num_bytes: int) -> None:
        self._blocks.clear()  # the memory may serve the larger block
        self._num_bytes = num_bytes
        self._blocks = {
            gpu: torch.empty(num_bytes, dtype=torch.uint8, device=device)
            for gpu, device in self._gpus.items()
        }
        self._handles = {gpu: self._share(block) for gpu, block in self._blocks.items()}

    def chunks(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Chunk]:
        """Yield weights in chunks; each must have been read when the next one is asked for."""
        entries: list[TensorEntry] = []
        filled = 0
        for name, tensor in tensors:
            size = tensor.nbytes
            # torch views bytes as wider values only at multiples of their width.
            has_room = filled + size <= self._num_bytes and filled % tensor.itemsize == 0
            if entries and not has_room:
                yield self._written(entries)
                entries, filled = [], 0
            if size > self._num_bytes or not self._blocks:
                self._allocate(max(size, self._num_bytes))
            self._write(bytes_of(tensor), filled)
            dtype = str(tensor.dtype).removeprefix("torch.")
            entries.append(TensorEntry(name, dtype, tuple(tensor.shape), filled, size))
            filled += size
        if entries:
            yield self._written(entries)

    def _write(self, values: Tensor, start: int) -> None:
        for block in self._blocks.values():
            block[start : start + len(values)].copy_(values)

    def _written(self, entries: list[TensorEntry]) -> Chunk:
        for block in self._blocks.values():
            if block.is_cuda:  # another process cannot wait for this one's stream
                torch.cuda.current_stream(block.device).synchronize()
        return Chunk(entries, self._handles)
