"""Logs a run, as JSON lines in its directory and with trackers such as TensorBoard.

The directory of a run holds `config.json`, `metrics.jsonl` and `samples.jsonl`, which people and
scripts can read without Laurel, and the files of the trackers.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TextIO, TypeVar

from laurel import plugins
from laurel.config.policy import LoggerConfig
from laurel.errors import ConfigError, DataError, MissingDependencyError
from laurel.observe.console import verbosity
from laurel.observe.files import replace_file
from laurel.plugins import LoggerServices
from laurel.protocols import MetricLogger

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
CONFIG_FILE = "config.json"

Line = TypeVar("Line")


class JsonlLogger:
    """Writes one JSON object per line and flushes it, so that a killed run loses nothing.

    `metrics.jsonl` holds `{"step", "time", <metric>: <number>, ...}`, and `samples.jsonl` one line
    for each row of a table: `{"step", "time", "table", "row": {<column>: <value>}}`. Numbers that
    JSON cannot express are the strings "NaN", "Infinity" and "-Infinity".

    A resumed run removes the lines after the step from which it resumes, because it repeats these
    steps: both files hold each step once. The line `{"event": "resumed", "step": N}` marks this.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        resumed_step: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._run_dir = run_dir
        self._resumed_step = resumed_step
        self._clock = clock
        self._samples: TextIO | None = None
        self._metrics = self._open(METRICS_FILE)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append the metrics as one line of `metrics.jsonl`."""
        record: dict[str, object] = {"step": step, "time": self._clock()}
        for name, value in metrics.items():
            record.setdefault(name, float(value))
        _write_line(self._metrics, record)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, step: int
    ) -> None:
        """Append each row as one line of `samples.jsonl`."""
        if self._samples is None:
            self._samples = self._open(SAMPLES_FILE)
        now = self._clock()
        for row in rows:
            named = dict(zip(columns, row, strict=True))
            _write_line(self._samples, {"step": step, "time": now, "table": name, "row": named})

    def log_config(self, config: Mapping[str, object]) -> None:
        """Write the configuration to `config.json`."""
        text = json.dumps(_plain(config), indent=2, allow_nan=False) + "\n"
        (self._run_dir / CONFIG_FILE).write_text(text, encoding="utf-8")

    def close(self) -> None:
        """Close the files of the logger."""
        self._metrics.close()
        if self._samples is not None:
            self._samples.close()

    def _open(self, name: str) -> TextIO:
        path = self._run_dir / name
        _drop_torn_line(path)
        if self._resumed_step is not None:
            _drop_superseded(path, self._resumed_step)
        # An unpaired surrogate, which UTF-8 cannot hold, becomes the JSON escape that can.
        file = path.open("a", encoding="utf-8", errors="backslashreplace", newline="\n")
        if self._resumed_step is not None:
            _write_line(file, {"event": "resumed", "step": self._resumed_step})
        return file


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Read the valid lines of a `metrics.jsonl`, oldest first, as `read_lines` does."""

    def metrics(record: Mapping[str, Any]) -> dict[str, float]:
        return {name: _number(value) for name, value in record.items()}

    return read_lines(path, metrics)


