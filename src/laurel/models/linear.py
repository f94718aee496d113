"""The matrix products of linear layers, by the quicker of the two CPU libraries that torch holds.

torch multiplies float32 matrices with MKL, which keeps the widest vector instructions for Intel's
processors. On others that have them, oneDNN, which torch holds too and uses for bfloat16, takes
half the time for the same arithmetic (docs/benchmarks.md). The choice depends on the processor
alone, never on a timing, so a run that goes on computes the bits that it would have computed.
"""

from __future__ import annotations

import functools
import platform
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

Library = Literal["torch", "onednn"]


@functools.cache
def preferred_library() -> Library:
    """The quicker library for float32 products here."""
    is_built_in: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not (is_built_in and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return "torch"
    return library_for(vendor=_vendor(), vectors=torch.backends.cpu.get_cpu_capability())


def library_for(*, vendor: str, vectors: str) -> Library:
    """The quicker library for float32 products on a processor, where torch holds both.

    Args:
        vendor: The maker, as the processor names it.
        vectors: Its widest vector instructions, as torch names them.
    """
    return "onednn" if vendor == "AuthenticAMD" and vectors == "AVX512" else "torch"


def multiply_with(library: Library, model: nn.Module) -> int:
    """Let all plain linear layers of a model use one library; weights and names stay as they are.

    Only float32 on the CPU, outside autocast, is affected.

    Returns:
        The number of layers that changed.
    """
    before, after = (nn.Linear, OneDnnLinear) if library == "onednn" else (OneDnnLinear, nn.Linear)
    layers = [module for module in model.modules() if type(module) is before]
    for layer in layers:
        layer.__class__ = after
    return len(layers)


class OneDnnLinear(nn.Linear):
    """`nn.Linear` whose float32 products on the CPU are oneDNN's."""

    def forward(self, input: Tensor) -> Tensor:
        """See `nn.Linear`."""
        is_float32 = input.dtype == self.weight.dtype == torch.float32
        if (
            not is_float32
            or input.device.type != "cpu"
            or not input.numel()
            or torch.is_autocast_enabled("cpu")
        ):
            return super().forward(input)
        return cast(Any, _Affine).apply(input, self.weight, self.bias)  # type: ignore[no-any-return]


class _Affine(torch.autograd.Function):
    """`input @ weight.T + bias`, and its derivatives, each one product of oneDNN."""

    @staticmethod
    def forward(ctx: FunctionCtx, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _times_transposed(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        to_input, to_weight, to_bias = ctx.needs_input_grad
        gradient_TO = gradient.reshape(-1, weight.shape[0])
        return (
            _times_transposed(gradient, weight.t()) if to_input else None,
            _to_weight(gradient_TO, input.reshape(-1, weight.shape[1])) if to_weight else None,
            gradient_TO.sum(0) if to_bias else None,
        )


def _to_weight(gradient_TO: Tensor, input_TI: Tensor) -> Tensor:
    """`gradient.T @ input`. The left factor is copied on the way, so it is the narrower one."""
    if gradient_TO.shape[1] <= input_TI.shape[1]:
        return _times_transposed(gradient_TO.t(), input_TI.t())
    return _times_transposed(input_TI.t(), gradient_TO.t()).t()


def _times_transposed(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """`left @ right.T + bias`, for matrices in either memory order."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right, bias, "none", [], "")
    return product


def _vendor() -> str:
    """The maker of the processor, as it names itself."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("vendor_id"):
                return line.partition(":")[2].strip()
    description = platform.processor()
    return next((name for name in ("AuthenticAMD", "GenuineIntel") if name in description), "")
