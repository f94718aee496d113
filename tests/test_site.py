"""The site's navigation and the pages are the same; `make docs` builds it strictly, in CI."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
MADE = {"architecture.md", "contributing.md", "changelog.md", "reference"}
"""By `docs/site_hooks.py`."""


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def hooks() -> Any:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def named(entry: Any) -> Iterator[str]:
    """The pages that an entry of a navigation names, or a list of entries."""
    if isinstance(entry, str):
        yield entry
        return
    for below in entry.values() if isinstance(entry, dict) else entry:
        yield from named(below)


def test_every_page_has_its_place_and_every_place_its_page(settings: dict[str, Any]) -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert sorted(named(settings["nav"])) == sorted(pages | MADE)


def test_the_build_that_ci_runs_counts_warnings() -> None:
    """`mkdocs build --quiet` drops them before they are counted, and is never strict."""
    (build,) = re.findall(r"^\t\$\(DOCS\) build.*$", (ROOT / "Makefile").read_text("utf-8"), re.M)
    assert "--strict" in build
    assert "--quiet" not in build
    assert "-q" not in build


def test_a_page_that_vanished_stays_in_the_navigation_for_mkdocs_to_name(
    hooks: Any, settings: dict[str, Any]
) -> None:
    config = SimpleNamespace(
        nav=[{"Guides": ["gone.md", {"Gone as well": "lost.md"}]}, "reference"]
    )
    found = list(named(hooks.on_config(config).nav))
    assert found[:2] == ["gone.md", "lost.md"]
    assert "reference/rewards.md" in found
    assert settings["strict"] is True
    assert settings["validation"]["nav"] == dict.fromkeys(
        ("omitted_files", "not_found", "absolute_links"), "warn"
    )
