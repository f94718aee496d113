"""The two ways on which new weights reach vLLM's processes from the process that started them.

`files`: safetensors in memory. `ipc`: GPU memory that both processes have open, where vLLM's
workers compute on GPUs of this process. Weights arrive in this process by a route of
`generation.weights`, or are the learner's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from laurel.errors import ConfigError, EngineError, LaurelError, setting_of
from laurel.extensions.vllm.weight_files import Shape, require_tensors, written
from laurel.generation.weights.handles import SharedMemory, visible_gpus
from laurel.generation.weights.held import HeldDtype, as_held
from laurel.types import Weights

Ask = Callable[..., Awaitable[list[Any]]]
"""Calls a method of every worker of vLLM's."""
MakeMemory = Callable[..., SharedMemory]

KEY = "policy.generation.vllm_cfg.weight_loading"
TRIED = bytes(range(7))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightLoading:
    """How vLLM's processes get new weights, and why so."""

    name: Literal["files", "ipc"]
    reason: str
    gpus: Mapping[str, torch.device] = field(default_factory=dict)
    """The device in this process of each GPU that vLLM computes on, with `ipc`."""


async def choose_loading(
    setting: Literal["auto", "ipc", "files"],
    ask: Ask,
    *,
    visible: Callable[[], Mapping[str, torch.device]] = visible_gpus,
    memory: MakeMemory = SharedMemory,
) -> WeightLoading:
    """Choose how weights reach vLLM: by handles where they serve, which is tried.

    Raises:
        ConfigError: `ipc` is set, and does not serve.
    """
    if setting == "files":
        return WeightLoading(name="files", reason="it is set")
    gpus = await ask("laurel_gpu")
    here = visible() if all(gpus) else {}
    if not all(gpus):
        why_not = "vLLM computes on a CPU"
    elif missing := sorted({*gpus} - {*here}):
        why_not = f"this process does not see vLLM's GPU {', '.join(missing)}"
    else:
        shared = {gpu: here[gpu] for gpu in dict.fromkeys(gpus)}
        failure = await _try(ask, memory(shared, num_bytes=len(TRIED)))
        if failure is None:
            await ask("init_weight_transfer_engine", {"packed": True})
            reason = "it is set" if setting == "ipc" else "vLLM computes on GPUs of this process"
            return WeightLoading(name="ipc", reason=reason, gpus=shared)
        why_not = f"vLLM cannot open memory of this process: {failure}"
    if setting == "ipc":
        raise ConfigError(f"{setting_of(KEY, 'ipc')}: {why_not}; set it to auto or files")
    return WeightLoading(name="files", reason=why_not)


async def _try(ask: Ask, memory: SharedMemory) -> str | None:
    tensor = torch.tensor(list(TRIED), dtype=torch.uint8)
    try:
        (chunk,) = memory.chunks([("tried", tensor)])
        answers = await ask("laurel_read_handle", chunk.handles)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wrong = next((answer for answer in answers if bytes(answer) != TRIED), None)
    return None if wrong is None else f"it read {wrong} where {list(TRIED)} had been written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Loads weights into vLLM in the chosen way."""

    ask: Ask
    loading: WeightLoading
    shapes: Mapping[str, Shape]
    """The shapes of all weights, by name."""
    num_bytes: int
    """An estimate of the size of all weights."""
    memory: MakeMemory = SharedMemory

    @asynccontextmanager
    async def prepared(
        self, weights: Weights, *, has_all: bool, held: HeldDtype | None
    ) -> AsyncIterator[Callable[[], Awaitable[object]]]:
        """Prepare new weights, and yield what loads them.

        What fails before that leaves vLLM with its old weights; what fails while it loads leaves it
        with a part of the new ones, and it cannot begin again.

        Raises:
            EngineError: A weight is missing or has another shape, there is no room for files, or
                vLLM does not take what it is given.
        """
        if self.loading.name == "ipc":
            yield partial(self._by_handles, weights, has_all=has_all, held=held)
            return
        expected: Any = {"expected": self.shapes, "expected_bytes": self.num_bytes}
        files = written(weights, held=held, has_all=has_all, **expected)
        paths = await asyncio.to_thread(files.__enter__)
        try:
            yield partial(self.ask, "laurel_load_weights", [str(path) for path in paths])
        finally:
            await asyncio.to_thread(files.__exit__, None, None, None)

    async def _by_handles(self, weights: Weights, *, has_all: bool, held: HeldDtype | None) -> None:
        changing = weights.changing if has_all else None
        came: dict[str, Shape] = {}
        try:
            memory = self.memory(self.loading.gpus)
            chunks = memory.chunks(as_held((changing or weights.tensors)(), held))
            await self.ask("start_weight_update")
            while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
                await self.ask("laurel_take_chunk", *chunk)
                came |= {entry.name: entry.shape for entry in chunk.entries}
            expected = {n: s for n, s in self.shapes.items() if changing is None or n in came}
            require_tensors(expected, came, weights.version)
            await self.ask("finish_weight_update")
        except LaurelError:
            raise
        except Exception as error:
            raise EngineError(
                f"the weights of step {weights.version} did not reach vLLM by CUDA IPC: "
                f"{type(error).__name__}: {error}. {setting_of(KEY, 'files')} sends them through "
                "files in memory instead"
            ) from error
