"""What MkDocs does besides, when it builds the site: the reference, and what only the files know.

MkDocs calls the functions whose names begin with `on_`.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "laurel"

sys.path.insert(0, str(Path(__file__).parent))  # MkDocs loads this file by its path
import site_commands  # noqa: E402

INCLUDED = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages that are files of the repository's root: each is there once, and included here."""

log = get_plugin_logger("laurel")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The navigation with the pages that are made here.

    An entry without a page stays, and MkDocs says which it is: a page that was renamed or lost
    would else be gone from the site without a word.
    """
    config.nav = _with_reference(config.nav or [])
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Pages without a file below docs/: those of the root, and the reference."""
    for source, name in INCLUDED.items():
        files.append(File.generated(config, name, content=_root_file(source)))
    for name, text in _reference().items():
        files.append(File.generated(config, name, content=text))
    return files


def _root_file(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _with_reference(entries: list[Any]) -> list[Any]:
    """The entries of the navigation; `reference` stands for all pages of the reference."""
    return [
        {
            title: _with_reference(below) if isinstance(below, list) else below
            for title, below in entry.items()
        }
        if isinstance(entry, Mapping)
        else {"Reference": list(_reference())}
        if entry == "reference"
        else entry
        for entry in entries
    ]


def _reference() -> dict[str, str]:
    """A page for each line of ARCHITECTURE.md's table of rooms, and one that lists them."""
    pages: dict[str, str] = {}
    lines = [
        "# Reference",
        "",
        "Made from the docstrings, low to high: a room uses only those above it.",
        "",
    ]
    seen: set[Path] = set()
    rooms = _rooms()
    for room, answers in rooms:
        name = f"reference/{room.replace('/', '_')}.md"
        pages[name] = _room_page(room, answers, [other for other, _ in rooms], seen)
        lines.append(
            f"- [`laurel.{room.replace('/', '.')}`]({posixpath.basename(name)}): {answers}"
        )
    left = {path for path in SOURCE.rglob("*.py") if path.stem[0] != "_"} - seen
    if left:
        log.warning("no room of ARCHITECTURE.md's table holds %s", sorted(map(str, left)))
    return {"reference/index.md": "\n".join(lines) + "\n", **pages}


def _rooms() -> list[tuple[str, str]]:
    """Each room and what it answers, in the table's order."""
    table = _root_file("ARCHITECTURE.md").split("## Rooms")[1]
    rows = re.findall(r"^\| (`.+?) \| (.+?) \|", table.split("\n## ")[0], re.MULTILINE)
    return [
        pair
        for names, answers in rows
        for pair in _answers(re.findall(r"`([^`]+)`", names), answers)
    ]


def _answers(rooms: list[str], answers: str) -> list[tuple[str, str]]:
    """A line for two rooms says two things, divided by a semicolon."""
    parts = answers.split("; ") if len(rooms) > 1 else [answers]
    return list(zip(rooms, parts, strict=True))


def _room_page(room: str, answers: str, rooms: list[str], seen: set[Path]) -> str:
    """The modules of a room, without those of rooms inside of it that have a line of their own."""
    place = SOURCE / room
    if not place.is_dir():
        modules = [place.with_suffix(".py")]
    else:
        inner = [SOURCE / other for other in rooms if other.startswith(f"{room}/")]
        modules = [
            path
            for path in sorted(place.rglob("*.py"))
            if path.stem[0] != "_" and not any(path.is_relative_to(other) for other in inner)
        ]
    seen.update(modules)
    text = [f"# `laurel.{room.replace('/', '.')}`", "", f"{answers[:1].upper()}{answers[1:]}.", ""]
    for path in modules:
        name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        text += [f"::: {name}", ""]
    return "\n".join(text)


_FENCE_NOTE = re.compile(
    r"^(?P<indent> *)<!-- (?P<kind>not run|file|hidden setup|output)(?:: *(?P<value>.*?))? *-->\n"
    r"(?:(?P<fence> *```)(?P<language>\w*)\n)?",
    re.MULTILINE,
)
_PICTURE = re.compile(
    r"<picture>\s*<source [^>]*srcset=\"(?P<dark>[^\"]+)\">\s*"
    r"<img alt=\"(?P<alt>[^\"]*)\" src=\"(?P<light>[^\"]+)\">\s*</picture>"
)
_COMMANDS = "<!-- made for the site: commands -->"
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]\n]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Notes to the tests become titles or vanish; links that leave docs/ become names of files.

    Options of commands are listed where a page has the mark for them: help texts say them already.
    A picture follows the theme that the reader chose, not the system's alone.
    """
    name = page.file.src_uri
    if _COMMANDS in markdown:
        markdown = markdown.replace(_COMMANDS, site_commands.commands_text())
    folder = "" if name in INCLUDED.values() else posixpath.dirname(f"docs/{name}")
    markdown = _FENCE_NOTE.sub(_shown_note, markdown)
    markdown = _PICTURE.sub(_shown_picture, markdown)
    return _LINK.sub(lambda link: _shown_link(link, folder, name), markdown)


def _shown_note(note: re.Match[str]) -> str:
    fence = f"{note['fence']}{note['language']}" if note["fence"] else ""
    if note["kind"] == "file" and fence:
        fence = f'{note["fence"]}{note["language"] or "text"} title="{note["value"]}"'
    return f"{fence}\n" if fence else ""


def _shown_picture(picture: re.Match[str]) -> str:
    light, dark = (picture[which].removeprefix("docs/") for which in ("light", "dark"))
    return f"![{picture['alt']}]({light}#only-light) ![{picture['alt']}]({dark}#only-dark)"


def _shown_link(link: re.Match[str], folder: str, page: str) -> str:
    """A link to a page of the site stays one, whatever it is called in the repository."""
    target = link["target"]
    if "://" in target or target.startswith("mailto:"):
        return link[0]
    path = posixpath.normpath(posixpath.join(folder, target))
    anchor = link["anchor"] or ""
    if path in INCLUDED or path.startswith("docs/"):
        name = INCLUDED.get(path) or path.removeprefix("docs/")
        return (
            f"[{link['text']}]({posixpath.relpath(name, posixpath.dirname(page) or '.')}{anchor})"
        )
    if not (ROOT / path).exists():
        log.warning("%s: a link to %s, which does not exist", page, path)
    shown = link["text"].strip("`")
    return f"`{path}`" if shown in path else f"{link['text']} (`{path}`)"


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Without the mark of reStructuredText that stands before literal blocks of docstrings."""
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")
