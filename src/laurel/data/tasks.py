"""Tasks from any data set: prompts to be answered, and what their environments judge by."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from laurel.config.tasks import TaskDataConfig, TaskSetConfig
from laurel.config.tree import nearest
from laurel.data.cells import Row
from laurel.data.held_out import held_out_prompts, split
from laurel.data.own_datasets import has_own_split, is_import_path
from laurel.data.processors import Processor, find_processor, own_form
from laurel.data.report import fingerprint, nothing_left
from laurel.data.roles import UnusualRoles
from laurel.data.set_reading import LeftOutRow, OpenedSet, open_set
from laurel.data.task_formats import TASK_SETS, TaskParts, settle
from laurel.data.task_needs import NeedsCheck, TaskNeeds
from laurel.data.text_report import TaskReport
from laurel.errors import ConfigError, DataError
from laurel.observe.counts import counted_that
from laurel.types import Task

DEFAULT_TASKS = "OpenMathInstruct-2"
"""What is read where the configuration names neither a set nor a path."""

FOR_FUNCTIONS = {"data_source": str, "extra_info": dict}
"""Columns that become metadata as they are: what verl's reward functions are given."""

NEEDS = TaskNeeds()
"""Of the environments without any settings."""

_HUBS = {name: known.hub for name, known in TASK_SETS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The tasks of a run."""

    train: list[Task]
    validation: list[Task]
    reports: dict[str, TaskReport]
    """`train` and, where there is one, `validation`."""
    validation_set_of: dict[str, str] = field(default_factory=dict)
    """By the id of a validation task, the name of its set; empty where sets have none."""


def load_task_data(
    data: TaskDataConfig,
    *,
    default_environment: str,
    environments: Sequence[str],
    needs: TaskNeeds = NEEDS,
) -> TaskData:
    """Every task that the `data` section names, with the held-out share where it names no others.

    Raises:
        ConfigError: An environment or processor that nobody knows.
        DataError: A file, a row, or nothing left.
    """

    def load(
        sets: Sequence[TaskSetConfig], name: str, limit: int | None
    ) -> tuple[list[Task], TaskReport]:
        return load_tasks(
            sets,
            name=name,
            default_environment=default_environment,
            environments=environments,
            needs=needs,
            on_bad_row=data.on_bad_row,
            limit=limit,
        )

    train_sets = data.train_sets()
    train, report = load(train_sets, "train", data.max_samples)
    reports = {"train": report}
    validation_sets = data.validation_sets()
    asks_share = any(config.split_validation_size for config in train_sets) or (
        bool(data.split_validation_size) and "split_validation_size" in data.model_fields_set
    )
    if not validation_sets and not asks_share:
        brought = [own_validation(config) for config in train_sets]
        validation_sets = [found for found in brought if found is not None]
    if validation_sets:
        names = data.validation_names()
        validation, reports["validation"] = load(validation_sets, "validation", None)
        return TaskData(
            train=train, validation=validation, reports=reports,
            validation_set_of=_names_by_task(validation, names),
        )  # fmt: skip
    kept, validation = _hold_out(train, train_sets, data)
    if not validation:
        return TaskData(train=train, validation=[], reports=reports)
    if not kept:
        raise DataError(
            "data.split_validation_size leaves no task to train on: every prompt is held out"
        )
    reports["validation"] = report.move_out(kept=kept, held_out=validation, name="validation")
    return TaskData(train=kept, validation=validation, reports=reports)


def load_tasks(
    sets: Sequence[TaskSetConfig],
    *,
    name: str,
    default_environment: str,
    environments: Sequence[str],
    needs: TaskNeeds = NEEDS,
    on_bad_row: Literal["error", "skip"] = "error",
    limit: int | None = None,
) -> tuple[list[Task], TaskReport]:
    """The tasks of several data sets, one after the other, and the report of what was left out.

    Args:
        sets: Each with its own environment, name, prompt files and processor.
        name: Of the whole, in the report and at the start of every id.
        default_environment: Who judges the tasks of a set that names nobody.
        environments: The names there are.
        needs: What environments cannot judge without: a row that lacks it is malformed.
        on_bad_row: Whether a malformed row is an error, or left out and counted.
        limit: Most rows that are used in all, before any is repeated.

    Raises:
        ConfigError: An environment or processor that nobody knows; or no environment is named, and
            the one that judges then does not fit the rows.
        DataError: A file, a row, or nothing left of a set.
    """
    for config in sets:
        check_environment(config.env_name or default_environment, environments)
    tasks: list[Task] = []
    reports: list[TaskReport] = []
    num_rows = 0
    for index, config in enumerate(sets):
        if limit is not None and num_rows >= limit:
            break
        label = name if len(sets) == 1 else f"{name}-{index + 1}"
        environment = config.env_name or default_environment
        fit = NeedsCheck(needs=needs, environment=environment, is_named=config.env_name is not None)
        reading = _Reading.open(config, label=label, environment=environment, fit=fit)
        tasks += reading.run(on_bad_row, None if limit is None else limit - num_rows)
        num_rows += reading.report.num_kept
        reports.append(reading.report)
    if not reports:
        raise DataError(f"data set '{name}': there is none; name one in data.train")
    return tasks, reports[0] if len(reports) == 1 else TaskReport.merge(reports, name=name)


def _names_by_task(tasks: Sequence[Task], names: Sequence[str]) -> dict[str, str]:
    """The name of the set that each task comes from, by the ids that `load_tasks` gives."""
    if len(names) < 2:
        return {task.id: name for name in names for task in tasks}
    starts = {f"validation-{index + 1}": name for index, name in enumerate(names)}
    return {task.id: starts[task.id.partition(":")[0]] for task in tasks}


def check_environment(environment: str, environments: Sequence[str]) -> None:
    """Raise ConfigError where there is no environment of that name."""
    if environment in environments:
        return
    near = nearest(environment, environments)
    hint = f" Did you mean {near}?" if near else ""
    raise ConfigError(
        f"data.env_name={environment}: there is no environment of that name.{hint} There are: "
        f"{', '.join(environments)}. One of your own is named by "
        f"+env.custom.{environment}.name=MODULE.CLASS"
    )


def own_validation(config: TaskSetConfig) -> TaskSetConfig | None:
    """The validation set that a training set brings with it; None where there is none.

    DeepScaler is validated on AIME 2024, and a class of the user's own on its `validation` split.
    """
    name = config.dataset_name
    known = TASK_SETS.get(name or "")
    if known is not None:
        if known.validation is None or config.data_path is not None:
            return None
        kept = {"prompt_file", "system_prompt_file", "env_name"}
        return known.validation.model_copy(update=config.model_dump(include=kept))
    if name is None or not is_import_path(name) or not has_own_split(config, "validation"):
        return None
    return config.model_copy(update={"split": "validation"})


def _hold_out(
    tasks: Sequence[Task], sets: Sequence[TaskSetConfig], data: TaskDataConfig
) -> tuple[list[Task], list[Task]]:
    """The tasks as (train, validation), by the share and seed of each set or, if unsaid, of all."""
    by_draw: dict[tuple[float, int], list[int]] = {}
    for index, config in enumerate(sets):
        said = config.model_fields_set
        share = config.split_validation_size if "split_validation_size" in said else (
            data.split_validation_size
        )  # fmt: skip
        seed = config.seed if "seed" in said else data.seed
        if share:
            by_draw.setdefault((share, seed), []).append(index)
    if not by_draw:
        return list(tasks), []
    prompts = [fingerprint(task.prompt) for task in tasks]
    held_out: set[bytes] = set()
    for (share, seed), indices in by_draw.items():
        starts = tuple(f"train-{index + 1}:" for index in indices)
        drawn_from = [
            prompt
            for task, prompt in zip(tasks, prompts, strict=True)
            if len(sets) == 1 or task.id.startswith(starts)
        ]
        if drawn_from:
            held_out |= held_out_prompts(drawn_from, share=share, seed=seed)
    return split(tasks, prompts, held_out)


# --------------------------------------------------------------------------------------- reading


@dataclass(slots=True, kw_only=True)
class _Reading:
    """One pass over one data set."""

    opened: OpenedSet[TaskSetConfig]
    config: TaskSetConfig
    """What rows are read by; settled at the first row where the set does not say it."""
    is_settled: bool
    processor: Processor
    environment: str
    task_name: str
    repeat: int
    report: TaskReport
    fit: NeedsCheck
    num_double_systems: int = 0
    roles: UnusualRoles = field(default_factory=UnusualRoles)

    @classmethod
    def open(
        cls, config: TaskSetConfig, *, label: str, environment: str, fit: NeedsCheck
    ) -> _Reading:
        if config.dataset_name is None and config.data_path is None:
            config = config.model_copy(update={"dataset_name": DEFAULT_TASKS})
        report = TaskReport(name=label)
        processor = find_processor(config.processor)
        opened = open_set(config, known=_HUBS, report=report)
        known = TASK_SETS.get(config.dataset_name or "")
        reads_any = opened.is_own or config.dataset_name in (None, "ResponseDataset")
        read_by = opened.config
        if reads_any:
            read_by = read_by.model_copy(update={"dataset_name": "ResponseDataset"})
        report.dataset_class = config.dataset_name or "ResponseDataset"
        return cls(
            opened=opened,
            config=read_by,
            is_settled=not (reads_any and processor is own_form),
            processor=processor,
            environment=environment,
            task_name=config.task_name or opened.task_name or _name_of(config),
            repeat=config.repeat or (known.repeat if known is not None else 1),
            report=report,
            fit=fit,
        )

    def run(self, on_bad_row: Literal["error", "skip"], limit: int | None) -> list[Task]:
        if self.processor is own_form:
            self.fit.check_set(self.config.dataset_name, self.report)
        limits = [most for most in (self.config.max_samples, limit) if most is not None]
        rows = self.opened.read(
            self._task, report=self.report, on_bad_row=on_bad_row, limit=min(limits, default=None)
        )
        if self.num_double_systems:
            self.report.notes.append(
                f"{counted_that(self.num_double_systems, 'row', 'begin')} with a system message, "
                "which now follows that of data.system_prompt_file"
            )
        self.report.notes += self.roles.notes()
        if not rows:
            raise DataError(nothing_left(self.report))
        self.fit.conclude(self.report.origin)
        tasks = list(_repeated(rows, self.repeat))
        if self.repeat > 1:
            self.report.notes.append(f"every task occurs {self.repeat} times")
        self.report.describe(tasks)
        return tasks

    def _task(self, source: str, row: Row) -> Task:
        if not self.is_settled:
            self.config, said = settle(row, self.config)
            self.is_settled = True
            self.fit.check_set(self.config.dataset_name, self.report)
            if said is not None:
                self.report.notes.append(said)
        parts = self._processed(source, row)
        if not any(m.content.strip() for m in parts.prompt if m.role != "system"):
            raise LeftOutRow("empty", "the prompt says nothing")
        prompt = self.opened.frame.around(parts.prompt)
        if self.opened.frame.system is not None and parts.prompt[0].role == "system":
            self.num_double_systems += 1
        self.roles.look(source, prompt)
        metadata = dict(parts.metadata)
        if parts.answer is not None:
            metadata.setdefault("ground_truth", parts.answer)
        for key, kind in FOR_FUNCTIONS.items():
            if isinstance(row.get(key), kind):
                metadata.setdefault(key, row[key])
        self.fit.check_row(parts, metadata)
        return Task(
            id=f"{self.report.name}:{source}",
            prompt=prompt,
            environment=self.environment,
            name=self.task_name,
            metadata=metadata,
            source=source,
        )

    def _processed(self, source: str, row: Row) -> TaskParts:
        try:
            return self.processor(row, self.config)
        except DataError as problem:
            raise DataError(f"{source}: {problem}") from problem


def _repeated(rows: Sequence[Task], repeat: int) -> Iterator[Task]:
    """All rows, then all of them again under other ids."""
    yield from rows
    for count in range(2, repeat + 1):
        for task in rows:
            yield replace(task, id=f"{task.id}#{count}")


def _name_of(config: TaskSetConfig) -> str:
    """What a set is called in figures: its own name, or the end of its path as NeMo RL has it."""
    name = config.dataset_name
    if name is not None and (name in TASK_SETS and config.data_path is None):
        return name
    if config.data_path is None:
        return (name or "").replace(":", ".").rpartition(".")[2]
    if name is not None and name not in ("ResponseDataset", *_PREFERENCES):
        return name
    parts = os.path.normpath(config.data_path).split(os.sep)
    last = parts[-1].removesuffix(".gz")
    stem = os.path.splitext(last)[0]
    return "-".join((*parts[-2:-1], stem)).strip("-.") or stem


_PREFERENCES = ("PreferenceDataset", "BinaryPreferenceDataset")
