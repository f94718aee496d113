import json
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from laurel.config.policy import MlflowConfig, WandbConfig
from laurel.observe.loggers import MlflowLogger, TensorboardLogger, WandbLogger


class FakeWandb:
    """Stands in for the wandb package and for its run."""

    def __init__(self):
        self.id = "run-1"
        self.logged: list[dict[str, Any]] = []
        self.config: Any = SimpleNamespace(update=self._update)
        self.updates: list[dict[str, Any]] = []
        self.arguments: dict[str, Any] = {}
        self.step_metrics: dict[str, str] = {}
        self.finished = False

    def _update(self, config, allow_val_change):
        assert allow_val_change
        self.updates.append(config)

    def init(self, **arguments):
        self.arguments = arguments
        return self

    def define_metric(self, name, step_metric):
        self.step_metrics[name] = step_metric

    def log(self, record):
        self.logged.append(record)

    def finish(self):
        self.finished = True

    def Table(self, columns, data):
        return columns, data


class FakeMlflow:
    """Stands in for the mlflow package and for its client."""

    def __init__(self):
        self.entities = SimpleNamespace(
            Metric=lambda name, value, timestamp, step: (name, value, step),
            Param=lambda key, value: (key, value),
        )
        self.metrics: list[Any] = []
        self.params: list[list[Any]] = []
        self.artifacts: dict[str, Any] = {}
        self.runs: list[str] = []
        self.experiments: list[str] = []
        self.status: dict[str, str] = {}

    def MlflowClient(self, tracking_uri):
        self.tracking_uri = tracking_uri
        return self

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name):
        self.experiments.append(name)
        return name

    def create_run(self, experiment_id, run_name):
        self.runs.append(experiment_id)
        return SimpleNamespace(info=SimpleNamespace(run_id=f"run-{len(self.runs)}"))

    def update_run(self, run_id, status):
        self.status[run_id] = status

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(params) <= 100
        self.metrics += metrics
        if params:
            self.params.append(params)

    def log_dict(self, run_id, config, path):
        self.artifacts[path] = config

    def log_text(self, run_id, text, path):
        self.artifacts[path] = text

    def set_terminated(self, run_id):
        self.status[run_id] = "FINISHED"


def test_tensorboard_holds_what_was_logged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorboardLogger(tmp_path)
    first.log_config({"rm": {"seed": 42}})
    for step in (1, 2, 3):
        first.log({"train/loss": float(step), "validation-default/accuracy": 0.5}, step=step)
    first.log_table("pairs", ["prompt", "score"], [("a|b\nc", 1.5)], step=3)
    first.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]
    (text,) = events.Tensors("pairs/text_summary")
    assert text.tensor_proto.string_val[0].decode() == (
        "| prompt | score |\n| --- | --- |\n| a\\|b<br>c | 1.5 |"
    )
    assert events.Tensors("config/text_summary")

    begun = int(time.time())
    while int(time.time()) == begun:  # its files are read by the second that they began in
        time.sleep(0.05)
    again = TensorboardLogger(tmp_path, resumed_step=1)
    again.log({"train/loss": 20.0}, step=2)
    again.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [1.0, 20.0]


def test_wandb_gets_its_own_step_so_that_resuming_works(tmp_path):
    package = FakeWandb()
    config = WandbConfig(project="p", name="n", entity="e")
    logger = WandbLogger(config, run_dir=tmp_path, library=package)
    assert package.arguments == {
        "project": "p",
        "name": "n",
        "entity": "e",
        "dir": str(tmp_path),
        "id": None,
        "resume": None,
    }
    assert package.step_metrics == {"*": "step"}
    logger.log_config({"rm": {"seed": 42}})
    logger.log({"train/loss": 0.5}, step=3)
    logger.log_table("pairs", ["a"], [(1,)], step=4)
    logger.close()
    assert package.updates == [{"rm": {"seed": 42}}]
    assert package.logged == [
        {"train/loss": 0.5, "step": 3},
        {"pairs": (["a"], [[1]]), "step": 4},
    ]
    assert package.finished

    WandbLogger(config, run_dir=tmp_path, resumed=True, library=package)
    assert (package.arguments["id"], package.arguments["resume"]) == ("run-1", "allow")


def test_mlflow_resumes_the_same_run(tmp_path):
    package = FakeMlflow()
    config = MlflowConfig(experiment_name="e", tracking_uri="file:here")
    run_config = {"rm": {f"key_{index}": index for index in range(130)}, "long": "x" * 7000}
    logger = MlflowLogger(config, run_dir=tmp_path, library=package)
    logger.log_config(run_config)
    logger.log({"train/loss": 0.5}, step=3)
    logger.log_table("validation-default/pairs", ["prompt", "score"], [("p", 1.5)], step=4)
    logger.close()
    assert package.tracking_uri == "file:here"
    assert package.metrics == [("train/loss", 0.5, 3)]
    assert [len(batch) for batch in package.params] == [100, 31]
    assert ("rm.key_7", "7") in package.params[0]
    assert len(dict(package.params[1])["long"]) == 6000
    assert json.loads(package.artifacts["validation-default/pairs/step_4.json"]) == [
        {"prompt": "p", "score": 1.5}
    ]
    assert package.status == {"run-1": "FINISHED"}

    again = MlflowLogger(config, run_dir=tmp_path, resumed=True, library=package)
    again.log_config(run_config)
    assert package.runs == ["e"]
    assert package.status == {"run-1": "RUNNING"}
    assert len(package.params) == 2  # MLflow refuses to change them

    MlflowLogger(config, run_dir=tmp_path, library=package)
    assert package.runs == ["e", "e"]
    assert package.experiments == ["e"]


@pytest.mark.filterwarnings("default")
def test_the_real_wandb_takes_it(tmp_path, monkeypatch):
    pytest.importorskip("wandb.sdk", reason="the extra 'wandb' is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for resumed in (False, True):
        logger = WandbLogger(WandbConfig(), run_dir=tmp_path, resumed=resumed)
        logger.log_config({"rm": {"seed": 42}})
        logger.log({"train/loss": math.nan, "train/accuracy": 0.5}, step=3)
        logger.log_table("validation-default/pairs", ["prompt", "score"], [("p", 1.5)], step=3)
        logger.close()
    assert (tmp_path / "wandb_run_id").read_text()
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 2


@pytest.mark.filterwarnings("default")
def test_the_real_mlflow_takes_it(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow.tracking", reason="the extra 'mlflow' is not installed")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.chdir(tmp_path)
    uri = (tmp_path / "store").as_uri()
    config = MlflowConfig(tracking_uri=uri)
    for resumed in (False, True):
        logger = MlflowLogger(config, run_dir=tmp_path, resumed=resumed)
        logger.log_config({"rm": {"seed": 42}, "empty": {}, "none": None})
        logger.log({"validation-default/accuracy": 0.5 + resumed / 4}, step=3 + resumed)
        logger.log({"train/loss": math.nan}, step=3)
        logger.log_table("validation-default/pairs", ["prompt", "score"], [("p", 1.5)], step=3)
        logger.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    run_id = (tmp_path / "mlflow_run_id").read_text()
    history = client.get_metric_history(run_id, "validation-default/accuracy")
    assert [(metric.step, metric.value) for metric in history] == [(3, 0.5), (4, 0.75)]
    run = client.get_run(run_id)
    assert run.data.params["rm.seed"] == "42"
    assert run.info.status == "FINISHED"
