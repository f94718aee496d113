"""Writes an imported configuration as YAML, with the origin of every line in a comment."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from laurel.config.dump import entry, literal
from laurel.config.importing import nemo_rl
from laurel.config.importing.rules import Imported, KeyOutcome, shown

_WIDTH = 100


def to_text(imported: Imported, *, source: str, output: str) -> str:
    """Return an imported configuration as YAML for `laurel rm|sft|grpo --config`.

    Args:
        imported: The result of the import.
        source: The name of the file that was imported.
        output: The name of the file that is written.
    """
    return "".join((*_header(imported, source, output), "\n", *_block(imported, _nested(imported))))


def _header(imported: Imported, source: str, output: str) -> Iterator[str]:
    yield f"# From {imported.system} ({source}), written by laurel config import.\n"
    yield f"# Run it: laurel {imported.run} --config {output}\n"
    lost = imported.with_status("not carried")
    if not lost:
        yield "# Everything was carried or is not needed.\n"
        return
    yield f"#\n# Not carried ({len(lost)}):\n"
    for one in lost:
        # What a source holds may have line breaks, which would end the comment.
        flat = " ".join(f"{said(one)}: {one.why}".split())
        for line in textwrap.wrap(
            flat,
            _WIDTH,
            initial_indent="#   ",
            subsequent_indent="#     ",
            break_on_hyphens=False,
            break_long_words=False,
        ):
            yield line + "\n"


def said(one: KeyOutcome) -> str:
    """Return `key=value` as the source has it, or a note that the source leaves the key out."""
    if not one.is_said:
        return (
            f"{one.key} (left out)"
            if one.value is None
            else (f"{one.key} (left out: {shown(one.key, one.value)})")
        )
    return f"{one.key}={shown(one.key, one.value)}"


def _nested(imported: Imported) -> dict[str, Any]:
    """Nest dotted keys; each leaf is a tuple of the dotted key and its value."""
    tree: dict[str, Any] = {}
    for dotted, value in imported.values.items():
        level = tree
        *blocks, last = dotted.split(".")
        for block in blocks:
            level = level.setdefault(block, {})
        level[last] = (dotted, value)
    order = list(type(imported.config).model_fields)
    return dict(sorted(tree.items(), key=lambda item: order.index(item[0])))


def _block(imported: Imported, tree: Mapping[str, Any], indent: int = 0) -> Iterator[str]:
    margin = "  " * indent
    is_unchanged = imported.system == nemo_rl.SYSTEM  # its references are references here
    for name, child in tree.items():
        if isinstance(child, dict):
            yield f"{margin}{name}:\n"
            yield from _block(imported, child, indent + 1)
            continue
        dotted, value = child
        text = entry(name, value if is_unchanged else literal(value))
        about = f"  # {imported.origins[dotted]}" if imported.origins[dotted] else ""
        lines = text.rstrip("\n").split("\n")
        if len(lines) == 1:
            yield f"{margin}{lines[0]}{about}\n"
        else:
            yield f"{margin}{lines[0]}{'' if '|' in lines[0] else about}\n"
            yield from (f"{margin}{line}\n" for line in lines[1:])
