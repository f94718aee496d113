"""Logs to Weights & Biases: its settings, and the logger as a plug-in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from laurel.config.yaml_tree import Section
from laurel.plugins import Logger, LoggerServices


class WandbConfig(Section):
    """The Weights & Biases logger."""

    project: str = "laurel"
    """Project."""
    name: str | None = None
    """Run name."""
    entity: str | None = None
    """Team."""


class WandbLogger:
    """Logs to Weights & Biases; a resumed run continues under the same id.

    Charts use Laurel's step, because W&B's own would refuse the steps that a resumed run repeats.
    """

    def __init__(
        self, config: WandbConfig, *, run_dir: Path, resumed: bool = False, library: Any = None
    ) -> None:
        self._wandb = library or import_module("wandb")
        # The run's directory holds the id: a resumed run must not begin a new one.
        id_file = run_dir / "wandb_run_id"
        run_id = (
            id_file.read_text(encoding="utf-8").strip() if resumed and id_file.is_file() else ""
        )
        self._run = self._wandb.init(
            project=config.project,
            name=config.name,
            entity=config.entity,
            dir=str(run_dir),
            id=run_id or None,
            resume="allow" if run_id else None,
        )
        id_file.write_text(self._run.id, encoding="utf-8")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log the metrics with their step."""
        self._run.log({**{name: float(value) for name, value in metrics.items()}, "step": step})

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, step: int
    ) -> None:
        """Log the rows as a W&B table."""
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table, "step": step})

    def log_config(self, config: Mapping[str, object]) -> None:
        """Set the configuration of the W&B run."""
        self._run.config.update(dict(config), allow_val_change=True)

    def close(self) -> None:
        """Finish the W&B run."""
        self._run.finish()


class Wandb(Logger):
    """Weights & Biases."""

    section = WandbConfig
    package = extra = "wandb"

    def make(self, section: WandbConfig, run: LoggerServices) -> WandbLogger:
        """Begin or continue a run there."""
        return WandbLogger(section, run_dir=run.run_dir, resumed=run.resumed_step is not None)
