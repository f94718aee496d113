"""What `laurel export` is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """What the command line says."""

    model: str
    output: Path
    step: int | None = None
    """Of a run: this checkpoint, not its best."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    overwrite: bool = False
    evaluations: Sequence[Path] = ()
    """What `laurel eval ... --output` wrote."""
    without_conversations: bool = False
    """Leave no conversation of the data in `scoring.json`."""
    push_to_hub: str | None = None
    private: bool = False
    max_length: int | None = None
    """For a model without `scoring.json`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpu_threads: int | None = None
    settings: Sequence[str] = field(default_factory=tuple)
    """What `--set` says."""
    as_json: bool = False
