"""The commands of `laurel` and their options, as the site's page of the command line lists them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any

import click
import typer.main

from laurel.cli.main import app

COMMON = 3
"""Commands that must share an option before it stands among the common ones."""
MANY = 6
"""Common options of a command that are not named again where another command has the same."""
Found = tuple[tuple[str, ...], Any, click.Context]
"""The words of a command, the command, and its context."""


_RANGE = r" \[x>=[01]\]|; x>=[01](?=\])"
"""How a command's help says that an option is a number of things."""


def all_commands() -> Iterator[Found]:
    """Yield every command, in the order of the help."""
    yield from _below(typer.main.get_command(app), ("laurel",), None)


def _below(command: Any, path: tuple[str, ...], above: click.Context | None) -> Iterator[Found]:
    context = click.Context(command, parent=above, info_name=path[-1])
    if not hasattr(command, "list_commands"):
        yield path[1:], command, context
        return
    for name in command.list_commands(context):
        yield from _below(command.get_command(context, name), (*path, name), context)


def commands_text() -> str:
    """Write the first sentence of every command, and each option once: common ones come first."""
    options = {
        path: [
            record
            for one in command.get_params(context)
            if (record := one.get_help_record(context))
        ]
        for path, command, context in _commands()
    }
    common: dict[str, tuple[str, str]] = {}
    for record, count in Counter(chain.from_iterable(options.values())).most_common():
        if count >= COMMON:
            common.setdefault(_name(record), record)
    # Those that occur most often come first: `--json` and `--help`.
    lines = ["### Common options", "", "Every command has the first two.", ""]
    lines += map(_option, common.values())
    first: dict[tuple[str, ...], str] = {}
    places: dict[tuple[str, str], str] = {}
    for path, command, _ in _commands():
        own = [record for record in options[path] if record not in common.values()]
        shared = [f"`{_name(one)}`" for one in options[path] if one in list(common.values())[2:]]
        about, *_ = re.split(r"\n\s*\n", (command.help or "").strip())
        lines += ["", f"### {path}", "", " ".join(about.split()), ""]
        known: dict[str, list[str]] = {}
        for record in own:
            if (place := places.setdefault(record, path)) == path:
                lines.append(_option(record))
            else:
                known.setdefault(place, []).append(f"`{_name(record)}`")
        lines += [f"- As of `{place}`: {', '.join(names)}" for place, names in known.items()]
        like, names = next(
            ((one, names) for names, one in first.items() if {*shared} <= {*names}), (path, ())
        )
        first.setdefault(tuple(shared), path)
        if len(shared) > MANY and like != path:
            without = ", ".join(name for name in names if name not in shared)
            lines.append(f"- Common: as of `{like}`" + (f", without {without}" if without else ""))
        elif shared:
            lines.append(f"- Common: {', '.join(shared)}")
    return "\n".join(lines)


def _commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    for path, command, context in all_commands():
        yield " ".join(("laurel", *path)), command, context


def _name(record: tuple[str, str]) -> str:
    words = record[0].split()
    return next((word for word in words if word.startswith("--")), words[0])


def _option(record: tuple[str, str]) -> str:
    name = re.sub(r" <(?:str|path|(?:int|float)(?: range)?|list\[\w+\])>", "", record[0])
    return f"- `{name}` {re.sub(_RANGE, '', ' '.join(record[1].split()))}"
