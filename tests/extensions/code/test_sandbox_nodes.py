"""Programs on the nodes of a cluster: who runs what, and what becomes of nodes that are lost."""

import logging
import subprocess
import sys

import pytest

from laurel.errors import ConfigError
from laurel.extensions.code import nodes as code_nodes
from laurel.extensions.code.environment import CodeEnvironment
from laurel.extensions.code.nodes import MAX_RESTARTS, NodePool
from laurel.extensions.code.sandbox.inside.monitor import RUNNING
from laurel.extensions.code.sandbox.jobs import Limits, SandboxJob, Status
from laurel.extensions.code.sandbox.tiers import Tier
from laurel.extensions.code.settings import SandboxConfig
from sandbox_nodes import PretendedNodes
from sandbox_processes import END, below, is_gone, wait_until

WAIT = "import time\ntime.sleep({seconds})\nprint({number})"
LONG = Limits(wall_s=600, cpu_s=600)
SLEEP = SandboxJob(code="import time\ntime.sleep(1000)", limits=LONG)


@pytest.fixture(scope="module", autouse=True)
def _layers(tier):
    if tier is Tier.LIMITS_ONLY:
        pytest.skip("nodes want more than limits")


@pytest.fixture
def opened(tier):
    """Opens pools on nodes that say of themselves what this machine was found to give."""
    pools = []

    def open_on(*names, each=1):
        nodes = PretendedNodes(*names, found=dict.fromkeys(names, tier))
        config = SandboxConfig(min_tier="D")
        pools.append(NodePool(config, nodes.cluster, num_workers=each))
        return pools[-1], nodes

    yield open_on
    for pool in pools:
        pool.close()


def jobs(count, seconds=0.0):
    return [
        SandboxJob(id=str(n), code=WAIT.format(seconds=seconds, number=n), limits=LONG)
        for n in range(count)
    ]


def is_running(nodes, name):
    return any(below(pid, RUNNING) for pid in nodes.zygotes(name))


def assert_all_right(results):
    assert [(one.status, one.stdout) for one in results] == [
        (Status.OK, f"{n}\n") for n in range(len(results))
    ], [one.reason for one in results]


def test_every_node_runs_programs_as_many_at_a_time_as_each_is_given(opened):
    pool, nodes = opened("1", "2", "3", each=2)
    assert pool.num_workers == 6
    running = [pool.submit(job) for job in jobs(6, 1.0)]
    wait_until(lambda: all(len(nodes.zygotes(name)) == 2 for name in nodes.names))
    assert_all_right([future.result(END) for future in running])
    for name in nodes.names:
        assert [call.method for call in nodes.newest(name).calls].count("submit") == 2, name


@pytest.mark.slow
def test_few_programs_are_spread_and_nodes_with_more_room_get_more(opened):
    pool, _ = opened("1", "2", each=2)
    pool._nodes.members[1].num_workers = 4
    futures = [pool.submit(job) for job in jobs(6, 1.0)]
    given = [len(node.outstanding) for node in pool._nodes.members]
    assert given == [2, 4]
    assert_all_right([future.result(END) for future in futures])
    few = [pool.submit(job) for job in jobs(2, 0.5)]
    assert [len(node.outstanding) for node in pool._nodes.members] == [1, 1]
    assert_all_right([future.result(END) for future in few])


def test_the_code_environment_runs_where_it_is_told(tier):
    nodes = PretendedNodes("1", "2", found={"1": tier, "2": tier})
    config = {"num_workers": 1, "sandbox": {"min_tier": "D"}}
    environment = CodeEnvironment(config, nodes=nodes.cluster)
    task = {"entry": "f", "call_tests": [{"args": [], "expected": 2}]}
    logs = [
        [{"role": "user", "content": "?"}, {"role": "assistant", "content": f"def f(): return {n}"}]
        for n in (1, 2, 2, 1)
    ]
    with environment:
        found = environment.step(logs, [task] * 4)
    assert found.rewards.tolist() == [0.0, 1.0, 1.0, 0.0]
    assert {call.method for call in nodes.calls()} >= {"find", "prepare", "submit", "collect"}
    assert all(group.over.is_set() for groups in nodes.groups.values() for group in groups)
    nodes.is_only_this = True
    with CodeEnvironment(config, nodes=nodes.cluster) as here:
        here.step(logs[:1], [task])
        assert len(here._pool.process_ids()) == 1, "without the way through the cluster"


