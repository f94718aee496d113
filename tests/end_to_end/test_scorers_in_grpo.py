"""`laurel grpo` judged by a function, by servers, by a judge, and by several models."""

import math
import re
from pathlib import Path

import pytest
import yaml

from judges import judge_server, question
from laurel.errors import UserError
from laurel.rewards.open import load_scorer
from laurel.rewards.spec import ScorerSpec, find_model
from policy_runs import completions_of, grpo, grpo_settings, metrics_of
from reward_models import small_model, write_model
from reward_servers import Answer, RewardServer

TWO_STEPS = (
    "grpo.max_num_steps=2",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "checkpointing.save_period=2",
)
FIGURE = "env/reward_model/"


@pytest.fixture(scope="module")
def reward_models(tmp_path_factory):
    root = tmp_path_factory.mktemp("reward_models")
    found = {}
    for seed, name in enumerate(("first", "second")):
        loaded = small_model(seed=seed)
        loaded.contract = loaded.contract.with_rules(mean=0.25, std=0.5 + seed)
        (root / name).mkdir()
        write_model(loaded, root / name)
        found[name] = str(root / name)
    return found


FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info, bonus):
    assert extra_info["prompt"][-1]["role"] == "user"
    right = float(f"{{{ground_truth}}}" in solution_str)
    return {"score": right + bonus, "right": right}

"""


def configured(directory, rewards, **run):
    """A file that sets the environment; returns the option that reads it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rewards.py").write_text(FUNCTION)
    written = {"env": {"reward_model": {"enabled": True, **rewards}}, **run}
    path = directory / "rewards.yaml"
    path.write_text(yaml.safe_dump(written))
    return str(path)


def run(directory, model, rewards, *changes):
    path = configured(directory, rewards)
    return grpo(
        grpo_settings(directory, model, *TWO_STEPS, "data.env_name=reward_model", *changes),
        path=Path(path),
    )


def function_in(directory, name, **settings):
    return {"path": f"{directory}/rewards.py:{name}", **settings}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_function_gives_the_rewards(tmp_path, model, num_workers):
    function = function_in(tmp_path, "compute_score", kwargs={"bonus": 0.5})
    done = run(tmp_path, model, {"function": function, "num_workers": num_workers})
    assert done.outcome.ended == "finished"
    for step, figures in metrics_of(tmp_path).items():
        rows = completions_of(tmp_path, step)
        expected = [0.5 + (f"{{{answer_of(row)}}}" in row["completion"]) for row in rows]
        assert [row["reward"] for row in rows] == expected
        assert figures["train/reward"] == pytest.approx(sum(expected) / len(rows))
        right = figures[f"{FIGURE}part/right/mean"]
        assert right == pytest.approx(sum(expected) / len(rows) - 0.5)


def answer_of(row):
    """As `policy_runs.sums` makes them."""
    (number,) = re.findall(r"number (\d+)\?", str(row["prompt"]))
    return 1 + int(number) % 2


def test_servers_give_the_run_that_the_model_gives(tmp_path, model, reward_models):
    """One of the two fails now and then, which changes nothing."""

    def at_times(number, asked):
        return Answer(status=500) if number % 3 == 1 else None

    name = reward_models["first"]
    scorer = load_scorer(find_model(name), ScorerSpec(device="cpu"), say=lambda _: None)
    run(tmp_path / "here", model, {"model_name": name, "precision": "float32"})
    with RewardServer() as one, RewardServer(at_times) as other:
        one.scorer = other.scorer = scorer  # type: ignore[assignment]
        rewards = {"urls": [one.url, other.url], "model_name": name}
        done = run(tmp_path / "there", model, rewards)
        assert len(one.asked) > 2
    assert done.outcome.ended == "finished"
    here, there = metrics_of(tmp_path / "here"), metrics_of(tmp_path / "there")
    for step in (1, 2):
        for figure in ("train/reward", f"{FIGURE}mean_reward", f"{FIGURE}std_reward"):
            assert there[step][figure] == pytest.approx(here[step][figure], abs=1e-5), figure
        assert there[step]["train/num_failures"] == 0
        assert [row["completion"] for row in completions_of(tmp_path / "there", step)] == [
            row["completion"] for row in completions_of(tmp_path / "here", step)
        ]


