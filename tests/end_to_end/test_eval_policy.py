"""`laurel eval policy`: answers of a tiny model, judged."""

import json

import pytest
from pyarrow import parquet

from laurel.errors import ConfigError, DataError
from laurel.extensions.evaluation.options import EvalPolicyOptions
from laurel.extensions.evaluation.policy import run_eval
from policy_runs import CPU, MATCHES, sums
from runs import write_rows

SETTINGS = (
    *CPU,
    *MATCHES[1:],
    "policy.max_total_sequence_length=64",
    "policy.generation.backend=transformers",
    "policy.generation.max_new_tokens=8",
)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    write_rows(path, sums(12))
    return path


def evaluated(model, tasks, capsys, *changes, **options):
    asked = {"environment": "matches", "dataset": "ResponseDataset"} | options
    chosen = EvalPolicyOptions(model=str(model), data_path=str(tasks), as_json=True, **asked)
    capsys.readouterr()
    exit_code = run_eval(None, [*SETTINGS, *changes], chosen)
    return exit_code, json.loads(capsys.readouterr().out)


def test_several_completions_give_pass_at_k(model, tasks, capsys, tmp_path):
    samples, output = tmp_path / "samples.parquet", tmp_path / "result.json"
    exit_code, result = evaluated(
        model, tasks, capsys, num_generations=4, samples=samples, output=output
    )
    assert exit_code == 0
    assert json.loads(output.read_text()) == result
    rewards = [task["rewards"] for task in result["tasks"]]
    assert [len(row) for row in rewards] == [4] * 12
    assert {r for row in rewards for r in row} <= {0.0, 1.0}
    figures = result["figures"]
    assert figures["pass@1"] == pytest.approx(sum(map(sum, rewards)) / 48)
    assert figures["pass@4"] == pytest.approx(sum(max(row) for row in rewards) / 12)
    assert figures["pass@1"] <= figures["pass@2"] <= figures["pass@4"]
    assert figures["reward_mean"] == pytest.approx(figures["pass@1"])
    assert figures["num_tasks"] == 12
    assert result["temperature"] == 1.0
    rows = parquet.read_table(samples).to_pylist()
    assert [row["reward"] for row in rows] == [r for row in rewards for r in row]


def test_one_completion_is_the_likeliest_and_the_same_each_time(model, tasks, capsys):
    _, first = evaluated(model, tasks, capsys, max_samples=5)
    _, again = evaluated(model, tasks, capsys, "grpo.seed=7", max_samples=5)
    assert first["temperature"] == 0.0
    assert [t["rewards"] for t in first["tasks"]] == [t["rewards"] for t in again["tasks"]]
    assert len(first["tasks"]) == 5
    assert "pass@2" not in first["figures"]


def test_the_tasks_of_a_configuration(model, tasks, capsys, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"data: {{validation: {{dataset_name: ResponseDataset, data_path: {tasks}}}, "
        f"env_name: matches}}\npolicy: {{model_name: {model}}}\n"
        "grpo: {max_val_samples: 3}\n"
        # What only training needs is not loaded.
        "loss_fn: {use_kl_in_reward: true, distillation: {model_name: ./nowhere}}\n"
    )
    assert run_eval(config, SETTINGS, EvalPolicyOptions(as_json=True)) == 0
    assert len(json.loads(capsys.readouterr().out)["tasks"]) == 12, "all of them"


def test_what_cannot_be_judged_is_counted_and_said_by_the_exit_code(model, tasks, capsys):
    exit_code, result = evaluated(
        model,
        tasks,
        capsys,
        "+env.custom.matches.kwargs={poison: '2'}",
        "env.max_failed_share=1",
        num_generations=4,
    )
    assert exit_code == 1
    figures, rewards_BG = result["figures"], [task["rewards"] for task in result["tasks"]]
    assert figures["num_failures"] == sum(row.count(None) for row in rewards_BG) > 0
    assert {bool(failure) for task in result["tasks"] for failure in task["failures"]} == {
        True,
        False,
    }
    judged_B = [[r for r in row if r is not None] for row in rewards_BG]
    means = [sum(row) / len(row) for row in judged_B if row]
    assert figures["reward_mean"] == pytest.approx(sum(means) / len(means))
    assert figures["num_tasks_unjudged"] == 12 - len(means)


def test_bad_input(model, tasks, tmp_path):
    with pytest.raises(ConfigError, match="no model is named; add --model"):
        run_eval(None, [], EvalPolicyOptions(data_path=str(tasks)))
    with pytest.raises(ConfigError, match="which tasks"):
        run_eval(None, SETTINGS, EvalPolicyOptions(model=str(model)))
    with pytest.raises(
        ConfigError,
        match=r"^--environment \w+: there is no environment of that name\. Did you mean code",
    ):
        run_eval(
            None,
            SETTINGS,
            EvalPolicyOptions(
                model=str(model), data_path=str(tasks), dataset="ResponseDataset", environment="cod"
            ),
        )
    with pytest.raises(DataError, match="is a directory"):
        run_eval(None, SETTINGS, EvalPolicyOptions(model=str(model), output=tmp_path))
    # The environment that a run named need not be there where another one grades.
    with pytest.raises(DataError, match="nowhere"):
        run_eval(
            None,
            [*SETTINGS, "data.env_name=registered_elsewhere"],
            EvalPolicyOptions(
                model=str(model),
                data_path="nowhere.jsonl",
                dataset="ResponseDataset",
                environment="math",
            ),
        )
