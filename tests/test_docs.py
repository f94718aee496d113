"""README.md and docs/ do what they say: their blocks run, their links lead somewhere.

`python tests/test_docs.py [PAGE ...]` runs the pages and writes anew the outputs that they show and
the parts that are generated.
CONTRIBUTING.md ("Pages") says what the comments before blocks mean. The second half of the pages is
run by `test_docs_guides.py`, so that two processes share the work.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from pydantic import ValidationError

from doc_pages import PAGES, ROOT, BlockFailed, blocks_of, outputs_of, same, warm_server
from doc_reference import with_generated
from laurel import plugins
from laurel.cli.main import app
from laurel.config.other_systems import foreign_keys
from laurel.config.plugged import OpenSection, known_keys
from laurel.config.schemas import SCHEMAS
from laurel.config.yaml_tree import Section
from site_commands import commands_text

SLOW = "<!-- slow page -->"
"""Pages with this comment are run by `make test-all` alone."""


@pytest.fixture(scope="module")
def server():
    with warm_server() as running:
        yield running


def parameters(pages):
    return [
        pytest.param(
            path,
            id=path.relative_to(ROOT).as_posix(),
            marks=[pytest.mark.slow] if SLOW in path.read_text(encoding="utf-8") else [],
        )
        for path in pages
    ]


def differences(path, said):
    return [
        f"{shown.place}: run `python tests/test_docs.py`; it said\n{said[run.line]}"
        for run, shown in outputs_of(path)
        if not same(shown.text, said[run.line], exact=shown.value == "exact")
    ]


@pytest.mark.parametrize("path", parameters(PAGES[::2]))
def test_the_blocks_of_a_page_run(path, server, tmp_path):
    assert differences(path, server(path, tmp_path / "page")) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_settings_of_a_page_are_settings_and_its_links_lead_somewhere(path):
    """`mkdocs build --strict` says of the site where links lead; this also of README."""
    wrong = [
        f"{block.place}: {told}"
        for block in blocks_of(path)
        if block.kind == "run" and block.language == "yaml"
        for settings in yaml.safe_load_all(block.text)
        if isinstance(settings, dict) and (told := problem(settings))
    ]
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    for name in re.findall(r"(?<!!)\[[^\]\n]*\]\(([^)\s#]+)[^)\s]*\)", text):
        # The site makes pages of the root's files, and the reference.
        made = re.match(r"(.*/)?((architecture|contributing|changelog)\.md$|reference/)", name)
        if "://" not in name and not made and not (path.parent / name).exists():
            wrong.append(f"a link to {name}")
    assert not wrong, "\n".join(wrong)


def problem(settings: dict[str, Any]) -> str | None:
    """Say why settings are neither those of a run nor a part of a section; None where they are."""
    told = ""
    for section in (*SCHEMAS.values(), *sections(Section)):
        foreign = {"defaults", *foreign_keys(section)}
        if settings.keys() <= foreign | {*known_keys(section)}:
            try:
                section.model_validate({k: settings[k] for k in settings.keys() - foreign})
            except ValidationError as error:
                others = [one for one in error.errors() if one["type"] != "missing"]
                if others:
                    told += f"{section.__name__}: {others}"
                    continue
            return None
    return told or f"no section has all of {sorted(settings)}"


def sections(base: type[Section]) -> Iterator[type[Section]]:
    for kind in plugins.KINDS:  # which have sections of their own
        for name in plugins.names(kind):
            plugins.plugin(kind, name)
    yield from _below(base)


def _below(base: type[Section]) -> Iterator[type[Section]]:
    for section in base.__subclasses__():
        if section is not OpenSection:  # which sections that hold plug-ins derive from
            yield section
        yield from _below(section)


def test_every_command_and_variable_has_its_place():
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")

    def leaves(command: Any, path: str) -> Iterator[str]:
        for name, below in getattr(command, "commands", {}).items():
            yield from leaves(below, f"{path} {name}")
        if not hasattr(command, "commands"):
            yield path

    commands = list(leaves(typer.main.get_command(app), "laurel"))
    site = commands_text()
    assert "<!-- made for the site: commands -->" in page
    assert [one for one in commands if f"\n### {one}\n" not in site] == []
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.encode()) <= 14_000
    told = re.findall(r"`(?:laurel )?(\w+)`", readme.partition("## Commands")[2])
    assert {one.split()[1] for one in commands} <= set(told)
    sources = [path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"\bLAUREL_[A-Z_]+", text)}
    assert [name for name in sorted(used) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", ["configuration.md", "models.md"])
def test_generated_parts_are_those_of_today(name):
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    now = with_generated(page)
    assert page.splitlines() == now.splitlines(), f"run `python tests/test_docs.py docs/{name}`"


def test_outputs_are_compared_without_their_figures():
    assert same("loss  0.31 in 12 s ---", "loss 1,044 in 1 min 3 s -----")
    assert same("a\n...\nd\n...", "a\nb\nc\nd")
    assert not same("a\n...\nd", "a\nb\nc")
    assert not same("accuracy 0.9", "loss 0.9")
    assert not same("loss 0.31", "loss 0.44", exact=True)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ("```bash\necho a > c\ntest $(cat c) = a\nfalse\n```\n", "page.md:1: exit status 1"),
        ("```python\na = 1\n```\n```python\nassert a == 2\n```\n", 'page.md", line 5'),
        ("<!-- hidden setup: none.py -->\n", "none.py"),
    ],
)
def test_a_block_that_fails_is_seen(block, told, server, tmp_path):
    (tmp_path / "page.md").write_text(block)
    with pytest.raises(BlockFailed, match=re.escape(told)):
        server(tmp_path / "page.md", tmp_path / "here")


def test_settings_that_are_none_are_seen():
    assert problem({"grpo": {"max_num_steps": 4}}) is None
    assert "precisoin" in str(problem({"policy": {"precisoin": "float32"}}))
    assert problem({"nothing": 1}) is not None


def test_outputs_are_written(server, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```bash\necho new\n```\n<!-- output -->\n```text\nold\n```\n")
    said = server(page, tmp_path / "here")
    assert len(differences(page, said)) == 1
    refresh(page, said)
    assert differences(page, said) == []


def refresh(path: Path, said: dict[int, str]) -> None:
    """Write the outputs that differ anew."""
    text = before = path.read_text(encoding="utf-8")
    for run, shown in reversed(outputs_of(path)):
        real = said[run.line]
        if not same(shown.text, real, exact=shown.value == "exact"):
            lines = "".join(f"{line.rstrip()}\n" for line in real.strip("\n").splitlines())
            text = text[: shown.start] + lines + text[shown.start + len(shown.text) :]
    if text != before:
        path.write_text(text, encoding="utf-8")
        print(f"{path.name}: outputs written")


def generate(path: Path) -> None:
    """Write the generated parts of a page that differ anew."""
    page = path.read_text(encoding="utf-8")
    if (now := with_generated(page)) != page:
        path.write_text(now, encoding="utf-8")
        print(f"{path.name}: generated parts written")


if __name__ == "__main__":
    with warm_server() as one_server:
        for one in [Path(name).resolve() for name in sys.argv[1:]] or PAGES:
            generate(one)
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as at:
                try:
                    refresh(one, one_server(one, Path(at) / "page"))
                except BlockFailed as failure:
                    print(failure)
