"""Compares two configurations: a run resumes only if no key changed that identifies it.

Every key identifies the run, unless its field is marked with `MayChange`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from laurel.config.environments import ScorerSource, SourceConfig
from laurel.config.schema_info import KeyInfo, Kinds, says_nothing, sections_of, step_into
from laurel.config.yaml_tree import (
    BY_NAME,
    IN_LIST,
    KeyPath,
    MayChange,
    Removed,
    Section,
    YamlNode,
    dotted,
    find_node,
    plain_values,
    with_key,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A key whose value is no longer what it was."""

    key: str
    before: object
    now: object


def changes(
    schema: type[Section], before: Any, now: Any, *, in_sweep: bool = False
) -> Iterator[Change]:
    """Yield the keys that identify a run and differ between two configurations.

    A key that one of them lacks has its default, because an earlier version did not know it. A key
    that the schema no longer has is not compared.

    Args:
        before: The plain values of one, such as a checkpoint's `config.yaml`.
        in_sweep: Whether the length of a run counts, too, as it does where trials are compared.
    """
    return _changes((schema,), before, now, (), None, in_sweep=in_sweep)


def gone(kinds: Kinds, before: YamlNode, path: KeyPath = ()) -> Iterator[tuple[str, str]]:
    """Yield the keys of a saved configuration that there are no more, each with what holds instead.

    Those that ask for nothing but what holds now are left out.
    """
    if isinstance(before.value, list):
        for i, child in enumerate(before.value):
            yield from gone(step_into(kinds, i).kinds, child, (*path, i))
    elif isinstance(before.value, dict):
        for key, child in before.value.items():
            info = step_into(kinds, key)
            # A block alone where sections stand by name has the keys of one of them.
            is_alone = info.standing == "name" and not isinstance(child.value, dict | list)
            removed = _removed(info.kinds if is_alone else kinds)
            if info.standing in ("field", "name") and not is_alone:
                yield from gone(info.kinds, child, (*path, key))
            elif key in removed and not says_nothing(removed[key], child):
                yield dotted((*path, key)), removed[key].instead


def _removed(kinds: Kinds) -> dict[str, Removed]:
    return {key: one for section in sections_of(kinds) for key, one in section.removed.items()}


def with_settings_of_all_models(before: YamlNode) -> YamlNode:
    """Return a saved configuration with what its reward models agree on said once for all of them.

    Each of `env.reward_model.models` once had those settings for itself. One that is null, such as
    the `server` of a model that asks none, agrees with any.
    """
    of_all = ScorerSource.model_fields.keys() - SourceConfig.model_fields.keys()
    section = ("env", "reward_model")
    models = find_node(before, (*section, "models"))
    if models is None or not isinstance(models.value, list):
        return before
    for key in of_all:
        found = [node for one in models.value if (node := find_node(one, (key,))) is not None]
        said = [node for node in found if plain_values(node) is not None]
        if said and all(plain_values(node) == plain_values(said[0]) for node in said):
            before = with_key(before, (*section, key), said[0])
    return before


_MOVED: tuple[tuple[KeyPath, KeyPath], ...] = (
    (("grpo", "tree", "length"), ("grpo", "tree", "segment")),
    (("grpo", "tree", "separator"), ("grpo", "tree", "segment")),
    (
        ("policy", "scratch", "num_kv_heads"),
        ("policy", "scratch", "config_overrides", "num_key_value_heads"),
    ),
    (
        ("policy", "scratch", "intermediate_size"),
        ("policy", "scratch", "config_overrides", "intermediate_size"),
    ),
)


def with_values_where_they_are_now(before: YamlNode) -> YamlNode:
    """Return a saved configuration with values of keys that are gone under those that have them."""
    for key, place in _MOVED:
        node = find_node(before, key)
        if node is not None and node.value is not None:
            before = with_key(before, [str(part) for part in place], node)
    return before


def with_judges_beside_their_models(before: YamlNode) -> YamlNode:
    """Return a saved configuration with what a judge once said of its model beside it.

    Bounds of scores, and the mean and deviation of a member, were two keys each.
    """
    at = ("env", "reward_model")
    section = find_node(before, at)
    if section is None or not isinstance(section.value, dict):
        return before
    found = _with_judge_beside(section, ScorerSource)
    models = found.value.get("models")
    if models is not None and isinstance(models.value, list):
        # Beside reward models, what a judge said of how it is computed held for it alone.
        are_judges = all(find_node(part, ("judge", "model")) for part in models.value)
        of_member = ScorerSource if are_judges else SourceConfig
        members = [_with_judge_beside(part, of_member) for part in models.value]
        parts = YamlNode(members, models.place)
        found = with_key(found, ("models",), parts)
    return with_key(before, at, found)


