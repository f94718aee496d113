"""docs/troubleshooting: every error of the source has its entry, and none has gone."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from collections.abc import Collection, Iterator
from functools import cache
from itertools import cycle
from pathlib import Path
from types import ModuleType

import pytest

from error_messages import CLASSES, HOLE, Message, all_messages, letters, messages
from headless_browser import NAMES, browser_page, find_browser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MAIN = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in [DOCS / "troubleshooting.md", *sorted((DOCS / "troubleshooting").glob("*.md"))]
}
NEVER_RAISED = {"LaurelError", "UserError"}
ENOUGH = 12
"""Letters that an entry says at least, or else half of what its message says: an entry of two
common words would stand for messages that its cure does not fit."""

PASSED_ON = {
    "rank …: …: …": "what one rank failed of, inside of the error that all ranks raise",
    "… replica …: …": "what a replica failed of; what follows has its own entry",
    "… (benchmark …): …": "names the benchmark of an error that has its own entry",
    "conversation …: …": "names the conversation of a failure that has its own entry",
    "test … of …: …": "names the test of a refusal that has its own entry",
}
"""Forms that need no entry: they say whose message follows. A form of holes alone is one anyway."""


def plain(text: str) -> str:
    """As messages are compared: what code spans and cells of tables cannot hold is left out."""
    return text.replace("`", "").replace("\\|", "|")


def entries(page: str) -> list[str]:
    """The first column of its tables, and the items of its lists."""
    found = re.findall(r"^\| `(.+?)` \| |^- `(.+)`$", page, re.MULTILINE)
    return [plain(row or item) for row, item in found]


def all_entries() -> list[str]:
    return [entry for page in PAGES.values() for entry in entries(page)]


def sections(page: str) -> dict[str, str]:
    return dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))


def covers(entry: str, form: str) -> bool:
    """Whether a form of a message has all fixed parts of an entry, which say enough of it."""
    if letters(entry) < ENOUGH and 2 * letters(entry) < letters(form):
        return False
    at = 0
    for part in entry.split(HOLE):
        at = plain(form).find(part.strip(), at)
        if at < 0:
            return False
        at += len(part.strip())
    return True


def without_entry(found: Collection[Message], known: Collection[str]) -> list[str]:
    return [
        f"{message.place}: {message.error}: {form}"
        for message in found
        for form in message.forms
        if letters(form) and form not in PASSED_ON
        and not any(covers(entry, form) for entry in known)
    ]  # fmt: skip


# ---------------------------------------------------------------------------------- of the pages


def test_every_class_has_its_section_with_messages_or_the_way_to_them() -> None:
    assert set(sections(MAIN)) == CLASSES
    for name, section in sections(MAIN).items():
        told = list(entries(section))
        for page in re.findall(r"\]\(troubleshooting/(\w+\.md)", section):
            told += entries(PAGES[page])
        forms = [form for one in all_messages() if one.error == name for form in one.forms]
        found = any(covers(entry, form) for entry in told for form in forms)
        assert found == (name not in NEVER_RAISED), name


def test_every_row_has_a_message_its_cause_and_its_cure() -> None:
    for name, page in PAGES.items():
        rows = [line for line in page.splitlines() if line.startswith("| `")]
        for row in rows:
            assert len([c for c in re.split(r"(?<!\\) \| ", row) if c.strip(" |")]) == 3, (
                name,
                row,
            )
        assert name == "troubleshooting.md" or rows


def test_every_error_of_the_source_has_an_entry() -> None:
    left = without_entry(all_messages(), all_entries())
    assert not left, (
        "no entry in docs/troubleshooting/*.md for:\n" + "\n".join(left) + "\n"
        "Write a row with its cause and cure into the section it belongs to; where the message "
        "says both itself, an item of the list below the section's table will do."
    )


def test_exceptions_are_of_the_source_and_have_no_entry() -> None:
    forms = {form for message in all_messages() for form in message.forms}
    assert PASSED_ON.keys() <= forms
    assert not [form for form in PASSED_ON if form in all_entries()]


def test_every_entry_is_a_message_of_the_source() -> None:
    forms = {form for message in all_messages() for form in message.forms}
    gone = [
        entry for entry in all_entries()
        if not any(covers(entry, form) for form in forms) and absent(entry, constant_texts())
    ]  # fmt: skip
    assert not gone


def test_no_page_has_an_entry_twice() -> None:
    for name, page in PAGES.items():
        for section in re.split(r"^## ", page, flags=re.MULTILINE):
            found = entries(section)
            assert not [entry for entry in found if found.count(entry) > 1], name


# ------------------------------------------ messages that are put together before they are raised


@cache
def constant_texts() -> list[str]:
    files = sorted((ROOT / "src" / "laurel").rglob("*.py"))
    return ["\0".join(texts(ast.parse(path.read_text(encoding="utf-8")))) for path in files]


def texts(tree: ast.AST) -> Iterator[str]:
    """The constant texts of a program; neighbours that make one message are one text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def absent(message: str, sources: list[str]) -> bool:
    """Whether no one file has all fixed parts of it."""
    parts = [part.strip() for part in message.split(HOLE) if len(part.strip()) > 2]
    return not parts or not any(all(part in source for part in parts) for source in sources)


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
    "accepts none of the known answers", "Test_list function asserts",
    "error: accepts none of the known answers", "answers",
)  # fmt: skip


