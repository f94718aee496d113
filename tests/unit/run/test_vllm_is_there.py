"""What vLLM cannot do for a run is told before anything is started."""

import importlib.util

import pytest

from laurel.config.grpo import GRPORun
from laurel.errors import ConfigError, MissingDependencyError
from laurel.run.grpo import check_vllm

IN_VLLM = {"enabled": True, "model_name": "m", "generation": {"backend": "vllm"}}


def run_of(generation="auto", address=None, reward_model=None):
    return GRPORun.model_validate(
        {
            "policy": {"model_name": "p", "generation": {"backend": generation}},
            "cluster": {"address": address},
            "env": {"reward_model": reward_model or {}},
        }
    )


@pytest.mark.parametrize(
    ("run", "key"),
    [
        (run_of("vllm"), "policy.generation.backend=vllm"),
        (run_of(reward_model=IN_VLLM), "env.reward_model.generation.backend=vllm"),
    ],
)
def test_it_is_looked_for_before_anything_is_started(run, key, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=f"{key} needs the package 'vllm'"):
        check_vllm(run, on_cluster=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_vllm(run, on_cluster=False)


def test_nodes_of_a_cluster_may_have_what_this_one_has_not(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_vllm(run_of("vllm", address="auto"), on_cluster=True)
    check_vllm(run_of(), on_cluster=True)


def test_a_reward_model_in_vllm_has_no_slots_on_a_cluster():
    with pytest.raises(ConfigError, match="laurel serve MODEL --engine vllm"):
        check_vllm(run_of(reward_model=IN_VLLM), on_cluster=True)
