"""Imports configurations of NeMo RL, whose keys Laurel shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from laurel.config.load import load_config
from laurel.config.other_systems import Adapted, UnreadKey
from laurel.config.schemas import SCHEMAS, Kind
from laurel.config.yaml_tree import DEFAULT, Section, YamlNode, plain_values
from laurel.errors import ConfigError
from laurel.extensions.importing import nemo_rl_files
from laurel.extensions.importing.rules import Imported, KeyOutcome, Source
from laurel.plugins import Importer

_SECTIONS = ("policy", "rm", "sft", "grpo", "loss_fn", "env", "checkpointing", "cluster")
"""The sections of NeMo RL's files; no other system has a section `policy`."""


class NemoRl(Importer):
    """NeMo RL: its keys are Laurel's, but for those that are translated when a file is read."""

    title = "NeMo RL"
    is_sure = True

    def own_keys(self, values: Mapping[str, Any]) -> list[str]:
        """Return the sections of a file."""
        sections = [key for key in values if key in _SECTIONS and isinstance(values[key], dict)]
        return sections if "policy" in sections else []

    def make(self, section: None, source: Source) -> Imported:
        """Return what `load_config` makes of a file, with the keys that it translates and drops."""
        if source.path is None:
            raise ConfigError(
                "a file of NeMo RL may name others (defaults), and is read by its name"
            )
        kinds: tuple[Kind, ...] = ("grpo", "sft", "rm")
        kinds_found = [kind for kind in kinds if kind in source.values]
        return _import_nemo_rl(source.path, source.run or [*kinds_found, *kinds[-1:]][0])

    def keys_beside(self, section: type[Section]) -> Mapping[str, str]:
        """Return the keys that only NeMo RL has."""
        return nemo_rl_files.keys_beside(section)

    def adapt(self, schema: type[Section], work: Adapted, problems: list[str]) -> None:
        """Translate the settings that NeMo RL has in another form."""
        nemo_rl_files.adapt(schema, work, problems)

    def unread(self, tree: YamlNode, ignored: Sequence[str]) -> list[UnreadKey]:
        """Return the ignored keys, a block such as Megatron's by its parts."""
        return nemo_rl_files.unread_keys(tree, ignored)


def _import_nemo_rl(path: Path, run: Kind) -> Imported:
    """Load a file of NeMo RL, and report which keys are translated, ignored or lost."""
    loaded = load_config(SCHEMAS[run], path, is_foreign=True)
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
    for key, value in _said_leaves(loaded.said, loaded.ignored, put):
        values[key] = value
        if key not in put:
            entries.append(KeyOutcome(key=key, status="carried", value=value, to={key: value}))
    entries += [
        KeyOutcome(
            key=unread.key,
            value=unread.value,
            why=unread.why,
            status="not carried" if unread.is_lost else "not needed",
        )
        for unread in nemo_rl_files.unread_keys(loaded.said, loaded.ignored)
        if unread.key not in moved
    ]
    return Imported(
        system=NemoRl.title,
        run=run,
        values=values,
        origins=dict.fromkeys(values, ""),
        entries=tuple(entries),
        config=loaded.config,
        keeps_references=True,
    )


_TAKEN_WHOLE = ("kwargs", "chat_template_kwargs", "hf_config_overrides", "labels")


def _said_leaves(
    tree: YamlNode, ignored: tuple[str, ...], whole: set[str], path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield every key that is read, with its value; a block in `whole` is yielded as one key."""
    for name, child in tree.value.items():
        here = ".".join((*path, name))
        if here in ignored or child.place == DEFAULT:
            continue
        is_block = isinstance(child.value, dict) and child.value
        if is_block and name not in _TAKEN_WHOLE and here not in whole:
            yield from _said_leaves(child, ignored, whole, (*path, name))
        else:
            yield here, plain_values(child)