def test_nodes_below_the_minimum_are_refused_with_their_addresses_before_any_program():
    found = {"1": Tier.FULL, "2": Tier.SECCOMP_ONLY, "3": None}
    nodes = PretendedNodes("1", "2", "3", found=found)
    with pytest.raises(ConfigError) as caught:
        NodePool(SandboxConfig(), nodes.cluster)
    said = str(caught.value)
    assert "10.0.0.1" not in said
    assert "node 10.0.0.2 (2): sandbox tier D (no namespaces: EPERM" in said
    assert "For a better one: allow user namespaces" in said
    assert "wants at least tier C" in said
    assert "node 10.0.0.3 (3): programs cannot be run here" in said
    assert all(group.over.is_set() for groups in nodes.groups.values() for group in groups)
    assert "submit" not in {call.method for call in nodes.calls()}


def test_nodes_that_cannot_be_opened_end_the_others():
    nodes = PretendedNodes("1", "2", found={"1": Tier.FULL, "2": Tier.FULL})
    nodes.broken["2"] = "other versions"
    with pytest.raises(ConfigError, match=r"node 10\.0\.0\.2 \(2\): other versions"):
        NodePool(SandboxConfig(), nodes.cluster)
    assert nodes.newest("1").over.is_set()


@pytest.mark.slow
def test_a_result_has_the_tier_of_its_node_and_the_pool_that_of_the_worst(tier, caplog):
    caplog.set_level(logging.INFO)
    worse = Tier.SECCOMP_ONLY
    if tier is worse:
        pytest.skip("this machine gives nothing better")
    nodes = PretendedNodes("1", "2", found={"1": tier, "2": worse})
    config = SandboxConfig(min_tier="D")
    with NodePool(config, nodes.cluster, num_workers=1) as pool:
        assert pool.tier is worse
        results = pool.run(jobs(8, 0.2))
    assert {one.tier for one in results} == {tier.value, worse.value}
    assert "node 10.0.0.2 (2): sandbox tier D" in caplog.text
    assert "2 sandbox workers on 2 nodes" in caplog.text


@pytest.mark.slow
def test_a_process_that_dies_in_the_middle_is_started_again_and_no_result_is_lost(opened, caplog):
    pool, nodes = opened("1", "2", each=2)
    futures = [pool.submit(job) for job in jobs(16, 0.5)]
    wait_until(lambda: is_running(nodes, "2"))
    lost = nodes.newest("2")
    lost.end("died")
    results = [future.result(END) for future in futures]
    assert_all_right(results)
    assert 1 <= sum(one.attempt == 2 for one in results) <= 2
    # The other node may have run everything meanwhile.
    wait_until(lambda: len(nodes.groups["2"]) == 2 and nodes.newest("2").calls)
    assert nodes.newest("2").calls[0].method == "prepare", "its tier is known"
    assert "sandbox of node 10.0.0.2 (2) was lost" in caplog.text
    assert f"restart 1 of {MAX_RESTARTS} at most" in caplog.text


@pytest.mark.slow
def test_a_job_that_loses_its_process_twice_is_a_failure_of_ours(opened):
    pool, nodes = opened("1", each=2)
    future = pool.submit(SLEEP)
    for number in (1, 2):
        wait_until(lambda n=number: len(nodes.groups["1"]) == n and is_running(nodes, "1"))
        assert_all_right(pool.run(jobs(1)))
        nodes.newest("1").end("died")
    result = future.result(END)
    assert (result.status, result.attempt) == (Status.SANDBOX_ERROR, 2)
    assert "process 7 is gone" in result.reason
    assert_all_right(pool.run(jobs(1)))


