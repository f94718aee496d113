"""The code blocks of a page, and what the comments before them say of them.

CONTRIBUTING.md ("Pages") has the convention for those who write pages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

_FENCE = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*?) -->\n)?"
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>\w*)[^\n`]*\n"
    r"(?P<text>.*?)^(?P=indent)(?P=fence) *$",
    re.MULTILINE | re.DOTALL,
)
_SETUP = re.compile(r"^<!-- hidden setup: (?P<script>\S+) -->$", re.MULTILINE)
_COMMAND = re.compile(
    r"^(\$ |laurel |make |python |pip |curl |ray |sbatch |kubectl |export |source )", re.MULTILINE
)
_KINDS = ("not run", "file", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    """Of its fence, from 1."""
    language: str
    text: str
    kind: str
    """`run`, `not run`, `file`, `output` or `shown`."""
    value: str
    """The reason, or the file's name."""
    start: int
    """Where its text begins in the page."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True, slots=True)
class Document:
    """A page: its blocks in their order, and the scripts that make what they name."""

    path: Path
    blocks: tuple[Block, ...]
    setups: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix()


def documents() -> list[Path]:
    """README.md and the pages, in an order that stays."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read(path: Path) -> Document:
    return parse(path.read_text(encoding="utf-8"), path)


def parse(text: str, path: Path) -> Document:
    page = path.relative_to(ROOT).as_posix()
    blocks = tuple(_block(found, text, page) for found in _FENCE.finditer(text))
    return Document(path, blocks, tuple(match["script"] for match in _SETUP.finditer(text)))


def _block(found: re.Match[str], text: str, page: str) -> Block:
    note = found["note"] or ""
    kind, _, value = (part.strip() for part in note.partition(":"))
    if kind not in _KINDS:
        kind, value = ("run" if found["language"] in ("bash", "python", "yaml") else "shown"), ""
    line = text.count("\n", 0, found.start("fence")) + 1
    indent = len(found["indent"])
    code = "".join(line[indent:] for line in found["text"].splitlines(keepends=True))
    return Block(
        page=page,
        line=line,
        language=found["language"],
        text=code,
        kind=kind,
        value=value,
        start=found.start("text"),
    )


def faults(document: Document) -> list[str]:
    """What does not keep to the convention."""
    wrong = []
    for index, block in enumerate(document.blocks):
        before = document.blocks[index - 1] if index else None
        if block.kind in ("not run", "file") and not block.value:
            wrong.append(f"{block.place}: '{block.kind}' says nothing after its colon")
        if block.kind == "output" and (before is None or before.kind != "run"):
            wrong.append(f"{block.place}: the output of no block that is run")
        if block.kind == "shown" and not block.language and _COMMAND.search(block.text):
            wrong.append(f"{block.place}: commands in a block without a language; say bash")
    return wrong


# -------------------------------------------------------------------------- comparing what it said

_MASKS = (
    (re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]"), ""),
    (re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b"), "HASH"),
    (re.compile(r"(?<![\w.])[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:e[-+]?\d+)?"), "0"),
    (re.compile(r"\d+(?:\.\d+)?"), "0"),
    (re.compile(r"\b0 ?(?:ms|s|min|h)\b(?: 0 ?(?:ms|s|min)\b)?"), "TIME"),
    (re.compile(r"(?:/[\w.\-]+){3,}"), "PATH"),
    (re.compile(r"[\u2500-\u259f]+"), "-"),
    (re.compile(r"-{3,}"), "-"),
    (re.compile(r"[ \t]+"), " "),
)


def masked(line: str) -> str:
    """A line without what differs from run to run: figures, durations, hashes, paths, widths."""
    for pattern, stand_in in _MASKS:
        line = pattern.sub(stand_in, line)
    return line.strip()


def same(shown: str, real: str) -> bool:
    """Whether a page shows what was said. A line `...` stands for any lines."""
    parts: list[list[str]] = [[]]
    for line in shown.strip("\n").splitlines():
        if line.strip() == "...":
            parts.append([])
        else:
            parts[-1].append(masked(line))
    lines = [masked(line) for line in real.strip("\n").splitlines()]
    if len(parts) == 1:
        return parts[0] == lines
    first, *middle, last = parts
    if lines[: len(first)] != first:
        return False
    at = len(first)
    for part in middle:
        found = _find(part, lines, at)
        if found is None:
            return False
        at = found + len(part)
    return len(lines) - len(last) >= at and lines[len(lines) - len(last) :] == last


def _find(part: Sequence[str], lines: Sequence[str], start: int) -> int | None:
    ends = range(start, len(lines) - len(part) + 1)
    return next((i for i in ends if list(lines[i : i + len(part)]) == list(part)), None)
