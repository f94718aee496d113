"""A model computed in a higher precision than its weights are held, or gathered, in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def weights_as(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Give every module its own weights in another dtype, for as long as it computes.

    Widening loses nothing, so what comes out is what these very weights mean. Only the modules that
    compute at the moment hold their weights twice.
    """
    narrow: dict[nn.Module, dict[str, Any]] = {}

    def widen(module: nn.Module, _inputs: Any) -> None:
        narrow[module] = dict(module._parameters)
        for name, parameter in narrow[module].items():
            if parameter is not None and parameter.is_floating_point():
                module._parameters[name] = _wide(parameter, dtype)

    def restore(module: nn.Module, *_: Any) -> None:
        module._parameters.update(narrow.pop(module, {}))

    with ExitStack() as stack:
        for module in model.modules():
            if module._parameters:
                stack.callback(restore, module)  # also where its computation raised
                stack.callback(module.register_forward_pre_hook(widen).remove)
                stack.callback(module.register_forward_hook(restore).remove)
        yield


def _wide(parameter: Tensor, dtype: torch.dtype) -> Any:
    return parameter.detach().to(dtype)
