"""Rewards while completions are still being drawn: the same ones as afterwards, whatever dies."""

import contextlib
import itertools
import os
import signal

import pytest
from pyarrow import parquet

from laurel.errors import EnvironmentFailedError, WorkerError
from laurel.observe.loggers import read_metrics
from laurel.rewards import preparing
from laurel.rewards.preparing import Preparers
from laurel.rewards.replicas import GroupScorer
from laurel.workers.spawned import SpawnedGroup
from policy_runs import assert_same_runs, grpo, grpo_settings, metrics_of, warm_started
from runs import settings, train
from sandbox_processes import is_gone, wait_until

BOUND = 1e-5
FIGURES = ("train/loss", "train/grad_norm", "train/reward", "train/reward_std", "train/reward_min")
PLAIN = (
    "~policy.optimizer",
    "+policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 3e-2}}",
    "grpo.max_num_steps=2",
)
"""Adam divides by what rounding makes of gradients near zero: its steps say little of them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return warm_started(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    latest = train(settings(tmp_path_factory.mktemp("judge"), "rm.max_num_steps=5")).outcome.latest
    assert latest is not None
    return latest


def judged_by(judge, *changes):
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
    grpo(grpo_settings(directory, model, *PLAIN, *judged_by(judge)))
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


WAYS = {
    "at the end": ("env.reward_model.use_reward_loop=false",),
    "at the end, as verl says it": ("reward_model.use_reward_loop=false",),
    "two replicas and a worker": (
        "env.reward_model.num_replicas=2",
        "env.reward_model.num_workers=1",
    ),
}


@pytest.mark.slow_parameters("two replicas and a worker")
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
def test_rewards_and_losses_are_the_same(tmp_path, model, judge, streamed, ways):
    grpo(grpo_settings(tmp_path, model, *PLAIN, *judged_by(judge, *ways)))
    assert_same_figures(tmp_path, streamed)


def test_how_much_was_hidden_is_logged(tmp_path, model, judge, streamed):
    grpo(grpo_settings(tmp_path, model, *PLAIN, *judged_by(judge, "use_reward_loop=false")))
    after, during = timed(tmp_path), timed(streamed)
    for figures in (after, during):
        assert 0 <= figures["performance/reward_hidden_share"] <= 1
        busy = figures["timing/train/rollout/environment_busy"]
        assert 0 < busy <= figures["timing/train/rollout/environment"] + 1e-6
    # Everything was judged after the last completion.
    busy = after["timing/train/rollout/environment_busy"]
    assert after["timing/train/rollout/environment_exposed"] >= busy
    assert after["performance/reward_hidden_share"] == 0


def test_a_run_with_the_loop_goes_on_bit_for_bit(tmp_path, model, judge):
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    grpo(grpo_settings(straight, model, *judged_by(judge)))
    grpo(grpo_settings(broken, model, *judged_by(judge, "grpo.max_num_steps=2")))
    again = grpo(grpo_settings(broken, model, *judged_by(judge)))
    assert "resuming from" in again.text
    assert_same_runs(straight, broken, 4)


def flaky(judge, *changes):
    return (
        "data.env_name=flaky",
        f"+env.custom.flaky={{name: reward_loop_fakes.FlakyEnvironment, "
        f"kwargs: {{model_name: {judge}}}}}",
        "grpo.num_generations_per_prompt=8",
        "policy.train_global_batch_size=24",
        *changes,
    )


@pytest.mark.slow
def test_failures_are_masked_and_counted_and_never_a_number(tmp_path, model, judge):
    grpo(grpo_settings(tmp_path, model, *PLAIN, *flaky(judge, "env.max_failed_share=0.9")))
    figures = metrics_of(tmp_path)
    counted = 0.0
    for step in (1, 2):
        path = tmp_path / "logs" / "exp_001" / "completions" / f"step_{step:06d}.parquet"
        rows = parquet.read_table(path).to_pylist()
        failed = [row for row in rows if row["reward"] is None]
        counted += figures[step]["train/num_failures"]
        assert len(failed) == figures[step]["train/num_failures"]
        words = [n for n in figures[step] if n.startswith("train/reward/failed")]
        left_out = figures[step]["train/num_failures_left_out"]
        assert sum(figures[step][name] for name in words) == len(failed) + left_out
        # Some tasks fail for good: others are in their place.
        assert (left_out > 0) == (figures[step]["train/groups_replaced"] > 0)
        assert set(words) <= {"train/reward/failed_timeout", "train/reward/failed_nan"}
        assert all(not row["advantage"] for row in failed)
        rewards = [row["reward"] for row in rows if row["reward"] is not None]
        assert 0.0 not in rewards
        assert figures[step]["train/reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert counted > 0


def test_too_large_a_share_of_failures_ends_the_run(tmp_path, model, judge):
    many = "+env.custom.flaky.kwargs.share=0.95"
    with pytest.raises(EnvironmentFailedError, match=r"could not judge .* of 24 samples"):
        grpo(grpo_settings(tmp_path, model, *PLAIN, *flaky(judge, many)))


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
    ways = WAYS["two replicas and a worker"]
    with pytest.raises(WorkerError, match=r"reward_worker 0 was lost .* lower num_workers") as end:
        grpo(grpo_settings(tmp_path, model, *PLAIN, *judged_by(judge, *ways)))
    assert end.value.exit_code == 75


ON_RAY = (
    "cluster.gpus_per_node=3",
    "env.reward_model.resources.gpus_per_node=2",
    "env.reward_model.batch_timeout=10",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "why"),
    [(signal.SIGKILL, "died in score"), (signal.SIGSTOP, "in score within 10 s")],
    ids=["killed", "stopped"],
)
def test_a_replica_that_is_lost_in_mid_batch_changes_nothing(
    tmp_path, model, judge, streamed, small_cluster, monkeypatch, caplog, number, why
):
    victims: list[int] = []
    asked: list[int] = []
    compute, numbers = GroupScorer._values, itertools.count(1)

    def end_and_compute(self, *args, **kwargs):
        pid = self._group._pids[0]
        asked.append(pid)
        if next(numbers) == 5:  # before the call: one that is done already would not miss it
            victims.append(pid)
            os.kill(pid, number)
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(GroupScorer, "_values", end_and_compute)
    grpo(grpo_settings(tmp_path, model, *PLAIN, *judged_by(judge, *ON_RAY)))
    assert len(victims) == 1
    wait_until(lambda: is_gone(victims[0]))
    assert len(set(asked)) >= 2, "the other replica, or the one in its place, did the rest"
    assert "restart 1 of 3 at most" in caplog.text
    assert why in caplog.text
    assert_same_figures(tmp_path, streamed)
    for step in (1, 2):
        figures = metrics_of(tmp_path)[step]
        assert figures["train/num_failures"] == 0
        assert figures["env/reward_model/num_samples"] == 12
