"""A process reward model from its rows to its scores: trained, resumed, scored, exported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from laurel import api
from laurel.cli.main import app
from laurel.environments.reward_model_environment import RewardModelEnvironment
from laurel.errors import ConfigError, DataError
from laurel.models.scoring import ScoringRules
from laurel.rewards.open import open_local
from policy_runs import completions_of, grpo, grpo_settings, metrics_of
from process_models import process_model, stepwise_rows
from process_models import solutions as solutions_of
from reward_models import small_model, write_model
from runs import assert_equal_runs, series, settings, train, write_rows
from serve_processes import Serving

STEPS = (
    "policy.reward_model_cfg.reward_model_type=process",
    "rm.loss.type=step_bce",
    "data.dataset_name=StepwiseSupervision",
    "data.split_validation_size=0.25",
    "policy.optimizer.kwargs.lr=1e-2",
    "rm.max_num_epochs=12",
    "rm.val_period=10",
    "checkpointing.save_period=10",
)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", stepwise_rows(64))


@pytest.fixture(scope="module")
def run(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    train(settings(directory, f"data.train_data_path={rows}", *STEPS))
    return directory


def test_it_learns_which_steps_are_wrong(run: Path) -> None:
    accuracy = series(run, "validation-default/step_accuracy")
    assert accuracy[max(accuracy)] > 0.95
    assert series(run, "validation-default/first_error_f1")[max(accuracy)] > 0.9
    loss = series(run, "train/loss")
    assert loss[max(loss)] < 0.5 * loss[min(loss)]


def test_the_contract_names_the_separator_and_the_read_out(run: Path) -> None:
    (best,) = (run / "saves").glob("best")
    saved = json.loads((best / "scoring.json").read_text())
    assert saved["steps"] == {"separator": "\n\n", "read_out": "each step", "aggregate": "min"}
    rules = ScoringRules.read(best)
    assert all(len(golden.values_K) >= 2 for golden in rules.golden)
    assert 0.0 < (rules.mean or 0.0) < 1.0
    card = (best / "README.md").read_text()
    assert "AutoModelForTokenClassification" in card
    assert "AutoModelForSequenceClassification" not in card


def test_score_prints_the_values_of_steps_and_one_aggregate(run: Path, tmp_path: Path) -> None:
    file = write_rows(
        tmp_path / "asked.jsonl",
        [
            {
                "prompt": "question 1",
                "completions": [
                    "step 0 is right\n\nstep 1 is wrong\n\nstep 2 is right",
                    "step 0 is right\n\nstep 1 is right",
                ],
            }
        ],
    )
    labelled = {
        "prompt": "question 1",
        "completions": ["step 0 is right", "step 1 is wrong", "step 2 is right"],
        "labels": [True, False, True],
    }
    write_rows(tmp_path / "labelled.jsonl", [labelled])

    def scored(*options: str, file: Path = file) -> dict[str, Any]:
        asked = ["score", str(file), "-m", str(run / "saves"), "--device", "cpu", "--json"]
        result = CliRunner().invoke(app, [*asked, *options], catch_exceptions=False)
        assert result.exit_code == 0
        (line,) = result.stdout.splitlines()
        found: dict[str, Any] = json.loads(line)
        return found

    found = scored()
    first, second = found["values"]
    assert [len(first), len(second)] == [3, 2]
    assert first[1] < 0.5 < min(first[0], *second)
    assert found["scores"] == [min(first), min(second)]
    assert scored("--aggregate", "product")["scores"] == pytest.approx(
        [math.prod(first), math.prod(second)]
    )
    assert scored("--aggregate", "last")["scores"] == [first[-1], second[-1]]
    # In a row of training, completions are the steps of one answer.
    assert scored(file=tmp_path / "labelled.jsonl")["values"] == [pytest.approx(first, abs=1e-5)]
    ((score,),) = api.score(run / "saves", [labelled])
    assert score.values_K == pytest.approx(first, abs=1e-5)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(run: Path, rows: Path, tmp_path: Path) -> None:
    parts = settings(tmp_path, f"data.train_data_path={rows}", *STEPS)
    train([*parts, "rm.max_num_steps=20"])
    train(parts)
    last = max(series(run, "train/loss"))
    assert_equal_runs(run, tmp_path, last=last)


def test_answers_that_are_too_long_are_left_out_and_counted(rows: Path, tmp_path: Path) -> None:
    changes = ("data.max_input_seq_length=40", "rm.max_num_steps=1")
    done = train(settings(tmp_path, f"data.train_data_path={rows}", *STEPS, *changes))
    assert "over-long" in done.text
    assert " rows/s" in done.text
    assert "pairs/s" not in done.text


def test_rows_of_pairs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="label no steps"):
        train(
            settings(
                tmp_path,
                "policy.reward_model_cfg.reward_model_type=process",
                "rm.loss.type=step_bce",
            )
        )


@pytest.mark.slow
def test_the_ranking_loss_learns_too(rows: Path, tmp_path: Path) -> None:
    changes = [one for one in STEPS if not one.startswith("rm.loss")]
    train(
        settings(
            tmp_path,
            f"data.train_data_path={rows}",
            *changes,
            "rm.loss.type=step_ranking",
            "rm.loss.step_margin=1",
            "rm.max_num_epochs=30",
        )
    )
    accuracy = series(tmp_path, "validation-default/step_accuracy")
    assert accuracy[max(accuracy)] > 0.9


@pytest.fixture(scope="module")
def solutions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ProcessBench's form of rows that the run has not seen."""
    lines = []
    for number, row in enumerate(stepwise_rows(40, seed=1)):
        wrong = [index for index, right in enumerate(row["labels"]) if not right]
        lines.append(
            {
                "id": str(number),
                "problem": row["prompt"],
                "steps": row["completions"],
                "label": wrong[0] if wrong else -1,
            }
        )
    return write_rows(tmp_path_factory.mktemp("bench") / "solutions.jsonl", lines)


