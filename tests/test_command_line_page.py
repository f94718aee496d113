"""The page of the command line is that of the code. `python tests/test_command_line_page.py`
writes it anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from laurel.cli.main import app

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "command_line.md"
START = "<!-- commands: written by `python tests/test_command_line_page.py` from the commands -->\n"
END = "<!-- end of commands -->"
GLOBAL = ("--quiet", "--verbose", "--help", "--install-completion", "--show-completion")


def commands() -> str:
    """Every command with its options, as markdown."""
    root: Any = typer.main.get_command(app)
    return "\n".join(
        line for path, command in leaves(root, ("laurel",)) for line in entry(path, command)
    )


def leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    below = getattr(command, "commands", None)
    if below is None:
        yield path, command
        return
    for name, one in below.items():
        yield from leaves(one, (*path, name))


def entry(path: tuple[str, ...], command: Any) -> Iterator[str]:
    context = typer.Context(command, info_name=path[-1])
    usage = " ".join([*path, *command.collect_usage_pieces(context)])
    yield f"### {' '.join(path)}\n"
    yield f"```text\n{usage}\n```\n"
    for paragraph in command.help.split("\n\n"):
        if paragraph.startswith("\b\nExample:"):
            example = paragraph.removeprefix("\b\nExample:\n").strip()
            yield f"For example:\n\n```text\n{example}\n```\n"
        else:
            yield " ".join(paragraph.split()) + "\n"
    rows = [one.get_help_record(context) for one in command.get_params(context)]
    rows = [row for row in rows if row is not None and not row[0].endswith(GLOBAL)]
    if rows:
        yield "| option | meaning |\n|---|---|"
        yield from (
            f"| `{cell(re.sub(r' <list.*>', '', name))}` | {cell(text)} |" for name, text in rows
        )
        yield ""


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def test_the_commands_on_the_page_are_those_of_the_code() -> None:
    written = PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0]
    assert written == commands(), "run `python tests/test_command_line_page.py`"


def test_every_variable_of_laurel_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    files = (ROOT / "src" / "laurel").rglob("*.py")
    used = {name for f in files for name in re.findall(r"\bLAUREL_[A-Z_]+", f.read_text("utf-8"))}
    assert {"LAUREL_API_KEY", "LAUREL_ADMIN_KEY"} <= used
    assert [name for name in sorted(used) if f"`{name}`" not in page] == []


def test_lists_of_commands_are_not_cut_off_at_80_columns() -> None:
    root: Any = typer.main.get_command(app)
    for path, group in [("laurel", root), *((n, c) for n, c in root.commands.items())]:
        if not hasattr(group, "commands"):
            continue
        listed = group.get_help(typer.Context(group, info_name=path, max_content_width=80))
        rows = listed.split("Commands:\n")[1].splitlines()
        assert [row for row in rows if row.endswith("...") or len(row) > 80] == []


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    PAGE.write_text(before + START + commands() + END + rest.split(END)[1], encoding="utf-8")
