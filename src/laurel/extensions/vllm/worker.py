"""Laurel's extension of vLLM's worker. It runs in vLLM's process, which imports it by name.

Written against vLLM 0.32. It reaches the worker only through attributes, so it can be imported
without vLLM; the probe of `VllmEngine` checks that it still works.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from laurel.extensions.vllm.processes import remove, segments_of
from laurel.generation.weights.buckets import TensorEntry
from laurel.generation.weights.handles import GpuHandle, gpu_of, opened


class LaurelWorker:
    """Methods that extend vLLM's worker class, which mixes them in (`worker_extension_cls`)."""

    model_runner: Any
    device: torch.device
    reload_weights: Callable[..., None]
    update_weights: Callable[[dict[str, Any]], None]
    """vLLM's own, which its engine for weight transfer carries out."""

    def laurel_end_with(self, pid: int) -> None:
        """End this process and vLLM's scheduler when the process with this id has ended.

        Otherwise vLLM would outlive a program that is killed, and keep its memory. Its shared
        memory is removed, too.
        """
        if hasattr(os, "pidfd_open"):
            psutil: Any = importlib.import_module("psutil")  # vLLM needs it too
            arguments = pid, os.getppid(), segments_of([psutil.Process()])
            waiting = threading.Thread(
                target=_end_after, args=arguments, name="laurel-end", daemon=True
            )
            waiting.start()

    def laurel_prepare_stage(self) -> None:
        """Allocate the buffer in which a later pipeline stage receives its inputs.

        vLLM allocates it in its profiling pass, which is skipped for a model that runs eagerly on a
        CPU with a cache of given size.
        """
        runner = self.model_runner
        if hasattr(runner, "intermediate_tensors") and runner.intermediate_tensors is None:
            runner.profile_run()

    def laurel_wider_weights(self, precision: str) -> list[str]:
        """Return the names of the weights that are held in a wider dtype than the model's.

        Buffers do not count: vLLM's own, such as the scales of its cache, are in no checkpoint.
        """
        width = getattr(torch, precision).itemsize
        parameters = self.model_runner.get_model().named_parameters()
        return [n for n, t in parameters if t.is_floating_point() and t.itemsize > width]

    def laurel_load_weights(self, paths: list[str]) -> list[str]:
        """Load weights from safetensors files; return the names of modules that were repacked."""
        self.reload_weights(weights_iterator=_tensors(paths))
        with torch.no_grad():
            return repack(self.model_runner.get_model())

    def laurel_gpu(self) -> str | None:
        """Return the identifier of this worker's GPU; None if it computes on a CPU."""
        return gpu_of(self.device) if self.device.type == "cuda" else None

    def laurel_read_handle(self, handles: dict[str, Any]) -> list[int]:
        """Return the bytes that the handle of this worker's GPU opens."""
        handle = GpuHandle(*handles[gpu_of(self.device)])
        values: list[int] = opened(handle, self.device.index).tolist()
        return values

    def laurel_take_chunk(self, entries: list[Any], handles: dict[str, Any]) -> None:
        """Pass a chunk of weights in shared GPU memory to vLLM's `ipc` engine.

        vLLM expects the arguments of a function of torch, classes among them, which it would only
        take pickled, and with `VLLM_ALLOW_INSECURE_SERIALIZATION` set. So they are put together
        here, from plain values.
        """
        self.update_weights(ipc_update(entries, handles))

    def laurel_report_untruncated_logprobs(self) -> bool:
        """Make the sampler report log-probabilities from before top-p and top-k.

        Returns:
            False if this vLLM's sampler does not support it.
        """
        sampler = getattr(self.model_runner, "sampler", None)
        return sampler is None or report_untruncated(sampler)


def ipc_update(entries: list[Any], handles: dict[str, Any]) -> dict[str, Any]:
    """Return a chunk of weights as vLLM's `IPCWeightTransferUpdateInfo` takes it."""
    table = [TensorEntry(*entry) for entry in entries]
    return {
        "names": [entry.name for entry in table],
        "dtype_names": [entry.dtype for entry in table],
        "shapes": [list(entry.shape) for entry in table],
        "tensor_sizes": [entry.num_bytes for entry in table],
        # vLLM puts its own number of the device in.
        "ipc_handles": {gpu: GpuHandle(*fields).arguments(0) for gpu, fields in handles.items()},
    }


def repack(model: torch.nn.Module) -> list[str]:
    """Refresh the packed copy of every weight that has one; return the names of those modules.

    On a CPU vLLM multiplies by a packed copy of each matrix (`cpu_linear` holds it). Reloading a
    layer packs it anew, but a head that is tied to the embedding has no tensor of its own in the
    checkpoint: vLLM loads the embedding, skips the head, and keeps using the head's old copy.
    Layers that released their weight after packing are empty here, and the reload has repacked
    them.
    """
    packed = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, Tensor) and weight.numel():
            module.quant_method.process_weights_after_loading(module)
            packed.append(name)
    return packed


def report_untruncated(sampler: Any) -> bool:
    """Make a sampler report the log-probabilities of `softmax(logits / temperature)`.

    vLLM offers them before the temperature (`raw_logprobs`), or after temperature, top-p and top-k
    (`processed_logprobs`), which renormalises them over fewer tokens. This function wraps the stage
    that truncates, in either of vLLM's two samplers, so that it passes on its input.

    Returns:
        False if the sampler has no such stage.
    """
    if (truncating := getattr(sampler, "topk_topp_sampler", None)) is not None:
        truncating.forward = _with_logprobs_before(truncating.forward)
        return True
    if (sample := getattr(sampler, "_sample_random", None)) is not None:
        sampler._sample_random = _with_logits_before(sample)
        return True
    return False


def _with_logprobs_before(forward: Callable[..., tuple[Tensor, Tensor | None]]) -> Any:
    def truncate(
        logits: Tensor, generators: Any, k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if k is None and p is None:
            return forward(logits, generators, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)  # forward overwrites the logits
        return forward(logits, generators, k, p)[0], logprobs

    return truncate


def _with_logits_before(sample: Callable[..., tuple[Tensor, Tensor]]) -> Any:
    def truncate(logits: Tensor, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
        untouched = logits.clone()
        return sample(logits, *arguments, **options)[0], untouched

    return truncate


def _end_after(pid: int, scheduler: int, segments: set[str]) -> None:
    select.select([os.pidfd_open(pid)], [], [])  # readable when it has ended
    remove(segments)  # first: others may end this process
    if scheduler not in (pid, 1):
        os.kill(scheduler, signal.SIGKILL)
    os._exit(1)


def _tensors(paths: list[str]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in paths:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                yield name, file.get_tensor(name)
