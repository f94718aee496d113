"""What the shell offers at a Tab: keys of the configuration, data sets, environments.

A shell puts a blank behind the only thing that is offered, and takes whatever all that is offered
begins with. So a section is never offered alone, but with what is in it; and beside a key that may
hold anything stands the same with its default. No model, data set or network is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from laurel.errors import LaurelError

if TYPE_CHECKING:
    from laurel.cli.schemas import Kind
    from laurel.config.section import Section

Offer = tuple[str, str]
"""What is offered, and a word about it, which zsh and fish show."""

_COMMANDS: dict[str, Kind] = {"rm": "rm", "sft": "sft", "grpo": "grpo", "policy": "grpo"}
"""The schema of the overrides of a command."""


def offer_overrides(context: typer.Context, incomplete: str) -> list[Offer]:
    """Keys of the configuration, and the values of those that can hold only a few."""
    from laurel.cli.schemas import SCHEMAS

    schema = SCHEMAS[_kind(context)]
    before = [text for text in context.params.get("overrides") or () if isinstance(text, str)]
    # bash takes `key=value` for three words, and wants the last of them.
    if before and before[-1] == "=":
        before.pop()
    elif incomplete or not before or "=" in before[-1]:
        return list(overrides(schema, incomplete))
    written = f"{before[-1]}=" if before else ""
    return [
        (value.removeprefix(written), about)
        for value, about in overrides(schema, written + incomplete)
        if value != written
    ]


def overrides(schema: type[Section], incomplete: str) -> Iterator[Offer]:
    """What `incomplete` may become: `sec` becomes `section.key=`, and that `section.key=value`.

    Args:
        schema: Of the whole configuration.
        incomplete: The beginning of an override, with its sign.
    """
    key = incomplete.lstrip("+~")
    sign, (key, equals, _) = incomplete[: len(incomplete) - len(key)], key.partition("=")
    *above, last = key.split(".")
    kinds: tuple[Any, ...] = (schema,)
    for name in above:
        kinds = _inside(kinds, name)
    found = {name: about for name, about in _keys(kinds) if name.startswith(last)}
    if equals:
        found = {last: found[last]} if last in found else {}
    while len(found) == 1 and not equals:
        (name,) = found
        deeper = dict(_keys(_inside(kinds, name)))
        if not deeper:
            break
        above, kinds, found = [*above, name], _inside(kinds, name), deeper
    path = sign + "".join(f"{name}." for name in above)
    if len(found) == 1 and sign != "~":
        (name,) = found
        yield from ((f"{path}{name}={value}", found[name]) for value in _values(kinds, name))
        return
    for name, about in found.items():
        ending = "." if dict(_keys(_inside(kinds, name))) else "" if sign == "~" else "="
        yield f"{path}{name}{ending}", about


def _inside(kinds: tuple[Any, ...], name: str) -> tuple[Any, ...]:
    from laurel.config.shape import step_into

    return step_into(kinds, name).kinds if kinds else ()


def _keys(kinds: tuple[Any, ...]) -> Iterator[Offer]:
    """The keys of the sections among these kinds, each with its first sentence."""
    from laurel.config.shape import sections_of

    for section in sections_of(kinds):
        for name, field in section.model_fields.items():
            yield name, " ".join((field.description or "").split()).partition(". ")[0]


def _values(kinds: tuple[Any, ...], name: str) -> list[str]:
    """The values that a key can hold, where these are few; else none of them, and its default."""
    from laurel.config.shape import choices_of, step_into

    step = step_into(kinds, name)
    if choices := choices_of(step.kinds):
        return choices
    if bool in step.kinds:
        return ["true", "false"]
    if step.field is None or step.field.is_required():
        return [""]
    default = step.field.get_default(call_default_factory=True)
    if default is None:
        return ["", "null"]
    said = str(default) if isinstance(default, int | float | str) else ""
    return ["", said] if said and said.isascii() and not set(said) & set(" \t'\"\\$`") else [""]


def _kind(context: typer.Context) -> Kind:
    """Which schema the command has: others are told it, or have it in their file."""
    from laurel.cli.schemas import kind_of

    command = context.info_name or ""
    if command in _COMMANDS:
        return _COMMANDS[command]
    said = context.params.get("kind") or context.params.get("trainer")
    file = context.params.get("config")
    if said in _COMMANDS:
        return _COMMANDS[said]
    try:
        return kind_of(Path(file) if file else None)
    except LaurelError:  # told when the command is carried out
        return "rm"


# ----------------------------------------------------------------------------- values of options


def offer_tasks() -> list[str]:
    """Data sets of tasks that have a name."""
    from laurel.data.task_formats import TASK_SETS

    return list(TASK_SETS)


def offer_preferences() -> list[str]:
    """Classes that read preferences."""
    from laurel.data.row_formats import DATASET_CLASSES

    return list(DATASET_CLASSES)


def offer_environments() -> list[str]:
    """Environments that are there without a configuration."""
    from laurel.environments.registry import BUILT_IN

    return list(BUILT_IN)


def offer_layers() -> list[str]:
    """Layers of the sandbox that can be left out."""
    from laurel.environments.sandbox.tiers import LAYERS

    return [*LAYERS, "cgroup"]
