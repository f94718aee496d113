"""Validation sets that are benchmarks, and validation sets of tasks that have names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from laurel.config.data import (
    SHORT,
    BenchmarkSetConfig,
    DataConfig,
    DatasetConfig,
    SetsConfig,
    TaskDataConfig,
)
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.resuming import changes
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.schema_info import kinds_of, sections_of
from laurel.config.schemas import SCHEMAS
from laurel.config.sft import SFTRun
from laurel.config.yaml_tree import Section
from laurel.data.tasks import load_task_data
from laurel.errors import ConfigError

PATHS = """
data:
  dataset_name: PreferenceDataset
  train_data_path: train.jsonl
  val_data_paths:
    Plain: plain.jsonl
    Block: {data_path: block.jsonl, dataset_name: HelpSteer3}
    Bench: {benchmark: reward-bench, data_path: [a.jsonl, b.jsonl], max_samples: 7}
    Own: {benchmark: rm-bench}
"""
BLOCKS = """
data:
  default: {dataset_name: PreferenceDataset}
  train: {data_path: train.jsonl}
  validation:
    Block: {data_path: block.jsonl}
    Bench: {benchmark: best-of-n, data_path: a.jsonl}
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_benchmarks_among_paths(tmp_path: Path) -> None:
    data = load_config(RewardTrainingRun, written(tmp_path, PATHS), []).config.data
    assert list(data.validation_sets()) == ["Plain", "Block"]
    found = data.benchmark_sets()
    assert list(found) == ["Bench", "Own"]
    assert found["Bench"].paths == ("a.jsonl", "b.jsonl")
    assert found["Bench"].max_samples == 7
    assert found["Own"].paths == ()


def test_benchmarks_among_blocks(tmp_path: Path) -> None:
    data = load_config(RewardTrainingRun, written(tmp_path, BLOCKS), []).config.data
    assert data.validation_sets()["Block"].dataset_name == "PreferenceDataset"
    # What fills the blocks of preferences is not for a benchmark.
    assert data.benchmark_sets()["Bench"].dataset_name is None


@pytest.mark.parametrize(
    ("block", "overrides"),
    [
        ("{data_path: v.jsonl, dataset_name: HelpSteer3}", ["data.validation.data_path=w.jsonl"]),
        ("{data_path: v.jsonl}", ["data.validation={data_path: w.jsonl, split: test}"]),
        ("{benchmark: reward-bench}", ["data.validation={benchmark: pairs, data_path: w.jsonl}"]),
        ("{A: {data_path: v.jsonl}}", ["+data.validation.default={data_path: w.jsonl}"]),
    ],
)
def test_a_set_without_a_name_is_the_default(
    tmp_path: Path, block: str, overrides: list[str]
) -> None:
    text = f"data:\n  train_data_path: t.jsonl\n  validation: {block}\n"
    data = load_config(RewardTrainingRun, written(tmp_path, text), overrides).config.data
    assert data.validation is not None
    assert data.validation["default"].data_path == "w.jsonl"


@pytest.mark.parametrize("schema", SCHEMAS.values())
@pytest.mark.parametrize(
    ("train", "validation", "named"),
    [
        ({"split": "x"}, {"split": "x"}, {"default": {"split": "x"}}),
        ([{"split": "x"}], [{"split": "x"}], {"default": {"split": "x"}}),
        (
            [{"split": "x"}],
            [{"split": "x"}, {"split": "y"}],
            {"1": {"split": "x"}, "2": {"split": "y"}},
        ),
    ],
)
def test_sets_may_be_written_alone_and_in_a_list(
    schema: Any, train: Any, validation: Any, named: Any
) -> None:
    said = {"data": {"train": train, "validation": validation}}
    meant = {"data": {"train": [{"split": "x"}], "validation": named}}
    overrides = [f"data={json.dumps(said['data'])}"]
    data = load_config(schema, None, overrides).config.data
    dumped = data.model_dump(include={"train", "validation"}, exclude_unset=True)
    assert {"data": dumped} == meant
    # As a checkpoint of an older version has them.
    assert not list(changes(schema, said, meant))
    at = "data.train" if isinstance(train, dict) else "data.train.0"
    overrides += [f"++data.validation={{split: '${{{at}.split}}'}}", f"{at}.subset=z"]
    data = load_config(schema, None, overrides).config.data
    assert [(one.split, one.subset) for one in data.train] == [("x", "z")]
    assert {name: one.split for name, one in data.validation.items()} == {"default": "x"}