@pytest.mark.slow
def test_what_only_waited_where_a_process_was_lost_is_not_to_blame(opened):
    pool, nodes = opened("1")
    futures = [pool.submit(job) for job in [*jobs(1, 4.0), *jobs(4)[1:]]]
    wait_until(lambda: is_running(nodes, "1"))
    nodes.newest("1").end("died")
    results = [future.result(END) for future in futures]
    assert_all_right(results)
    assert [one.attempt for one in results] == [2, 1, 1, 1]


@pytest.mark.slow
def test_a_node_that_has_left_is_given_up_and_others_run_what_it_had(opened, caplog):
    pool, nodes = opened("1", "2", each=2)
    futures = [pool.submit(job) for job in jobs(12, 0.4)]
    wait_until(lambda: is_running(nodes, "2"))
    nodes.names.remove("2")
    nodes.newest("2").end("died")
    assert_all_right([future.result(END) for future in futures])
    assert caplog.text.count("the node has left the cluster") == 1
    assert "Its 2 sandbox workers are given up; there are 2 on other nodes" in caplog.text
    assert len(nodes.groups["2"]) == 1
    assert_all_right(pool.run(jobs(4)))


def test_restarts_have_an_end_and_without_a_node_everything_is_a_failure(opened, caplog):
    pool, nodes = opened("1", each=2)
    assert_all_right(pool.run(jobs(2)))
    nodes.broken["1"] = "no room"
    nodes.newest("1").end("died")
    results = pool.run(jobs(6))
    assert {one.status for one in results} == {Status.SANDBOX_ERROR}
    assert "failed in the same way when it had just been started again" in results[0].reason
    assert "there are 0 on other nodes" in caplog.text


def test_a_node_that_does_not_answer_is_lost(opened, monkeypatch):
    monkeypatch.setattr(code_nodes, "COLLECT_SECONDS", 0.5)
    monkeypatch.setattr(code_nodes, "MARGIN_SECONDS", 4.0)
    pool, nodes = opened("1")
    assert_all_right(pool.run(jobs(1)))
    nodes.newest("1").frozen.set()
    job = SandboxJob(code="print(0)", limits=Limits(cpu_s=1, wall_s=1))
    (result,) = pool.run([job])
    assert (result.status, result.attempt, result.stdout) == (Status.OK, 2, "0\n")
    assert nodes.groups["1"][0].failure is not None
    assert "no answer" in str(nodes.groups["1"][0].failure)


def test_closing_ends_what_runs_and_waits_for_every_call(opened):
    pool, nodes = opened("1", "2")
    futures = [pool.submit(SLEEP) for _ in range(4)]
    wait_until(lambda: all(is_running(nodes, name) for name in nodes.names))
    zygotes = [pid for name in nodes.names for pid in nodes.zygotes(name)]
    pool.close()
    pool.close()
    counts = [len(nodes.newest(name).calls) for name in nodes.names]
    assert {future.result(END).status for future in futures} == {Status.SANDBOX_ERROR}
    for pid in zygotes:
        wait_until(lambda pid=pid: is_gone(pid))
    assert not [node for node in pool._nodes.members if node.thread.is_alive()], (
        "none of them may still ask a node"
    )
    assert [len(nodes.newest(name).calls) for name in nodes.names] == counts
    assert [len(nodes.groups[name]) for name in nodes.names] == [1, 1], "none was started again"
    assert pool.run(jobs(1))[0].reason == "the sandbox has been shut down"


@pytest.mark.slow
def test_a_run_in_one_process_has_nothing_of_ray():
    program = (
        "import sys\n"
        "from laurel.extensions.code.environment import CodeEnvironment\n"
        "environment = CodeEnvironment({'num_workers': 1, 'sandbox': {'min_tier': 'D'}})\n"
        "log = [{'role': 'assistant', 'content': '<code>6 * 7</code>'}]\n"
        "print(environment.step([log], [None]).answers)\n"
        "environment.shutdown()\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'ray'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "['42']\n[]\n", done.stderr
