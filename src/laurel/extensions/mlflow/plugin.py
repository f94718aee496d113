"""Logs to MLflow: its settings, and the logger as a plug-in."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from laurel.config.yaml_tree import Section
from laurel.observe.loggers import flat
from laurel.plugins import Logger, LoggerServices

_MLFLOW_BATCH = 100
"""The maximum number of parameters that MLflow accepts in one request."""
_MLFLOW_PARAMETER_LENGTH = 6000


class MlflowConfig(Section):
    """The logger of an MLflow run."""

    experiment_name: str = "laurel"
    """Experiment."""
    run_name: str | None = None
    """Run."""
    tracking_uri: str | None = None
    """Server; null means MLflow's default."""


class MlflowLogger:
    """Logs to an MLflow experiment; a resumed training run continues its MLflow run."""

    def __init__(
        self, config: MlflowConfig, *, run_dir: Path, resumed: bool = False, library: Any = None
    ) -> None:
        if library is None:
            import_module("mlflow.entities")
        self._mlflow = library or import_module("mlflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=config.tracking_uri)
        id_file = run_dir / "mlflow_run_id"
        self._run_id = (
            id_file.read_text(encoding="utf-8").strip() if resumed and id_file.is_file() else ""
        )
        self._has_parameters = bool(self._run_id)
        if not self._run_id:
            experiment = self._client.get_experiment_by_name(config.experiment_name)
            experiment_id = (
                experiment.experiment_id
                if experiment is not None
                else self._client.create_experiment(config.experiment_name)
            )
            run = self._client.create_run(experiment_id, run_name=config.run_name)
            self._run_id = str(run.info.run_id)
            id_file.write_text(self._run_id, encoding="utf-8")
        else:
            self._client.update_run(self._run_id, status="RUNNING")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log the metrics in one batch."""
        now = int(time.time() * 1000)
        entity = self._mlflow.entities.Metric
        records = [entity(name, float(value), now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=records)

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, step: int
    ) -> None:
        """Log the rows as a JSON artifact."""
        records = [dict(zip(columns, row, strict=True)) for row in rows]
        text = json.dumps(records, indent=2, default=str)
        self._client.log_text(self._run_id, text, f"{name}/step_{step}.json")

    def log_config(self, config: Mapping[str, object]) -> None:
        """Log the configuration as an artifact, and its leaves as parameters.

        A resumed run logs no parameters, which MLflow does not allow to change.
        """
        self._client.log_dict(self._run_id, dict(config), "config.json")
        if self._has_parameters:
            return
        self._has_parameters = True
        parameters = [
            self._mlflow.entities.Param(key, str(value)[:_MLFLOW_PARAMETER_LENGTH])
            for key, value in flat(config)
        ]
        for start in range(0, len(parameters), _MLFLOW_BATCH):
            batch = parameters[start : start + _MLFLOW_BATCH]
            self._client.log_batch(self._run_id, params=batch)

    def close(self) -> None:
        """Mark the MLflow run as finished."""
        self._client.set_terminated(self._run_id)


class Mlflow(Logger):
    """MLflow."""

    section = MlflowConfig
    package = extra = "mlflow"

    def make(self, section: MlflowConfig, run: LoggerServices) -> MlflowLogger:
        """Begin or continue a run there."""
        return MlflowLogger(section, run_dir=run.run_dir, resumed=run.resumed_step is not None)