def test_a_pasted_message_finds_its_entry(site_messages: ModuleType, tmp_path: Path) -> None:
    """Of every message of the source, with names and numbers in its holes."""
    pytest.importorskip("websockets")
    browser = find_browser()
    if browser is None:
        pytest.skip(f"needs one of {', '.join(NAMES)}")
    place = tmp_path / "page.html"
    box = site_messages._BOX.replace("{entries}", json.dumps(list(site_messages.index())))
    script = (DOCS / "assets" / "find_message.js").read_text(encoding="utf-8")
    place.write_text(f"<meta charset=utf-8>{box}<script>{script}</script>", encoding="utf-8")
    forms = [
        form for message in all_messages() for form in message.forms
        if letters(form) > 3 and form not in PASSED_ON
    ]  # fmt: skip
    words = cycle(
        ["results/run-7/step_20", "12", "pairs.jsonl", "policy.optimizer", "0.5", "qwen3"]
    )
    pasted = ["error: " + re.sub(HOLE, lambda _: next(words), form) for form in forms]
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
    best = [covers(hits[0], form) for hits, form in zip(found, forms, strict=True) if hits]
    among = [any(covers(hit, form) for hit in hits[:3])
             for hits, form in zip(found, forms, strict=True)]  # fmt: skip
    assert all(among), [form for form, is_found in zip(forms, among, strict=True) if not is_found]
    assert sum(best) > 0.95 * len(forms)


# ------------------------------------------------------------------------------ of this test itself


def forms_of(body: str, *, before: str = "", other: str = "") -> list[str]:
    source = f"{before}\ndef f(path, error):\n    {body}\n"
    found = messages({"room.py": source, "other.py": other})
    return [form for message in found for form in message.forms]


def test_a_message_is_read_from_the_program() -> None:
    assert forms_of("raise DataError('no rows')") == ["no rows"]
    assert forms_of("raise DataError(f'{path}: no ' 'rows') from error") == ["…: no rows"]
    assert forms_of("return DataError('a ' + ('b' if path else f'c{path}'))") == ["a b", "a c…"]
    assert forms_of("why = 'so' if path else 'thus'\n    raise DataError(f'no: {why}')") == [
        "no: so", "no: thus",
    ]  # fmt: skip
    assert forms_of("raise DataError(f'no. {CURE}')", before="CURE = 'Mend it'") == ["no. Mend it"]
    helper = "def told(name):\n    return f'{name} is not what was expected here'"
    imported = "from laurel.other import told"
    assert forms_of("raise DataError(told(path))", before=imported, other=helper) == [
        "… is not what was expected here"
    ]
    assert forms_of("raise KeyError('not ours')") == []
    assert forms_of("raise DataError(str(error)) from error") == ["…"]
    assert forms_of("raise UnusableRow('kind', f'{path} is null', remedy='Fill it')") == [
        "… is null. Fill it"
    ]


def test_an_error_without_an_entry_is_seen() -> None:
    found = messages({"room.py": "raise DataError(f'{path}: the moon is in the wrong phase')"})
    assert without_entry(found, ["… cannot be read: …"]) == [
        "room.py:1: DataError: …: the moon is in the wrong phase"
    ]
    assert not without_entry(found, ["the moon is in the … phase"])
    assert without_entry(found, ["…: the …"])  # it would cover nearly all
    assert without_entry(found, ["in the wrong phase is the moon"])


def test_a_message_that_the_code_does_not_have_is_seen() -> None:
    sources = ["\0".join(texts(ast.parse('raise E(f"{a} is bad: " "choose " f"{b}; or wait")')))]
    assert not absent("… is bad: choose …; or wait", sources)
    assert absent("… is bad: pick …; or wait", sources)
    assert absent("…", sources)
