"""Rows on disk, and the real data where it is present."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from laurel.config.data import DatasetConfig
from laurel.data.preferences import load_preferences
from laurel.data.report import DataReport
from laurel.types import Preference

Loader = Callable[..., tuple[list[Preference], DataReport]]


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows as JSON lines and returns the path."""

    def write(rows: Sequence[Any], name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def load(write_rows: Callable[..., Path]) -> Loader:
    """Loads rows (or a path) with the defaults of a run; keywords are the configuration's keys."""

    def run(
        rows: Sequence[Any] | Path | None,
        *,
        ties: Any = "drop",
        duplicates: Any = "drop",
        on_bad_row: Any = "error",
        attributes: Sequence[str] = (),
        max_samples: int | None = None,
        **config: Any,
    ) -> tuple[list[Preference], DataReport]:
        if rows is not None:
            path = rows if isinstance(rows, Path) else write_rows(rows)
            config["data_path"] = str(path)
        return load_preferences(
            DatasetConfig(**config),
            name="train",
            ties=ties,
            duplicates=duplicates,
            on_bad_row=on_bad_row,
            attributes=attributes,
            max_samples=max_samples,
        )

    return run


@pytest.fixture
def real_data() -> Path:
    """The folder of real data sets, or a skip that says how to name it."""
    folder = Path(os.environ.get("LAUREL_DATA", "../shared/data"))
    if not (folder / "ukp_convarg1").is_dir():
        pytest.skip(f"no real data in {folder}; set LAUREL_DATA to the folder that holds it")
    return folder
