"""Who judges a run on Ray: reward workers spread over the nodes, and several models in slots."""

import itertools
import os
import signal
import threading
from pathlib import Path

import pytest
import yaml

from laurel.rewards import open
from packages import installed
from policy_runs import grpo, grpo_settings, metrics_of
from reward_models import small_model, write_model

pytestmark = pytest.mark.usefixtures("warm_processes")

ray = pytest.importorskip("ray")
from laurel.workers.ray_actor import SpreadGroup  # noqa: E402  where there is Ray
from laurel.workers.ray_group import RayGroup  # noqa: E402

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


@pytest.fixture(scope="module")
def two_nodes():
    """Of one slot each, and nothing besides; their address."""
    from ray.cluster_utils import Cluster

    ray.shutdown()  # the cluster of tests before
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


ENGINE = """
import sys
from laurel.plugins import EngineThatServes

class Stub(EngineThatServes):
    def make(self, section, start): ...

    def serve_command(self, section, host, port, *, on_gpu, rests):
        assert not (on_gpu or rests)
        return [sys.executable, {program!r}, host, str(port), {folder!r}], {{}}
"""
ASKS = """
import httpx2

async def compute_score(data_source, solution_str, ground_truth, extra_info,
                        reward_router_address):
    async with httpx2.AsyncClient(timeout=120) as client:
        url = f"http://{reward_router_address}/score"
        reply = await client.post(url, json={"content": "poison"})
    return {"score": len(solution_str), "server": reply.json()["server"]}
"""


@pytest.mark.slow
def test_a_model_that_a_run_serves_is_on_another_node_and_comes_back(
    tmp_path, model, two_nodes, monkeypatch
):
    program = str(Path(__file__).parents[1] / "model_server.py")
    engine = ENGINE.format(program=program, folder=str(tmp_path))
    site = tmp_path / "site"
    site.mkdir()
    installed(site, "stub", {"stub_engine": engine}, {"engines": {"stub": "stub_engine:Stub"}})
    monkeypatch.syspath_prepend(site)
    (tmp_path / "asks.py").write_text(ASKS)
    placed: list[tuple[str, str]] = []
    build = RayGroup._build

    def noted(group, reservation, payload):
        build(group, reservation, payload)
        placed.append((group.role, group._node_ids[0]))

    monkeypatch.setattr(RayGroup, "_build", noted)
    done = run(
        tmp_path / "run",
        model,
        {
            "function": {"path": f"{tmp_path}/asks.py:compute_score"},
            "server": {
                "model_name": "m",
                "backend": "stub",
                "resources": {"gpus_per_node": 1, "num_nodes": 1},
            },
        },
        "cluster.num_nodes=2",
        "cluster.gpus_per_node=1",
        f"cluster.address={two_nodes}",
        "grpo.max_num_steps=1",
    )
    assert "reward_model: node 1, slot 0" in done.text
    first, second = [node for role, node in placed if role.startswith("model server")]
    assert first == second  # with its first question it died
    assert dict(placed)["policy"] != first
    figures = metrics_of(tmp_path / "run")[1]
    assert figures["train/num_failures"] == 0
    assert figures["env/reward_model/num_samples"] == 12


def ensemble(judges):
    parts = [
        {"name": name, "model_name": judge}
        for name, judge in zip(("kind", "wise"), judges, strict=True)
    ]
    return {
        "models": parts,
        "precision": "float32",
        "combine": "mean_minus_std",
        "uncertainty_penalty": 0.5,
    }


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