IN_BLOCKS = {
    "one set": "train: {data_path: t.jsonl, split_validation_size: 0.2, KEY: q}",
    "a list": "train: [{data_path: t.jsonl, split_validation_size: 0.2, KEY: q}]",
}


@pytest.mark.parametrize("kind", ["rm", "sft", "grpo"])
@pytest.mark.parametrize("text", IN_BLOCKS.values(), ids=IN_BLOCKS)
def test_an_override_of_a_key_of_sets_holds_where_the_file_has_blocks(tmp_path, kind, text):
    """As `laurel init` and saved configurations have them: the messages name these keys."""
    key = "prompt_key" if kind == "rm" else "input_key"
    path = written(tmp_path, f"data:\n  {text.replace('KEY', key)}\n")

    def data(*overrides):
        return load_config(SCHEMAS[kind], path, overrides).config.data

    (one,) = data("data.split_validation_size=0", f"data.{key}=p").train
    assert (one.split_validation_size, one[key], one.data_path) == (0, "p", "t.jsonl")
    (one,) = data("data.train_data_path=u.jsonl", "data.train_split=x").train
    assert (one.data_path, one.split, one.split_validation_size) == ("u.jsonl", "x", 0.2)
    ((name, held),) = data(f"data.{key}=p", "data.val_data_path=v.jsonl").validation.items()
    assert (name, held.data_path, held[key]) == ("default", "v.jsonl", "p")
    named = "+data.validation={A: {data_path: a.jsonl, split: z}}"
    assert data(named, "data.val_data_path=b.jsonl").validation["A"].data_path == "b.jsonl"


def test_a_split_alone_is_one_of_the_training_set():
    data = DataConfig(train={"data_path": "hub/x", "subset": "s"}, val_split="v")
    (held,) = data.validation.values()
    assert (held.data_path, held.subset, held.split) == ("hub/x", "s", "v")
    ((_, held),) = DataConfig(val_split="validation").validation_sets().items()
    assert (held.dataset_name, held.split) == ("HelpSteer3", "validation")


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
@pytest.mark.parametrize(
    ("flat", "block"), [("train_data_path", "train"), ("val_data_path", "validation")]
)
def test_a_set_has_one_form(schema: Any, flat: str, block: str) -> None:
    both = [f"data.{flat}=a.jsonl", f"data.{block}={{data_path: b.jsonl}}"]
    with pytest.raises(ConfigError) as error:
        load_config(schema, None, both)
    assert f"data.{flat}" in str(error.value)
    assert f"data.{block}" in str(error.value)


def test_flat_keys_and_dictionaries_without_a_file() -> None:
    flat = DataConfig(train_data_path="t", val_data_path="b")
    assert flat.validation_sets()["default"].data_path == "b"
    named = {"Block": {"data_path": "b"}, "Bench": {"benchmark": "judge-bench"}}
    data = DataConfig.model_validate({"train": {"data_path": "t"}, "validation": named})
    assert isinstance(data.validation_sets()["Block"], DatasetConfig)
    assert isinstance(data.benchmark_sets()["Bench"], BenchmarkSetConfig)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        (
            "{benchmark: rewardbench, data_path: a}",
            "data.validation.B.benchmark: must be one of best-of-n, judge-bench, pairs, "
            "process-bench, reward-bench, reward-bench-2, rm-bench, not 'rewardbench'; did you "
            "mean 'reward-bench'?",
        ),
        ("{benchmark: best-of-n}", "data_path is missing: benchmark=best-of-n has no place"),
        ("{benchmark: pairs}", "data_path is missing: benchmark=pairs has no place"),
        ("{benchmark: rm-bench, dataset_name: pairs}", "dataset_name is for benchmark=pairs"),
        ("{benchmark: reward-bench, prior: true}", "laurel eval reward-bench --prior"),
        ("{benchmark: rm-bench, max_samples: 0}", "max_samples: must be a whole number of"),
        ("{benchmark: rm-bench, data_pth: a}", "did you mean 'data_path'?"),
    ],
)
def test_what_is_written_wrongly(tmp_path: Path, block: str, told: str) -> None:
    text = f"data:\n  train_data_path: t\n  val_data_paths:\n    B: {block}\n"
    with pytest.raises(ConfigError) as error:
        load_config(RewardTrainingRun, written(tmp_path, text), [])
    assert told in str(error.value)
    assert "run.yaml:4" in str(error.value)