def report(*command: str) -> dict[str, Any]:
    result = CliRunner().invoke(
        app, [*command, "--device", "cpu", "--json"], catch_exceptions=False
    )
    assert result.exit_code == 0
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_eval_finds_first_errors_and_the_best_of_n(
    run: Path, solutions: Path, tmp_path: Path
) -> None:
    model = str(run / "saves")
    found = report("eval", "process-bench", "-m", model, "-d", str(solutions))
    assert found["final"]["value"] > 0.9
    groups = write_rows(
        tmp_path / "groups.jsonl",
        [
            {
                "prompt": f"question {number}",
                "completions": [
                    "step 0 is right\n\nstep 1 is wrong",
                    "step 0 is right\n\nstep 1 is right",
                ],
                "correct": [False, True],
            }
            for number in range(4)
        ],
    )
    for how in ("min", "mean"):
        best = report("eval", "best-of-n", "-m", model, "-d", str(groups), "--aggregate", how)
        assert best["final"]["value"] == 1.0


def test_too_long_an_answer_gets_no_score_and_the_screens_say_so(run: Path, tmp_path: Path) -> None:
    steps = ["step 0 is right"] * 60
    solution = {"id": "1", "problem": "question 1", "steps": steps}
    file = write_rows(
        tmp_path / "solutions.jsonl",
        [{**solution, "label": -1}, {**solution, "steps": steps[:2], "label": 1}],
    )
    row = write_rows(tmp_path / "row.jsonl", [{"prompt": "q", "completions": ["\n\n".join(steps)]}])
    shown = ""
    for command in (["score", str(row)], ["eval", "process-bench", "-d", str(file)]):
        asked = [*command, "-m", str(run / "saves"), "--device", "cpu"]
        result = CliRunner().invoke(app, asked, catch_exceptions=False)
        assert result.exit_code == 1
        shown = result.output
        assert "tokens get no score" in shown
        assert " cut " not in shown
    card = next((run / "saves").glob("*/README.md")).read_text()
    assert "longer ones get no score" in card
    assert "its accuracy is unknown" not in card
    assert "longest step" in shown
    assert "longer wins" not in shown
    assert f"the first: {file}:1: longer than" in shown


