"""Defines the `data` sections: the sets of `train` and `validation`, and what holds for all rows.

A key of a set may also be written in `data` itself, where it holds for every set that has none of
its own: `data.input_key`. `data.train_data_path`, `data.val_data_path`, `data.train_split` and
`data.val_split` name the set where there is one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from laurel import plugins
from laurel.config.plugged import NameOf
from laurel.config.schema_info import item_kinds, kinds_of, sections_of
from laurel.config.yaml_tree import (
    BY_NAME,
    IN_LIST,
    MAY_CHANGE,
    Removed,
    Section,
    YamlNode,
    removed,
)


def is_import_path(name: str) -> bool:
    """Report whether a name can only be an import path, because it has a dot or a colon."""
    return "." in name or ":" in name


class SetConfig(Section):
    """One data set: the class that reads it, and its place."""

    dataset_name: str | None = None
    """The class that reads it, or the import path of your own; null: the columns decide."""
    data_path: Annotated[str | None, MAY_CHANGE] = None
    """A file (.json, .jsonl, .csv, .parquet, .arrow; also .gz), a directory of
    `datasets.save_to_disk`, or a name on the Hugging Face hub."""
    subset: str | None = None
    """Configuration of a hub data set."""
    split: str | None = None
    """Split of a hub data set; `train` where none is said."""
    max_samples: int | None = Field(default=None, ge=1)
    """Read only the first rows, after filtering."""
    prompt_file: Annotated[str | None, MAY_CHANGE] = None
    """Text file with `{}` where the first user message goes."""
    system_prompt_file: Annotated[str | None, MAY_CHANGE] = None
    """Text file put before every conversation as a system message."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of your own class. Keys of its block that Laurel does not know are added,
    as in NeMo RL."""
    system_key: str | None = None
    """Column of the system message of a conversation that has none of its own. Null: `system`,
    `system_prompt` or `system_message`, where a row has a text there; `""`: none."""


# `laurel rm` names the columns of pairs with these.
_COLUMNS_OF_PAIRS = dict.fromkeys(
    ("prompt_key", "chosen_key", "rejected_key"),
    "for sft and grpo: data.input_key, data.output_key",
)


class TextSetConfig(SetConfig):
    """A set of questions and answers, or of conversations."""

    other_commands: ClassVar[Mapping[str, str]] = _COLUMNS_OF_PAIRS

    input_key: str = "input"
    """Column of the question (ResponseDataset); without it, and without a setting, Laurel looks for
    one."""
    output_key: str = "output"
    """Column of the answer (ResponseDataset); likewise."""
    split_validation_size: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share held out for validation where no validation set is named. Rows with the same prompt
    stay on one side."""
    seed: int = 42
    """Seed of the held-out share, and of rows that are made."""


SHORT = {
    "train_data_path": ("train", "data_path"),
    "train_split": ("train", "split"),
    "val_data_path": ("validation", "data_path"),
    "val_split": ("validation", "split"),
}
"""The keys of `data` that name a set, each with the block that it names and the block's key."""