def read_lines(path: Path, take: Callable[[Mapping[str, Any]], Line]) -> list[Line]:
    """Read the objects of a file of JSON lines that a run wrote, oldest first.

    Lines of steps that a resumed run repeated are omitted, and so is an incomplete last line.

    Raises:
        DataError: A line holds something else, or `take` raises a ValueError or TypeError for it.
    """
    found: list[tuple[float, Line]] = []
    with path.open(encoding="utf-8", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                break
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise TypeError("expected a JSON object")
                if "event" not in record:
                    found.append((record.get("step", 0), take(record)))
                elif record["event"] == "resumed":
                    found = [one for one in found if one[0] <= record["step"]]
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(f"{path}:{number}: not a line of {path.stem}: {error}") from error
    return [one for _, one in found]


class Loggers:
    """Passes everything to several loggers; one that fails is switched off, and the run goes on.

    `warn` gets one line about each logger that failed; by default it is written to Python's log.
    """

    def __init__(
        self, loggers: Mapping[str, MetricLogger], *, warn: Callable[[str], None] | None = None
    ) -> None:
        self._loggers = dict(loggers)
        self._warn = warn or logging.getLogger(__name__).warning

    @property
    def names(self) -> tuple[str, ...]:
        """The loggers that still work."""
        return tuple(self._loggers)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log the metrics with every logger that still works."""
        self._each(lambda logger: logger.log(metrics, step=step))

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, step: int
    ) -> None:
        """Log the table with every logger that still works."""
        self._each(lambda logger: logger.log_table(name, columns, rows, step=step))

    def log_config(self, config: Mapping[str, object]) -> None:
        """Log the configuration with every logger that still works."""
        self._each(lambda logger: logger.log_config(config))

    def close(self) -> None:
        """Close all loggers; a second call does nothing."""
        self._each(lambda logger: logger.close())
        self._loggers.clear()

    def add(self, name: str, opener: Callable[[], MetricLogger]) -> None:
        """Open one more logger; if that fails, warn and go on without it."""
        try:
            self._loggers[name] = opener()
        except Exception as error:  # a tracker may raise anything: network, login, disk
            self._warn(_switched_off(name, error))

    def _each(self, action: Callable[[MetricLogger], None]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                action(logger)
            except Exception as error:  # a tracker may raise anything: network, login, disk
                del self._loggers[name]
                self._warn(_switched_off(name, error))
                # It has failed already, and the user was warned.
                with contextlib.suppress(Exception):
                    logger.close()


def check_available(
    config: LoggerConfig, *, is_installed: Callable[[str], bool] | None = None
) -> None:
    """Raise MissingDependencyError if a logger that is switched on is not installed.

    This imports nothing, so a run can call it before it creates or loads anything.
    """
    # A folder called `wandb` in the working directory is found too, but has no origin.
    is_installed = is_installed or (
        lambda name: getattr(find_spec(name), "origin", None) is not None
    )
    for name in config.enabled:
        logger, _ = config.settings_of(plugins.Logger, name)
        purpose = f"logger.{name}_enabled"
        if logger.package is None or is_installed(logger.package):
            continue
        if logger.extra is not None:
            raise MissingDependencyError.of(logger.package, extra=logger.extra, purpose=purpose)
        raise MissingDependencyError(
            f"{purpose} needs the package '{logger.package}', which is not installed. "
            f"Install it with: pip install {logger.package}, or set {purpose}=false"
        )


def open_loggers(
    config: LoggerConfig,
    *,
    run_dir: Path,
    run_config: Mapping[str, object],
    resumed_step: int | None = None,
    warn: Callable[[str], None] | None = None,
) -> Loggers:
    """Open the loggers that are switched on, and log the run's configuration.

    `resumed_step` is the step of the checkpoint from which the run resumes. Entries of later steps
    in the same directory are removed or hidden, and trackers continue the same run.
    """
    check_available(config)

    loggers = Loggers({}, warn=warn)
    run = plugins.LoggerServices(run_dir=run_dir, resumed_step=resumed_step)
    for name in config.enabled:
        logger, section = config.settings_of(plugins.Logger, name)
        loggers.add(name, partial(logger.make, section, run))
    loggers.log_config(run_config)
    return loggers


def shows_whole_samples(config: LoggerConfig) -> bool:
    """Report whether a validation prints its samples completely, rather than in one line each."""
    # A user who sets the number of samples wants to read them.
    return verbosity() == "verbose" or "num_val_samples_to_print" in config.model_fields_set


def next_run_dir(log_dir: str | Path) -> Path:
    """Create the next free directory `exp_001`, `exp_002`, ... in `log_dir`.

    Runs that start at the same time get different directories.
    """
    parent = Path(log_dir)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [re.fullmatch(r"exp_(\d+)", entry.name) for entry in parent.iterdir()]
        number = max((int(match[1]) for match in taken if match), default=0)
        while True:
            number += 1
            # Creating it is the test, because two runs that start at once cannot both succeed.
            try:
                (parent / f"exp_{number:03d}").mkdir()
            except FileExistsError:
                continue
            return parent / f"exp_{number:03d}"
    except OSError as error:
        raise ConfigError(
            f"logger.log_dir: cannot create a run directory in {parent}: {error.strerror}. "
            "Set logger.log_dir to a directory that can be written"
        ) from error


def _switched_off(name: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"logger '{name}' failed and is switched off for the rest of the run ({reason})"


def _drop_torn_line(path: Path) -> None:
    # A kill may have cut the last line short.
    if not path.is_file():
        return
    with path.open("rb+") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            file.truncate(end)


def _drop_superseded(path: Path, resumed_step: int) -> None:
    # This removes the lines after the step, and those that earlier resumed runs repeated.
    if not path.is_file():
        return
    with path.open("rb") as file:
        lines = file.readlines()
    kept: list[tuple[float, bytes]] = []
    for line in lines:
        step, is_resume = _step_of(line)
        if is_resume:
            kept = [(earlier, text) for earlier, text in kept if earlier <= step]
        # The mark of a resume stays, even if its step is repeated later.
        kept.append((-math.inf if is_resume else step, line))
    remaining = [text for step, text in kept if step <= resumed_step]
    if len(remaining) == len(lines):
        return
    with replace_file(path) as new:
        new.buffer.writelines(remaining)


def _step_of(line: bytes) -> tuple[float, bool]:
    # Returns the step, and whether the line marks a resume. A line in another format has no step.
    try:
        record = json.loads(line)
        return float(record.get("step", -math.inf)), record.get("event") == "resumed"
    except (ValueError, TypeError, AttributeError):
        return -math.inf, False


def _write_line(file: TextIO, record: Mapping[str, object]) -> None:
    # With one write and a flush, a kill leaves at most one incomplete line, which is recognised.
    file.write(json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n")
    file.flush()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):  # numpy's numbers too
        number = float(value)
        if math.isfinite(number):
            return number
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    return str(value)


def _number(value: object) -> float:
    # The inverse of `_plain` for numbers.
    if isinstance(value, str):
        return float(value)
    if isinstance(value, int | float):
        return value
    raise TypeError(f"{value!r} is not a number")


class TensorboardLogger:
    """Writes event files for TensorBoard; events after `resumed_step` are hidden."""

    def __init__(self, events_dir: Path, *, resumed_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard would show the steps that a resumed run repeats twice.
        purge_step = None if resumed_step is None else resumed_step + 1
        self._writer: Any = SummaryWriter(str(events_dir), purge_step=purge_step, flush_secs=10)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write each metric as a scalar."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, step: int
    ) -> None:
        """Write the table as Markdown text."""
        lines = [columns, ["---"] * len(columns), *rows]
        cells = [[str(v).replace("|", "\\|").replace("\n", "<br>") for v in line] for line in lines]
        text = "\n".join("| " + " | ".join(line) + " |" for line in cells)
        self._writer.add_text(name, text, step)

    def log_config(self, config: Mapping[str, object]) -> None:
        """Write the configuration as preformatted text."""
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", "\n".join("    " + line for line in text.splitlines()))

    def close(self) -> None:
        """Close the event files."""
        self._writer.close()


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys with their values; lists and empty blocks are values."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# The loggers by name, as plug-ins.


class Jsonl(plugins.Logger):
    """Files of JSON lines in the run's directory."""

    def make(self, section: None, run: LoggerServices) -> JsonlLogger:
        """Open the files."""
        return JsonlLogger(run.run_dir, resumed_step=run.resumed_step)


class Tensorboard(plugins.Logger):
    """TensorBoard events."""

    package = "tensorboard"

    def make(self, section: None, run: LoggerServices) -> TensorboardLogger:
        """Open the event files."""
        return TensorboardLogger(run.run_dir / "tensorboard", resumed_step=run.resumed_step)
