"""`logger.csv_enabled=true`: one line for each metric, in a file of the run's directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from laurel.config.yaml_tree import Section
from laurel.plugins import Logger, LoggerServices


class CsvConfig(Section):
    """The logger of lines of text."""

    file: str = "metrics.csv"
    """File inside the run's log directory."""


class Csv(Logger):
    """Lines of text: step, metric, value."""

    section = CsvConfig

    def make(self, section: CsvConfig, run: LoggerServices) -> CsvLogger:
        """Open the file; a resumed run goes on in it."""
        return CsvLogger(run.run_dir / section.file)


class CsvLogger:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Write the metrics."""
        self._file.writelines(f"{step},{name},{value}\n" for name, value in metrics.items())
        self._file.flush()

    def log_table(self, name: str, columns: Sequence[str], rows: Sequence, *, step: int) -> None:
        """Leave tables out."""

    def log_config(self, config: Mapping[str, object]) -> None:
        """Leave it out."""

    def close(self) -> None:
        self._file.close()