class SetsConfig(Section):
    """The rows of a run."""

    @classmethod
    @cache
    def short_keys(cls) -> Mapping[str, tuple[type[Section], str]]:
        """Return the keys of sets that may be written in the section itself."""
        if "train" not in cls.model_fields:  # what the commands' sections derive from
            return {}
        (block,) = sections_of(item_kinds(kinds_of(cls.model_fields["train"].annotation)[0]) or ())
        own = cls.model_fields.keys() | {"data_path", "split"}
        found = {key: (block, named) for key, (_, named) in SHORT.items()}
        return found | {key: (block, key) for key in block.model_fields if key not in own}

    shuffle: bool = True
    """Shuffle the training rows each epoch, from the seed of the run."""
    max_samples: int | None = Field(default=None, ge=1)
    """Use only the first training rows, after filtering."""
    on_bad_row: Literal["error", "skip"] = "error"
    """`error` stops the run with file and line of a malformed row, or of one that the chat template
    refuses; `skip` leaves it out and counts it."""

    @classmethod
    def in_blocks(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of the section with the keys of sets put into the sets.

        Raises:
            ValueError: A path is written beside the blocks of sets.
        """
        short = cls.short_keys()
        found = {key: value for key, value in values.items() if key not in short}
        said = {key: values[key] for key in short if values.get(key) is not None}
        of_all = {key: value for key, value in said.items() if key not in SHORT}
        if values.get("env_name") is not None:
            of_all["env_name"] = values["env_name"]
        forms: dict[str, Any] = {"train": IN_LIST.func, "validation": BY_NAME.func}
        for block, form in forms.items():
            named = {key: meant for key, (its, meant) in SHORT.items() if its == block}
            own = {meant: said[key] for key, meant in named.items() if key in said}
            sets = form(found.get(block))
            if sets and "data_path" in own:
                (key, *_) = named
                raise ValueError(
                    f"data.{key} and data.{block} are two forms of the same thing; keep one"
                )
            if block == "validation":
                of_all.pop("split_validation_size", None)  # nothing is held out of it
                if own and not sets:
                    own = _beside(forms["train"](found.get("train")), own)
            base = of_all | own
            if isinstance(sets, list) and base:
                found[block] = [_filled(one, base) for one in sets]
            elif isinstance(sets, dict) and base:
                found[block] = {name: _filled(one, base) for name, one in sets.items()}
            elif base and not sets and (own or block == "train"):
                found[block] = [base] if block == "train" else {"default": base}
        return found

    @classmethod
    def place_of_short(cls, block: YamlNode, key: str) -> tuple[YamlNode, tuple[str, ...]]:
        """Return where an override sets a key of sets, and the section's block made ready for it.

        A path or a split is that of the only set there is. Another key is that of the only training
        set, even where it has one; of several sets each keeps its own.
        """
        if key in SHORT:
            name, meant = SHORT[key]
            sets = _sets_in(block, name)
            return block, (*sets[0], meant) if len(sets) == 1 else (key,)
        training = _sets_in(block, "train")
        if len(training) == 1:
            block = _without(block, (*training[0], key))
        return block, (key,)

    @classmethod
    def outdone(cls, values: Mapping[str, Any]) -> dict[str, str]:
        """Return the keys of sets of which every set that would take them has its own."""

        def sets_without(key: str | None) -> list[Any]:
            found = cls.in_blocks({one: value for one, value in values.items() if one != key})
            train = in_list(found.get("train")) or ()
            validation = by_name(found.get("validation")) or {}
            return [*map(_said_in, train), {k: _said_in(one) for k, one in validation.items()}]

        in_list: Any = IN_LIST.func
        by_name: Any = BY_NAME.func
        given = [key for key in cls.short_keys() if values.get(key) is not None]
        whole = sets_without(None) if given else []
        why = "every set that it is for has its own"
        return {key: why for key in given if sets_without(key) == whole}

    @model_validator(mode="before")
    @classmethod
    def _puts_keys_into_sets(cls, values: Any) -> Any:
        return cls.in_blocks(values) if isinstance(values, Mapping) else values

    def without_effect(self) -> dict[str, str]:
        """Return the shares of validation sets, of which nothing is held out."""
        share, named = "split_validation_size", getattr(self, "validation", None) or {}
        why = "it is the part of a training set that is held out for validation"
        return {
            f"validation.{name}.{share}": why
            for name, one in named.items()
            if isinstance(one, SetConfig) and share in one.model_fields_set and one.get(share)
            if not is_endless(one)
        }


def _beside(train: Sequence[Any] | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a validation set of which a path or a split is said, as the only training set is."""
    if train is None or len(train) != 1:
        return dict(own)
    (one,) = train
    said = _said_in(one)
    if "data_path" in own and said.get("data_path") is None:
        return dict(own)  # the rows of the training set are no file's
    return {key: value for key, value in said.items() if key not in _OF_TRAINING} | dict(own)


def _said_in(one: Any) -> Any:
    """Return a set with the keys that are given."""
    return one.model_dump(exclude_unset=True) if isinstance(one, Section) else one


_OF_TRAINING = ("split", "split_validation_size", "max_samples", "task_name")


def _sets_in(data: YamlNode, block: str) -> list[tuple[str, ...]]:
    """Return the paths of the sets that a block of `data` has, without benchmarks."""
    node = data.value.get(block)
    if node is None or not isinstance(node.value, dict | list) or not node.value:
        return []
    entries = node.value
    if isinstance(entries, list):
        named = {str(place): one for place, one in enumerate(entries)}
    elif block == "train" or not all(isinstance(one.value, dict) for one in entries.values()):
        return [] if "benchmark" in entries else [(block,)]
    else:
        named = entries
    return [
        (block, name)
        for name, one in named.items()
        if isinstance(one.value, dict) and "benchmark" not in one.value
    ]


def _without(node: YamlNode, path: Sequence[str]) -> YamlNode:
    """Return a copy of a block without the key at a path."""
    key: Any = int(path[0]) if isinstance(node.value, list) else path[0]
    children = copy(node.value)
    if len(path) > 1:
        children[key] = _without(children[key], path[1:])
    else:
        children.pop(key, None)
    return replace(node, value=children)


def _filled(one: Any, base: Mapping[str, Any]) -> Any:
    """Return a set with what it lacks filled in; a benchmark as it is."""
    if isinstance(one, SetConfig):
        return type(one).model_validate({**base, **one.model_dump(exclude_unset=True)})
    return {**base, **one} if isinstance(one, dict) and "benchmark" not in one else one


class TextDataConfig(SetsConfig):
    """The rows of questions, answers and conversations."""

    other_commands: ClassVar[Mapping[str, str]] = _COLUMNS_OF_PAIRS


def row_maker(config: SetConfig) -> plugins.Rows | None:
    """Return the plug-in that makes the rows of a set; None if they are read from a file."""
    name = config.dataset_name or ""
    return plugins.find(plugins.Rows, name) if name in plugins.names("rows") else None


def is_endless(config: SetConfig) -> bool:
    """Report whether a set has rows without end, divided between training and validation."""
    made = row_maker(config)
    return made is not None and made.endless


# A benchmark of reward models as a validation set.

BenchmarkName = Annotated[str, NameOf("benchmarks")]
"""The name of a benchmark, which is also the name of its `laurel eval` command."""


class BenchmarkSetConfig(Section):
    """One benchmark, with the rows that `laurel eval` would read."""

    removed: ClassVar[Mapping[str, Removed]] = removed("BenchmarkSetConfig")

    benchmark: BenchmarkName
    """The benchmark."""
    data_path: str | list[str] | None = None
    """Files (.jsonl, .json, .csv, .parquet, .arrow; also .gz), directories of
    `datasets.save_to_disk`, or names on the hub. Null: the benchmark's own place on the hub;
    `pairs` and `best-of-n` have none."""
    split: str | None = None
    """Of a directory or a hub data set; null: the benchmark's own, or `train`."""
    dataset_name: str | None = None
    """The class that reads them (`pairs`); null: the columns decide."""
    max_samples: int | None = Field(default=None, ge=1)
    """Rows at most, a share of each subset, always the same ones. A shortened benchmark has no
    final score."""

    @model_validator(mode="after")
    def _fits(self) -> BenchmarkSetConfig:
        if "dataset_name" in self.model_fields_set and self.benchmark != "pairs":
            raise ValueError("dataset_name is for benchmark=pairs; leave it out")
        if not self.paths and self.benchmark in ("pairs", "best-of-n") and not self.dataset_name:
            raise ValueError(
                f"data_path is missing: benchmark={self.benchmark} has no place of its own; name a "
                "file or a hub name, or a dataset_name that has one"
            )
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """Return the paths of the benchmark's rows; if empty, they are read from the hub."""
        if self.data_path is None:
            return ()
        return (self.data_path,) if isinstance(self.data_path, str) else tuple(self.data_path)


# The `data` section of reward-model training. Names and meanings follow NeMo RL's files.

DEFAULT_DATASET = "HelpSteer3"


class DatasetConfig(SetConfig):
    """One set of preferences: the class that reads it, and its place."""

    dataset_name: str | None = None
    """HelpSteer3, HelpSteer2, Tulu3Preference, PKU-SafeRLHF, Nectar, SHP, WebGPT,
    PreferenceDataset, BinaryPreferenceDataset, or the dotted import path of your own class."""
    prompt_key: str = "prompt"
    """Column of the prompt (BinaryPreferenceDataset)."""
    chosen_key: str = "chosen"
    """Column of the preferred answer (BinaryPreferenceDataset)."""
    rejected_key: str = "rejected"
    """Column of the other answer (BinaryPreferenceDataset)."""
    margin_key: str | None = None
    """Column of the margin of `chosen` (a number), for `rm.loss.use_margin`."""
    target_key: str | None = None
    """Column of the probability, 0 to 1, that `chosen` is better (soft label)."""
    split_validation_size: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share held out for validation where no validation set of preferences is named. Rows with the
    same prompt stay on one side."""


class DataConfig(SetsConfig):
    """The rows of preferences."""

    train: Annotated[list[DatasetConfig] | None, IN_LIST] = None
    """Training sets; all rows of all. Null: HelpSteer3. Keys of a set may also stand in `data`
    itself, for all sets without their own; there `train_data_path` and `train_split` say where the
    rows are, and `val_data_path` and `val_split` those of validation."""
    validation: Annotated[dict[str, DatasetConfig | BenchmarkSetConfig] | None, BY_NAME] = None
    """Validation sets by name (a block without one is called `default`); any of them may be a
    `benchmark`, such as `{Bench: {benchmark: reward-bench, data_path: rows.jsonl.gz}}`."""

    max_input_seq_length: int | None = Field(default=None, ge=2)
    """Longest conversation in tokens; null means `policy.max_total_sequence_length`."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """What happens to a conversation longer than `max_input_seq_length`. Truncation is the default
    because a scorer must give every conversation a score, and training should see what scoring
    sees. A process reward model always drops, because the steps of a cut answer cannot all be read.
    Either way the rows are counted in the data report."""
    truncation_side: Literal["left", "right"] = "left"
    """The end that is cut. `left` keeps the answer, which gets the score."""
    ties: Literal["drop", "error"] = "drop"
    """Rows whose completions all share one rank, if the loss cannot use them."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Rows that are equal to an earlier row."""
    group_by_prefix: bool = False
    """Bring rows with the same system message and first question, such as those that continue one
    dialogue, into one step and one micro-batch, where the tokens with which they begin alike are
    computed once, at any depth. The rows of a step are no longer independent of each other."""

    @field_validator("validation", mode="before")
    @classmethod
    def _sets_or_benchmarks(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {
            name: (BenchmarkSetConfig if "benchmark" in block else DatasetConfig)(**block)
            if isinstance(block, dict)
            else block
            for name, block in value.items()
        }

    def train_sets(self) -> list[DatasetConfig]:
        """Return the training sets; a lone one that is not named is HelpSteer3."""
        sets = self.train or [DatasetConfig()]
        if len(sets) == 1 and sets[0].dataset_name is None and sets[0].data_path is None:
            return [sets[0].model_copy(update={"dataset_name": DEFAULT_DATASET})]
        return sets

    def validation_sets(self) -> dict[str, DatasetConfig]:
        """Return the preference sets used for validation by name; empty if none is configured.

        A split of a set that is not named is one of HelpSteer3.
        """
        named = self.validation or {}
        return {
            name: one.model_copy(update={"dataset_name": DEFAULT_DATASET})
            if one.split is not None and one.dataset_name is None and one.data_path is None
            else one
            for name, one in named.items()
            if not isinstance(one, BenchmarkSetConfig)
        }

    def benchmark_sets(self) -> dict[str, BenchmarkSetConfig]:
        """Return the benchmarks among the validation sets, by name."""
        named = self.validation or {}
        return {k: v for k, v in named.items() if isinstance(v, BenchmarkSetConfig)}


# The `data` section of runs that answer prompts (GRPO).


class GeneratorConfig(Section):
    """One generator of tasks in a mixture."""

    weight: float = Field(default=1.0, gt=0)
    """Its part of the rows, relative to the weights of the others."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Its own settings, such as those of the difficulty: `{min_terms: 2, max_terms: 3}`."""


class TaskSetConfig(TextSetConfig):
    """One set of tasks: the class that reads it, its place, and the environment."""

    dataset_name: str | None = None
    """OpenMathInstruct-2, DeepScaler, AIME2024, AIME2025, AIME2026, DAPOMath17K, DAPOMathAIME2024,
    GSM8K, NuminaMath-1.5, OpenR1-Math-220k, HumanEval, MBPP, CodeTasks (rows with tests),
    ResponseDataset, reasoning_gym (rows without end), verifiers, openenv, openreward, a class of
    preferences (for their prompts), or the import path of your own class. Null with a path: the
    columns decide."""
    tasks: dict[str, Annotated[float, Field(gt=0)] | GeneratorConfig] | None = None
    """The generators of reasoning_gym, each with its weight, or with `weight` and `config`:
    `{chain_sum: 0.5, leg_counting: {weight: 0.5, config: {max_animals: 5}}}`."""
    repeat: int | None = Field(default=None, ge=1)
    """Times that each task occurs; AIME's default is 16, others' 1."""
    processor: str | None = None
    """How a row becomes a task: math_hf_data_processor, math_data_processor (columns problem and
    expected_answer), multichoice_qa_processor, code_data_processor (rows with tests), or the import
    path of your own function (row, configuration of the set) -> TaskParts. Null: the set's own."""
    env_name: str | None = None
    """The environment that grades the answers."""
    task_name: str | None = None
    """Name under which metrics are reported; null is that of the data set."""


class TaskDataConfig(TextDataConfig):
    """The rows of tasks."""

    env_name: str | None = None
    """The environment of sets that name none; null is `reward_model` where that is enabled, else
    `math`."""
    train: Annotated[list[TaskSetConfig] | None, IN_LIST] = None
    """Training sets: a mixture, all rows of all. Null: OpenMathInstruct-2. Keys of a set may also
    stand in `data` itself, for all sets without their own; there `train_data_path` and
    `train_split` say where the rows are, and `val_data_path` and `val_split` those of
    validation."""
    validation: Annotated[dict[str, TaskSetConfig] | None, BY_NAME] = None
    """Validation sets by name, together a mixture; each of several has figures of its own besides,
    `validation-<Name>/...`. A block without a name is called `default`; those of a list have their
    `task_name`, or their place."""

    max_input_seq_length: int | None = Field(default=None, ge=1)
    """Longest prompt in tokens; longer ones are left out and counted. Null leaves room for at least
    one new token in `policy.max_total_sequence_length`."""

    def train_sets(self) -> list[TaskSetConfig]:
        """Return the training sets."""
        return self.train or [TaskSetConfig()]

    def validation_sets(self) -> list[TaskSetConfig]:
        """Return the task sets used for validation; empty if none is configured."""
        return list((self.validation or {}).values())

    def sets(self) -> list[TaskSetConfig]:
        """Return the sets of training and of validation."""
        return [*self.train_sets(), *self.validation_sets()]

    def validation_names(self) -> list[str]:
        """Return the names of validation sets that have figures of their own."""
        names = list(self.validation or ())
        return [] if names == ["default"] else names
