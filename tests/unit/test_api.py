"""The commands as functions: what they refuse. The notebooks' tests run them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from laurel import api
from laurel.errors import ConfigError, DataError, ModelError
from laurel.observe.console import CompletionRow, write_completions
from laurel.types import Score


def test_a_kind_of_training_that_is_none() -> None:
    kind: Any = "grp"
    with pytest.raises(ConfigError, match="kind 'grp' is none of rm, sft, grpo; did you mean"):
        api.train(kind)


def test_a_benchmark_that_is_none() -> None:
    name: Any = "pair"
    with pytest.raises(ConfigError, match=r"none of best-of-n, .* did you mean 'pairs'"):
        api.evaluate(name, "model")


def test_settings_are_checked_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        api.train("rm", {"policy.modl_name": "x", "rm.max_num_steps": "many"})
    assert "did you mean 'model_name'" in str(caught.value)
    assert "rm.max_num_steps" in str(caught.value)
    assert "setting 'policy.modl_name': " in str(caught.value)
    assert "++" not in str(caught.value)


def test_errors_name_arguments_and_keys_as_the_caller_wrote_them(tmp_path: Path) -> None:
    rows = [{"question": "q", "chosen": "a", "rejected": "b"}]
    own = "--model is a fine name --data"
    with pytest.raises(ModelError, match=rf"^model=.*/{own}: there is no such directory"):
        api.evaluate("pairs", tmp_path / own, quiet=True)
    with pytest.raises(ModelError, match=r"^model=.*nowhere: there is no such directory"):
        api.score(tmp_path / "nowhere", rows, settings={"data.prompt_key": "question"})
    with pytest.raises(ConfigError, match=r"^setting 'rm\.seed': .*only the columns of rows"):
        api.score("model", rows, settings={"rm.seed": 1})


def test_a_file_comes_before_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "rm.yaml"
    file.write_text("policy: {model_name: ./not-there}\n", encoding="utf-8")
    with pytest.raises(ModelError, match="nor-there: there is no such directory"):
        api.train(
            "rm",
            {"policy.model_name": "./nor-there", "data.train_data_path": "x"},
            config=file,
            quiet=True,
        )


def test_a_row_that_cannot_be_scored_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "completions": ["a"]}, {"prompt": "p", "completions": []}]
    with pytest.raises(DataError, match=re.escape("rows[1]: 'completions' is empty")):
        api.score(tmp_path / "no-model", rows)


def test_a_bad_row_may_be_skipped_as_on_the_command_line() -> None:
    good = {"question": "a", "chosen": "b", "rejected": "c"}
    rows = [good, {"question": "a"}, good]
    scorer: Any = SimpleNamespace(
        contract=SimpleNamespace(rules=SimpleNamespace(steps=None)),
        score_now=lambda groups: [(Score(value=1.0),) * 2 for _ in groups],
    )
    settings = {"data.prompt_key": "question"}
    with pytest.raises(
        DataError, match=r"rows\[1\]: .*keys question, which .* or set data\.on_bad_row=skip"
    ):
        api.score(scorer, rows, settings=settings)
    first, bad, last = api.score(scorer, rows, settings={**settings, "data.on_bad_row": "skip"})
    assert [one.value for one in (*first, *last)] == [1.0] * 4
    (failed,) = bad
    assert failed.value is None
    assert failed.failure is not None
    assert failed.failure.startswith("rows[1]: ")
    assert "on_bad_row" not in failed.failure


@pytest.mark.parametrize(
    "use",
    [
        lambda: api.score(None, [{"prompt": "a", "completions": ["b"]}]),
        lambda: api.open_scorer(None),
        lambda: api.evaluate("pairs", None, ["rows.jsonl"]),
        lambda: api.export(None, "exported"),
    ],
)
def test_a_run_without_a_best_checkpoint_has_no_model_to_use(use: Callable[[], Any]) -> None:
    with pytest.raises(ModelError, match=r"outcome\.best is None where checkpointing\.metric_name"):
        use()


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory to read a run from"):
        api.read_run(None)
    with pytest.raises(DataError, match="no run logged here"):
        api.read_run(tmp_path)


def test_the_completions_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 4, "train/loss": 1.0}\n', encoding="utf-8")
    run = api.read_run(tmp_path)
    with pytest.raises(DataError, match="no completions of step 2; there are none"):
        run.completion_file(2)
    row = CompletionRow(
        step=3, task="t", group="g", environment="e", prompt="p", completion="c", reward=1.0
    )
    write_completions(tmp_path / "completions" / "step_000003.parquet", [row])
    assert run.completion_file(3).is_file()
    with pytest.raises(DataError, match="no completions of step 2; there are those of steps 3 to"):
        run.completion_file(2)
