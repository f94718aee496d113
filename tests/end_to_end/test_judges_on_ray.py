"""Who judges a run on Ray: reward workers spread over the nodes, and several models in slots."""

import itertools
import os
import signal
import threading

import pytest
import yaml

from laurel.rewards import open
from policy_runs import grpo, grpo_settings, metrics_of
from reward_models import small_model, write_model

ray = pytest.importorskip("ray")
from laurel.workers.ray_actor import SpreadGroup  # noqa: E402  where there is Ray

BOUND = 1e-5
STORE = 80 * 2**20
FIGURES = ("train/loss", "train/grad_norm", "train/reward", "train/reward_std")
SETTLED = (
    "~policy.optimizer",
    "+policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 3e-2}}",
    "grpo.max_num_steps=2",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "data.env_name=reward_model",
)


@pytest.fixture(scope="module")
def judges(tmp_path_factory):
    """Two reward models, with statistics of their scores."""
    root = tmp_path_factory.mktemp("judges")
    for seed in (0, 1):
        judge = small_model(seed=seed)
        judge.contract = judge.contract.with_rules(mean=0.25, std=0.5 + seed)
        (root / str(seed)).mkdir()
        write_model(judge, root / str(seed))
    return [str(root / "0"), str(root / "1")]


def run(directory, model, rewards, *changes):
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "rewards.yaml"
    path.write_text(yaml.safe_dump({"env": {"reward_model": {"enabled": True, **rewards}}}))
    return grpo(grpo_settings(directory, model, *SETTLED, *changes), path=path)


def assert_same(found, expected, *more):
    for step in (1, 2):
        figures = metrics_of(found)[step]
        assert figures["train/num_failures"] == 0
        assert figures["env/reward_model/num_samples"] == 12
        for name in (*FIGURES, *more):
            value = metrics_of(expected)[step][name]
            assert figures[name] == pytest.approx(value, rel=BOUND, abs=BOUND), name


@pytest.fixture
def two_nodes(no_ray):
    """Of one slot each, and nothing besides; their address."""
    from ray.cluster_utils import Cluster

    slots = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": STORE}
    nodes = Cluster(initialize_head=True, head_node_args={**slots, "include_dashboard": False})
    try:
        nodes.add_node(**slots)
        yield nodes.address
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.mark.slow
def test_reward_workers_are_on_all_nodes_and_one_that_is_killed_changes_nothing(
    tmp_path, model, judges, two_nodes, monkeypatch, caplog
):
    rewards = {"model_name": judges[0], "precision": "float32"}
    run(tmp_path / "here", model, rewards)
    nodes: list[str] = []
    victims: list[int] = []
    submit, numbers = SpreadGroup._submit, itertools.count(1)

    def kill_and_submit(group, calls):
        nodes.append(group._node_ids[0])
        if next(numbers) == 4:  # before the call: one that is done already would not miss it
            victims.append(group._pids[0])
            os.kill(group._pids[0], signal.SIGKILL)
        return submit(group, calls)

    monkeypatch.setattr(SpreadGroup, "_submit", kill_and_submit)
    before = threading.enumerate()
    run(
        tmp_path / "there",
        model,
        {**rewards, "num_workers": 2, "resources": {"num_nodes": 1}},
        "cluster.num_nodes=2",
        "cluster.gpus_per_node=1",
        f"cluster.address={two_nodes}",
    )
    assert len(set(nodes)) == 2
    assert len(victims) == 1
    assert "reward_worker rank 0 of 1 died in prepare" in caplog.text
    assert "it is started again, restart 1 of 8 at most" in caplog.text
    assert_same(tmp_path / "there", tmp_path / "here")
    # A worker that was still being started would start a cluster of its own where Ray has ended.
    left = [one.name for one in threading.enumerate() if one not in before]
    assert not [name for name in left if name.startswith("laurel-")]


def ensemble(judges):
    parts = [
        {"name": name, "model_name": judge, "precision": "float32"}
        for name, judge in zip(("kind", "wise"), judges, strict=True)
    ]
    return {"models": parts, "combine": "mean_minus_std", "uncertainty_penalty": 0.5}


@pytest.fixture(scope="module")
def several_here(tmp_path_factory, model, judges):
    directory = tmp_path_factory.mktemp("several_here")
    run(directory, model, ensemble(judges))
    return directory


@pytest.mark.slow
def test_two_replicas_of_several_models_judge_from_slots_as_they_do_here(
    tmp_path, model, judges, several_here, small_cluster, monkeypatch
):
    def load_here(*_, **__):
        raise AssertionError("it was loaded in the process of the run")

    monkeypatch.setattr(open, "LocalScorer", load_here)
    rewards = {**ensemble(judges), "resources": {"gpus_per_node": 2}}
    done = run(tmp_path, model, rewards, "cluster.gpus_per_node=3")
    assert "reward_model: node 0, slot" in done.text
    parts = (
        f"env/reward_model/part/{name}/{what}"
        for name in ("kind", "wise")
        for what in ("mean", "std")
    )
    assert_same(tmp_path, several_here, *parts)
