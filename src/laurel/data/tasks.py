"""Reads tasks from any data set: prompts to answer, with what their environments grade by."""

from __future__ import annotations

import os
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import islice
from typing import Any, Literal

from laurel import plugins
from laurel.config.data import TaskDataConfig, TaskSetConfig, is_endless, is_import_path, row_maker
from laurel.config.yaml_tree import nearest
from laurel.data.columns import (
    READ_OTHERWISE,
    ColumnNotes,
    refuse_tools,
    texts_in,
    with_system,
)
from laurel.data.own_rows import own_validation_split
from laurel.data.reading import (
    NO_HUB,
    HubSet,
    LeftOutRow,
    OpenedSet,
    UnusualRoles,
    asks_share,
    hold_out_of_sets,
    open_set,
    read_prompt_frame,
    read_sets,
)
from laurel.data.report import TaskReport, no_rows_left
from laurel.data.sources import (
    Row,
    UnusableRow,
    complaint,
    is_list,
    json_kind,
    required,
    text,
)
from laurel.data.task_formats import (
    PREFERENCE_SETS,
    TaskParts,
    answer_text,
    columns,
    names_of_sets,
    own_forms,
    resolve_columns,
    task_set,
)
from laurel.errors import ConfigError, DataError, counted_that, setting_of
from laurel.observe.user_code import ForkGuard, import_object
from laurel.plugins import EnvironmentKind
from laurel.types import Conversation, Message, Task

# The needs of environments, checked against the rows of a set.
#
# A task without its answer or tests would get a reward of 0 for any completion, without a reason.

PROSE_WORDS = 20
"""A known answer with more words than this and no marked final answer counts as prose."""
_WORD = re.compile(r"[^\W\d_]{2,}")
_MARKED = ("\\boxed", "####")

