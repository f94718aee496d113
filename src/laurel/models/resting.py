"""Models and their optimizer on the host for a while, when others need the memory of the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Resting:
    """What a learner keeps on a device. On a CPU there is nothing to give back."""

    def __init__(self, models: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> None:
        """Name what lies there; nothing is moved yet."""
        self._models = models
        self._optimizer = optimizer
        self._homes: list[tuple[nn.Module, torch.device]] = []
        self._states: list[tuple[dict[str, Any], str, torch.device]] = []

    def sleep(self) -> None:
        """Move everything to the host. Gradients are dropped."""
        self._optimizer.zero_grad(set_to_none=True)
        for model in self._models:
            device = next(model.parameters()).device
            if device.type != "cpu":
                self._homes.append((model, device))
                model.to("cpu")
        for state in self._optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.device.type != "cpu":
                    self._states.append((state, name, value.device))
                    state[name] = value.to("cpu")
        if self._homes:
            torch.cuda.empty_cache()

    def wake(self) -> None:
        """Move everything back to where it was."""
        while self._homes:
            model, device = self._homes.pop()
            model.to(device)
        while self._states:
            state, name, device = self._states.pop()
            state[name] = state[name].to(device)
