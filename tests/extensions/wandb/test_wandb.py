import math
from unittest.mock import MagicMock

import pytest

from laurel.extensions.wandb.plugin import WandbConfig, WandbLogger


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
