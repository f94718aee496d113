"""A data file, read as each command would read it: does it fit, and what is lost?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from laurel.cli.preference_data import load_data
from laurel.cli.schemas import SCHEMAS
from laurel.cli.task_setup import check_tests, needs_of
from laurel.config.grpo_training import GRPORun
from laurel.config.load import load_config
from laurel.config.reward_training import RewardTrainingRun
from laurel.config.sft_training import SFTRun
from laurel.data.cells import Row, UnusableRow
from laurel.data.code_tasks import OWN_TESTS
from laurel.data.demonstrations import Dialogue, load_demonstration_data
from laurel.data.known_formats import TRAINERS, KnownFormat, Trainer, recognise
from laurel.data.report import DataReport, LeftOut
from laurel.data.sources import locate, read_rows
from laurel.data.task_needs import NO_NEEDS
from laurel.data.tasks import load_task_data
from laurel.data.text_report import TextReport
from laurel.errors import ConfigError, DataError
from laurel.observe.counts import counted
from laurel.types import Preference, Task

if TYPE_CHECKING:
    from laurel.config.section import Section


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRows:
    """What stands in a file, before anybody makes anything of it."""

    path: str
    num_rows: int
    unreadable: LeftOut
    """Rows that are no rows: no JSON, no object, a wrong number of cells."""
    first: Row
    first_source: str

    @property
    def columns(self) -> list[str]:
        """Those of the first row."""
        return [str(column) for column in self.first]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one command makes of a file."""

    trainer: Trainer
    config: Section
    """The run's configuration, with the file and what the command has to be told."""
    settings: tuple[str, ...] = ()
    """What it has to be told besides the path."""
    report: DataReport | TextReport | None = None
    """None where no row is left."""
    problem: str = ""
    """Why no row is left."""
    first: Preference | Dialogue | Task | None = None
    """The first row that it would use."""
    environments: dict[str, int] = field(default_factory=dict)
    """GRPO: environments of Laurel's that could judge, and how many tasks each."""
    tasks: Sequence[Task] = ()
    """GRPO: the rows that it would use."""

    @property
    def fits(self) -> bool:
        """Whether any row can be used."""
        return self.report is not None

    @property
    def num_malformed(self) -> int:
        """Rows at which a run would stop unless it is told to leave them out."""
        left_out = self.report.dropped.get("malformed") if self.report is not None else None
        return 0 if left_out is None else left_out.count


def look_at(path: str) -> RawRows:
    """Read a file, a directory or a hub data set from end to end.

    Raises:
        DataError: There is no such thing, or not a single row in it.
    """
    unreadable = LeftOut()
    said: list[str] = []

    def tell(source: str, problem: UnusableRow) -> None:
        unreadable.add(LeftOut(1, [source]))
        said.append(f"{locate(path, source)}: {problem.message}")
        del said[1:]

    first: tuple[str, Row] | None = None
    num_rows = 0
    for source, row in read_rows(path, on_bad_row=tell):
        first = first or (source, row)
        num_rows += 1
    if first is None:
        raise DataError(
            f"{path}: none of its {counted(unreadable.count, 'row')} can be read; "
            f"the first: {said[0]}"
        )
    return RawRows(
        path=path, num_rows=num_rows + unreadable.count, unreadable=unreadable,
        first=first[1], first_source=first[0],
    )  # fmt: skip


def configured(
    raw: RawRows, trainers: Sequence[Trainer], overrides: Sequence[str]
) -> dict[Trainer, tuple[Section, tuple[str, ...], KnownFormat | None]]:
    """For each command its configuration, what it has to be told, and the form of the rows.

    Args:
        raw: The file.
        trainers: The commands that are asked about.
        overrides: What the user says; a key that a command does not have leaves that command out.

    Raises:
        ConfigError: No command understands the overrides.
    """
    found: dict[Trainer, tuple[Section, tuple[str, ...], KnownFormat | None]] = {}
    problems: list[str] = []
    for trainer in trainers:
        try:
            found[trainer] = _configured(raw, trainer, overrides)
        except ConfigError as problem:
            problems.append(str(problem) if len(trainers) == 1 else f"laurel {trainer}: {problem}")
    if not found:
        raise ConfigError("\n".join(problems))
    return found


