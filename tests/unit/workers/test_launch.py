"""From plans to reserved slots: on clusters that are only described, and on real ones."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from group_workers import Worker
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.policy import ClusterConfig
from laurel.errors import ConfigError, WorkerError
from laurel.planning.plan import Plan
from laurel.run.allocation import device_of, open_cluster, reserve_roles
from laurel.run.request import backend_of, plan_to_run, request_of
from laurel.workers.reservations import NodeNeed, NodeState, Resources, match
from planned import planned
from processes import forked

ray_cluster = pytest.importorskip("laurel.workers.ray_cluster", exc_type=ImportError)
ray_group = pytest.importorskip("laurel.workers.ray_group", exc_type=ImportError)

JUDGED = ("env.reward_model.enabled=true", "env.reward_model.model_name=judge")
STORE = 80 * 2**20


def run(*overrides: str) -> GRPORun:
    return load_config(GRPORun, None, [*JUDGED, *overrides]).config


def backend(*overrides: str) -> str:
    config = run(*overrides)
    return backend_of(planned(config), config.cluster)


def test_one_rank_of_each_role_on_one_slot_stays_in_this_process() -> None:
    assert backend() == "local"
    assert backend("cluster.backend=ray") == "ray"
    assert backend("cluster.address=auto") == "ray", "who names a cluster wants it"
    assert backend("cluster.gpus_per_node=2", "env.reward_model.resources.gpus_per_node=1") == "ray"
    assert backend("cluster.gpus_per_node=2") == "ray"
    assert backend("cluster.gpus_per_node=8", "cluster.placement.policy.slots=[3]") == "local"


def test_what_one_process_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"policy 2, generation 2, reward_model 2 slots\); set "):
        backend("cluster.gpus_per_node=2", "cluster.backend=local")


def test_a_run_that_does_not_fit_does_not_start() -> None:
    with pytest.raises(ConfigError) as refused:
        plan_to_run(
            request_of(
                run(
                    "cluster.gpus_per_node=3",
                    "env.reward_model.resources.gpus_per_node=4",
                    "env.reward_model.resources.num_nodes=2",
                )
            )
        )
    lines = str(refused.value).splitlines()
    assert lines[0] == "the run does not fit its cluster"
    assert "env.reward_model.resources.num_nodes=2: there is one node to divide" in lines[1]
    assert lines[2] == "    fix  env.reward_model.resources.num_nodes=1"
    assert "reward model 4 + policy at least 1 = 5 slots" in lines[3]
    assert plan_to_run(request_of(run())).fits


@pytest.mark.usefixtures("no_ray")
def test_several_nodes_need_an_address() -> None:
    config = run("cluster.num_nodes=2")
    with pytest.raises(ConfigError, match=r"(?s)cluster.num_nodes=2 needs a Ray cluster.*ray up"):
        open_cluster(planned(config), config.cluster)


LABELS = st.frozensets(st.sampled_from("ab"))
NODES = st.lists(st.tuples(st.integers(0, 3), LABELS), max_size=5)


@pytest.mark.slow
@settings(max_examples=400)
@given(NODES, NODES)
def test_as_many_needs_are_met_as_trying_every_way_finds(
    needs: list[tuple[int, frozenset[str]]], nodes: list[tuple[int, frozenset[str]]]
) -> None:
    def serves(need: tuple[int, frozenset[str]], node: tuple[int, frozenset[str]]) -> bool:
        return need[0] <= node[0] and need[1] <= node[1]

    asked = [NodeNeed(slots=slots, labels=labels) for slots, labels in needs]
    found = match(asked, [slots for slots, _ in nodes], [labels for _, labels in nodes])
    assert len(set(found.values())) == len(found)
    assert all(serves(needs[need], nodes[node]) for need, node in found.items())
    padded = [*range(len(nodes)), *([None] * len(needs))]
    best = (
        max(
            sum(
                node is not None and serves(need, nodes[node])
                for need, node in zip(needs, chosen, strict=True)
            )
            for chosen in set(itertools.permutations(padded, len(needs)))
        )
        if needs and len(needs) <= 3
        else len(found)
    )
    assert len(found) == best


def test_alike_nodes_are_taken_in_their_order() -> None:
    needs = [NodeNeed(slots=8)] * 3
    assert match(needs, [8, 0, 8, 8, 8], [frozenset()] * 5) == {0: 0, 1: 2, 2: 3}


class Described:
    """Nodes as they are written down; reservations are only noted."""

    def __init__(self, *nodes: NodeState, growing: Sequence[NodeState] = ()) -> None:
        self.states = list(nodes)
        self.growing = list(growing)
        self.reserved: list[tuple[str, int, str, list[int]]] = []

    def nodes(self) -> list[NodeState]:
        states = list(self.states)
        self.states += self.growing[:1]
        self.growing = self.growing[1:]
        return states

    def reserve(
        self, role: str, workers: int, each: Resources, *, nodes: list[int], patience: float | None
    ) -> Any:
        self.reserved.append((role, workers, str(each), nodes))
        ids = [self.states[node].id for node in nodes]
        return ray_cluster.Reservation(
            role=role, each=each, group=None, node_ids=ids, bundles=list(range(workers))
        )


def node(name: str, gpus: int, *labels: str, free: int | None = None, **held: int) -> NodeState:
    holders: Mapping[str, Mapping[str, float]] = {who: {"GPU": n} for who, n in held.items()}
    return NodeState(
        id=name,
        address=name,
        total={"GPU": gpus, "CPU": 4},
        labels=frozenset(labels),
        free={"GPU": gpus if free is None else free, "CPU": 4},
        held=holders,
    )


def plan_of(*overrides: str) -> Plan:
    plan = planned(run("cluster.device=cuda", *overrides))
    assert plan.fits, plan.conflicts
    return plan


TWO_NODES = (
    "cluster.num_nodes=2",
    "cluster.gpus_per_node=2",
    "env.reward_model.resources.num_nodes=1",
)


def test_roles_get_their_slots_of_one_reservation() -> None:
    """The head has no GPU, so the plan's nodes are the cluster's second and third."""
    cluster: Any = Described(node("head", 0), node("a", 2), node("b", 4))
    roles = reserve_roles(plan_of(*TWO_NODES), cluster, "cuda")
    assert cluster.reserved == [("policy, generation, reward_model", 4, "1 GPU", [1, 1, 2, 2])]
    assert {name: slots.node_ids for name, slots in roles.items()} == {
        "policy": ["a", "a"],
        "generation": ["a", "a"],
        "reward_model": ["b", "b"],
    }
    assert roles["policy"].bundles == roles["generation"].bundles == [0, 1]
    assert roles["reward_model"].bundles == [2, 3]
    # Policy and generation take turns, so each has half of its slots.
    shares = [roles[n].share for n in ("policy", "generation", "reward_model")]
    assert shares == [0.5, 0.5, 1.0]


def test_shares_of_parts_and_of_turns() -> None:
    plan = plan_of(
        "cluster.gpus_per_node=4",
        "cluster.placement={policy: {slots: [0, 1], fraction: 0.7},"
        " generation: {shares: policy, slots: [1]}, reward_model: {slots: [1, 2], fraction: 0.3}}",
    )
    cluster: Any = Described(node("a", 4))
    roles = reserve_roles(plan, cluster, "cuda")
    assert cluster.reserved[0][1:] == (3, "1 GPU", [0, 0, 0])
    assert roles["generation"].bundles == [1]
    assert roles["reward_model"].bundles == [1, 2]
    # 0.7 in two turns, 0.3 beside them
    assert {name: slots.share for name, slots in roles.items()} == {
        "policy": 0.35,
        "generation": 0.35,
        "reward_model": 0.3,
    }
    thirds = reserve_roles(plan_of(), cluster, "cpu")
    assert [slots.share for slots in thirds.values()] == [0.3333] * 3


def test_labelled_nodes_are_found_wherever_they_are() -> None:
    plan = plan_of(
        "cluster.num_nodes=2",
        "cluster.gpus_per_node=2",
        "cluster.labels={pool=train: [0], pool=judge: [1]}",
        "cluster.placement={policy: {labels: [pool=train]}, reward_model: {labels: [pool=judge]}}",
    )
    judge, train = node("a", 2, "pool=judge"), node("b", 2, "pool=train", "zone=1")
    roles = reserve_roles(plan, cluster := Described(judge, train), "cuda")  # type: ignore[arg-type]
    assert roles["policy"].node_ids == ["b", "b"]
    assert roles["reward_model"].node_ids == ["a", "a"]
    cluster = Described(node("a", 2, "pool=train"), train)
    with pytest.raises(ConfigError) as refused:
        reserve_roles(plan, cluster, "cuda")  # type: ignore[arg-type]
    assert "for node 1 of the plan there is none that has 2 of them with pool=judge even on" in str(
        refused.value
    )
    assert "node 1 (b, pool=train, zone=1): 2 of 2 GPU free" in str(refused.value)


def test_what_the_cluster_has_not_is_told_before_anything_is_reserved() -> None:
    small: Any = Described(node("a", 2))
    with pytest.raises(ConfigError, match=r"cluster\.num_nodes=2, and the Ray cluster has 1 even"):
        reserve_roles(plan_of(*TWO_NODES), small, "cuda")
    narrow: Any = Described(node("a", 1), node("b", 8))
    with pytest.raises(ConfigError, match="for node 1 of the plan there is none that has 2 of th"):
        reserve_roles(plan_of(*TWO_NODES), narrow, "cuda")
    assert not small.reserved
    assert not narrow.reserved


def test_who_holds_the_rest_is_told() -> None:
    cluster: Any = Described(node("a", 2), node("b", 2, free=1, judge=1))
    with pytest.raises(ConfigError) as refused:
        reserve_roles(plan_of(*TWO_NODES), cluster, "cuda", patience=0.1)
    text = str(refused.value)
    assert "for node 1 of the plan there is none that has 2 of them now." in text
    assert "node 1 (b): 1 of 2 GPU free; held by judge (1 GPU)" in text


def test_nodes_that_are_still_joining_are_waited_for() -> None:
    cluster: Any = Described(node("a", 2), growing=[node("b", 2)])
    roles = reserve_roles(plan_of(*TWO_NODES), cluster, "cuda", patience=30)
    assert roles["reward_model"].node_ids == ["b", "b"]


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_a_cluster_of_our_own_has_a_slot_for_every_rank_however_few_cores() -> None:
    config = run(
        "cluster.gpus_per_node=6",
        "cluster.device=cpu",
        "cluster.placement={policy: {slots: 3}, generation: {shares: policy},"
        " reward_model: {slots: 3}}",
        "grpo.num_prompts_per_step=3",
        "policy.train_global_batch_size=48",
    )
    plan = plan_to_run(request_of(config))
    with forked():
        opened = open_cluster(plan, config.cluster, object_store_bytes=STORE)
    with opened as cluster:
        assert cluster.nodes()[0].total["CPU"] >= 6
        assert device_of(config.cluster, cluster) == "cpu"
        roles = reserve_roles(plan, cluster, "cpu")
        with (
            ray_group.RayGroup(roles["policy"], Worker, 1) as policy,
            ray_group.RayGroup(roles["generation"], Worker, 2) as generation,
            ray_group.RayGroup(roles["reward_model"], Worker, 3) as judge,
        ):
            assert policy.call("compute", 0) == [1, 2, 3]
            assert generation.call("compute", 0) == [2, 3, 4]
            assert judge.call("where") == [("reward_model", rank, 3) for rank in range(3)]
        roles["policy"].release()


@pytest.mark.slow
@pytest.mark.usefixtures("no_ray")
def test_the_slots_of_a_node_are_its_gpus_in_their_order() -> None:
    """Ray gives numbers of GPUs out without looking whether there are any."""
    plan = plan_of(
        "cluster.gpus_per_node=4",
        "cluster.placement={policy: {slots: [1, 2]}, generation: {shares: policy},"
        " reward_model: {slots: [3, 0]}}",
    )
    with forked():
        started = ray_cluster.RayCluster(cpus=1, gpus=4, object_store_bytes=STORE)
    with started as cluster:
        assert device_of(ClusterConfig(), cluster) == "cuda"
        assert device_of(ClusterConfig(device="cpu"), cluster) == "cpu"
        roles = reserve_roles(plan, cluster, "cuda")
        found = {}
        for name, slots in roles.items():
            with ray_group.RayGroup(slots, Worker) as group:
                found[name] = [e["CUDA_VISIBLE_DEVICES"] for e in group.call("environment")]
        assert found == {
            "policy": ["1", "2"],
            "generation": ["1", "2"],
            "reward_model": ["0", "3"],
        }
        _test_ranks_of_two_slots(roles)


def _test_ranks_of_two_slots(roles: Mapping[Any, Any]) -> None:
    """In the same cluster: a process has the GPUs of both, also when it is started again."""
    with (
        ray_group.RayGroup(roles["policy"], Worker) as policy,
        ray_group.RayGroup(roles["reward_model"].joined(2), Worker) as judge,
    ):
        for _ in range(2):
            with ray_group.RayGroup(roles["generation"].joined(2), Worker) as replica:
                assert replica.size == 1
                assert replica.call_one(0, "environment")["CUDA_VISIBLE_DEVICES"] == "1,2"
                assert replica.call("where") == [("generation", 0, 1)]
                os.kill(replica.call_one(0, "pid"), signal.SIGKILL)
                with pytest.raises(WorkerError, match="generation rank 0"):
                    replica.call("where")
        assert policy.call("compute", 0) == [0, 1], "on the same slots, and not touched"
        assert judge.call_one(0, "environment")["CUDA_VISIBLE_DEVICES"] == "0,3"


def test_slots_of_a_rank_are_on_one_node() -> None:
    def slots_on(*node_ids: str) -> Any:
        return ray_cluster.Reservation(
            role="generation",
            each=Resources(gpus=1),
            group=None,
            node_ids=list(node_ids),
            bundles=list(range(len(node_ids))),
            devices=[str(n) for n in range(len(node_ids))],
        )

    joined = slots_on("a", "a", "a", "a", "b", "b").joined(2)
    assert (joined.size, joined.node_ids, joined.bundles) == (3, ["a", "a", "b"], [0, 2, 4])
    assert joined.devices == ["0,1", "2,3", "4,5"]
    second = slots_on("a", "a", "b", "b").part("generation 2,3", [2, 3]).joined(2)
    assert (second.bundles, second.devices, second.slots_each) == ([2], ["2,3"], 2)
    for several in (["a", "a", "a"], ["a", "b", "b", "a"]):
        with pytest.raises(ConfigError, match="2 on one node for each rank; ask for a multiple"):
            slots_on(*several).joined(2)
