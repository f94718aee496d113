"""Removed keys: each is refused with what holds now, and accepted in old checkpoints."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from laurel.config.load import load_config
from laurel.config.other_systems import foreign_keys
from laurel.config.resuming import gone
from laurel.config.schema_info import (
    is_mapping,
    item_kinds,
    kinds_of_field,
    says_nothing,
    sections_of,
)
from laurel.config.schemas import SCHEMAS, Kind
from laurel.config.yaml_tree import Removed, Section, graft, removed
from laurel.errors import ConfigError

OTHER = "surely no default"
Place = tuple[str, ...]


def places(schema: Any, path: Place = ()) -> Iterator[tuple[type[Section], Place]]:
    yield schema, path

    def below(kinds: Any, here: Place) -> Iterator[tuple[type[Section], Place]]:
        for section in dict.fromkeys(sections_of(kinds)):
            yield from places(section, here)
        for kind in kinds:
            name = "x" if is_mapping(kind) else "0"
            yield from below(item_kinds(kind) or (), (*here, name))

    for name, field in schema.model_fields.items():
        yield from below(kinds_of_field(field), (*path, name))


def cases() -> Iterator[Any]:
    for kind, schema in SCHEMAS.items():
        for section, path in places(schema):
            # Keys that files of others have are ignored.
            for key in sorted(section.removed.keys() - foreign_keys(section).keys()):
                one = section.removed[key]
                yield pytest.param(kind, (*path, key), one, id=f"{kind} {'.'.join(path)}.{key}")


# What makes a validation set the benchmark that had the key.
BESIDE = {"prior": {"benchmark": "reward-bench"}, "zero_spread": {"benchmark": "reward-bench-2"}}


def written(path: Place, value: Any) -> Any:
    value = {path[-1]: value, **BESIDE.get(path[-1], {})}
    for key in reversed(path[:-1]):
        value = [value] if key == "0" else {key: value}
    return value


@pytest.mark.parametrize(("kind", "path", "one"), [*cases()])
def test_it_is_refused_with_what_holds_now(kind: Kind, path: Place, one: Removed, tmp_path) -> None:
    file = tmp_path / "old.yaml"
    file.write_text(yaml.safe_dump(written(path, OTHER)))
    with pytest.raises(ConfigError) as raised:
        load_config(SCHEMAS[kind], file)
    message = " ".join(str(raised.value).split())
    assert "old.yaml:" in message
    assert path[-1] in message
    assert one.instead in message

    file.write_text(yaml.safe_dump(written(path, one.was)))
    said = ""
    with contextlib.suppress(ConfigError):  # something else may be missing at such a place
        said = "".join(load_config(SCHEMAS[kind], file).warnings)
    assert not said or ".".join(path) in said.replace("[", ".").replace("]", "")


@pytest.mark.parametrize(("kind", "path", "one"), [*cases()])
def test_a_checkpoint_may_have_it(kind: Kind, path: Place, one: Removed) -> None:
    ((key, instead),) = gone((SCHEMAS[kind],), graft(written(path, OTHER), "config.yaml"))
    assert key.endswith(path[-1])
    assert instead == one.instead
    assert not list(gone((SCHEMAS[kind],), graft(written(path, one.was), "config.yaml")))


@pytest.mark.parametrize(
    ("block", "is_nothing"),
    [
        ({}, True),
        ({"enabled": True}, True),
        ({"enabled": True, "train_mb_tokens": None}, True),
        ({"enabled": False}, False),
        ({"enabled": 1}, False),
        ({"enabled": True, "other": True}, False),
        (True, False),
    ],
)
def test_of_a_block_each_key_that_is_written_is_asked(block: Any, *, is_nothing: bool) -> None:
    assert says_nothing(removed("ScorerSource")["sequence_packing"], graft(block, "")) == is_nothing


def test_all_are_of_a_section() -> None:
    assert len([*cases()]) > 20
