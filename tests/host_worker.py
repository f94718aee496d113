"""vLLM's worker on a CPU, with memory of the host in place of that of a GPU."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from laurel.extensions.vllm.engine import VllmEngine
from laurel.extensions.vllm.loading import choose_loading
from laurel.extensions.vllm.worker import LaurelWorker
from laurel.generation.weights.handles import GpuHandle, SharedMemory
from weight_workers import from_shared_memory, in_shared_memory, one_gpu

BLOCK_BYTES = 20_000


class HostWorker(LaurelWorker):
    """Mixed into vLLM's worker: only what asks for a GPU is replaced."""

    def laurel_gpu(self) -> str | None:
        return next(iter(one_gpu()))

    def laurel_read_handle(self, handles: dict[str, Any]) -> list[int]:
        (fields,) = handles.values()
        found: list[int] = from_shared_memory(GpuHandle(*fields), 0).tolist()
        return found

    def laurel_take_chunk(self, entries: list[Any], handles: dict[str, Any]) -> None:
        engine = importlib.import_module("vllm.distributed.weight_transfer.ipc_engine")
        engine.packed_ipc_consumer = read_from_host
        torch.accelerator.synchronize = lambda *_: None
        super().laurel_take_chunk(entries, handles)


def read_from_host(
    *,
    ipc_handle: dict[str, tuple[Any, ...]],
    names: list[str],
    shapes: list[list[int]],
    dtype_names: list[str],
    tensor_sizes: list[int],
    device_index: int,
    importer: Any,
) -> list[tuple[str, Tensor]]:
    """As vLLM's `packed_ipc_consumer`, of which it takes what it does not do on a GPU."""
    packed: Any = importlib.import_module("vllm.distributed.weight_transfer.packed_tensor")
    (arguments,) = ipc_handle.values()
    handle = GpuHandle(arguments[1][0], *arguments[7:10], *arguments[11:])
    values = from_shared_memory(handle, 0)[: sum(tensor_sizes)]
    dtypes = [getattr(torch, name) for name in dtype_names]
    found = packed.unpack_tensor(values, names, shapes, dtypes, tensor_sizes)
    return [(name, tensor.clone()) for name, tensor in found]


class HostEngine(VllmEngine):
    """Loads weights by handles of memory of the host."""

    def _start(self, name: str, model: str, arguments: Any) -> None:
        changed = {
            "worker_extension_cls": f"{__name__}.{HostWorker.__name__}",
            "weight_transfer_config": {"backend": "ipc"},
        }
        super()._start(name, model, lambda: arguments() | changed)

    async def _prepare(self) -> None:
        await super()._prepare()
        found = await choose_loading("ipc", self._ask, visible=one_gpu, memory=small_memory)
        self._loader = type(self._loader)(
            ask=self._ask, loading=found, shapes=self._shapes, num_bytes=0, memory=small_memory
        )


def small_memory(gpus: Any, *, num_bytes: int = BLOCK_BYTES) -> SharedMemory:
    return SharedMemory(gpus, num_bytes=num_bytes, share=in_shared_memory)