@pytest.mark.slow
def test_a_judge_gives_the_rewards(tmp_path, model):
    def say(asked):
        response, _, known = question(asked).partition("|known:")
        return f"Score: {10 if f'{{{known}}}' in response else 2}"

    with judge_server(say) as server:
        judge = {
            "num_samples": 2,
            "temperature": 0.5,
            "template": "{{ response }}|known:{{ ground_truth }}",
        }
        section = {"urls": [server.url], "url_model": "judge", "judge": judge}
        done = run(tmp_path, model, {**section, "transform": {"scale": 0.1}})
        assert len(server.asked) <= 2 + 2 * 2 * 12
    assert done.outcome.ended == "finished"
    for step, figures in metrics_of(tmp_path).items():
        rows = completions_of(tmp_path, step)
        expected = [1.0 if f"{{{answer_of(row)}}}" in row["completion"] else 0.2 for row in rows]
        assert [row["reward"] for row in rows] == pytest.approx(expected)
        assert figures[f"{FIGURE}part/unreadable/mean"] == 0.0


@pytest.mark.slow
def test_a_judge_in_this_process_compares_the_completions_of_a_group(tmp_path, model):
    judge = {
        "compares": True,
        "read_out": "log_probability",
        "template": "{{ response }}|{{ other_response }}",
    }
    section = {"model_name": str(model), "precision": "float32", "judge": judge}
    done = run(tmp_path, model, section)
    assert done.outcome.ended == "finished"
    for step, figures in metrics_of(tmp_path).items():
        # What one side wins the other loses, so the mean of each group is 1/2.
        rewards = [row["reward"] for row in completions_of(tmp_path, step)]
        assert sum(rewards) / len(rewards) == pytest.approx(0.5)
        assert len(set(rewards)) > 1
        assert 0 <= figures[f"{FIGURE}part/position_flips/mean"] <= 1
        assert figures[f"{FIGURE}part/word_mass/mean"] > 0


@pytest.mark.slow
def test_two_models_give_the_rewards(tmp_path, model, reward_models):
    parts = [
        {"name": "kind", "model_name": reward_models["first"]},
        {"name": "wise", "model_name": reward_models["second"]},
    ]
    rewards = {
        "models": parts,
        "precision": "float32",
        "combine": "mean_minus_std",
        "uncertainty_penalty": 0.5,
    }
    done = run(tmp_path, model, rewards)
    assert done.outcome.ended == "finished"
    figures = metrics_of(tmp_path)[1]
    kind = (figures[f"{FIGURE}part/kind/mean"] - 0.25) / 0.5
    wise = (figures[f"{FIGURE}part/wise/mean"] - 0.25) / 1.5
    # The penalty is at most half the mean distance of the two, and at least that of their means.
    assert figures["train/reward"] < (kind + wise) / 2 - 0.25 * abs(kind - wise) + 1e-6
    assert math.isfinite(figures["train/reward"])


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ({"urls": ["http://127.0.0.1:1"], "connect_patience": 0}, "127.0.0.1:1/v1/score does not"),
        ({"function": {"path": "os.path:jion"}}, "did you mean 'join'"),
        (
            {"models": [{"name": n, "model_name": f"/none/{n}"} for n in "ab"]},
            "env.reward_model.models[0].model_name=/none/a: there is no such directory",
        ),
    ],
)
def test_wrong_settings_are_told_before_the_policy_is_loaded(tmp_path, rewards, message):
    policy = tmp_path / "policy"
    policy.mkdir()
    (policy / "config.json").write_text("not even JSON")
    with pytest.raises(UserError, match=re.escape(message)):
        run(tmp_path, policy, rewards)
