"""The pictures of the pages: all there, all used, all made by `docs/make_screens.py`."""

from __future__ import annotations

import datetime
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PICTURE = re.compile(
    r"^!\[(?P<alt>[^\]]*)\]\(assets/(?P<name>[^)]+)\)\n(?P<below>\n.*\n)?", re.MULTILINE
)


@pytest.fixture(scope="module")
def screens() -> Iterator[Any]:
    spec = importlib.util.spec_from_file_location("make_screens", DOCS / "make_screens.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path[:] = path
        del sys.modules[spec.name]


@pytest.fixture(scope="module")
def pictures() -> list[tuple[str, re.Match[str]]]:
    return [
        (page.name, found)
        for page in DOCS.glob("*.md")
        for found in PICTURE.finditer(page.read_text("utf-8"))
    ]


def test_pages_show_what_the_script_makes_and_nothing_else(
    screens: Any, pictures: list[tuple[str, re.Match[str]]]
) -> None:
    made = {screen.name for screen in screens.SCREENS}
    assert {found["name"] for _, found in pictures} == made
    there = {path.name for path in (DOCS / "assets").iterdir()}
    figures = {f"{name}-{theme}.svg" for name in ("forest", "speed") for theme in ("light", "dark")}
    assert there == made | figures | {"find_message.js", "leaf.svg", "site.css"}
    for page in DOCS.glob("*.md"):  # another way to write a picture would escape the rest
        assert page.read_text("utf-8").count("](assets/") == sum(
            name == page.name for name, _ in pictures
        )


def test_each_says_what_it_shows_and_where_it_is_from(
    screens: Any, pictures: list[tuple[str, re.Match[str]]]
) -> None:
    commands = {screen.name: screen.command for screen in screens.SCREENS}
    for page, found in pictures:
        assert len(found["alt"]) > 40, f"{page}: {found['name']} has no text for who cannot see it"
        line = (found["below"] or "").strip()
        assert line.startswith(f"*`{commands[found['name']]}`, "), (
            f"{page}: {found['name']}: {line}"
        )
        assert re.search(r", \d+ [A-Z][a-z]+ \d{4}, \d+ cores of .+; docs/make_screens.py\*$", line)


def test_they_are_small_and_ask_for_nothing_from_elsewhere(screens: Any) -> None:
    for screen in screens.SCREENS:
        picture = (DOCS / "assets" / screen.name).read_bytes()
        assert len(picture) <= screens.MOST_BYTES < 2**18
        if screen.name.endswith(".svg"):
            addresses = set(re.findall(rb"https?://[^\s\"<]+", picture))
            assert addresses <= {b"http://www.w3.org/2000/svg", b"https://www.textualize.io"}
            assert b"url(http" not in picture
        else:
            assert picture.startswith(b"\x89PNG")


def test_the_plan_in_the_picture_is_what_the_command_says_today(
    screens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from laurel.cli.main import app

    (screen,) = (one for one in screens.SCREENS if one.name == "plan.svg")
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", str(screens.WIDTH))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = CliRunner().invoke(app, screen.command.split()[1:])
    assert said.exit_code == 0, said.output
    now = screens.said_in(screens.terminal(said.output, title="laurel plan", name="plan"))
    shown = screens.said_in((DOCS / "assets" / "plan.svg").read_text("utf-8"))
    assert shown == now, f"run `python docs/make_screens.py {screen.name}`"
    assert "it fits" in shown[-1].replace("&#160;", " ")


def test_the_line_below_a_picture_is_written_anew_in_its_place(screens: Any) -> None:
    line = screens.caption("laurel plan", datetime.date(2026, 11, 3))
    assert line.startswith("*`laurel plan`, 3 November 2026, ")
    page = "Text.\n\n![alt](assets/plan.svg)\n\nMore.\n"
    once = screens.captioned(page, "plan.svg", line)
    assert once == f"Text.\n\n![alt](assets/plan.svg)\n\n{line}\n\nMore.\n"
    other = line.replace(" 3 ", " 4 ")
    assert screens.captioned(once, "plan.svg", other) == once.replace(line, other)
    assert screens.captioned(page, "demo.svg", line) == page


def test_a_terminal_keeps_the_text(screens: Any) -> None:
    svg = screens.terminal("\x1b[31mred\x1b[0m <&>\n" + "x" * 200, title="t", name="n")
    lines = [line.replace("&#160;", " ") for line in screens.said_in(svg)]
    assert lines[0].rstrip() == "red &lt;&amp;&gt;"
    assert [len(line.rstrip()) for line in lines[1:3]] == [screens.WIDTH, 200 - screens.WIDTH]