def _with_judge_beside(source: YamlNode, of_source: type[Section]) -> YamlNode:
    keys = dict(source.value)
    if {"mean", "std"} <= keys.keys() and plain_values(keys["mean"]) is not None:
        keys["normalize"] = YamlNode([keys["mean"], keys["std"]], source.place)
    judge = keys.get("judge")
    if judge is not None and isinstance(judge.value, dict) and "model" in judge.value:
        said = {key: node for key, node in judge.value.items() if plain_values(node) is not None}
        said["url_model" if "urls" in said else "model_name"] = said.pop("model")
        keys |= {key: said[key] for key in of_source.model_fields.keys() & said.keys()}
        bounds = [
            judge.value.get(key) or YamlNode(default, judge.place)
            for key, default in (("lowest", 0.0), ("highest", 10.0))
        ]
        ends = [plain_values(bound) for bound in bounds]
        limits = [
            bound if end is not None else YamlNode(infinite, judge.place)
            for bound, end, infinite in zip(bounds, ends, (-math.inf, math.inf), strict=True)
        ]
        keys["judge"] = with_key(judge, ("score_range",), YamlNode(limits, judge.place))
    return YamlNode(keys, source.place)


def mark_of(field: FieldInfo) -> MayChange | None:
    """Return the mark of a field; None if it has none of its own."""
    return next((one for one in field.metadata if isinstance(one, MayChange)), None)


def _changes(
    kinds: Kinds, before: Any, now: Any, path: KeyPath, mark: MayChange | None, *, in_sweep: bool
) -> Iterator[Change]:
    for key, info, one, other in _entries(kinds, before, now):
        inner = (mark_of(info.field) if info.field else None) or mark
        if _has_parts(one, other):
            yield from _changes(info.kinds, one, other, (*path, key), inner, in_sweep=in_sweep)
        elif one != other and (inner is None or (in_sweep and not inner.in_sweeps)):
            yield Change(key=dotted((*path, key)), before=one, now=other)


def _has_parts(one: Any, other: Any) -> bool:
    """Report whether two values are compared part by part."""
    if isinstance(one, dict) and isinstance(other, dict):
        return True
    are_lists = isinstance(one, list) and isinstance(other, list)
    return are_lists and len(one) == len(other) and all(isinstance(i, dict) for i in one + other)


def _entries(kinds: Kinds, before: Any, now: Any) -> Iterator[tuple[str | int, KeyInfo, Any, Any]]:
    if isinstance(now, list):
        for i, (one, other) in enumerate(zip(before, now, strict=True)):
            yield i, step_into(kinds, i), one, other
        return
    for section in sections_of(kinds):
        before = section.in_blocks(_without_twice(before) if section.short_keys() else before)
    keys = dict.fromkeys((*before, *now))
    # Of a union those sections that have all of the keys.
    fitting = tuple(one for one in sections_of(kinds) if keys.keys() <= one.model_fields.keys())
    for key in keys:
        info = step_into(fitting or kinds, key)
        if info.standing in ("field", "name"):
            missing = _default(info)
            one, other = before.get(key, missing), now.get(key, missing)
            for mark in info.field.metadata if info.field else ():
                if mark in (IN_LIST, BY_NAME):
                    one, other = mark.func(one), mark.func(other)
                # An earlier version wrote the defaults of a set that nothing was said of.
                if mark == IN_LIST:
                    one = one or ([{}] if _is_alone(other) else one)
                    other = other or ([{}] if _is_alone(one) else other)
            yield key, info, one, other


def _is_alone(sets: Any) -> bool:
    return isinstance(sets, list) and len(sets) == 1 and isinstance(sets[0], dict)


def _without_twice(data: Any) -> Any:
    """Return a saved `data` without the paths beside blocks of sets, which were once ignored."""
    blocks = {"train_data_path": "train", "val_data_path": "validation"}
    return {k: v for k, v in data.items() if k not in blocks or not data.get(blocks[k])}


def _default(info: KeyInfo) -> Any:
    if info.field is None or info.field.is_required():
        return None
    value = info.field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        return value.model_dump(mode="json")
    return list(value) if isinstance(value, tuple) else value
