import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from laurel.config.policy import LoggerConfig
from laurel.errors import ConfigError, DataError, MissingDependencyError
from laurel.observe.console import set_verbosity
from laurel.observe.loggers import (
    JsonlLogger,
    Loggers,
    check_available,
    next_run_dir,
    open_loggers,
    read_metrics,
    shows_whole_samples,
)


class RecordingLogger:
    """A logger that remembers, and fails from its `fails_at`-th call on."""

    def __init__(self, fails_at=None):
        self.calls: list[str] = []
        self._fails_at = fails_at

    def _call(self, name):
        self.calls.append(name)
        if self._fails_at is not None and len(self.calls) >= self._fails_at:
            raise ConnectionError("the network is down")

    def log(self, metrics, *, step):
        self._call("log")

    def log_table(self, name, columns, rows, *, step):
        self._call("log_table")

    def log_config(self, config):
        self._call("log_config")

    def close(self):
        self._call("close")


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def ticking(start=1000.0):
    times = iter(start + step for step in range(100))
    return lambda: next(times)


def test_numbers_that_json_cannot_say_stay_valid_json(tmp_path):
    logger = JsonlLogger(tmp_path)
    logger.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.5)}, step=1)
    logger.close()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=refuse)
    assert [record[name] for name in "abcd"] == ["NaN", "Infinity", "-Infinity", 0.5]
    (read,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(read["a"])
    assert (read["b"], read["c"]) == (math.inf, -math.inf)


def test_a_line_a_step_that_no_metric_takes_the_place_of(tmp_path):
    logger = JsonlLogger(tmp_path, clock=ticking())
    logger.log({"step": 99.0, "time": 0.0, "train/loss": 0.5, "train/num_valid": 4}, step=1)
    # Written through: there before close.
    assert lines_of(tmp_path / "metrics.jsonl") == [
        {"step": 1, "time": 1000.0, "train/loss": 0.5, "train/num_valid": 4.0}
    ]
    logger.close()


def test_both_files_hold_each_step_once_after_resumes(tmp_path):
    for resumed_step in (None, 3, 1):
        logger = JsonlLogger(tmp_path, resumed_step=resumed_step)
        for step in range((resumed_step or 0) + 1, 5):
            logger.log({"a": step + 10.0 * (resumed_step or 0)}, step=step)
            logger.log_table("t", ["x"], [("\u2028",)], step=step)
        logger.close()
    for name in ("metrics.jsonl", "samples.jsonl"):
        with (tmp_path / name).open(encoding="utf-8", newline="\n") as file:
            lines = [json.loads(line) for line in file]
        assert [line["step"] for line in lines if "event" not in line] == [1, 2, 3, 4], name
        assert [line["step"] for line in lines if "event" in line] == [3, 1], name
    assert sorted(f.name for f in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert [record["a"] for record in read] == [1.0, 12.0, 13.0, 14.0]


def test_a_file_that_earlier_versions_left_with_doubled_steps_is_cleaned(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = ['{"step": 1}', '{"step": 2, "a": 1.0}', '{"event": "resumed", "step": 1}']
    path.write_text("\n".join([*rows, '{"step": 2, "a": 2.0}', "not ours"]) + "\n")
    JsonlLogger(tmp_path, resumed_step=2).close()
    texts = path.read_text().splitlines()
    assert texts[:4] == [rows[0], rows[2], '{"step": 2, "a": 2.0}', "not ours"]
    assert len(texts) == 5


def test_a_line_that_a_kill_cut_short_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "time": 0.0, "a": 1.0}\n{"step": 2, "ti')
    assert [record["step"] for record in read_metrics(path)] == [1]
    logger = JsonlLogger(tmp_path, resumed_step=1)
    logger.log({"a": 2.0}, step=2)
    logger.close()
    assert [record.get("step") for record in lines_of(path)] == [1, 1, 2]
    assert [record["a"] for record in read_metrics(path)] == [1.0, 2.0]


def test_foreign_lines_are_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "a": [1]}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:2: not a line of metrics"):
        read_metrics(path)
    path.write_text("[3]\nnonsense\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:1"):
        read_metrics(path)


def test_tables_go_to_samples(tmp_path):
    logger = JsonlLogger(tmp_path, clock=ticking())
    assert not (tmp_path / "samples.jsonl").exists()
    rows = [("2+2? 日本 \u2028", 1.5), ("lone \udc80", math.nan)]
    logger.log_table("validation-default/pairs", ["prompt", "score"], rows, step=16)
    logger.close()
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert "日本" in lines[0]
    first, second = map(json.loads, lines)
    assert first == {
        "step": 16,
        "time": 1000.0,
        "table": "validation-default/pairs",
        "row": {"prompt": "2+2? 日本 \u2028", "score": 1.5},
    }
    assert second["row"] == {"prompt": "lone \udc80", "score": "NaN"}


def test_the_configuration_is_kept(tmp_path):
    logger = JsonlLogger(tmp_path)
    config = {"policy": {"lr": 2e-6, "name": None, "betas": (0.9, 0.98)}, "dir": Path("x"), "n": 3}
    logger.log_config(config)
    logger.close()
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "policy": {"lr": 2e-6, "name": None, "betas": [0.9, 0.98]},
        "dir": "x",
        "n": 3,
    }


def test_everything_reaches_every_logger():
    left, right = RecordingLogger(), RecordingLogger()
    loggers = Loggers({"left": left, "right": right})
    loggers.log_config({})
    loggers.log({"a": 1.0}, step=1)
    loggers.log_table("t", ["a"], [[1]], step=1)
    loggers.close()
    loggers.close()
    assert left.calls == right.calls == ["log_config", "log", "log_table", "close"]


def test_a_logger_that_fails_or_does_not_open_warns_once_and_the_others_go_on():
    def unopened():
        raise TimeoutError

    warnings: list[str] = []
    bad, good = RecordingLogger(fails_at=2), RecordingLogger()
    loggers = Loggers({"wandb": bad, "jsonl": good}, warn=warnings.append)
    loggers.add("mlflow", unopened)
    for step in range(1, 5):
        loggers.log({"a": 1.0}, step=step)
    assert loggers.names == ("jsonl",)
    assert bad.calls == ["log", "log", "close"]
    assert good.calls == ["log"] * 4
    mlflow, wandb = warnings
    assert "'mlflow' failed and is switched off for the rest of the run (TimeoutError)" in mlflow
    assert "'wandb'" in wandb
    assert "ConnectionError: the network is down" in wandb


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_stops_the_log_not_the_run(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    warnings: list[str] = []
    loggers = Loggers({"jsonl": JsonlLogger(tmp_path)}, warn=warnings.append)
    loggers.log({"a": 1.0}, step=1)
    loggers.log({"a": 1.0}, step=2)
    loggers.close()
    (warning,) = warnings
    assert "No space left on device" in warning


def test_what_is_missing_is_said_before_anything_is_made(tmp_path):
    config = LoggerConfig(wandb_enabled=True, mlflow_enabled=True)
    with pytest.raises(MissingDependencyError, match=r"logger\.wandb_enabled.*\[wandb\]"):
        check_available(config, is_installed=lambda package: package != "wandb")
    with pytest.raises(MissingDependencyError, match=r"logger\.mlflow_enabled.*\[mlflow\]"):
        check_available(config, is_installed=lambda package: package != "mlflow")
    with pytest.raises(MissingDependencyError, match="tensorboard_enabled=false"):
        check_available(config, is_installed=lambda package: package != "tensorboard")
    check_available(config, is_installed=lambda package: True)
    off = LoggerConfig(tensorboard_enabled=False)
    check_available(off, is_installed=lambda package: False)


def test_opening_what_the_configuration_names(tmp_path):
    config = LoggerConfig()
    loggers = open_loggers(config, run_dir=tmp_path, run_config={"rm": {"seed": 42}})
    assert loggers.names == ("jsonl", "tensorboard")
    loggers.log({"train/loss": 0.5}, step=1)
    loggers.close()
    assert json.loads((tmp_path / "config.json").read_text()) == {"rm": {"seed": 42}}
    assert [record["train/loss"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0.5]
    assert list((tmp_path / "tensorboard").iterdir())

    again = open_loggers(config, run_dir=tmp_path, run_config={}, resumed_step=0)
    again.log({"train/loss": 0.4}, step=1)
    again.close()
    assert [record["train/loss"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [0.4]

    none = LoggerConfig(tensorboard_enabled=False)
    fewest = open_loggers(none, run_dir=tmp_path, run_config={})
    assert fewest.names == ("jsonl",)
    fewest.close()


def test_run_directories_count_up(tmp_path):
    log_dir = tmp_path / "deep" / "logs"
    assert next_run_dir(log_dir) == log_dir / "exp_001"
    assert next_run_dir(str(log_dir)) == log_dir / "exp_002"
    (log_dir / "exp_041").mkdir()
    (log_dir / "exp_042").write_text("a file in the way")
    (log_dir / "exp_old").mkdir()
    assert next_run_dir(log_dir) == log_dir / "exp_043"
    assert (log_dir / "exp_043").is_dir()


def test_runs_that_start_at_once_get_different_directories(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        directories = list(pool.map(next_run_dir, [tmp_path] * 64))
    assert len(set(directories)) == 64


def test_a_log_directory_that_is_a_file_is_an_error(tmp_path):
    blocked = tmp_path / "logs"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"logger\.log_dir: cannot create .*File exists"):
        next_run_dir(blocked)


def test_a_validation_shows_three_lines_unless_asked_for_more():
    assert LoggerConfig().num_val_samples_to_print == 3
    assert not shows_whole_samples(LoggerConfig())
    assert shows_whole_samples(LoggerConfig(num_val_samples_to_print=3))
    set_verbosity("verbose")
    try:
        assert shows_whole_samples(LoggerConfig())
    finally:
        set_verbosity("normal")
