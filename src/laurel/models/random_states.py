"""The states of the global random generators, taken and put back as plain values."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_log = logging.getLogger(__name__)


def random_states() -> dict[str, Any]:
    """States of the global generators: Python's, numpy's, torch's on the CPU and on each GPU.

    GPUs are left out while this process has not used one.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if used else []
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state().numpy(),
        "cuda": [state.numpy() for state in cuda],
    }


def restore_random_states(states: Mapping[str, Any]) -> None:
    """Put the generators back to what `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(torch.from_numpy(states["torch"]))
    available = torch.cuda.device_count() if states["cuda"] else 0
    for device, state in enumerate(states["cuda"][:available]):
        torch.cuda.set_rng_state(torch.from_numpy(state), device)
    if available < len(states["cuda"]):
        _log.warning(
            "the checkpoint has random states of %d GPUs and %d are here: the run goes on, but "
            "not with the numbers it would have drawn",
            len(states["cuda"]),
            available,
        )