def test_an_aggregate_is_refused_for_other_models(tmp_path: Path) -> None:
    write_model(small_model(), tmp_path / "model")
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completions": ["b"]}])
    asked = ["score", str(rows), "-m", str(tmp_path / "model"), "--aggregate", "min"]
    with pytest.raises(ConfigError, match="no process reward model"):
        CliRunner().invoke(app, [*asked, "--device", "cpu"], catch_exceptions=False)


def test_an_export_is_tested_with_plain_transformers(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "plain"
    report("export", "-m", str(run / "saves"), "-o", str(output))
    assert json.loads((output / "config.json").read_text())["architectures"] == [
        "Qwen3ForTokenClassification"
    ]
    rules = ScoringRules.read(output)
    assert rules.steps is not None
    assert rules.golden


def test_a_validation_set_may_be_processbench(rows: Path, solutions: Path, tmp_path: Path) -> None:
    bench = f"data.val_data_paths={{Bench: {{benchmark: process-bench, data_path: {solutions}}}}}"
    changes = [one for one in STEPS if "split_validation" not in one]
    train(
        settings(
            tmp_path,
            f"data.train_data_path={rows}",
            *changes,
            bench,
            "checkpointing.metric_name=validation-Bench_final_score",
            "rm.max_num_steps=10",
        )
    )
    assert series(tmp_path, "validation-Bench/final_score")
    assert series(tmp_path, "validation-Bench/erroneous_accuracy")


@pytest.mark.slow
@pytest.mark.usefixtures("warm_processes")
def test_serve_gives_the_values_of_steps_and_the_aggregate(run: Path, tmp_path: Path) -> None:
    answers = (
        "step 0 is right\n\nstep 1 is wrong\n\nstep 2 is right",
        "step 0 is right\n\nstep 1 is right",
        "step 0 is right\n\n" * 40,
    )
    (scores,) = open_local(str(run / "saves"), say=lambda _: None).score_now(
        [solutions_of("question 1", *answers)]
    )
    asked = ("--model", str(run / "saves"), "--device", "cpu", "--aggregate", "mean")
    with Serving(tmp_path, *asked) as server:
        status, reply = server.ready().score(*answers, prompt="question 1")
        text = "<|im_start|>user\nq<|im_end|>"
        _, pooled = server.ask("/classify", {"input": [text]})
    assert status == 200
    *whole, cut = reply["groups"][0]["scores"]
    for found, expected in zip(whole, scores, strict=False):
        assert found["values"] == pytest.approx(expected.values_K, abs=1e-6)
        assert found["value"] == pytest.approx(sum(expected.values_K) / len(expected.values_K))
    assert cut["value"] is None
    assert cut["values"] == []
    assert "longer than 128 tokens" in cut["failure"]
    assert "Send messages" in json.dumps(pooled)


def test_an_environment_gives_the_rewards_of_steps_and_their_aggregate(run: Path) -> None:
    answers = (
        "step 0 is right\n\nstep 1 is wrong\n\n",
        "\n\nstep 0\n\n \n\nstep 1",
        "",
        "a\n\n" * 60,
    )
    logs = [
        [{"role": "user", "content": "question 1"}, {"role": "assistant", "content": answer}]
        for answer in answers
    ]
    config = {
        "precision": "float32",
        "model_name": str(run / "saves"),
        "transform": {"scale": 2.0, "shift": -1.0},
    }
    (scores,) = open_local(str(run / "saves"), say=lambda _: None).score_now(
        [solutions_of("question 1", *answers)]
    )
    with RewardModelEnvironment(config, device="cpu") as environment:
        assert environment.spec.gives_steps
        found = environment.step(logs, [{}] * len(logs))
    assert found.rewards.tolist()[:3] == pytest.approx(
        [2.0 * (one.value or 0.0) - 1.0 for one in scores[:3]], abs=1e-5
    )
    # An answer whose steps cannot all be read has no reward, and takes no part.
    assert found.failures is not None
    assert found.failures[:3] == [None] * 3
    assert "longer than 128 tokens" in str(found.failures[3])
    assert found.steps is not None
    # The last step goes on to the end, blanks and separators included.
    ends = [[step.end for step in steps or ()] for steps in found.steps]
    assert ends == [[17, 34], [10, 19], [0], []]
    assert found.steps[3] is None
    for steps, score in zip(found.steps[:3], scores, strict=False):
        assert [step.value for step in steps or ()] == pytest.approx(
            [2.0 * value - 1.0 for value in score.values_K], abs=1e-5
        )
    less = {**config, "transform": {"subtract_reference": True}}
    with RewardModelEnvironment(less, device="cpu") as environment:
        assert not environment.spec.gives_steps


PER_STEP = "grpo.adv_estimator.per_step=true"


def test_a_policy_learns_from_advantages_per_step(model: Path, tmp_path: Path) -> None:
    # The policy writes \\boxed{1}: with this separator, in two steps.
    write_model(process_model(separator="{"), tmp_path / "prm")
    rewarded = (
        "data.env_name=reward_model",
        f"env.reward_model.model_name={tmp_path}/prm",
        "env.reward_model.precision=float32",
        "grpo.max_num_steps=1",
        "grpo.val_at_end=false",
    )
    grpo(grpo_settings(tmp_path / "run", model, PER_STEP, *rewarded))
    rows = completions_of(tmp_path / "run", 1)
    assert any(len(row["step_rewards"]) > 1 for row in rows)
    for row in rows:
        assert row["reward"] == pytest.approx(min(row["step_rewards"]))
        assert row["step_ends"][-1] == row["num_tokens"], "the token that ends the turn is its own"
        assert row["step_ends"] == sorted(set(row["step_ends"]))
        # An answer may begin or end with the separator, and blank text is no step.
        parts = [part for part in row["completion"].split("{") if part.strip()]
        assert len(row["step_rewards"]) == max(len(parts), 1)
    figures = metrics_of(tmp_path / "run")[1]
    assert figures["train/steps/mean_per_completion"] > 1
    assert figures["train/steps/share_without"] == 0
    assert figures["train/advantages/std"] > 0
    # The same first rollouts with the aggregate teach something else.
    grpo(grpo_settings(tmp_path / "other", model, *rewarded))
    assert [row["reward"] for row in completions_of(tmp_path / "other", 1)] == [
        row["reward"] for row in rows
    ]
    assert metrics_of(tmp_path / "other")[1]["train/loss"] != figures["train/loss"]


@pytest.mark.slow
def test_the_noise_of_steps_is_what_a_run_reads(model: Path, tmp_path: Path) -> None:
    """By that of completions no group would have a signal, and dynamic sampling would find none."""
    settings = (
        PER_STEP,
        "data.env_name=digits",
        "+env.custom.digits.name=policy_fakes.DigitSteps",
        "+env.custom.digits.kwargs.noise=1e6",
        "+env.custom.digits.kwargs.step_noise=0.001",
        "grpo.use_dynamic_sampling=true",
        "grpo.dynamic_sampling_max_gen_batches=50",
        "grpo.max_num_epochs=99",
        "grpo.max_num_steps=1",
    )
    grpo(grpo_settings(tmp_path, model, *settings))
    figures = metrics_of(tmp_path)[1]
    assert figures["train/scorer_noise"] == 0.001
    assert figures["train/groups_at_noise_floor"] == 0
    assert figures["train/groups_without_signal"] == 0


def test_an_environment_without_steps_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the environment math gives no rewards of steps"):
        grpo(grpo_settings(tmp_path, None, PER_STEP))
