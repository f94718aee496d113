import json
import math
import time
from unittest.mock import MagicMock

import pytest

from laurel.config.policy import MlflowConfig, WandbConfig
from laurel.observe.loggers import MlflowLogger, TensorboardLogger, WandbLogger


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
    package = MagicMock()
    run = package.init.return_value
    run.id = "run-1"
    config = WandbConfig(project="p", name="n", entity="e")
    logger = WandbLogger(config, run_dir=tmp_path, library=package)
    given = package.init.call_args.kwargs
    assert [given[key] for key in ("project", "name", "entity", "id")] == ["p", "n", "e", None]
    run.define_metric.assert_called_once_with("*", step_metric="step")
    logger.log_config({"rm": {"seed": 42}})
    logger.log({"train/loss": 0.5}, step=3)
    logger.log_table("pairs", ["a"], [(1,)], step=4)
    logger.close()
    run.config.update.assert_called_once_with({"rm": {"seed": 42}}, allow_val_change=True)
    package.Table.assert_called_once_with(columns=["a"], data=[[1]])
    assert [call.args[0] for call in run.log.call_args_list] == [
        {"train/loss": 0.5, "step": 3},
        {"pairs": package.Table.return_value, "step": 4},
    ]
    run.finish.assert_called_once()

    WandbLogger(config, run_dir=tmp_path, resumed=True, library=package)
    given = package.init.call_args.kwargs
    assert (given["id"], given["resume"]) == ("run-1", "allow")


def test_mlflow_resumes_the_same_run(tmp_path):
    package = MagicMock()
    client = package.MlflowClient.return_value
    client.get_experiment_by_name.return_value = None
    client.create_experiment.return_value = "e"
    client.create_run.return_value.info.run_id = "run-1"
    package.entities.Metric = lambda name, value, timestamp, step: (name, value, step)
    package.entities.Param = lambda key, value: (key, value)
    config = MlflowConfig(experiment_name="e", tracking_uri="file:here")
    run_config = {"rm": {f"key_{index}": index for index in range(130)}, "long": "x" * 7000}
    logger = MlflowLogger(config, run_dir=tmp_path, library=package)
    logger.log_config(run_config)
    params = [call.kwargs["params"] for call in client.log_batch.call_args_list]
    assert [len(batch) for batch in params] == [100, 31]
    assert ("rm.key_7", "7") in params[0]
    assert len(dict(params[1])["long"]) == 6000
    client.log_batch.reset_mock()
    logger.log({"train/loss": 0.5}, step=3)
    client.log_batch.assert_called_once_with("run-1", metrics=[("train/loss", 0.5, 3)])
    logger.log_table("validation-default/pairs", ["prompt", "score"], [("p", 1.5)], step=4)
    run_id, text, path = client.log_text.call_args.args
    assert (run_id, path) == ("run-1", "validation-default/pairs/step_4.json")
    assert json.loads(text) == [{"prompt": "p", "score": 1.5}]
    logger.close()
    client.set_terminated.assert_called_once_with("run-1")

    client.log_batch.reset_mock()
    again = MlflowLogger(config, run_dir=tmp_path, resumed=True, library=package)
    again.log_config(run_config)
    client.create_run.assert_called_once()
    client.update_run.assert_called_once_with("run-1", status="RUNNING")
    client.log_batch.assert_not_called()  # MLflow refuses to change them


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