def _configured(
    raw: RawRows, trainer: Trainer, overrides: Sequence[str]
) -> tuple[Section, tuple[str, ...], KnownFormat | None]:
    base = [f"data.train_data_path={json.dumps(raw.path)}"]
    said = load_config(SCHEMAS[trainer], None, [*base, *overrides]).config
    known = recognise(_as_called(raw.first, cast("Any", said).data))
    settings = tuple(known.trainers.get(trainer, ())) if known is not None else ()
    if trainer == "grpo" and not any(one.startswith("data.env_name=") for one in settings):
        settings = (*settings, "data.env_name=reward_model")  # which needs nothing but prompts
    keys = {setting.partition("=")[0] for setting in overrides}
    settings = tuple(one for one in settings if one.partition("=")[0] not in keys)
    options = ["data.on_bad_row=skip"] if "data.on_bad_row" not in keys else []
    if "data.split_validation_size" not in keys:
        options.append("data.split_validation_size=0")  # all rows are looked at
    config = load_config(SCHEMAS[trainer], None, [*base, *options, *settings, *overrides]).config
    return config, settings, known


def _as_called(row: Row, data: Any) -> Row:
    """The row with the columns that `data` names under the names that they have by default."""
    renamed = dict(row)
    for key, field_of_key in type(data).model_fields.items():
        column, default = getattr(data, key), field_of_key.default
        if key.endswith("_key") and isinstance(default, str) and column in row:
            renamed[default] = row[column]
    return renamed


# ----------------------------------------------------------------------------------- as each reads


def read_as(trainer: Trainer, config: Section, settings: tuple[str, ...] = ()) -> Reading:
    """What a command makes of the file that its configuration names. Nothing is raised for rows."""
    try:
        if isinstance(config, RewardTrainingRun):
            return _read_preferences(config, settings)
        if isinstance(config, SFTRun):
            return _read_demonstrations(config, settings)
        return _read_tasks(cast("GRPORun", config), settings)
    except DataError as problem:
        return Reading(trainer=trainer, config=config, settings=settings, problem=str(problem))


def _read_preferences(config: RewardTrainingRun, settings: tuple[str, ...]) -> Reading:
    data = load_data(config)
    return Reading(
        trainer="rm", config=config, settings=settings, report=data.reports["train"],
        first=data.train[0],
    )  # fmt: skip


def _read_demonstrations(config: SFTRun, settings: tuple[str, ...]) -> Reading:
    data = load_demonstration_data(config.data)
    return Reading(
        trainer="sft", config=config, settings=settings, report=data.reports["train"],
        first=data.train[0],
    )  # fmt: skip


def _read_tasks(config: GRPORun, settings: tuple[str, ...]) -> Reading:
    data = load_task_data(
        config.data,
        default_environment=config.default_environment,
        environments=config.env.names(),
        # Where nobody has said who judges, what each environment lacks is counted afterwards.
        needs=needs_of(config.env) if config.data.env_name is not None else NO_NEEDS,
    )
    check_tests(data, config)
    return Reading(
        trainer="grpo", config=config, settings=settings, report=data.reports["train"],
        first=data.train[0], environments=_environments_of(data.train), tasks=data.train,
    )  # fmt: skip


def _environments_of(tasks: Sequence[Task]) -> dict[str, int]:
    counts = {
        "math": sum("ground_truth" in task.metadata for task in tasks),
        "code": sum(any(key in task.metadata for key in OWN_TESTS) for task in tasks),
        "reward_model": len(tasks),
    }
    return {name: count for name, count in counts.items() if count}


def readings_of(
    raw: RawRows, *, trainer: Trainer | None, overrides: Sequence[str] = ()
) -> tuple[KnownFormat | None, list[Reading]]:
    """The form of a file, and what each command (or one) makes of it.

    Raises:
        ConfigError: No command understands the overrides.
    """
    asked = TRAINERS if trainer is None else (trainer,)
    found = configured(raw, asked, overrides)
    known = next(iter(found.values()))[2]
    readings = [read_as(one, config, settings) for one, (config, settings, _) in found.items()]
    if known is not None and "rm" in known.trainers:
        # What people preferred is an answer to imitate, not one to check others by.
        for reading in readings:
            reading.environments.pop("math", None)
    return known, readings
