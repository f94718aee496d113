"""Packages as pip installs them, written by a test: modules, and metadata with entry points."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def installed(
    folder: Path, name: str, modules: Mapping[str, str], points: Mapping[str, Mapping[str, str]]
) -> Path:
    """Write a package with its entry points, by group and name; the folder goes on `sys.path`."""
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (
        f"[laurel.{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in points.items()
    )
    (info / "entry_points.txt").write_text("\n".join(groups))
    return folder
