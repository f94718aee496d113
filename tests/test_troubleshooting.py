"""docs/troubleshooting: its tables are whole, and its field finds the entry of a pasted message."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import cycle
from pathlib import Path
from types import ModuleType

import pytest

from headless_browser import NAMES, browser_page, find_browser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MAIN = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in [DOCS / "troubleshooting.md", *sorted((DOCS / "troubleshooting").glob("*.md"))]
}


def plain(text: str) -> str:
    """As messages are compared: what code spans and cells of tables cannot hold is left out."""
    return text.replace("`", "").replace("\\|", "|")


def entries(page: str) -> list[str]:
    """The first column of its tables, and the items of its lists."""
    found = re.findall(r"^\| `(.+?)` \| |^- `(.+)`$", page, re.MULTILINE)
    return [plain(row or item) for row, item in found]


def all_entries() -> list[str]:
    return [entry for page in PAGES.values() for entry in entries(page)]


# ---------------------------------------------------------------------------------- of the pages


def test_every_row_has_a_message_its_cause_and_its_cure() -> None:
    for name, page in PAGES.items():
        rows = [line for line in page.splitlines() if line.startswith("| `")]
        for row in rows:
            assert len([c for c in re.split(r"(?<!\\) \| ", row) if c.strip(" |")]) == 3, (
                name,
                row,
            )
        assert name == "troubleshooting.md" or rows


def test_no_page_has_an_entry_twice() -> None:
    for name, page in PAGES.items():
        for section in re.split(r"^## ", page, flags=re.MULTILINE):
            found = entries(section)
            assert not [entry for entry in found if found.count(entry) > 1], name


# --------------------------------------------------------------------- the field for a message


@pytest.fixture(scope="module")
def site_messages() -> ModuleType:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_messages", DOCS / "site_messages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_field_knows_every_entry_and_where_it_stands(site_messages: ModuleType) -> None:
    index = list(site_messages.index())
    assert sorted(one["message"] for one in index) == sorted(all_entries())
    assert site_messages.MARK in MAIN
    for one in index:
        assert not re.search(r"\]\(|\.md(?!<)", one["told"]), one  # links are links
        page, _, anchor = one["place"].partition("#")
        headings = re.findall(r"^## (.+)$", PAGES[Path(page).with_suffix(".md").name], re.MULTILINE)
        assert anchor in {re.sub(r"[^a-z-]", "", h.lower().replace(" ", "-")) for h in headings}


FRAGMENTS = (
    "accepts none of the known answers",
    "Test_list function asserts",
    "error: accepts none of the known answers",
    "answers",
)


def test_a_pasted_message_finds_its_entry(site_messages: ModuleType, tmp_path: Path) -> None:
    """Every entry, with names and numbers in the places that it leaves open."""
    pytest.importorskip("websockets")
    browser = find_browser()
    if browser is None:
        pytest.skip(f"needs one of {', '.join(NAMES)}")
    place = tmp_path / "page.html"
    box = site_messages._BOX.replace("{entries}", json.dumps(list(site_messages.index())))
    script = (DOCS / "assets" / "find_message.js").read_text(encoding="utf-8")
    place.write_text(f"<meta charset=utf-8>{box}<script>{script}</script>", encoding="utf-8")
    words = cycle(["results/run-7/step_20", "12", "pairs.jsonl", "policy.optimizer", "qwen3"])
    known = all_entries()
    pasted = ["error: " + re.sub("…", lambda _: next(words), entry) for entry in known]
    with browser_page(browser) as page:
        page.open(place.as_uri())
        *found, by_run, by_words, prefixed, by_one_word = page.run(
            "(entries => "
            + json.dumps([*pasted, *FRAGMENTS])
            + ".map(text => laurelMessages.search(entries, text)"
            ".map(entry => entry.message)))(JSON.parse(document.getElementById('messages')"
            ".textContent))"
        )
        page.run(
            "(field => {field.value = 'error: there is no\\n  module of the moon';"
            " field.dispatchEvent(new Event('input'))})(document.querySelector('textarea'))"
        )
        assert not page.run("document.querySelector('#find-message p').hidden")
        assert page.complaints == []
    assert "accepts none of the known answers" in by_run[0]
    assert "the asserts of 'test_list' call no function" in by_words
    assert prefixed == by_run
    assert by_one_word == []
    among = [entry in hits[:3] for entry, hits in zip(known, found, strict=True)]
    assert sum(among) > 0.95 * len(known), [
        k for k, hit in zip(known, among, strict=True) if not hit
    ]
