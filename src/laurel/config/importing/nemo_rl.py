"""Imports NeMo RL's files, whose keys Laurel shares, with each key's outcome and the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laurel.config.importing.rules import Imported, KeyOutcome
from laurel.config.load import load_config
from laurel.config.nemo_rl import unread_keys
from laurel.config.schemas import SCHEMAS, Kind
from laurel.config.yaml_tree import DEFAULT, YamlNode, plain_values

SYSTEM = "NeMo RL"


def import_file(path: Path, run: Kind) -> Imported:
    """Load a file of NeMo RL, and report which keys are translated, ignored or lost.

    Raises:
        ConfigError: The file is invalid, as in `load_config`.
    """
    loaded = load_config(SCHEMAS[run], path)
    moved = {move.key for move in loaded.moves}
    put = {key for move in loaded.moves for key in move.to}
    entries = [
        KeyOutcome(
            key=move.key,
            status="carried",
            value=move.value,
            to=dict(move.to),
            why="translated" if list(move.to) != [move.key] else "",
        )
        for move in loaded.moves
    ]
    values: dict[str, Any] = {}
    for key, value in _leaves(loaded.said, loaded.ignored, put):
        values[key] = value
        if key not in put:
            entries.append(KeyOutcome(key=key, status="carried", value=value, to={key: value}))
    entries += [
        KeyOutcome(
            key=one.key,
            value=one.value,
            why=one.why,
            status="not carried" if one.is_lost else "not needed",
        )
        for one in unread_keys(loaded.said, loaded.ignored)
        if one.key not in moved
    ]
    return Imported(
        system=SYSTEM,
        run=run,
        values=values,
        origins=dict.fromkeys(values, ""),
        entries=tuple(entries),
        config=loaded.config,
    )


_TAKEN_WHOLE = ("kwargs", "chat_template_kwargs", "hf_config_overrides", "labels")


def _leaves(
    tree: YamlNode, ignored: tuple[str, ...], whole: set[str], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield every key that is read, with its value; a block in `whole` is yielded as one key."""
    for name, child in tree.value.items():
        here = ".".join((*path, name))
        if here in ignored or child.place == DEFAULT:
            continue
        is_block = isinstance(child.value, dict) and child.value
        if is_block and name not in _TAKEN_WHOLE and here not in whole:
            yield from _leaves(child, ignored, whole, (*path, name))
        else:
            yield here, plain_values(child)