NOT_WHAT_IS_RIGHT = (
    "completions are graded against the answers that people preferred, which need not be right. To "
    "learn from preferences: laurel rm, and then a policy against that reward "
    "model (laurel init --task grpo-rm, data.env_name=reward_model)"
)
"""The note for preferences whose environment compares with a known answer."""
_CHOICES = (
    "Name the environment: data.env_name=reward_model with env.reward_model.enabled=true and "
    "env.reward_model.model_name=DIR; your own under env.custom; "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNeeds:
    """Names the environments that need a known answer or tests in every task."""

    answers: frozenset[str] = frozenset({"math", "math_default"})
    """The environments that compare with a known answer, so that every task needs one."""
    tests: frozenset[str] = frozenset()
    """The environments that reward a task without tests with 0, so that every task needs tests."""
    keys_of_tests: Mapping[str, str] = field(default_factory=dict)
    """The metadata keys of tests that environments of packages run, too, with the environments."""
    guess: str | None = "math"
    """The default environment, used if the configuration and the rows name none."""


def tests_in(metadata: Mapping[str, Any], needs: TaskNeeds) -> dict[str, str]:
    """Return the metadata keys with tests of a task, each with the environment that runs them."""
    keys = {**keys_of_tests(), **needs.keys_of_tests}
    return {key: name for key, name in keys.items() if metadata.get(key) is not None}


@cache
def keys_of_tests() -> dict[str, str]:
    """Return the metadata keys of tests, each with Laurel's own environment that runs them."""
    own = [name for name in plugins.names("environments") if plugins.is_own("environments", name)]
    return {key: name for name in own for key in plugins.find(EnvironmentKind, name).tests}


NO_NEEDS = TaskNeeds(answers=frozenset(), guess=None)
"""The `TaskNeeds` for a caller that only inspects rows: no environment needs anything."""


@dataclass(slots=True, kw_only=True)
class NeedsCheck:
    """Checks that a data set's tasks have the answers or tests that their environment needs."""

    needs: TaskNeeds
    environment: str
    is_named: bool
    """True if the configuration names the environment."""
    num_answers: int = 0
    num_texts: int = 0

    @property
    def is_guessed(self) -> bool:
        """Report whether the environment is the default, because none is named."""
        return not self.is_named and self.environment == self.needs.guess

    def check_set(self, dataset_name: str | None, report: TaskReport) -> None:
        """Refuse preferences for which no environment is named.

        Raises:
            ConfigError: Rows are preferences, and no environment is named.
        """
        if dataset_name not in PREFERENCE_SETS:
            return
        if self.is_guessed:
            raise ConfigError(
                f"{report.origin}: rows of {dataset_name} say which answer people prefer, "
                f"not which one is right, and no environment is named: {self.environment}, the "
                f"default, looks for one value in them. {_CHOICES}"
                f"or data.env_name={self.environment} if the preferred answers are ones to check "
                "by. To learn from the preferences themselves, use laurel rm"
            )
        if self.environment in self.needs.answers:
            report.notes.append(NOT_WHAT_IS_RIGHT)

    def check_row(self, parts: TaskParts, metadata: Mapping[str, Any]) -> None:
        """Check that a task has the answer or the tests that its environment grades by.

        Raises:
            UnusableRow: The task lacks the answer or the tests that its environment needs.
        """
        tests = tests_in(metadata, self.needs)
        if parts.answer is None and self.environment in self.needs.answers:
            runs = next(iter(tests.values()), None)
            by_tests = f", or data.env_name={runs}: the row brings tests" if runs else ""
            raise UnusableRow(
                f"no answer in '{parts.answer_key}'",
                f"the row has no answer in '{parts.answer_key}', and the environment "
                f"'{self.environment}' checks against one",
                remedy="Set data.output_key to the column that holds it, or data.env_name to an "
                f"environment that needs none{by_tests}",
            )
        if not tests and self.environment in self.needs.tests:
            *others, last = [name for name, form in own_forms().items() if form.has_tests]
            looked_for = {**keys_of_tests(), **self.needs.keys_of_tests}
            raise UnusableRow(
                "no tests",
                f"the row brings no tests, and the environment '{self.environment}' gives nothing "
                f"but 0 without: it looks for {', '.join(looked_for)}",
                remedy=f"Set data.dataset_name to {', '.join(others)} or {last}, which read tests "
                "in other forms, or data.env_name to an environment that needs none",
            )
        if parts.answer is not None:
            self.num_answers += 1
            has_many_words = len(_WORD.findall(parts.answer)) > PROSE_WORDS
            self.num_texts += has_many_words and not any(m in parts.answer for m in _MARKED)

    def conclude(self, origin: str) -> None:
        """Check after the last row that an unnamed environment can grade most of the known answers.

        Raises:
            ConfigError: Most answers are prose, and no environment is named.
        """
        if self.is_guessed and self.num_texts * 2 > self.num_answers:
            raise ConfigError(
                f"{origin}: {self.num_texts:,} of {self.num_answers:,} known answers are texts of "
                f"more than {PROSE_WORDS} words, and no environment is named: {self.environment}, "
                f"the default, looks for one value in each. {_CHOICES}data.output_key if "
                f"another column holds the value; or data.env_name={self.environment} if these are "
                "answers to check by"
            )


# How a row becomes a task: the functions that `data.processor` names, and a place for more.
#
# A processor is given the row as it was read and the configuration of its set, and returns
# `TaskParts`. Prompt files, the environment and the tokens are not its business: NeMo RL's
# processors, which are given a tokenizer and return token ids, cannot be used as they are.

Processor = Callable[[Row, TaskSetConfig], TaskParts]

PROCESSORS: dict[str, Processor] = {}
"""The functions that convert rows to tasks, by the name that `data.processor` uses."""


def register_processor(name: str, processor: Processor) -> None:
    """Register a function that converts rows to tasks, so that `data.processor` can name it.

    Raises:
        ConfigError: The name is taken.
    """
    if name in (known := processors()):
        raise ConfigError(
            f"there is already a processor called {name!r}; those are: {', '.join(known)}"
        )
    PROCESSORS[name] = processor


def processors() -> dict[str, Processor]:
    """Return the functions that convert rows to tasks, those of plug-ins too, by name."""
    plugged = {form.processor: form.make(None, name) for name, form in own_forms().items()}
    return {**PROCESSORS, **{name: read for name, read in plugged.items() if name}}


def find_processor(name: str | None) -> Processor:
    """Return the processor with a name or import path; None is the reader of the set's own form.

    Raises:
        ConfigError: The name is unknown.
        DataError: The import path cannot be imported.
    """
    if name is None:
        return own_form
    known = processors()
    if name in known:
        return known[name]
    if not is_import_path(name):
        near = nearest(name, known)
        hint = f" Did you mean {near}?" if near else ""
        raise ConfigError(
            f"data.processor={name} is unknown.{hint} Known are: {', '.join(known)}; or give "
            "the import path of your own function (row, config) -> TaskParts"
        )
    found = import_object(name, where=setting_of("data.processor", name), kind=DataError)
    if not callable(found):
        raise DataError(f"data.processor={name} is a {type(found).__name__}, not a function")
    return _guarded(found, name)


def own_form(row: Row, config: TaskSetConfig) -> TaskParts:
    """Read a row with the reader of its own data set; this is the default processor."""
    known = task_set(config.dataset_name or "ResponseDataset")
    assert known is not None, "sets of other names are read as ResponseDataset"
    return known.read(row, config)


def multichoice(row: Row, config: TaskSetConfig) -> TaskParts:
    """Read a multiple-choice row: the prompt lists lettered options, and the answer is a letter.

    The options are a list, an object of letters, an object of `label` and `text` lists, or columns
    `A`, `B`, ...; the answer is a letter, the index of an option (from 0), or an option's text.
    """
    key = "question" if "question" in row or config.input_key == "input" else config.input_key
    question = text(required(row, key, setting="input_key"), what=f"'{key}'")
    options = _options(row)
    lines = [f"{letter}) {option}" for letter, option in options.items()]
    subject = row.get("subject")
    return TaskParts(
        prompt=(Message("user", "\n".join((question, *lines))),),
        answer=_letter(row.get("answer", row.get(config.output_key)), options),
        metadata={} if subject is None else {"subject": subject},
    )


def _options(row: Row) -> dict[str, str]:
    given: Any = row.get("options") if row.get("options") is not None else row.get("choices")
    if given is None:
        given = {
            letter: row[letter] for letter in string.ascii_uppercase if row.get(letter) is not None
        }
    if isinstance(given, Mapping) and {"label", "text"} <= given.keys():
        given = dict(zip(given["label"], given["text"], strict=False))
    if is_list(given):
        given = dict(zip(string.ascii_uppercase, given, strict=False))
    if not isinstance(given, Mapping):
        raise UnusableRow(
            "options are no list", f"the options are {json_kind(given)} where a list is expected"
        )
    options = {
        str(letter).strip(): answer_text(option, what="an option") or ""
        for letter, option in given.items()
        if option is not None
    }
    if len(options) < 2:
        raise UnusableRow(
            "too few options",
            f"the row has {len(options)} options in 'options', 'choices' or columns A, B, ...",
        )
    return options


def _letter(value: Any, options: Mapping[str, str]) -> str | None:
    said = answer_text(value, what="'answer'")
    if said is None or said in options:
        return said
    if not isinstance(value, str) and said.isdecimal() and int(said) < len(options):
        return list(options)[int(said)]
    texts = [letter for letter, option in options.items() if option == said]
    if len(texts) == 1:
        return texts[0]
    if said.isdecimal() and int(said) < len(options) and not texts:
        return list(options)[int(said)]  # a place, as a CSV file holds it
    raise UnusableRow(
        "the answer is no option",
        f"the answer {said!r:.60} is neither one of {', '.join(options)} nor the text of an option",
    )


def _guarded(processor: Callable[..., Any], name: str) -> Processor:
    """Wrap the user's function so that its errors name it."""

    def run(row: Row, config: TaskSetConfig) -> TaskParts:
        try:
            with ForkGuard():
                parts = processor(row, config)
        except (UnusableRow, LeftOutRow):
            raise
        except Exception as problem:  # the user's code may raise anything
            raise DataError(
                f"data.processor={name} raised {type(problem).__name__}: {problem}"
            ) from problem
        if not isinstance(parts, TaskParts):
            raise DataError(
                f"data.processor={name} returned a {type(parts).__name__}; it must return "
                "laurel.data.task_formats.TaskParts"
            )
        return parts

    return run


register_processor("default", own_form)
register_processor("math_hf_data_processor", own_form)
register_processor("math_data_processor", columns("problem", "expected_answer"))
register_processor("multichoice_qa_processor", multichoice)
register_processor("helpsteer3_data_processor", own_form)


# Rows that the package of an environment makes, some without end.

NUM_SHOWN = 512
"""The number of the first rows of an endless set that stand for it: in the data report, in the
fingerprint of the data, for a tokenizer from scratch, and where prompts are checked."""
NUM_VALIDATION = 256
"""The number of validation rows of an endless set, unless `max_samples` says another."""
_MAX_TRIES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeRows:
    """The rows that a package makes for one set: a list of them, or without end.

    A row is a mapping: `prompt`, a text or messages with `role` and `content`; `answer`, the known
    answer, if there is one; and `metadata`, a mapping of what else its environment needs, if any.
    """

    origin: str
    """Where they come from, for the data report."""
    rows: Sequence[Row] = ()
    """All rows, if they have an end."""
    make: Callable[[int, int], Row | None] | None = None
    """Makes row `n` of a set without end, at the try `k`, as a pure function of both: None if what
    it found belongs to the other side of training and validation."""


RowSource = Callable[[TaskSetConfig], MadeRows]
"""Makes the rows of a set from its settings, before the first is read; its `max_samples` are the
most rows that are read of it, also where `data.max_samples` says so."""


class EndlessTasks:
    """The tasks of a set without end, by their number; each is made when it is asked for."""

    num_rows = 1 << 40
    """More rows than any run takes."""

    def __init__(
        self,
        label: str,
        make: Callable[[int, int], Row | None],
        read: Callable[[str, Row], Task],
        report: TaskReport,
    ) -> None:
        """Take the function that makes a row, as in `MadeRows`, and the one that reads it.

        The report counts the rows that are left out.
        """
        self._label, self._make, self._read, self._report = label, make, read, report
        self.skips_bad_rows = False
        """Whether the next try replaces a malformed row, which otherwise is an error."""
        self.fits: Callable[[Task], bool] = lambda task: True
        """Whether a task can be used; others are replaced by the next try."""

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> Task:
        source = f"{self._label}[{index}]"
        for attempt in range(_MAX_TRIES):
            row = self._make(index, attempt)
            if row is None:
                continue
            try:
                task = self._read(source, row)
            except UnusableRow as problem:
                if not self.skips_bad_rows:
                    raise DataError(complaint(problem, None, source)) from problem
                self._report.num_read += 1
                self._report.drop_malformed(source, problem)
            except LeftOutRow as left_out:
                self._report.num_read += 1
                self._report.drop(left_out.reason, source, kind=left_out.kind)
            else:
                if self.fits(task):
                    return task
        raise DataError(
            f"{source}: {_MAX_TRIES} tries made no row that can be used: too few different prompts "
            "for training and validation both, or all are too long. Change data.tasks, or raise "
            "data.max_input_seq_length"
        )

    def of_id(self, task_id: str) -> Task:
        """Return the task with an id, which holds its number."""
        return self[int(task_id.rpartition("[")[2].rstrip("]"))]

    def __iter__(self) -> Iterator[Task]:
        return (self[index] for index in range(self.num_rows))


DEFAULT_TASKS = "OpenMathInstruct-2"
"""The data set that is read if the configuration names neither a set nor a path."""

FOR_FUNCTIONS = {"data_source": str, "extra_info": dict}
"""The columns that verl's reward functions expect, with their types; they become metadata."""

NEEDS = TaskNeeds()
"""The `TaskNeeds` of the environments that require no configuration."""

_NO_SOURCES: Mapping[str, RowSource] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskData:
    """The training and validation tasks of a run, with their reports."""

    train: list[Task]
    validation: list[Task]
    reports: dict[str, TaskReport]
    """The report of `train` and, if there is a validation set, of `validation`."""
    validation_set_of: dict[str, str] = field(default_factory=dict)
    """The name of a validation task's data set, by the task's id; empty if sets have no names."""
    endless: EndlessTasks | None = None
    """The training tasks, if they have no end; `train` then holds the first `NUM_SHOWN`."""


def load_task_data(
    data: TaskDataConfig,
    *,
    default_environment: str,
    environments: Sequence[str],
    needs: TaskNeeds = NEEDS,
    sources: Mapping[str, RowSource] = _NO_SOURCES,
) -> TaskData:
    """Read all tasks that the `data` section names; hold out a share if it names no validation set.

    `sources` make the rows of the data sets that packages bring, by the names of these.

    Raises:
        ConfigError: An environment or a processor is unknown.
        DataError: A file or a row cannot be used, or no task is left.
    """

    load = partial(
        load_tasks,
        default_environment=default_environment,
        environments=environments,
        needs=needs,
        on_bad_row=data.on_bad_row,
        sources=sources,
    )
    train_sets, validation_sets = sets_of_run(data)
    for config in train_sets:
        made = row_maker(config)
        if config.tasks is not None and (made is None or "tasks" not in made.keys):
            users = " or ".join(plugins.readers(plugins.Rows, "tasks"))
            raise ConfigError(
                f"data.tasks names generators of {users}, and has no effect on "
                f"{config.dataset_name or 'these rows'}: leave it out, or set "
                f"data.dataset_name={users}"
            )
    endless: list[EndlessTasks] = []
    train, report = load(train_sets, name="train", limit=data.max_samples, endless=endless)
    if endless and len(train_sets) > 1:
        raise ConfigError(
            f"data.train: {report.origin} has no end, so that it cannot be mixed with other sets; "
            "give its block max_samples"
        )
    reports = {"train": report}
    if not validation_sets and endless and train_sets[0].split_validation_size:
        changes = {"split": "validation", "max_samples": NUM_VALIDATION}
        validation_sets = [config.model_copy(update=changes) for config in train_sets]
    elif not validation_sets and not endless and not asks_share(train_sets):
        brought = [own_validation_tasks(config) for config in train_sets]
        validation_sets = [found for found in brought if found is not None]
    if validation_sets:
        names = data.validation_names()
        validation, reports["validation"] = load(validation_sets, name="validation")
        return TaskData(
            train=train,
            validation=validation,
            reports=reports,
            validation_set_of=_names_by_task(validation, names),
            endless=endless[0] if endless else None,
        )
    if endless:
        return TaskData(train=train, validation=[], reports=reports, endless=endless[0])
    kept, validation = hold_out_of_sets(train, train_sets)
    if not validation:
        return TaskData(train=train, validation=[], reports=reports)
    if not kept:
        raise DataError(
            "data.split_validation_size leaves no task to train on: every prompt is held out"
        )
    reports["validation"] = report.move_out(kept=kept, held_out=validation, name="validation")
    return TaskData(train=kept, validation=validation, reports=reports)


def sets_of_run(data: TaskDataConfig) -> tuple[list[TaskSetConfig], list[TaskSetConfig]]:
    """Return the sets of training, and of validation where any is named.

    Sets without end divide their prompts between the two by seed and share. Those of validation
    take both from training, and the prompts that training leaves out.

    Raises:
        ConfigError: Seeds or shares differ, so that training would see prompts of validation.
    """
    train, validation = data.train_sets(), []
    for config in data.validation_sets():
        if is_endless(config):
            changes: dict[str, Any] = {"split": config.split or "validation"}
            for key in ("seed", "split_validation_size"):
                same = [one for one in train if one.dataset_name == config.dataset_name]
                values = {getattr(one, key) for one in same}
                own = getattr(config, key)
                # A share of 0 is that of training.
                if key in config.model_fields_set and (own or key == "seed"):
                    values.add(own)
                if len(values) > 1:
                    said = " and ".join(map(str, sorted(values)))
                    raise ConfigError(
                        f"data.validation: {key} is {said} in sets of {config.dataset_name}, so "
                        "that training would see prompts of validation: give all of them the same, "
                        f"or set only data.{key}"
                    )
                changes[key] = values.pop() if values else own
            config = config.model_copy(update=changes)
        validation.append(config)
    return train, validation


def load_tasks(
    sets: Sequence[TaskSetConfig],
    *,
    name: str,
    default_environment: str,
    environments: Sequence[str],
    needs: TaskNeeds = NEEDS,
    on_bad_row: Literal["error", "skip"] = "error",
    limit: int | None = None,
    sources: Mapping[str, RowSource] = _NO_SOURCES,
    endless: list[EndlessTasks] | None = None,
) -> tuple[list[Task], TaskReport]:
    """Read the tasks of several data sets in sequence, and report what was left out.

    Args:
        name: The name of the whole, in the report and at the start of every id.
        default_environment: The environment of sets that name none.
        needs: What environments cannot grade without; a row that lacks it is malformed.
        limit: The largest number of rows to use in all, before any is repeated.
        sources: What makes the rows of the sets that packages bring, by the names of these.
        endless: Where sets without end are put, of which the first rows are returned; None: of
            these as many rows are read as a validation takes.

    Raises:
        ConfigError: An environment or a processor is unknown; or no environment is named, and the
            default one does not fit the rows.
        DataError: A file or a row cannot be used, or no row of a set is left.
    """
    # A wrong name is reported before the first file is read, which may take minutes; that of
    # `data.env_name` also where all sets name their own.
    for environment in dict.fromkeys(environments_named(sets, default_environment)):
        check_environment(environment, environments)

    def load(config: TaskSetConfig, label: str, most: int | None) -> tuple[list[Task], TaskReport]:
        environment = _environment_of(config, default_environment)
        fit = NeedsCheck(needs=needs, environment=environment, is_named=config.env_name is not None)
        reading = _Reading.open(
            config,
            label=label,
            environment=environment,
            fit=fit,
            source=sources.get(config.dataset_name or ""),
            limit=most,
        )
        if reading.endless is not None and most is None and config.max_samples is None:
            most = NUM_VALIDATION if endless is None else NUM_SHOWN
            if endless is not None:
                endless.append(reading.endless)
                reading.report.notes.append(
                    f"the rows have no end; these {most} are the first of them"
                )
        return reading.run(on_bad_row, most), reading.report

    return read_sets(sets, load, name=name, limit=limit)


def _names_by_task(tasks: Sequence[Task], names: Sequence[str]) -> dict[str, str]:
    # `load_tasks` puts the set's number into the ids of tasks.
    if len(names) < 2:
        return {task.id: name for name in names for task in tasks if name}
    starts = {f"validation-{index + 1}": name for index, name in enumerate(names)}
    named = {task.id: starts[task.id.partition(":")[0]] for task in tasks}
    return {task_id: name for task_id, name in named.items() if name}


def _environment_of(config: TaskSetConfig, default: str) -> str:
    known = task_set(config.dataset_name)
    return config.env_name or (known.environment if known is not None else None) or default


def environments_named(sets: Sequence[TaskSetConfig], default: str) -> list[str]:
    """Return the default environment, and those that grade the tasks of the sets."""
    return [default, *(_environment_of(config, default) for config in sets)]


def check_environment(
    environment: str, environments: Sequence[str], *, named_by: str = "data.env_name="
) -> None:
    """Check that an environment is among those that exist.

    Args:
        named_by: The key or the option that names it, as it is written before the name.

    Raises:
        ConfigError: There is no environment of that name.
    """
    if environment in environments:
        return
    near = nearest(environment, environments)
    hint = f" Did you mean {near}?" if near else ""
    raise ConfigError(
        f"{named_by}{environment}: there is no environment of that name.{hint} There are: "
        f"{', '.join(environments)}. One of your own is named by "
        f"+env.custom.{environment}.name=MODULE.CLASS"
    )


def own_validation_tasks(config: TaskSetConfig) -> TaskSetConfig | None:
    """Return the validation set that comes with a training set; None if there is none.

    DeepScaler has AIME 2024, and a class of the user's own has its `validation` split.
    """
    name = config.dataset_name
    known = task_set(name)
    if known is not None:
        if known.validation is None or config.data_path is not None:
            return None
        kept = {"prompt_file", "system_prompt_file", "env_name"}
        return known.validation.model_copy(update=config.model_dump(include=kept))
    split = own_validation_split(config) if name and is_import_path(name) else None
    return None if split is None else config.model_copy(update={"split": split})


@dataclass(slots=True, kw_only=True)
class _Reading:
    opened: OpenedSet[TaskSetConfig]
    config: TaskSetConfig
    """The settings that rows are read with; those not given are settled at the first row."""
    is_settled: bool
    processor: Processor
    environment: str
    task_name: str
    repeat: int
    report: TaskReport
    fit: NeedsCheck
    endless: EndlessTasks | None = None
    """The tasks, if the set has no end."""
    num_double_systems: int = 0
    roles: UnusualRoles = field(default_factory=UnusualRoles)
    columns: ColumnNotes = field(default_factory=ColumnNotes)

    @classmethod
    def open(
        cls,
        config: TaskSetConfig,
        *,
        label: str,
        environment: str,
        fit: NeedsCheck,
        source: RowSource | None = None,
        limit: int | None = None,
    ) -> _Reading:
        if config.dataset_name is None and config.data_path is None:
            config = config.model_copy(update={"dataset_name": DEFAULT_TASKS})
        report = TaskReport(name=label)
        processor = find_processor(config.processor)
        limits = [most for most in (config.max_samples, limit) if most is not None]
        asked = config.model_copy(update={"max_samples": min(limits, default=None)})
        rows = None if source is None else source(asked)
        if rows is not None:
            report.origin = rows.origin
            opened = OpenedSet(
                config=config,
                is_own=False,
                task_name=None,
                frame=read_prompt_frame(config.prompt_file, config.system_prompt_file),
                path=None,
                parts=(),
                rows=rows.rows,
            )
        else:
            opened = open_set(config, known=_hubs(config.dataset_name), report=report)
        known = task_set(config.dataset_name)
        reads_any = opened.is_own or config.dataset_name in (None, "ResponseDataset")
        read_by = opened.config
        if reads_any:
            read_by = read_by.model_copy(update={"dataset_name": "ResponseDataset"})
        report.dataset_class = config.dataset_name or "ResponseDataset"
        reading = cls(
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
        if rows is not None and rows.make is not None:
            reading.endless = EndlessTasks(
                config.dataset_name or "", rows.make, reading._task, report
            )
        return reading

    def run(self, on_bad_row: Literal["error", "skip"], limit: int | None) -> list[Task]:
        if self.processor is own_form:
            self.fit.check_set(self.config.dataset_name, self.report)
        if self.endless is None:
            rows = self.opened.read(
                self._task, report=self.report, on_bad_row=on_bad_row, limit=limit
            )
        else:
            self.endless.skips_bad_rows = on_bad_row == "skip"
            limits = [most for most in (limit, self.config.max_samples) if most is not None]
            rows = list(islice(self.endless, min(limits)))
            self.report.num_read += len(rows)
        if self.num_double_systems:
            self.report.notes.append(
                f"{counted_that(self.num_double_systems, 'row', 'begin')} with a system message, "
                "which now follows that of data.system_prompt_file"
            )
        self.report.notes += self.roles.notes() + self.columns.notes()
        if not rows:
            raise DataError(no_rows_left(self.report))
        self.fit.conclude(self.report.origin)
        tasks = list(rows)
        # The repetitions follow all rows and have ids of their own.
        for count in range(2, self.repeat + 1):
            tasks += [replace(task, id=f"{task.id}#{count}") for task in rows]
        if self.repeat > 1:
            self.report.notes.append(f"every task occurs {self.repeat} times")
        self.report.describe(tasks)
        return tasks

    def _task(self, source: str, row: Row) -> Task:
        if not self.is_settled:
            self.config, said = resolve_columns(row, self.config)
            self.is_settled = True
            self.fit.check_set(self.config.dataset_name, self.report)
            if said is not None:
                self.report.notes.append(said)
        try:
            parts = self.processor(row, self.config)
        except DataError as problem:
            raise DataError(f"{source}: {problem}") from problem
        if not any(m.content.strip() for m in parts.prompt if m.role != "system"):
            raise LeftOutRow("empty", "the prompt says nothing")
        refuse_tools(row)
        asked = with_system(row, parts.prompt, self.config.system_key)
        prompt = self.opened.frame.around(asked)
        if self.opened.frame.system is not None and asked[0].role == "system":
            self.num_double_systems += 1
        self.roles.look(source, prompt)
        metadata = dict(parts.metadata)
        if parts.answer is not None:
            metadata.setdefault("ground_truth", parts.answer)
        for key, kind in FOR_FUNCTIONS.items():
            if isinstance(row.get(key), kind):
                metadata.setdefault(key, row[key])
        self.fit.check_row(parts, metadata)
        self._look(source, row, prompt, metadata, parts.answer_key)
        return Task(
            id=f"{self.report.name}:{source}",
            prompt=prompt,
            environment=self.environment,
            name=self.task_name,
            metadata=metadata,
            source=source,
        )

    def _look(
        self,
        source: str,
        row: Row,
        prompt: Conversation,
        metadata: Mapping[str, Any],
        answer_key: str,
    ) -> None:
        read = {*metadata, *self._read_otherwise(metadata)}
        # A number is found in no text.
        if isinstance(row.get(answer_key), int | float):
            read.add(answer_key)
        self.columns.look(source, row, prompt, others=texts_in(metadata), read=read)

    def _read_otherwise(self, metadata: Mapping[str, Any]) -> Iterable[str]:
        if tests_in(metadata, NO_NEEDS):
            forms = [form for form in own_forms().values() if form.has_tests]
            return [key for form in forms for key in form.otherwise]
        name = self.config.dataset_name
        known = task_set(name)
        return READ_OTHERWISE.get(name or "", known.otherwise if known is not None else ())


def _hubs(asked: str | None) -> dict[str, HubSet]:
    # Of sets that are not asked for the names alone are read.
    hubs = dict.fromkeys(names_of_sets(), NO_HUB)
    if asked in hubs and (known := task_set(asked)) is not None:
        hubs[asked] = known.hub
    return hubs


def _name_of(config: TaskSetConfig) -> str:
    # Metrics have the set's own name, or the end of its path as in NeMo RL.
    name = config.dataset_name
    if name is not None and (task_set(name) is not None and config.data_path is None):
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
