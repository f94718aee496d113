"""The options of `laurel export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The options of the command line."""

    model: str
    output: Path
    average: Sequence[str] = ()
    """Models whose mean is written, instead of `model`."""
    step: int | None = None
    """The step of a run's checkpoint; None takes its best."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    overwrite: bool = False
    evaluations: Sequence[Path] = ()
    """Reports of `laurel eval ... --output`, for the card."""
    without_conversations: bool = False
    """Keep the conversations of the data out of `scoring.json`."""
    push_to_hub: str | None = None
    private: bool = False
    max_length: int | None = None
    """The longest conversation, for a model without `scoring.json`."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpu_threads: int | None = None
    settings: Sequence[str] = field(default_factory=tuple)
    """The settings of `--set`."""
    as_json: bool = False
