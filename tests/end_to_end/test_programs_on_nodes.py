"""Programs of the policy on every node of a Ray cluster, and nodes that are lost."""

import os
import signal
from collections import Counter

import pytest

from laurel.extensions.code.nodes import NodePool
from laurel.extensions.code.sandbox.detection import detect
from laurel.extensions.code.sandbox.inside.monitor import RUNNING
from laurel.extensions.code.sandbox.jobs import Limits, SandboxJob, Status
from laurel.extensions.code.sandbox.tiers import Tier
from laurel.extensions.code.settings import SandboxConfig
from laurel.workers.reservations import ClusterNodes
from policy_runs import (
    completions_of,
    grpo,
    grpo_settings,
    metrics_of,
)
from runs import write_rows
from sandbox_processes import END, below, is_gone, wait_until

pytestmark = pytest.mark.usefixtures("warm_processes")

ray = pytest.importorskip("ray")
from laurel.workers.ray_cluster import RayCluster  # noqa: E402  where there is Ray
from laurel.workers.ray_group import NodeGroup, is_on_the_only_node, nodes_to_work_on  # noqa: E402

STORE = 80 * 2**20
LIMITS = Limits(wall_s=60, cpu_s=60)
STEPS = (
    "~policy.optimizer",
    "+policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 3e-2}}",
    "data.dataset_name=CodeTasks",
    "data.env_name=code",
    "env.code.sandbox.min_tier=D",
    "policy.generation.max_new_tokens=24",
    "policy.max_total_sequence_length=96",
    "grpo.max_num_steps=2",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
)


@pytest.fixture(scope="module", autouse=True)
def _sandbox():
    found = detect()
    if found.tier in (None, Tier.LIMITS_ONLY):
        pytest.skip(found.sentence())


@pytest.fixture(scope="module")
def two_nodes():
    """Of two slots each."""
    from ray.cluster_utils import Cluster

    ray.shutdown()  # the cluster of tests before
    slots = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": STORE}
    nodes = Cluster(initialize_head=True, head_node_args={**slots, "include_dashboard": False})
    try:
        nodes.second = nodes.add_node(**slots)
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


@pytest.fixture
def groups():
    """Every process on a node that was started, the newest last."""
    return []


@pytest.fixture
def pool(two_nodes, groups):
    def make(*args, **kwargs):
        groups.append(NodeGroup(*args, **kwargs))
        return groups[-1]

    with RayCluster(two_nodes.address):
        nodes = ClusterNodes(nodes_to_work_on, make, is_on_the_only_node)
        with NodePool(SandboxConfig(min_tier="D"), nodes, num_workers=2) as pool:
            yield pool


def jobs(count):
    return [
        SandboxJob(id=str(n), code=f"import time\ntime.sleep(0.4)\nprint({n})", limits=LIMITS)
        for n in range(count)
    ]


def assert_all_right(results):
    assert [(one.status, one.stdout) for one in results] == [
        (Status.OK, f"{n}\n") for n in range(len(results))
    ], [one.reason for one in results if one.reason]


def running_below(group):
    return below(group._pids[0], RUNNING)


@pytest.mark.slow
def test_both_nodes_run_programs_and_an_actor_that_is_killed_loses_none(pool, groups, caplog):
    assert not is_on_the_only_node()
    assert pool.num_workers == 4 or os.sched_getaffinity(0) == {0}
    assert len({group._node_ids[0] for group in groups}) == 2
    futures = [pool.submit(job) for job in jobs(40)]
    wait_until(lambda: all(running_below(group) for group in groups[:2]))
    victim = groups[1]
    left = [victim._pids[0], *(one.pid for one in below(victim._pids[0]))]
    os.kill(victim._pids[0], signal.SIGKILL)
    results = [future.result(END) for future in futures]
    assert_all_right(results)
    assert 1 <= sum(one.attempt == 2 for one in results) <= pool.num_workers
    assert "is started again, restart 1 of 8 at most" in caplog.text
    wait_until(lambda: len(groups) == 3)  # the other node may have run everything meanwhile
    assert groups[2]._node_ids == victim._node_ids
    for pid in left:
        wait_until(lambda pid=pid: is_gone(pid))
    processes = [group._pids[0] for group in (groups[0], groups[2])]
    zygotes = [one.pid for pid in processes for one in below(pid)]
    assert zygotes
    pool.close()
    for pid in (*processes, *zygotes):
        wait_until(lambda pid=pid: is_gone(pid))


def run(directory, model, *changes):
    directory.mkdir()
    rows = [
        {
            "prompt": f"Give {1 + i % 2} ({i})",
            "entry": "f",
            "test_code": f"assert f() == {1 + i % 2}",
            "reference_solution": f"def f(): return {1 + i % 2}",
        }
        for i in range(16)
    ]
    write_rows(directory / "tasks.jsonl", rows)
    done = grpo(grpo_settings(directory, model, *STEPS, *changes))
    assert done.outcome.ended == "finished"


@pytest.mark.slow
def test_a_run_on_a_cluster_has_the_rewards_of_one_in_process(
    tmp_path, writer, two_nodes, monkeypatch
):
    run(tmp_path / "here", writer, "env.code.num_workers=2")
    asked = []
    submit = NodeGroup._submit

    def submit_and_note(group, calls):
        asked.extend(group._node_ids[0] for call in calls.values() if call.method == "submit")
        return submit(group, calls)

    monkeypatch.setattr(NodeGroup, "_submit", submit_and_note)
    run(
        tmp_path / "there",
        writer,
        "env.code.num_workers=1",
        "cluster.backend=ray",
        f"cluster.address={two_nodes.address}",
    )
    nodes = Counter(asked)
    assert len(nodes) == 2
    assert min(nodes.values()) > 1
    for step in (1, 2):
        here, there = (metrics_of(tmp_path / name)[step] for name in ("here", "there"))
        assert there["env/code/sandbox_failures"] == 0
        assert 0 < there["train/reward"] < 1
        for name in here:
            if name.startswith(("env/code/", "train/reward")):
                assert there[name] == pytest.approx(here[name], rel=1e-6), name
        found = [
            [(row["completion"], row["reward"]) for row in completions_of(tmp_path / name, step)]
            for name in ("here", "there")
        ]
        assert sorted(found[0]) == sorted(found[1])


@pytest.mark.slow
def test_a_node_that_is_lost_leaves_its_programs_to_the_other(pool, groups, two_nodes, caplog):
    """The last test of these nodes."""
    futures = [pool.submit(job) for job in jobs(16)]
    second = next(g for g in groups if g._node_ids[0] == two_nodes.second.node_id)
    wait_until(lambda: running_below(second))
    two_nodes.remove_node(two_nodes.second, allow_graceful=False)
    assert_all_right([future.result(4 * END) for future in futures])
    # That may be before Ray has noticed: the other node has what it had as soon as it is silent.
    wait_until(lambda: "sandbox workers are given up" in caplog.text)
    assert_all_right(pool.run(jobs(4)))
    wait_until(is_on_the_only_node)