def test_validation_tasks_by_name(tmp_path: Path) -> None:
    text = (
        "data:\n  train: {data_path: t.jsonl}\n  default: {env_name: math}\n  validation:\n"
        "    Easy: {data_path: e.jsonl}\n    Hard: {data_path: h.jsonl, env_name: code}\n"
    )
    data = load_config(GRPORun, written(tmp_path, text), []).config.data
    assert data.validation_names() == ["Easy", "Hard"]
    assert [one.env_name for one in data.validation_sets()] == ["math", "code"]
    listed = text.replace("    Easy: ", "    - ").replace("    Hard: ", "    - ")
    data = load_config(GRPORun, written(tmp_path, listed), []).config.data
    assert data.validation_names() == ["1", "2"]
    listed = listed.replace("e.jsonl}", "e.jsonl, task_name: Easy}")
    data = load_config(GRPORun, written(tmp_path, listed), []).config.data
    assert data.validation_names() == ["Easy", "2"]
    # A name that is the place of another.
    data = load_config(GRPORun, written(tmp_path, listed.replace("Easy", "'2'")), []).config.data
    assert [one.data_path for one in data.validation_sets()] == ["e.jsonl", "h.jsonl"]


@pytest.mark.parametrize(
    ("schema", "key"), [(RewardTrainingRun, "kwargs"), (SFTRun, "kwargs"), (GRPORun, "tasks")]
)
def test_a_lone_set_may_say_nothing_but_a_mapping(
    tmp_path: Path, schema: type[Section], key: str
) -> None:
    text = f"data:\n  dataset_name: reasoning_gym\n  validation: {{{key}: {{some: 2.0}}}}\n"
    data: Any = load_config(schema, written(tmp_path, text), []).config
    assert data.data.validation["default"].get(key) == {"some": 2.0}


def test_tasks_of_a_list_have_the_names_of_their_blocks(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"input": "{n} + 1?", "output": "{n + 1}"}}\n' for n in range(2)))
    block: dict[str, Any] = {"data_path": str(rows), "dataset_name": "ResponseDataset"}
    data = TaskDataConfig.model_validate(
        {"train": block, "validation": [block | {"task_name": "Easy"}, block]}
    )
    loaded = load_task_data(data, default_environment="math", environments=["math"])
    named = [loaded.validation_set_of.get(task.id) for task in loaded.validation]
    assert named == ["Easy", "Easy", "2", "2"]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_a_key_of_sets_that_reaches_no_set_is_named(kind: Any) -> None:
    """Every short key, beside sets that all have their own; and beside one more that has none."""
    (data,) = sections_of(kinds_of(SCHEMAS[kind].model_fields["data"].annotation))
    assert issubclass(data, SetsConfig)
    named = {short: SHORT.get(short, ("train", short)) for short in data.short_keys()}
    assert len(named) > 10
    for short, (block, key) in named.items():
        if key == "data_path":
            continue  # refused beside sets
        one, other = {"data_path": "a", key: "x"}, {"data_path": "b", key: "y"}
        sets: dict[str, Any] = {"train": [one, other]}
        if block == "validation":
            sets["validation"] = {"a": one, "b": other}
        assert list(data.outdone({short: "z", **sets})) == [short]
        bare = {"data_path": "c"}
        more = {"train": [*sets["train"], bare], "validation": {"a": one, "c": bare}}
        assert data.outdone({short: "z", **sets, block: more[block]}) == {}
        assert data.outdone({short: "z", "train": [one, other], "validation": {"a": one}}) == (
            {short: "every set that it is for has its own"}
        )


@pytest.mark.parametrize("by_override", [False, True])
def test_the_loader_names_a_key_that_reaches_no_set(tmp_path: Path, by_override: bool) -> None:
    said = "system_key: c"
    sets = "[{data_path: a.jsonl, system_key: x}, {data_path: b.jsonl, system_key: y}]"
    text = f"data:\n  train: {sets}\n" + ("" if by_override else f"  {said}\n")
    overrides = ["data.system_key=c"] if by_override else []
    warnings = load_config(RewardTrainingRun, written(tmp_path, text), overrides).warnings
    assert [line for line in warnings if "data.system_key (every set" in line]
