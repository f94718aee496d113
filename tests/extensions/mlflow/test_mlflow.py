import json
import math
from unittest.mock import MagicMock

import pytest

from laurel.extensions.mlflow.plugin import MlflowConfig, MlflowLogger


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
