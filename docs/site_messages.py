"""What MkDocs puts into troubleshooting.html: a field for a message, and all entries to find it in.

The site's search looks for words on pages; a pasted message has names, numbers and signs of its own
among them, so that it finds nearly anything. docs/assets/find_message.js compares it with entries.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import markdown
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
MARK = "<!-- find a message -->"
_BOX = """<div id="find-message" hidden>
<label for="message">Paste your message</label>
<textarea id="message" rows="3" spellcheck="false"></textarea>
<ol aria-live="polite"></ol>
<p hidden>No entry has these words. A library below may have said it.</p>
</div>
<script type="application/json" id="messages">{entries}</script>
"""
_CELL = re.compile(r"(?<!\\) \| ")


def on_page_content(html: str, *, page: Page, **_: Any) -> str:
    """The field in place of its mark; a reader without scripts sees nothing of it."""
    if page.file.src_uri != "troubleshooting.md":
        return html
    assert MARK in html, f"docs/troubleshooting.md has lost its {MARK}"
    entries = json.dumps(list(index()), ensure_ascii=False).replace("</", "<\\/")
    return html.replace(MARK, _BOX.replace("{entries}", entries))


def index() -> Iterator[dict[str, str]]:
    """Each entry: its message, why and what to do (HTML), and the section it stands in."""
    for path in [DOCS / "troubleshooting.md", *sorted((DOCS / "troubleshooting").glob("*.md"))]:
        page = path.relative_to(DOCS).with_suffix(".html").as_posix()
        section = ""
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("## "):
                section = line[3:].replace("`", "")
            elif line.startswith("| `"):
                cells = [cell.strip(" |") for cell in _CELL.split(line)]
                if len(cells) == 3 and section:
                    told = f"Why: {cells[1]}. What to do: {cells[2]}."
                    yield _entry(cells[0], told, page, section)
            elif line.startswith("- `"):
                yield _entry(line[2:], "The message says what to do.", page, section)


def _entry(message: str, told: str, page: str, section: str) -> dict[str, str]:
    # markdown's own rule of anchors: what is no letter, digit, blank or - goes, and blanks are -
    anchor = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", section).strip().lower())
    told = told.replace("\\|", "|").replace("](../", "](")
    told = re.sub(r"\]\(([\w/]+)\.md", r"](\1.html", told)
    html = markdown.markdown(told).removeprefix("<p>").removesuffix("</p>")
    return {
        "message": message.replace("`", "").replace("\\|", "|"),
        "told": f"{html} ",
        "place": f"{page}#{anchor}",
        "section": section,
    }
