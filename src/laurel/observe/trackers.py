"""Loggers that are other people's programs: TensorBoard, Weights & Biases, MLflow.

Each imports its library when it is made, and takes a stand-in for it in tests. Which of them run
is decided in `loggers.py`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laurel.config.schema import MlflowConfig, WandbConfig
from laurel.errors import MissingDependencyError

_MLFLOW_BATCH = 100
"""Parameters that MLflow takes in one request."""
_MLFLOW_PARAMETER_LENGTH = 6000


class TensorboardLogger:
    """Event files for TensorBoard. Events beyond `resumed_step` are hidden."""

    def __init__(self, events_dir: Path, *, resumed_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingDependencyError(
                "logger.tensorboard_enabled needs the package 'tensorboard'. "
                "Install it with: pip install tensorboard"
            ) from error
        purge_step = None if resumed_step is None else resumed_step + 1
        self._writer: Any = SummaryWriter(str(events_dir), purge_step=purge_step, flush_secs=10)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """See `MetricLogger`."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), step)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, step: int
    ) -> None:
        """See `MetricLogger`."""
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join("| " + " | ".join(map(_markdown_cell, line)) + " |" for line in lines)
        self._writer.add_text(name, text, step)

    def log_config(self, config: Mapping[str, object]) -> None:
        """See `MetricLogger`."""
        text = json.dumps(config, indent=2, default=str)
        self._writer.add_text("config", "\n".join("    " + line for line in text.splitlines()))

    def close(self) -> None:
        """See `MetricLogger`."""
        self._writer.close()


class WandbLogger:
    """A run at Weights & Biases. A resumed run goes on under the same id.

    Charts use our own step: W&B's would refuse the steps that a resumed run does again.
    """

    def __init__(
        self, config: WandbConfig, *, run_dir: Path, resumed: bool = False, library: Any = None
    ) -> None:
        self._wandb = library or _import_wandb()
        run_id = _stored_id(run_dir / "wandb_run_id") if resumed else None
        self._run = self._wandb.init(
            project=config.project,
            name=config.name,
            entity=config.entity,
            dir=str(run_dir),
            id=run_id,
            resume="allow" if run_id else None,
        )
        (run_dir / "wandb_run_id").write_text(self._run.id, encoding="utf-8")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """See `MetricLogger`."""
        self._run.log({**{name: float(value) for name, value in metrics.items()}, "step": step})

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, step: int
    ) -> None:
        """See `MetricLogger`."""
        table = self._wandb.Table(columns=list(columns), data=[list(row) for row in rows])
        self._run.log({name: table, "step": step})

    def log_config(self, config: Mapping[str, object]) -> None:
        """See `MetricLogger`."""
        self._run.config.update(dict(config), allow_val_change=True)

    def close(self) -> None:
        """See `MetricLogger`."""
        self._run.finish()


class MlflowLogger:
    """A run in an MLflow experiment. A resumed run goes on under the same id."""

    def __init__(
        self, config: MlflowConfig, *, run_dir: Path, resumed: bool = False, library: Any = None
    ) -> None:
        self._mlflow = library or _import_mlflow()
        self._client = self._mlflow.MlflowClient(tracking_uri=config.tracking_uri)
        self._run_id = _stored_id(run_dir / "mlflow_run_id") if resumed else None
        self._has_parameters = self._run_id is not None
        if self._run_id is None:
            experiment = self._client.get_experiment_by_name(config.experiment_name)
            experiment_id = (
                experiment.experiment_id
                if experiment is not None
                else self._client.create_experiment(config.experiment_name)
            )
            run = self._client.create_run(experiment_id, run_name=config.run_name)
            self._run_id = str(run.info.run_id)
            (run_dir / "mlflow_run_id").write_text(self._run_id, encoding="utf-8")
        else:
            self._client.update_run(self._run_id, status="RUNNING")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """See `MetricLogger`."""
        now = int(time.time() * 1000)
        entity = self._mlflow.entities.Metric
        records = [entity(name, float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=records)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, step: int
    ) -> None:
        """See `MetricLogger`."""
        records = [dict(zip(columns, row, strict=True)) for row in rows]
        text = json.dumps(records, indent=2, default=str)
        self._client.log_text(self._run_id, text, f"{name}/step_{step}.json")

    def log_config(self, config: Mapping[str, object]) -> None:
        """See `MetricLogger`. MLflow lets nobody change a parameter: a resumed run logs none."""
        self._client.log_dict(self._run_id, dict(config), "config.json")
        if self._has_parameters:
            return
        self._has_parameters = True
        parameters = [
            self._mlflow.entities.Param(key, str(value)[:_MLFLOW_PARAMETER_LENGTH])
            for key, value in _flat(config)
        ]
        for start in range(0, len(parameters), _MLFLOW_BATCH):
            batch = parameters[start : start + _MLFLOW_BATCH]
            self._client.log_batch(self._run_id, params=batch)

    def close(self) -> None:
        """See `MetricLogger`."""
        self._client.set_terminated(self._run_id)


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise MissingDependencyError.of(
            "wandb", extra="wandb", purpose="logger.wandb_enabled"
        ) from error
    return wandb


def _import_mlflow() -> Any:
    try:
        import mlflow
        import mlflow.entities
    except ImportError as error:
        raise MissingDependencyError.of(
            "mlflow", extra="mlflow", purpose="logger.mlflow_enabled"
        ) from error
    return mlflow


def _stored_id(path: Path) -> str | None:
    return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None


def _markdown_cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def _flat(config: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    """Leaves of nested mappings under dotted keys."""
    leaves: list[tuple[str, object]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            leaves += _flat(value, f"{prefix}{key}.")
        else:
            leaves.append((f"{prefix}{key}", value))
    return leaves
