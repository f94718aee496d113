"""Who writes what of a spread state, as torch's distributed checkpoints plan it, and the file."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import (
    CUSTOM_METADATA_KEY,
    SAVED_OFFSETS_KEY,
    _gen_file_name,
)
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from laurel.models.parallel import host_copy


class ShareWriter(HuggingFaceStorageWriter):
    """Plans with all ranks and copies this rank's part; the file is written by a call of its own.

    That needs no other rank and no device, so it may go on while they train; and it cannot wait for
    a rank that was lost.
    """

    def __init__(self, directory: Path) -> None:
        """See `HuggingFaceStorageWriter`."""
        super().__init__(path=str(directory), save_distributed=True)
        self._directory = directory
        self._file_name = ""
        self._parts: dict[str, Tensor] = {}
        self._offsets: dict[str, dict[str, list[int]]] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called by torch when all have agreed: take the copies."""
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is no tensor"
            name = item.index.fqn
            part = planner.resolve_data(item)
            assert isinstance(part, Tensor)
            self._parts[name] = host_copy(part)
            self._offsets[name] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
        if plan.items:
            self._file_name = _gen_file_name(1, 1, plan.storage_data["shard_index"])
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def write(self) -> None:
        """Write this rank's file, where it has one, and let the copies go.

        Raises:
            OSError, SafetensorError: The disk refuses.
        """
        parts, self._parts = self._parts, {}
        if not parts:
            return
        # One entry alone: of several the order would be drawn anew in every file.
        metadata = {CUSTOM_METADATA_KEY: json.dumps(self._offsets)}
        save_file(parts, self._directory / self._file_name, metadata=metadata)
