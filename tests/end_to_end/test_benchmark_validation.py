"""Benchmarks as validation sets of `laurel rm`, and of the judge of `laurel grpo`."""

import json
from typing import Any

import pytest

import runs
from laurel.errors import ConfigError, DataError
from laurel.extensions.evaluation.run import EvalScorer, EvaluationRequest, run_benchmark
from laurel.rewards.spec import ScorerSpec
from policy_runs import grpo, grpo_settings, metrics_of
from runs import BAD, GOOD, series, write_rows

SUBSETS = ("mt-bench-easy", "llmbar-natural", "donotanswer", "hep-go")
"""One of each section."""


def bench_rows(count=40):
    """Rows that follow the rule of `runs.pairs`, but for those of Chat Hard, which turn it round:
    the more a model learns, the worse it is at them."""
    rows = []
    for i in range(count):
        words = GOOD[i // 4 % 4], BAD[i // 4 % 3]
        subset = SUBSETS[i % 4]
        better, worse = reversed(words) if subset == "llmbar-natural" else words
        rows.append(
            {
                "id": i,
                "subset": subset,
                "prompt": f"question {i}?",
                "chosen": f"one {better} answer",
                "rejected": f"one {worse} answer",
            }
        )
    return rows


def list_rows():
    return [
        {
            "prompt": f"question {i}?",
            "completions": [
                f"{GOOD[i % 4]} reply",
                f"{BAD[i % 4]} reply",
                f"{GOOD[i % 4]} reply",
                f"more {BAD[(i + 1) % 4]} answer",
            ],
            "correct": [True, False, True, False],
        }
        for i in range(9)
    ]


def benches(directory, **more):
    """Settings of two validation sets that are benchmarks, as text of the command line."""
    rows = write_rows(directory / "bench.jsonl", bench_rows())
    lists = write_rows(directory / "lists.jsonl", list_rows())
    return {
        "Rewards": f"{{benchmark: reward-bench, data_path: {rows}}}",
        "Lists": f"{{benchmark: best-of-n, data_path: {lists}}}",
        **more,
    }


def settings(directory, *changes, sets=None):
    directory.mkdir(parents=True, exist_ok=True)
    sets = benches(directory) if sets is None else sets
    named = ", ".join(f"{name}: {block}" for name, block in sets.items())
    return runs.settings(directory, f"data.val_data_paths={{{named}}}", *changes)


def evaluated(model, name, data, output):
    """What `laurel eval` finds of a model."""
    scorer = EvalScorer(model=str(model), options=ScorerSpec(device="cpu"), cpu_threads=1)
    run_benchmark(
        name, EvaluationRequest(scorer=scorer, data=(str(data),), output=output, as_json=True)
    )
    found: dict[str, Any] = json.loads((output / f"{name}-report.json").read_text())
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Three checkpoints, the best by a figure of a benchmark."""
    directory = tmp_path_factory.mktemp("run")
    small = f"{{benchmark: reward-bench, data_path: {directory}/bench.jsonl, max_samples: 10}}"
    changes = settings(
        directory,
        "rm.max_num_steps=9",
        "rm.max_num_epochs=9",
        "rm.val_period=3",
        "checkpointing.save_period=3",
        "policy.optimizer.kwargs.lr=5e-4",
        "checkpointing.keep_top_k=null",
        "checkpointing.metric_name=validation-Rewards_chat_hard",
        sets=benches(directory, Small=small),
    )
    return directory, runs.train(changes)


def test_every_figure_is_that_of_laurel_eval(finished, tmp_path, capsys):
    directory, _ = finished
    for step in (3, 9):
        model = directory / "saves" / f"step_{step}"
        said = evaluated(model, "reward-bench", directory / "bench.jsonl", tmp_path / f"r{step}")

        def logged(name, step=step):
            return series(directory, f"validation-Rewards/{name}")[step]

        assert logged("final_score") == said["final"]["value"]
        assert logged("longer_wins_final_score") == said["final"]["longer_wins"]
        sections = {one["name"]: one for one in said["sections"]}
        assert logged("accuracy") == sections["all rows, unweighted"]["value"]
        assert logged("longer_wins_baseline") == sections["all rows, unweighted"]["longer_wins"]
        assert logged("num_rows") == sections["all rows, unweighted"]["num_rows"] == 40
        assert logged("num_failures") == said["num_failures"] == 0
        for name, key in (
            ("Chat", "chat"),
            ("Chat Hard", "chat_hard"),
            ("Safety", "safety"),
            ("Reasoning", "reasoning"),
        ):
            assert logged(key) == sections[name]["value"]
        lists = evaluated(model, "best-of-n", directory / "lists.jsonl", tmp_path / f"l{step}")
        assert series(directory, "validation-Lists/final_score")[step] == lists["final"]["value"]
    capsys.readouterr()
    # The model learns the rule, so its figures move: equality above is not that of constants.
    assert len(set(series(directory, "validation-Rewards/final_score").values())) > 1 or (
        len(set(series(directory, "validation-Lists/final_score").values())) > 1
    )


def test_what_is_said_and_kept(finished):
    directory, run = finished
    assert "validation-Small: cut to 10 of 40 rows (max_samples)" in run.text
    assert series(directory, "validation-Small/num_rows") == {3: 10.0, 6: 10.0, 9: 10.0}
    assert series(directory, "validation-Small/final_score") == {}
    assert "validation-Small/final_score" not in run.outcome.metrics
    assert "validation-Rewards/final_score" in run.outcome.metrics
    times = [
        series(directory, f"timing/validation{name}/total_validation_time")[9]
        for name in ("", "-Rewards", "-Lists", "-Small", "-default")
    ]
    assert times[0] == pytest.approx(sum(times[1:]))
    report = json.loads((directory / "logs/exp_001/data_report.json").read_text())
    assert report["validation-Small"]["num_kept"] == 10
    assert report["validation-Small"]["num_read"] == 40


def test_the_best_is_best_by_the_benchmark(finished):
    directory, run = finished
    figures = series(directory, "validation-Rewards/chat_hard")
    best = runs.metric_of(directory / "saves" / runs.best_name(run))
    assert best == max(figures.values()) > figures[9]
    for step, value in figures.items():
        assert runs.metric_of(directory / "saves" / f"step_{step}") == value


@pytest.mark.slow
def test_only_benchmarks_are_enough(tmp_path):
    changes = (
        "data.split_validation_size=0",
        "rm.max_num_steps=2",
        "rm.val_period=1",
        "rm.val_at_start=true",
    )
    run = runs.train(settings(tmp_path, *changes))
    assert sorted(series(tmp_path, "validation-Lists/accuracy")) == [0, 1, 2]
    assert "no validation set" not in run.text
    # `auto`: the accuracy of the first.
    assert (
        runs.metric_of(tmp_path / "saves" / "step_2")
        == (series(tmp_path, "validation-Rewards/accuracy")[2])
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            ["checkpointing.metric_name=validation-Rewards_prior"],
            "these rows of RewardBench give no prior .*They give: validation-Rewards_final_score",
        ),
        (
            [
                "data.val_data_paths.Rewards.max_samples=8",
                "checkpointing.metric_name=validation-Rewards_final_score",
            ],
            "give no final_score .cut to 8 of 40 rows.*They give: validation-Rewards_accuracy",
        ),
    ],
)
def test_a_metric_that_is_never_measured_ends_the_run_early(tmp_path, changes, told):
    with pytest.raises(ConfigError, match=told):
        runs.train(settings(tmp_path, *changes))
    assert not (tmp_path / "saves").exists()
    assert not (tmp_path / "logs").exists()


def test_rows_that_cannot_be_used_end_the_run_early(tmp_path):
    other = write_rows(tmp_path / "pairs.jsonl", bench_rows(2))
    sets = {"Judged": f"{{benchmark: judge-bench, data_path: {other}}}"}
    with pytest.raises(DataError, match=r"Judged \(benchmark judge-bench\): .*pairs.jsonl:1"):
        runs.train(settings(tmp_path / "run", sets=sets))
    sets = {"Gone": f"{{benchmark: rm-bench, data_path: {tmp_path}/gone.jsonl}}"}
    with pytest.raises(DataError, match=r"Gone \(benchmark rm-bench\): .*gone.jsonl"):
        runs.train(settings(tmp_path / "run", sets=sets))
    held = {"default": f"{{benchmark: reward-bench, data_path: {other}}}"}
    with pytest.raises(ConfigError, match="'default' is the name of a benchmark and that of"):
        runs.train(settings(tmp_path / "run", sets=held))
    assert not (tmp_path / "run" / "logs").exists()


@pytest.fixture(scope="module")
def judged(finished, tmp_path_factory):
    """A run whose judge is measured before it, with two validation sets of tasks."""
    directory, _ = finished
    root = tmp_path_factory.mktemp("grpo")
    tasks = [{"input": f"question {i}?", "output": "1"} for i in range(12)]
    train = write_rows(root / "train.jsonl", tasks)
    easy, hard = (write_rows(root / f"{n}.jsonl", tasks[:k]) for n, k in (("easy", 3), ("hard", 6)))
    bench = (
        f"{{benchmark: reward-bench, data_path: {directory}/bench.jsonl}}",
        f"{{benchmark: best-of-n, data_path: {directory}/lists.jsonl, max_samples: 4}}",
    )
    changes = [
        c
        for c in grpo_settings(root, None)
        if not c.startswith(("data.train_data_path", "data.dataset_name", "data.split"))
    ]
    changes += [
        f"data.train={{dataset_name: ResponseDataset, data_path: {train}}}",
        f"data.validation={{Easy: {{dataset_name: ResponseDataset, data_path: {easy}}}, "
        f"Hard: {{dataset_name: ResponseDataset, data_path: {hard}}}}}",
        "grpo.max_num_steps=2",
        "grpo.val_period=1",
        "checkpointing.save_period=1",
        "checkpointing.metric_name=validation-Hard_reward_mean",
        "env.reward_model.enabled=true",
        "env.reward_model.precision=float32",
        f"env.reward_model.model_name={directory}/saves/step_9",
        f"env.reward_model.benchmarks={{Rewards: {bench[0]}, Lists: {bench[1]}}}",
    ]
    return root, changes, grpo(changes)


def test_the_judge_is_measured_once_before_the_first_step(finished, judged):
    directory, (root, _, _) = finished[0], judged
    steps = metrics_of(root)
    found = {k: v for k, v in steps[0].items() if k.startswith("reward_model/")}
    for name in ("final_score", "accuracy", "chat", "reasoning", "longer_wins_baseline"):
        # As when it was trained: it is the same model.
        trained = series(directory, f"validation-Rewards/{name}")[9]
        assert found[f"reward_model/Rewards_{name}"] == trained
    assert found["reward_model/Lists_num_rows"] == 4
    assert "reward_model/Lists_final_score" not in found
    assert not [k for step in (1, 2) for k in steps[step] if k.startswith("reward_model/")]


def test_named_sets_of_tasks_have_figures_of_their_own(judged):
    root, _, run = judged
    steps = metrics_of(root)
    for step in (1, 2):
        figures = steps[step]
        easy, hard = (figures[f"validation-{name}/reward_mean"] for name in ("Easy", "Hard"))
        # Four tasks of a set at most (grpo.max_val_samples), so Easy counts 3 and Hard 4.
        assert figures["validation/reward_mean"] == pytest.approx((3 * easy + 4 * hard) / 7)
        assert figures["validation-Hard/num_failures"] == 0
        assert runs.metric_of(root / "saves" / f"step_{step}") == hard
    best = max((1, 2), key=lambda step: steps[step]["validation-Hard/reward_mean"])
    assert runs.best_name(run) == f"step_{best}"


def test_a_run_that_goes_on_does_not_measure_its_judge_again(judged):
    root, changes, _ = judged
    more = grpo([*changes, "grpo.max_num_steps=3"])
    assert "judge   Rewards" not in more.text
    assert runs.last_step(root) == 3


def test_wrong_settings_of_a_judge_are_told(finished, tmp_path):
    bench = f"{{benchmark: reward-bench, data_path: {finished[0]}/bench.jsonl}}"
    asked = f"env.reward_model.benchmarks={{Rewards: {bench}}}"
    with pytest.raises(ConfigError, match=r"no task of this run uses .*'reward_model'"):
        grpo(grpo_settings(tmp_path / "math", None, asked))
    gone = asked.replace("bench.jsonl", "gone.jsonl")
    with pytest.raises(DataError, match=r"Rewards \(benchmark reward-bench\): .*gone.jsonl"):
        grpo(grpo_settings(tmp_path / "gone", None, gone))
    with pytest.raises(ConfigError, match=r"never measures that.*validation_reward_mean"):
        grpo(
            grpo_settings(
                tmp_path / "name", None, "checkpointing.metric_name=validation-Easy_reward_mean"
            )
        )
