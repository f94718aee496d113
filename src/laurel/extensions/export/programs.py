"""Exports for programs: what `laurel.api` does with `laurel export`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from laurel.extensions.export.export import run_export
from laurel.extensions.export.options import ExportOptions

if TYPE_CHECKING:
    from rich.console import Console


def export_model(output: Path, console: Console, **fields: Any) -> Path:
    """Export a model; what is chosen are fields of `ExportOptions`."""
    run_export(ExportOptions(output=output, **fields), messages=console)
    return output
