"""What a run was told: its settings beside the defaults, and beside those of other runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from laurel.config.grpo_training import GRPORun
from laurel.config.reward_training import RewardTrainingRun
from laurel.config.section import Section
from laurel.config.sft_training import SFTRun

_SCHEMAS: Mapping[str, type[Section]] = {
    "rm": RewardTrainingRun,
    "sft": SFTRun,
    "grpo": GRPORun,
}
_SAYS_NOTHING = re.compile(r"(^|\.)seed$|^logger\.|^checkpointing\.checkpoint_dir$", re.ASCII)
"""Keys in which runs may differ and still be the same experiment: seeds, and where things lie."""
MISSING = "–"


class Setting(NamedTuple):
    """A key whose value is not the default."""

    key: str
    value: str
    default: str


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys with dots, and their values; lists and empty blocks are values."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def changed_settings(kind: str, config: Mapping[str, Any]) -> list[Setting] | None:
    """The settings that differ from the defaults of this version of Laurel, in their order.

    None where it is not known what they are the settings of.
    """
    schema = _SCHEMAS.get(kind)
    if schema is None or not config:
        return None
    defaults = dict(flat(schema().model_dump(mode="json")))
    # A block that is empty or null by default has no keys of its own to compare with.
    blocks = {key for key, value in defaults.items() if value in (None, {}, [])}
    settings = []
    for key, value in flat(config):
        known = key in defaults or any(key.startswith(f"{block}.") for block in blocks)
        default = defaults.get(key)
        if value != default:
            settings.append(Setting(key, as_text(value), as_text(default) if known else "unknown"))
    return settings


def differing_settings(
    configs: Sequence[Mapping[str, Any]],
) -> list[tuple[str, list[str]]]:
    """Keys in which the runs differ, each with its value in every run."""
    tables = [dict(flat(config)) for config in configs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = []
    for key in keys:
        values = [as_text(table[key]) if key in table else MISSING for table in tables]
        if len(set(values)) > 1:
            rows.append((key, values))
    return rows


def same_but_for_seeds(configs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The runs in groups whose settings differ in nothing but seeds and places.

    Runs without a configuration are groups of one: nobody knows what they share.
    """
    groups: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        told = {key: as_text(v) for key, v in flat(config) if not _SAYS_NOTHING.search(key)}
        groups.setdefault(repr(sorted(told.items())) if told else f"run {index}", []).append(index)
    return list(groups.values())


def as_text(value: object) -> str:
    """A value as it is written in YAML, in short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_text(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_text, value)) + "]"
    return str(value)
