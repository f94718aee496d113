"""Rows on disk, and the real data where it is present."""

import json
import os
from pathlib import Path

import pytest

from laurel.config.data import DatasetConfig
from laurel.data.preferences import load_preferences


@pytest.fixture
def write_rows(tmp_path):
    """Writes rows as JSON lines and returns the path."""

    def write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


@pytest.fixture
def load(write_rows):
    """Loads rows (or a path) with the defaults of a run; keywords are the configuration's keys."""

    def run(
        rows,
        *,
        ties="drop",
        duplicates="drop",
        on_bad_row="error",
        attributes=(),
        max_samples=None,
        limit_of_set=None,
        **config,
    ):
        if rows is not None:
            path = rows if isinstance(rows, Path) else write_rows(rows)
            config["data_path"] = str(path)
        return load_preferences(
            DatasetConfig(max_samples=limit_of_set, **config),
            name="train",
            ties=ties,
            duplicates=duplicates,
            on_bad_row=on_bad_row,
            attributes=attributes,
            max_samples=max_samples,
        )

    return run


@pytest.fixture
def real_data():
    """The folder of real data sets, or a skip that says how to name it."""
    folder = Path(os.environ.get("LAUREL_DATA", "../shared/data"))
    if not (folder / "ukp_convarg1").is_dir():
        pytest.skip(f"no real data in {folder}; set LAUREL_DATA to the folder that holds it")
    return folder
