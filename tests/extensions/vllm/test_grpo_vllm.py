"""`laurel grpo` with completions drawn by a real vLLM."""

import importlib.util
import itertools
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from laurel.errors import EngineError
from laurel.observe.loggers import read_metrics
from policy_fakes import HOOKS
from policy_runs import (
    HOOKED,
    MATCHES,
    grpo,
    grpo_settings,
    metrics_of,
    rewritten_turns,
    sft,
    sft_settings,
)
from processes import descendants, fork_of, forked
from sandbox_processes import is_gone, wait_until

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"
)

VLLM = ("policy.generation.backend=vllm", "policy.generation.max_concurrent=16")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Like `model` of conftest.py, with two heads of a size that vLLM computes on a CPU."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    heads = ("policy.scratch.hidden_size=64", "policy.scratch.num_heads=2")
    saved = sft(sft_settings(directory, *heads, "sft.max_num_epochs=8")).outcome.latest
    assert saved is not None
    return saved


def test_vllm_draws_from_the_weights_of_each_step_and_its_death_ends_the_run(tmp_path, model):
    """Were a step drawn from older weights, its log-probs would differ by far more than rounding.

    At this learning rate a step changes log-probabilities by hundredths.
    """
    psutil = pytest.importorskip("psutil")
    killed: list[int] = []
    updates = itertools.count(1)

    def kill_engine_in_the_last_step():
        if next(updates) < 4:
            return
        for child in psutil.Process(os.getpid()).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
                if "EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()):
                    child.send_signal(signal.SIGKILL)
                    killed.append(child.pid)

    steps = ("grpo.max_num_steps=9", "grpo.max_num_epochs=9")
    HOOKS["update"] = kill_engine_in_the_last_step
    try:
        with pytest.raises(EngineError):
            grpo(grpo_settings(tmp_path, model, *VLLM, *MATCHES, *HOOKED, *steps))
    finally:
        HOOKS.clear()
    assert killed
    trained = [figures for figures in metrics_of(tmp_path).values() if "train/loss" in figures]
    assert len(trained) >= 3, "steps with a signal, or nothing is shown"
    for figures in trained:
        assert figures["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
        assert figures["train/staleness"] == 0.0
    logged = read_metrics(tmp_path / "logs" / "exp_001" / "metrics.jsonl")
    assert any("timing/train/prepare_for_generation/wake" in line for line in logged), (
        "the engine rests while the learner works"
    )


def test_vllm_samples_rollouts_of_several_sequences_that_branch(tmp_path, model):
    """Each turn in the context that it is trained in, and ahead of the learner."""
    ahead = ("grpo.max_staleness=1", "loss_fn.use_importance_sampling_correction=true")
    turns = rewritten_turns(tmp_path, 2)
    with forked():
        run = grpo(grpo_settings(tmp_path, model, *VLLM, *turns, *ahead))
    assert run.outcome.ended == "finished"
    trained = [figures for figures in metrics_of(tmp_path).values() if "train/loss" in figures]
    assert len(trained) == 4
    for figures in trained:
        assert figures["train/sequences_per_rollout"] > 1.5
        assert figures["train/tree/branched_share"] == 0.5
    # Weights are older by a step from the second on.
    assert trained[0]["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)


TWO_SLOTS = (
    "cluster.gpus_per_node=2",
    "policy.generation.vllm_cfg.tensor_parallel_size=2",
    "+policy.generation.vllm_kwargs.kv_cache_memory_bytes=67108864",
    "grpo.max_num_steps=2",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "checkpointing.save_period=1000",
)


SCRATCH_WITH_HEADS = (
    "policy.scratch.hidden_size=64",
    "policy.scratch.num_layers=1",
    "policy.scratch.num_heads=2",
)


def test_a_replica_over_two_slots_on_ray_is_started_again_when_it_is_killed(
    tmp_path, small_cluster, caplog
):
    """vLLM with tp 2, in turns with a learner with dp 2 on the same two slots.

    A policy from scratch has no directory of its own: the run keeps one from which a lost replica
    is started again, and removes it at its end.
    """
    psutil = pytest.importorskip("psutil")
    killed: list[Any] = []
    seen: list[Any] = []
    first = threading.Lock()
    shared = Path("/dev/shm")
    before = set(shared.glob("vllm_dist_*"))

    def kill_once():
        if first.acquire(blocking=False):
            wait_until(kill_a_replica)  # a process may be read while it begins or ends

    def kill_a_replica():
        """The actor that has vLLM's scheduler below it, and that two workers: one a slot."""
        for one in psutil.Process().children(recursive=True):
            actor = fork_of(one.pid) if "default_worker" in command_of(one) else None
            if actor is None:
                continue
            below = [one for one in descendants(actor.pid) if fork_of(one.pid) is None]
            # Without what Python starts beside them to remove what they share.
            family = [actor, *(one for one in below if "resource_tracker" not in command_of(one))]
            if len(family) == 4 and family == seen:  # twice: they are no passing helpers
                killed.extend(family)
                actor.send_signal(signal.SIGKILL)
                return True
            if len(family) == 4:
                seen[:] = family
        return False

    def command_of(process):
        try:
            return " ".join(process.cmdline())
        except psutil.Error:  # Ray's come and go
            return ""

    HOOKS["judge"] = kill_once
    try:
        settings = grpo_settings(tmp_path, None, *VLLM, *MATCHES, *TWO_SLOTS)
        run = grpo([*settings, *SCRATCH_WITH_HEADS])
    finally:
        HOOKS.clear()
    assert killed
    assert run.outcome.ended == "finished"
    assert not list((tmp_path / "saves").glob(".start-*"))
    assert "generation: node 0, slots 0-1, in turns with policy" in run.text
    assert "is back and has the weights of step 0" in caplog.text
    for one in killed:  # nothing of a replica outlives its first process
        wait_until(lambda one=one: is_gone(one.pid))
    assert set(shared.glob("vllm_dist_*")) <= before
    trained = [figures for figures in metrics_of(tmp_path).values() if "train/loss" in figures]
    assert len(trained) == 2
    for figures in trained:
        assert figures["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)
