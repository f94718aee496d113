"""Where a run goes, and what is refused before anything is started."""

import importlib.util
from typing import Any

import pytest
import torch

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.errors import ConfigError, MissingDependencyError
from laurel.run.grpo import check_engines, check_judges
from laurel.run.request import plan_allocation

JUDGED = ("env.reward_model.enabled=true", "env.reward_model.model_name=judge")
ONE_FOR_JUDGING = (*JUDGED, "env.reward_model.resources.gpus_per_node=1")


def planned(*overrides, schema=GRPORun):
    return plan_allocation(load_config(schema, None, overrides).config)


def test_one_slot_is_this_process():
    assert not planned().are_remote
    assert not planned(schema=RewardTrainingRun).are_remote
    assert not planned(*JUDGED).are_remote


@pytest.mark.parametrize(
    "overrides",
    [
        ("cluster.gpus_per_node=2", *ONE_FOR_JUDGING),
        ("cluster.num_nodes=2", "policy.dtensor_cfg.cpu_offload=true"),
        ("cluster.backend=ray",),
        ("cluster.address=auto",),
    ],
)
def test_more_slots_or_an_address_are_ray(overrides):
    assert planned(*overrides).are_remote


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("cluster.gpus_per_node=2", "cluster.backend=local"), r"cluster\.backend=local"),
        (("policy.dtensor_cfg.tensor_parallel_size=2",), r"tensor_parallel_size=2.*\n.*fix"),
        (("policy.dtensor_cfg.cpu_offload=true",), "the policy has one rank"),
        (("cluster.gpus_per_node=1", *ONE_FOR_JUDGING), r"fix +cluster\.num_nodes=2"),
    ],
)
def test_what_cannot_be_is_told_with_the_key(overrides, said):
    with pytest.raises(ConfigError, match=said):
        planned(*overrides)


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
        check_engines(run, on_cluster=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_engines(run, on_cluster=False)


def test_a_judge_in_vllm_says_its_share_of_the_gpu_that_the_policy_trains_on(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    vllm: dict[str, Any] = {"backend": "vllm"}
    judge = {"enabled": True, "model_name": "j", "judge": {}, "generation": vllm}
    run = run_of(reward_model=judge)
    check_judges(run, on_cluster=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"take 0\.9 of the memory of the GPU"):
        check_judges(run, on_cluster=False)
    on_cpu = run.model_copy(update={"cluster": run.cluster.model_copy(update={"device": "cpu"})})
    check_judges(on_cpu, on_cluster=False)
    vllm["vllm_cfg"] = {"gpu_memory_utilization": 0.3}
    run = run_of(reward_model=judge)
    check_judges(run, on_cluster=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"generation\.backend=vllm needs"):
        check_judges(run, on_cluster=False)


def test_a_judge_to_load_is_refused_on_a_cluster_by_its_section():
    asked = {"url_model": "a", "urls": ["http://a"], "judge": {}}
    loaded = {"model_name": "j", "judge": {}}
    models = [
        {"name": f"m{i}", "normalize": "none", **judge} for i, judge in enumerate((asked, loaded))
    ]
    for section, key in ((loaded, "judge"), ({"models": models}, r"models\[1\]\.judge")):
        run = run_of(reward_model={"enabled": True} | section)
        check_judges(run, on_cluster=False)
        with pytest.raises(ConfigError, match=rf"^env\.reward_model\.{key}: .*vllm serve j"):
            check_judges(run, on_cluster=True)
    check_judges(run_of(reward_model={"enabled": True, **asked}), on_cluster=True)


def test_nodes_of_a_cluster_may_have_what_this_one_has_not(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    check_engines(run_of("vllm", address="auto"), on_cluster=True)
    check_engines(run_of(), on_cluster=True)


def test_a_reward_model_in_vllm_has_no_slots_on_a_cluster():
    with pytest.raises(ConfigError, match="laurel serve MODEL --engine vllm"):
        check_engines(run_of(reward_model=IN_VLLM), on_cluster=True)
