"""README.md is short, begins with what a reader asks first, and its figures are today's."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laurel.cli.main import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ORDER = (
    "forest-light.svg",
    "Laurel is for engineers",
    "Not yet run on a GPU",
    "make demo",
    "make test",
    "report.png",
    "## Train a reward model",
    "## Score and serve",
    "## GRPO with a reward model",
    "## GRPO with a reward function of your own",
    "speed-light.svg",
    "2 CPU cores",
    "## Commands",
    "## Read on",
    "Apache-2.0",
)


@pytest.fixture(scope="module")
def figures() -> Iterator[Any]:
    path = ROOT / "docs" / "make_figures.py"
    spec = importlib.util.spec_from_file_location("make_figures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_it_is_short_and_in_order() -> None:
    assert len(README.encode()) <= 14_000
    assert len(README.splitlines()) <= 160
    at = 0
    for text in ORDER:
        assert text in README[at:], f"'{text}' is missing, or stands too early"
        at = README.index(text, at)


def test_the_status_stands_at_the_top() -> None:
    top = "\n".join(README.splitlines()[:25])
    assert "**Not yet run on a GPU.**" in top
    assert "Version 0.1; there is no release yet." in top


def test_the_table_has_every_command() -> None:
    names = {command.name for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    told = set(re.findall(r"`(?:laurel )?(\w+)`", README.partition("## Commands")[2]))
    assert names <= told, f"not in the table: {sorted(names - told)}"


def test_the_figures_are_drawn_from_what_is_there(
    figures: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assets = figures.ASSETS
    monkeypatch.setattr(figures, "ASSETS", tmp_path)
    for theme in figures.THEMES:
        figures.forest(theme)
        figures.speed(theme)
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == 4
    for path in drawn:
        shown = (assets / path.name).read_text(encoding="utf-8")
        assert shown == path.read_text(encoding="utf-8"), "run `python docs/make_figures.py`"


def test_the_ratios_in_words_are_those_of_the_figure(figures: Any) -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    values = {ratio.what: figures.measured(ratio, page) for ratio in figures.RATIOS}
    assert f"a GRPO step {values['GRPO step']:.1f} times as fast as TRL's" in README
    training = [value for what, value in values.items() if what.startswith("Reward model")]
    assert f"{min(training):.1f} to {max(training):.1f} times" in README.replace("\n", " ")


def test_a_figure_that_the_page_no_longer_has_is_told(figures: Any) -> None:
    (ratio, *_) = figures.RATIOS
    with pytest.raises(ValueError, match="no table below '## A GRPO step against TRL'"):
        figures.measured(ratio, "# Benchmarks\n\nNothing yet.\n")
