"""Tensors that ranks hold in shares, in safetensors files: each rank writes and reads its own.

The files are those of torch's distributed checkpoints in their safetensors form; the header of each
says where in the whole tensor its parts begin. Whoever reads takes what overlaps with its own
shares, so the ranks may be others than those that wrote, or a single process. Nothing in the files
can run code. A file that holds whole tensors is read in the same way.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from laurel.errors import CheckpointError


def plan_shares(directory: Path, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """Copy to the host what this rank is to write of some tensors: a collective call.

    Args:
        directory: Made if need be; the same on every rank, on a disk that all share.
        tensors: The same names on every rank. What is not spread is the same everywhere, and is
            written once.

    Returns:
        What writes the copies, this rank's own and without the others.

    Raises:
        CheckpointError: A rank could not begin; said on all of them.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    from laurel.models.share_writer import ShareWriter

    writer = ShareWriter(directory)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        raise CheckpointError(f"'{directory}' could not be written: {_said(error)}") from error
    return writer.write


def read_shares(
    directory: Path, like: Callable[[str], Tensor | None], *, leave_out: str | None = None
) -> dict[str, Tensor]:
    """The tensors in the files of a directory. Each rank reads by itself.

    Args:
        directory: What `plan_shares` had filled, or one with files of whole tensors.
        like: Of the name of a tensor one of its shape that is spread as it shall be; None where it
            has a shape of its own. What is not spread comes on the CPU.
        leave_out: Beginning of the names of tensors that are not wanted.

    Raises:
        CheckpointError: A part is missing, or a tensor has not the shape of the other.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = HuggingFaceStorageReader(path=str(directory))
    targets: dict[str, Any] = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if leave_out is not None and name.startswith(leave_out):
            continue
        _refuse_gaps(directory, name, entry)
        targets[name] = _target(directory, name, entry, like(name))
    if not targets:
        return {}
    try:
        with warnings.catch_warnings():
            # It says that no ranks take part.
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            load(targets, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"'{directory}' cannot be read: {_said(error)}") from error
    return targets


def _refuse_gaps(directory: Path, name: str, entry: Any) -> None:
    """Refuse a tensor that the files do not have all of, which torch would leave as memory was."""
    present = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    if present != math.prod(entry.size):
        raise CheckpointError(
            f"'{directory}' has {present:,} of the {math.prod(entry.size):,} numbers of {name}: "
            "a file is missing"
        )


def _target(directory: Path, name: str, entry: Any, like: Tensor | None) -> Tensor:
    """Memory for what is read of a tensor."""
    dtype = entry.properties.dtype
    if like is None or not entry.size:
        return torch.empty(entry.size, dtype=dtype)
    if entry.size != like.shape:
        # The end of a tensor is where its last part ends.
        raise CheckpointError(
            f"'{directory}': {name} is {list(entry.size)} and its weight {list(like.shape)}: a "
            "file is missing, or it cannot be divided over ranks"
        )
    return torch.empty_like(like, dtype=dtype, device=None if isinstance(like, DTensor) else "cpu")


def _said(error: Any) -> str:
    """What failed, on the first rank where something did."""
    rank, (cause, _) = min(error.failures.items())
    return f"rank {rank}: {type(cause).__name__}: {cause}"
