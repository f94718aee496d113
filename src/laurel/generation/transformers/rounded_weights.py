"""Rounds the weights of a policy's linear layers once, before many tokens are drawn with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from laurel.models.forest.policy import PolicyModel


@contextmanager
def rounded_weights(model: PolicyModel) -> Iterator[None]:
    """Multiply with a copy of the linear weights, in the dtype that autocast would round them to.

    Autocast rounds a weight in every call of its layer. A decoding step multiplies every weight
    with a few rows, so that rounding from float32 moves four times the bytes of the product. The
    values are those of autocast, so completions do not change. The parameters themselves stay,
    because a checkpoint may be saved meanwhile. The copy ends with the context: training needs the
    memory, and changes the weights.

    Args:
        model: The policy. Nothing is rounded unless autocast lowers its precision, nor where its
            weights are sharded.
    """
    layers = _layers(model) if model.lowers_precision else []
    try:
        for layer in layers:
            layer.rounded = layer.weight.detach().to(model.precision)
            layer.__class__ = _RoundedLinear
        if model.lowers_precision and model.device.type != "cpu":
            model.rounded_head_VD = model.head.weight.detach().to(model.precision)
        yield
    finally:
        model.rounded_head_VD = None
        for layer in layers:
            layer.__class__ = nn.Linear
            layer.__dict__.pop("rounded", None)


def _layers(model: PolicyModel) -> list[nn.Linear]:
    return [
        layer
        for layer in model.causal_lm.modules()
        if type(layer) is nn.Linear
        and layer is not model.head
        and layer.weight.dtype == torch.float32
        and not isinstance(layer.weight, DTensor)
    ]


class _RoundedLinear(nn.Linear):
    rounded: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.rounded, self.bias)
