"""Reads the record of a run back from its directory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from laurel.errors import DataError
from laurel.observe.loggers import CONFIG_FILE, METRICS_FILE, SAMPLES_FILE, read_lines, read_metrics

HEALTH_FILE = "health.jsonl"
DATA_REPORT = "data_report.json"
COMPLETIONS_DIRECTORY = "completions"
EVALUATIONS = "*-report.json"
"""The reports of `laurel eval ... --output`, in the run's directory or in a folder inside."""

KINDS = {"rm": "Reward model", "sft": "Fine-tuning", "grpo": "GRPO"}
"""The title of each kind of run, by the section of a configuration that identifies the kind."""

TIMED = (
    "timing/train/total_step_time",
    "timing/validation/total_validation_time",
    "timing/train/checkpointing",
)
"""The timers that add up to a run's time, without the wait between a stop and a resume."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A metric over the steps of a run; values that are not finite are omitted."""

    steps: tuple[float, ...]
    values: tuple[float, ...]

    def __bool__(self) -> bool:
        return bool(self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The data of one run; the field of a missing file is empty."""

    path: Path
    kind: str = ""
    """`rm`, `sft`, `grpo`, or empty if the configuration shows none of these."""
    metrics: Sequence[Mapping[str, float]] = ()
    samples: Sequence[Mapping[str, Any]] = ()
    """The rows of `samples.jsonl`: `{"step", "table", "row"}`."""
    config: str = ""
    """The configuration as YAML."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The configuration as plain values."""
    health: Sequence[Mapping[str, Any]] = ()
    """The lines of `health.jsonl`: alarms that were raised or ended."""
    evaluations: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The reports of `laurel eval` by their path in the directory."""
    data: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The data reports by the name of the data set."""

    @property
    def title(self) -> str:
        """The title of the run: its kind, or the name of its directory."""
        return KINDS.get(self.kind, self.path.name)

    @property
    def num_steps(self) -> int:
        """The last step that was logged."""
        return int(max((record.get("step", 0) for record in self.metrics), default=0))

    @property
    def seconds(self) -> float | None:
        """The seconds spent on steps, validations and checkpoints; None if nothing was timed."""
        return math.fsum(map(self.total, TIMED)) or None

    def series(self, name: str) -> Series:
        """Return the values of a metric over the steps, by its full name."""
        points = [(r["step"], r[name]) for r in self.metrics if name in r and "step" in r]
        finite = [(step, value) for step, value in points if math.isfinite(value)]
        return Series(steps=tuple(s for s, _ in finite), values=tuple(v for _, v in finite))

    def not_finite(self, name: str) -> list[float]:
        """Return the steps at which a metric was NaN or infinite."""
        return [r["step"] for r in self.metrics if not math.isfinite(r.get(name, 0.0))]

    def names(self) -> list[str]:
        """Return the names of all metrics, in the order of their first appearance."""
        return list(dict.fromkeys(name for record in self.metrics for name in record))

    def latest(self, name: str) -> float | None:
        """Return the last finite value of a metric."""
        series = self.series(name)
        return series.values[-1] if series else None

    def completion_file(self, step: int) -> Path:
        """Return the parquet file of a training step's completions with their rewards.

        Raises:
            DataError: The step has no such file.
        """
        path = self.path / COMPLETIONS_DIRECTORY / f"step_{step:06d}.parquet"
        if not path.is_file():
            held = [int(file.stem[5:]) for file in completion_files(self.path, self.num_steps)]
            hint = f"there are those of steps {held[0]} to {held[-1]}" if held else "there are none"
            raise DataError(f"{path.parent}: no completions of step {step}; {hint}")
        return path

    def total(self, name: str) -> float:
        """Return the sum of a metric over the run; for a timer, the seconds spent."""
        return math.fsum(self.series(name).values)


def read_run_record(path: Path) -> RunRecord:
    """Read the run of a directory.

    Raises:
        DataError: There is no such directory, it holds no run, or one of its files is broken.
    """
    if not path.is_dir():
        raise DataError(f"{path}: there is no such directory; name one that a run logged to")
    # A run that has not logged yet has a configuration.
    if not any((path / name).is_file() for name in (METRICS_FILE, CONFIG_FILE, "config.yaml")):
        inside = sorted(entry.name for entry in path.glob("exp_*") if entry.is_dir())
        hint = f"; did you mean {path / inside[-1]}?" if inside else ""
        raise DataError(
            f"{path}: no run logged here: neither {METRICS_FILE} nor {CONFIG_FILE}{hint}"
        )

    def lines_of(name: str) -> list[Mapping[str, Any]]:
        file = path / name
        return read_lines(file, lambda line: line) if file.is_file() else []

    metrics = path / METRICS_FILE
    sections = _json(path / CONFIG_FILE)
    yaml = path / "config.yaml"
    return RunRecord(
        path=path,
        kind=next((kind for kind in KINDS if kind in sections), ""),
        metrics=read_metrics(metrics) if metrics.is_file() else (),
        samples=[row for row in lines_of(SAMPLES_FILE) if isinstance(row.get("row"), dict)],
        config=yaml.read_text(encoding="utf-8") if yaml.is_file() else "",
        settings=sections,
        data=_json(path / DATA_REPORT),
        health=lines_of(HEALTH_FILE),
        evaluations={
            file.relative_to(path).as_posix(): report
            for file in sorted([*path.glob(EVALUATIONS), *path.glob(f"*/{EVALUATIONS}")])
            if "benchmark" in (report := _json(file))
        },
    )


def completion_files(path: Path, num_steps: int) -> list[Path]:
    """Return the files of completions up to the run's last step, in the order of their steps."""
    # A run that was resumed from an earlier step may have left files beyond its last one.
    found = {
        int(match[1]): file
        for file in (path / COMPLETIONS_DIRECTORY).glob("step_*.parquet")
        if (match := re.fullmatch(r"step_(\d+)", file.stem))
    }
    return [found[step] for step in sorted(found) if step <= num_steps]


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object")
    return value


# The alarms of a run, read from `health.jsonl`.

MAX_SAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RaisedAlarm:
    """One alarm, from the step at which it was raised to that at which it ended."""

    name: str
    since: int
    until: int | None = None
    """The step at which the alarm ended; None if it has not."""
    metric: str = ""
    value: float | None = None
    """The value of the metric when the alarm was raised."""
    threshold: float | None = None
    baseline: float | None = None
    text: str = ""
    advice: str = ""
    samples: Sequence[Mapping[str, Any]] = ()


def alarms_of(lines: Iterable[Mapping[str, Any]]) -> list[RaisedAlarm]:
    """Read the alarms from lines of `health.jsonl`: first those that have not ended, latest first.

    A line that raises an alarm again is ignored, because the alarm began with the first one.
    """
    ended: list[RaisedAlarm] = []
    going_on: dict[str, RaisedAlarm] = {}
    for line in lines:
        name, step = str(line.get("alarm", "")), _number(line.get("step"))
        if not name or step is None:
            continue
        if line.get("state") == "over":
            alarm = going_on.pop(name, None)
            if alarm is not None:
                ended.append(replace(alarm, until=int(step)))
        elif line.get("state") == "raised" and name not in going_on:
            samples = line.get("samples")
            going_on[name] = RaisedAlarm(
                name=name,
                since=int(step),
                metric=str(line.get("metric") or ""),
                value=_number(line.get("value")),
                threshold=_number(line.get("threshold")),
                baseline=_number(line.get("baseline")),
                text=str(line.get("text") or ""),
                advice=str(line.get("advice") or ""),
                samples=[sample for sample in samples if isinstance(sample, dict)][:MAX_SAMPLES]
                if isinstance(samples, list)
                else (),
            )
    return [
        *sorted(going_on.values(), key=lambda alarm: -alarm.since),
        *sorted(ended, key=lambda alarm: -alarm.since),
    ]


def _number(value: object) -> float | None:
    # JSON has no NaN: loggers write it as text, and `float` reads that.
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
