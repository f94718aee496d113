"""Chooses the faster of torch's two matrix libraries, MKL and oneDNN, for linear layers on CPUs.

torch multiplies float32 matrices with MKL, which uses the widest vector instructions only on
Intel's processors. On other processors that have these instructions, oneDNN takes half the time
(docs/benchmarks.md). Its sums round differently, by about 1e-6 of their size. That is within the
tolerance of sampling and of policy updates, but not of scores, so reward models keep MKL. The
choice depends only on the processor and the sizes, never on a timing.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LARGE = 2**22
"""The number of multiplications from which a product with gradients is faster with oneDNN."""


@contextmanager
def fast_matmul(model: nn.Module) -> Iterator[None]:
    """Let a model multiply with oneDNN while the context is open, if that is faster on this CPU.

    This affects plain linear layers that compute in float32 on the CPU. Where gradients are needed,
    only large products use oneDNN.
    """
    # The compiler chooses the products of compiled layers, and does not know this operation.
    is_compiled = any(module._compiled_call_impl is not None for module in model.modules())
    uses_onednn = prefers_onednn() and not is_compiled
    layers = [m for m in model.modules() if type(m) is nn.Linear] if uses_onednn else []
    for layer in layers:
        layer.__class__ = _OneDnnLinear
    try:
        yield
    finally:
        for layer in layers:
            layer.__class__ = nn.Linear


class _OneDnnLinear(nn.Linear):
    """A linear layer that computes float32 products on the CPU with oneDNN."""

    def forward(self, input: Tensor) -> Tensor:
        if (
            not input.dtype == self.weight.dtype == torch.float32
            or input.device.type != "cpu"
            or torch.is_autocast_enabled("cpu")
        ):
            return super().forward(input)
        if not torch.is_grad_enabled() or not (input.requires_grad or self.weight.requires_grad):
            return _product(input, self.weight, self.bias)
        if input.numel() * self.out_features < LARGE:
            return super().forward(input)
        product: Tensor = _LinearProduct.apply(input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product


class _LinearProduct(torch.autograd.Function):
    """Computes a linear layer with oneDNN, in the forward and the backward pass."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(input, weight)
        return _product(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_output: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        rows = by_output.flatten(0, -2)
        by_input = _product(by_output, weight.T.contiguous()) if needs_input else None
        by_weight = None
        if needs_weight:
            by_weight = _product(rows.T.contiguous(), input.flatten(0, -2).T.contiguous())
        return by_input, by_weight, rows.sum(0) if needs_bias else None


def _product(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `input @ weight.T + bias`, computed by oneDNN."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight, bias, "none", [], "")
    return product


@functools.cache
def prefers_onednn() -> bool:
    """Return whether this machine's processor multiplies faster with oneDNN than with MKL."""
    is_built_in: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return (
        is_built_in
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and _vendor() == "AuthenticAMD"
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
    )


def _vendor() -> str:
    """Return the name by which the processor identifies its vendor; empty if unknown."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("vendor_id"):
                return line.partition(":")[2].strip()
    description = platform.processor()
    return next((name for name in ("AuthenticAMD", "GenuineIntel") if name in description), "")
