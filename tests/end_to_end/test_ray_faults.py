"""A rank or a node that dies in a run on Ray: one clear error, and the run resumes."""

import os
import signal
import threading

import pytest

import runs
from laurel.errors import ConfigError, EnvironmentFailedError, WorkerError
from laurel.generation.replicas import GeneratorReplicas
from laurel.training.learner_group import LearnerGroup
from laurel.workers.reservations import Resources
from policy_runs import MATCHES, grpo, grpo_settings, metrics_of
from runs import settings, start, train
from sandbox_processes import below, is_gone, wait_until

pytestmark = pytest.mark.usefixtures("warm_processes")

ray = pytest.importorskip("ray")
from laurel.workers.ray_cluster import RayCluster  # noqa: E402  where there is Ray

SPREAD = ("cluster.gpus_per_node=2", "cluster.device=cpu")
LONG = (
    "+policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 3e-2, momentum: 0.9}}",
    # It does not end by itself, however late it is killed.
    "rm.max_num_epochs=100000",
    "rm.max_num_steps=100000",
    "rm.val_period=0",
    "rm.val_at_end=false",
    "checkpointing.save_period=5",
)


def long_settings(directory, *changes):
    chosen = [c for c in settings(directory) if not c.startswith(("policy.optimizer", "rm.val"))]
    return [*chosen, *LONG, *changes]


@pytest.mark.slow
def test_a_node_that_is_lost_in_mid_step_ends_the_run_and_it_resumes(tmp_path, monkeypatch):
    from ray.cluster_utils import Cluster

    ray.shutdown()  # the cluster of tests before
    small = {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 * 2**20}
    nodes = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
    over_both = (
        "cluster.num_nodes=2",
        "cluster.gpus_per_node=1",
        "cluster.device=cpu",
        f"cluster.address={nodes.address}",
    )
    try:
        second = nodes.add_node(**small)
        with RayCluster(nodes.address) as cluster:
            assert [node.total["CPU"] for node in cluster.nodes()] == [2.0, 2.0]
            with pytest.raises(ConfigError, match="3 are to be on node 0, which has room for 2"):
                cluster.reserve("policy", 3, Resources(), nodes=[0, 0, 0])
            slots = cluster.reserve("policy", 2, Resources(), nodes=[0, 1])
            assert slots.node_ids == [node.id for node in cluster.nodes()]

        pids = []
        update = LearnerGroup.update

        def lose_and_update(learner, *given):
            if (tmp_path / "saves" / "step_5").is_dir() and not pids:
                pids.extend(learner.group._pids)
                lost = threading.Thread(target=nodes.remove_node, args=(second, False))
                lost.start()
            return update(learner, *given)

        monkeypatch.setattr(LearnerGroup, "update", lose_and_update)
        with pytest.raises(WorkerError, match="policy rank 1 of 2 died") as died:
            train(long_settings(tmp_path, *over_both))
        assert died.value.exit_code == 75
        assert len(pids) == 2
        for pid in pids:
            wait_until(lambda pid=pid: is_gone(pid))
        nodes.add_node(**small)
        # Ray counts a dead node among the living for some seconds.
        resumed = train(long_settings(tmp_path, *over_both, "rm.max_num_steps=30"))
        assert "resuming from" in resumed.text
    finally:
        ray.shutdown()
        nodes.shutdown()
    straight = tmp_path / "straight"
    train(long_settings(straight, "rm.max_num_steps=30"))
    last = max(metrics_of(straight))
    expected, found = metrics_of(straight)[last], metrics_of(tmp_path)[last]
    assert found["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_a_run_whose_raylet_dies_says_so(tmp_path):
    log = tmp_path / "out.txt"
    process = start(long_settings(tmp_path, *SPREAD), log=log)
    try:
        runs.wait_until(lambda: (tmp_path / "saves" / "step_5").is_dir(), process)
        (raylet,) = below(process.pid, "raylet")
        raylet.kill()
        assert process.wait(timeout=120) == 75
    finally:
        process.kill()
    told = [line for line in log.read_text().splitlines() if line.startswith("error:")]
    assert len(told) == 1
    # Now and then the ranks are known to be lost before Ray ends the process.
    assert "lost its Ray cluster" in told[0] or "of 2 died" in told[0]


def newest_worker():
    """Process of the worker that was started last: replicas come after the learner's ranks."""
    from ray._private.state import actors

    seats = [actor for actor in actors().values() if actor["State"] == "ALIVE"]
    return int(max(seats, key=lambda actor: actor["StartTime"])["Pid"])


@pytest.mark.slow
def test_a_replica_that_is_lost_after_its_checkpoint_was_pruned_comes_back(
    tmp_path, model, small_cluster, caplog, monkeypatch
):
    steps = ("grpo.val_period=0", "grpo.val_at_end=false", "checkpointing.save_period=1")
    own = (
        "cluster.gpus_per_node=2",
        "policy.generation.colocated.enabled=false",
        "policy.generation.colocated.resources.gpus_per_node=1",
        "checkpointing.keep_top_k=1",
        "checkpointing.metric_name=null",
        *MATCHES,
    )
    run_dir = tmp_path / "run"
    grpo(grpo_settings(run_dir, model, *own, *steps, "grpo.max_num_steps=1"))
    killed: list[int] = []

    generate = GeneratorReplicas.generate

    # Killed before a request, the replica is missed by this request. Killed while completions are
    # scored, it may have no request left, and then the next weights find it dead.
    def kill_before_a_request(generator, request):
        if (run_dir / "saves" / "step_4").is_dir() and not killed:
            assert not (run_dir / "saves" / "step_2").exists(), "nothing was pruned yet"
            killed.append(newest_worker())
            os.kill(killed[0], signal.SIGKILL)
        return generate(generator, request)

    monkeypatch.setattr(GeneratorReplicas, "generate", kill_before_a_request)
    finished = grpo(grpo_settings(run_dir, model, *own, *steps, "grpo.max_num_steps=6"))
    assert killed
    assert "resuming from" in finished.text
    assert finished.outcome.ended == "finished"
    text = "".join(r.message for r in caplog.records) + finished.text
    assert "replica 0 is back and has the weights of step 4" in text


@pytest.mark.slow
def test_a_killed_actor_of_an_environment_ends_the_run_with_its_name(
    tmp_path, model, small_cluster
):
    remote = ("data.env_name=far", "+env.custom.far.name=policy_fakes.RemoteMath")
    with pytest.raises(EnvironmentFailedError, match=r"far.*(died|killed|dead)"):
        grpo(grpo_settings(tmp_path / "run", model, *remote, "grpo.val_period=0"))
    assert metrics_of(tmp_path / "run")[1]["train/reward"] >= 0
