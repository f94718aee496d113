"""Runs of `laurel grpo` that `laurel serve` judges: what dies, and that they end all the same.

The router of such a run lives in the process of the run. Figures in brackets are the cases of the
project's fault matrix.
"""

import signal
import threading

import pytest

from laurel.rewards.remote.http import HttpScorer
from policy_runs import (
    assert_same_runs,
    completions_of,
    grpo,
    grpo_settings,
    metrics_of,
)
from reward_models import small_model, write_model
from runs import last_step, laurel_here, run
from serve_processes import KEY, SamePort

pytestmark = pytest.mark.usefixtures("warm_processes")

NUM_STEPS = 6
COMPUTED = "laurel_scorer_computed_total"
LENGTH = (
    f"grpo.max_num_steps={NUM_STEPS}",
    "grpo.max_num_epochs=99",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "checkpointing.save_period=2",
    "data.env_name=reward_model",
    "env.reward_model.enabled=true",
    "env.reward_model.api_key_env=KEY_OF_THE_TEST",
)


@pytest.fixture(autouse=True)
def key(monkeypatch):
    monkeypatch.setenv("KEY_OF_THE_TEST", KEY)


def figure(server, name):
    """One of those of `/metrics`; only digits and letters in its name."""
    _, text = server.serving.ask("/metrics")
    (line,) = [one for one in text.decode().splitlines() if one.startswith(f"{name} ")]
    return float(line.split()[1])


def asking(servers, **settings):
    urls = ", ".join(server.url for server in servers)
    more = (f"env.reward_model.{name}={value}" for name, value in settings.items())
    return (*LENGTH, f"env.reward_model.urls=[{urls}]", *more)


KILLED = """
import os, signal, sys
from pathlib import Path
from laurel.cli.main import main
from laurel.rewards.remote.http import HttpScorer
from runs import last_step

directory = Path(sys.argv[1])
score = HttpScorer.score

async def score_and_die(scorer, groups):
    found = await score(scorer, groups)
    if last_step(directory) >= 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return found

HttpScorer.score = score_and_die
sys.argv[1:2] = ["grpo"]
main()
"""
"""`laurel grpo`, which is killed after three steps, when it has got scores."""


@pytest.mark.slow
def test_a_run_that_is_killed_with_its_router_ends_the_same_and_nothing_is_computed_twice(
    tmp_path, model
):  # [23]
    """Killed while completions of a step are scored that has not been learned from. There is no
    ledger of scores: the run draws the same completions again, and the server knows their scores.
    """
    directory = tmp_path / "rm"
    write_model(small_model(max_length=128), directory)
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    with SamePort(tmp_path, "--model", str(directory), "--cpu-threads", "1") as server:
        settings = asking([server])
        overrides = grpo_settings(broken, model, *settings)
        asked = "laurel_scorer_completions_total"
        killed = run(overrides, program=("-c", KILLED, str(broken)))
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert last_step(broken) == 3
        last = grpo(overrides)
        assert "resuming from" in last.text
        computed, asked_before = (
            figure(server, COMPUTED),
            figure(server, asked),
        )

        grpo(grpo_settings(straight, model, *settings))
        assert figure(server, asked) > asked_before
        assert figure(server, COMPUTED) == computed
    for step in range(1, NUM_STEPS + 1):
        expected, found = completions_of(straight, step), completions_of(broken, step)
        assert [row["completion"] for row in found] == [row["completion"] for row in expected]
        rewards = [row["reward"] for row in found]
        assert rewards == pytest.approx([row["reward"] for row in expected], abs=1e-5)
        assert metrics_of(broken)[step]["train/num_failures"] == 0


@pytest.mark.slow
def test_a_run_waits_for_servers_that_die_and_come_back_and_ends_the_same(
    tmp_path, model, monkeypatch
):  # [1, 14]
    """First one of two, then both. Every figure and weight is that of a quiet run."""
    quiet, restless = tmp_path / "quiet", tmp_path / "restless"
    rising, score = [], HttpScorer.score
    with SamePort(tmp_path, "--null") as one, SamePort(tmp_path, "--null") as other:
        settings = asking([one, other])
        grpo(grpo_settings(quiet, model, *settings))

        def rise():
            one.start()
            other.start()

        falls = {2: one.kill, 4: other.kill}

        async def score_without_them(scorer, groups):
            fall = falls.pop(last_step(restless), None)
            if fall is not None:
                fall()
                if not falls:
                    rising.append(threading.Thread(target=rise))
                    rising[0].start()
            return await score(scorer, groups)

        monkeypatch.setattr(HttpScorer, "score", score_without_them)
        done = grpo(grpo_settings(restless, model, *settings))
        rising[0].join()
    assert done.outcome.ended == "finished"
    assert_same_runs(quiet, restless, NUM_STEPS)


@pytest.mark.slow
def test_a_run_whose_servers_stay_away_ends_and_can_be_gone_on_with(
    tmp_path, model, monkeypatch
):  # [15]
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    with SamePort(tmp_path, "--null") as server:
        settings = asking([server], request_timeout=15)
        settings += ("env.max_failed_share=0",)  # one failed score ends it: none is left out
        grpo(grpo_settings(straight, model, *settings))
        overrides = ["grpo", *grpo_settings(broken, model, *settings)]
        score = HttpScorer.score

        async def score_without_it(scorer, groups):
            if last_step(broken) >= 3:
                server.kill()
            return await score(scorer, groups)

        with monkeypatch.context() as patched:
            patched.setattr(HttpScorer, "score", score_without_it)
            ended = laurel_here(overrides)
        assert ended.returncode == 1
        assert "could not judge" in ended.stderr
        assert "connection: " in ended.stderr
        assert last_step(broken) == 3
        server.start()
        done = laurel_here(overrides)
        assert "resuming from" in done.stdout + done.stderr
    assert_same_runs(straight, broken, NUM_STEPS)
