"""Rewards while completions are still being drawn: the same ones as afterwards, whatever dies."""

import contextlib
import itertools
import os
import re
import shutil
import signal

import pytest

from laurel.errors import WorkerError
from laurel.observe.loggers import read_metrics
from laurel.rewards import preparing
from laurel.rewards.preparing import Preparers
from laurel.rewards.replicas import GroupScorer
from laurel.workers.spawned import SpawnedGroup
from policy_runs import assert_same_runs, grpo, grpo_settings, metrics_of
from reward_models import small_model, write_model
from sandbox_processes import is_gone, wait_until

pytestmark = pytest.mark.usefixtures("warm_processes")

BOUND = 1e-5
FIGURES = ("train/loss", "train/grad_norm", "train/reward", "train/reward_std", "train/reward_min")
PLAIN = (
    "~policy.optimizer",
    "+policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 3e-2}}",
    "grpo.max_num_steps=2",
)
"""Adam divides by what rounding makes of gradients near zero: its steps say little of them."""


def graded_by(judge, *changes):
    return (
        "env.reward_model.enabled=true",
        f"env.reward_model.model_name={judge}",
        "env.reward_model.precision=float32",
        "data.env_name=reward_model",
        *changes,
    )


@pytest.fixture(scope="module")
def streamed(tmp_path_factory, model, judge):
    """A run with the loop, as it is by default."""
    directory = tmp_path_factory.mktemp("streamed")
    grpo(grpo_settings(directory, model, *PLAIN, *graded_by(judge)))
    return directory


def assert_same_figures(found, expected):
    for step in (1, 2):
        for name in FIGURES:
            value = metrics_of(expected)[step][name]
            assert metrics_of(found)[step][name] == pytest.approx(value, rel=BOUND, abs=BOUND), name


def timed(directory):
    """All figures of the first step, the timed ones too."""
    rows = read_metrics(directory / "logs" / "exp_001" / "metrics.jsonl")
    return next(row for row in rows if int(row["step"]) == 1 and "train/loss" in row)


TWO_REPLICAS = ("env.reward_model.num_replicas=2", "env.reward_model.num_workers=1")


def test_judged_at_the_end_rewards_are_the_same_and_none_is_hidden(
    tmp_path, model, judge, streamed
):
    """The key as verl writes it."""
    at_the_end = "reward_model.use_reward_loop=false"
    grpo(grpo_settings(tmp_path, model, *PLAIN, *graded_by(judge, at_the_end)))
    assert_same_figures(tmp_path, streamed)
    after, during = timed(tmp_path), timed(streamed)
    for figures in (after, during):
        assert 0 <= figures["performance/reward_hidden_share"] <= 1
        busy = figures["timing/train/rollout/environment_busy"]
        assert 0 < busy <= figures["timing/train/rollout/environment"] + 1e-6
    # Everything was judged after the last completion.
    busy = after["timing/train/rollout/environment_busy"]
    assert after["timing/train/rollout/environment_exposed"] >= busy
    assert after["performance/reward_hidden_share"] == 0


@pytest.mark.slow
def test_a_run_with_the_loop_goes_on_bit_for_bit(tmp_path, model, judge):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    grpo(grpo_settings(straight, model, *graded_by(judge)))
    grpo(grpo_settings(broken, model, *graded_by(judge, "grpo.max_num_steps=2")))
    again = grpo(grpo_settings(broken, model, *graded_by(judge)))
    assert "resuming from" in again.text
    assert_same_runs(straight, broken, 4)


@pytest.mark.slow
def test_when_nobody_is_left_who_renders_the_run_ends_and_says_why(
    tmp_path, model, judge, monkeypatch
):
    prepare = Preparers.prepare

    def kill_and_prepare(self, groups):
        for replica in self.workers.replicas:
            group = replica.value
            assert isinstance(group, SpawnedGroup)
            # Two threads may ask at once: what the other has just killed is gone already.
            with contextlib.suppress(ProcessLookupError):
                os.kill(group._process.pid, signal.SIGKILL)
        return prepare(self, groups)

    monkeypatch.setattr(Preparers, "prepare", kill_and_prepare)
    monkeypatch.setattr(preparing, "MAX_RESTARTS", 1)
    with pytest.raises(WorkerError, match=r"reward_worker 0 was lost .* lower num_workers") as end:
        grpo(grpo_settings(tmp_path, model, *PLAIN, *graded_by(judge, *TWO_REPLICAS)))
    assert end.value.exit_code == 75


ON_RAY = (
    "cluster.gpus_per_node=3",
    "env.reward_model.resources.gpus_per_node=2",
)


@pytest.mark.slow
def test_a_replica_that_is_killed_in_mid_batch_changes_nothing(
    tmp_path, model, judge, streamed, small_cluster, monkeypatch, caplog
):
    victims: list[int] = []
    asked: list[int] = []
    compute, numbers = GroupScorer._values, itertools.count(1)

    def end_and_compute(self, *args, **kwargs):
        pid = self._group._pids[0]
        asked.append(pid)
        if next(numbers) == 5:  # before the call: one that is done already would not miss it
            victims.append(pid)
            os.kill(pid, signal.SIGKILL)
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(GroupScorer, "_values", end_and_compute)
    grpo(grpo_settings(tmp_path, model, *PLAIN, *graded_by(judge, *ON_RAY)))
    assert len(victims) == 1
    wait_until(lambda: is_gone(victims[0]))
    assert len(set(asked)) >= 2, "the other replica, or the one in its place, did the rest"
    assert "restart 1 of 3 at most" in caplog.text
    assert "died in score" in caplog.text
    assert_same_figures(tmp_path, streamed)
    for step in (1, 2):
        figures = metrics_of(tmp_path)[step]
        assert figures["train/num_failures"] == 0
        assert figures["env/reward_model/num_samples"] == 12


@pytest.mark.slow
def test_a_reward_model_that_is_replaced_in_place_scores_in_no_part_of_the_run(
    tmp_path, model, judge, streamed, monkeypatch, caplog
):
    """Its completions would be compared with those of the model that the run began with."""
    used, other = tmp_path / "judge", tmp_path / "other"
    shutil.copytree(judge, used)
    write_model(small_model(seed=7, max_length=512), other)
    compute, numbers = GroupScorer._values, itertools.count(1)
    refusal = re.compile(r"loaded version 'judge-\w+', and this set serves 'judge-\w+'")

    def replace_and_compute(self, *args, **kwargs):
        number = next(numbers)
        if number == 2:
            shutil.copytree(other, used, dirs_exist_ok=True)
            os.kill(self._group.pid, signal.SIGKILL)
        elif number > 2 and self._group.death() is None:
            # The run would end before the other replica is there again.
            wait_until(lambda: refusal.search(caplog.text))
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(GroupScorer, "_values", replace_and_compute)
    grpo(grpo_settings(tmp_path, model, *PLAIN, *graded_by(used, *TWO_REPLICAS)))
    assert_same_figures(tmp_path, streamed)
    assert refusal.search(caplog.text)
