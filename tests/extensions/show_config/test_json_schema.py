"""JSON schemas of configuration files accept what the loader accepts, and no misspelt key."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from laurel.cli.main import app
from laurel.config.load import load_config, to_yaml
from laurel.config.resuming import changes
from laurel.config.schemas import SCHEMAS, Kind
from laurel.extensions.show_config.json_schema import json_schema, schema_text

ROOT = Path(__file__).parents[3]
SCHEMA_FILES = {kind: ROOT / "recipes" / "schemas" / f"{kind}.json" for kind in SCHEMAS}
RECIPES = sorted(
    [*(ROOT / "recipes").glob("*.yaml"), *(ROOT / "examples" / "configs").rglob("*.yaml")]
)
MODELINE = re.compile(r"# yaml-language-server: \$schema=(\S+)\n")


@cache
def validator(kind: Kind) -> Draft202012Validator:
    """Made once: it takes longer than what it is asked."""
    return Draft202012Validator(json_schema(kind))


def complaints(kind: Kind, document: Any) -> Sequence[str]:
    """Say where a document does not fit."""
    found = validator(kind).iter_errors(document)
    return [f"{error.json_path}: {error.message}" for error in found]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_the_shipped_schemas_are_those_that_the_command_prints(kind: Kind):
    done = CliRunner().invoke(app, ["config", "--for", kind, "--json-schema"])
    assert done.stdout == schema_text(kind)
    assert SCHEMA_FILES[kind].read_text(encoding="utf-8") == done.stdout, (
        f"laurel config --for {kind} --json-schema > {SCHEMA_FILES[kind].relative_to(ROOT)}"
    )
    Draft202012Validator.check_schema(json_schema(kind))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_names_its_schema_and_fits_it(path: Path):
    text = path.read_text(encoding="utf-8")
    modeline = MODELINE.match(text)
    assert modeline is not None
    kind = next(
        kind
        for kind, file in SCHEMA_FILES.items()
        if (path.parent / modeline[1]).resolve() == file.resolve()
    )
    document = yaml.safe_load(text)
    assert complaints(kind, document) == []
    section = next(value for value in document.values() if isinstance(value, dict))
    section["misspelt_key"] = 1
    assert len(complaints(kind, document)) == 1


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_without_a_word_and_is_written_as_it_was_read(
    path: Path, tmp_path: Path
):
    modeline = MODELINE.match(path.read_text(encoding="utf-8"))
    assert modeline is not None
    schema = SCHEMAS[Path(modeline[1]).stem]  # type: ignore[index]
    loaded = load_config(schema, path)
    assert loaded.warnings == ()
    written = tmp_path / "written.yaml"
    written.write_text(to_yaml(loaded.config), encoding="utf-8")
    assert load_config(schema, written).config == loaded.config
    # Described, it has the keys of all plug-ins with their defaults.
    written.write_text(to_yaml(loaded.config, describe=True), encoding="utf-8")
    again = load_config(schema, written).config
    dumped = [one.model_dump(mode="json") for one in (again, loaded.config)]
    assert not list(changes(schema, *dumped))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("rm", "rm: {seed: '${oc.env:SEED,3}', max_num_steps: null}"),
        ("rm", "policy: {model_name: '???', scheduler: '${policy.optimizer}'}"),
        ("rm", "rm: {val_period: -1}"),
        ("rm", "policy: {_override_: true, revision: 12e3}"),
        ("rm", "data: {train: {}, validation: {}}"),
        ("rm", "data: {train: [], validation: []}"),
        ("rm", "policy: {optimizer: {kwargs: {lr: 1e-4}}}"),
        ("rm", "data: {validation: {a: {data_path: a.jsonl}, b: {benchmark: reward-bench}}}"),
        ("rm", "grpo: {anything: 1}\npolicy: {megatron_cfg: {enabled: false}}"),
        ("sft", "data: {split: train}"),
        ("grpo", "use_reward_loop: true"),
        ("grpo", "reward_model: {use_reward_loop: true}"),
        ("grpo", "env: {custom: {mine: {name: a.B, kwargs: {anything: [1]}}}}"),
        ("grpo", "env: {reward_model: {urls: ['${oc.env:URL}']}}"),
    ],
)
def test_what_the_loader_accepts_fits(kind: Kind, text: str):
    assert complaints(kind, yaml.safe_load(text)) == []


@pytest.mark.parametrize(
    ("kind", "text", "place"),
    [
        ("rm", "rm: {sed: 1}", "$.rm"),
        ("rm", "rm: {seed: many}", "$.rm.seed"),
        ("rm", "rm: {max_num_epochs: 0}", "$.rm.max_num_epochs"),
        ("rm", "polcy: {}", "$"),
        ("sft", "policy: {precision: float8}", "$.policy.precision"),
        ("grpo", "env: {reward_model: {modl_name: x}}", "$.env.reward_model"),
    ],
)
def test_what_the_loader_refuses_does_not_fit(kind: Kind, text: str, place: str):
    (found,) = complaints(kind, yaml.safe_load(text))
    assert found.startswith((f"{place}: ", f"{place.rpartition('.')[0]}: "))


def test_a_file_of_all_defaults_fits(tmp_path: Path):
    for kind, schema in SCHEMAS.items():
        values = load_config(schema).config.model_dump(mode="json")
        assert complaints(kind, values) == []


def test_the_schema_is_of_no_single_configuration():
    done = CliRunner().invoke(app, ["config", "--json-schema", "rm.seed=1"])
    assert done.exit_code == 2
    assert "every configuration" in done.stderr
