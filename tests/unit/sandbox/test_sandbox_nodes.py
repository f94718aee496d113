"""Programs on the nodes of a cluster: who runs what, and what becomes of nodes that are lost."""

import logging
import os
import pickle
import signal
import subprocess
import sys
import threading

import pytest

from laurel.config.environments import SandboxConfig
from laurel.environments.code import nodes as node_runner
from laurel.environments.code.nodes import (
    MAX_RESTARTS,
    NodeSet,
    NodeWorker,
    as_plain,
    of_plain,
    open_pool_on,
)
from laurel.environments.code_environment import CodeEnvironment
from laurel.errors import ConfigError
from laurel.sandbox.detection import detect
from laurel.sandbox.inside.monitor import RUNNING
from laurel.sandbox.jobs import CallTest, Limits, SandboxJob, Status, StdioTest
from laurel.sandbox.runner import ProcessOutcome, SandboxLostError, SandboxStartError
from laurel.sandbox.tiers import Tier
from laurel.workers.rendezvous import RankPlace
from sandbox_nodes import PretendedNodes
from sandbox_processes import END, below, is_gone, wait_until

WAIT = "import time\ntime.sleep({seconds})\nprint({number})"
LONG = Limits(wall_s=600, cpu_s=600)
SLEEP = SandboxJob(code="import time\ntime.sleep(1000)", limits=LONG)


@pytest.fixture(scope="module", autouse=True)
def tier():
    found = detect()
    if found.tier in (None, Tier.LIMITS_ONLY):
        pytest.skip(found.sentence())
    assert found.tier is not None
    return found.tier


@pytest.fixture
def opened(tier):
    """Opens pools on nodes that say of themselves what this machine was found to give."""
    pools = []

    def open_on(*names, each=1):
        nodes = PretendedNodes(*names, found=dict.fromkeys(names, tier))
        config = SandboxConfig(num_workers=each, min_tier="D")
        pools.append(open_pool_on(config, nodes.cluster))
        return pools[-1], nodes

    yield open_on
    for pool in pools:
        pool.close()


def node_set_of(nodes, tier, *, each):
    return NodeSet(nodes.cluster, num_workers=each, limits_mb=64, accept=lambda found: tier)


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
        asked = [call for call in nodes.newest(name).calls if call.method == "one"]
        assert sorted(call.args[0] for call in asked) == [0, 1], name
    assert pool.report().zygotes_started == 6


def test_few_programs_are_spread_too(tier):
    node_set = node_set_of(PretendedNodes("1", "2", found={"1": tier, "2": tier}), tier, each=2)
    runners = [node_set.make_runner() for _ in range(4)]
    found = [(runner._node.id, runner._index) for runner in runners]  # type: ignore[attr-defined]
    assert found == [("1", 0), ("2", 0), ("1", 1), ("2", 1)]
    node_set.close()


def test_no_expected_value_leaves_this_process(opened):
    pool, nodes = opened("1")
    found = pool.run(
        [
            SandboxJob(
                code="def f(x):\n    return x",
                mode="call",
                entry="f",
                tests=[CallTest(args=["given"], expected="expected-marker")],
            ),
            SandboxJob(
                code="print(input())",
                mode="stdio",
                tests=[StdioTest(stdin="given", stdout="expected-marker")],
            ),
        ]
    )
    assert [one.status for one in found] == [Status.WRONG_ANSWER] * 2
    sent = pickle.dumps([tuple(call) for call in nodes.calls()])
    assert b"given" in sent
    assert b"expected-marker" not in sent


def test_an_outcome_travels_whole():
    outcome = ProcessOutcome(
        ended_by="stdout",
        signal=9,
        cpu_s=0.5,
        wall_s=1.0,
        max_rss_kb=7,
        stdout=b"\xff\x00",
        stderr=b"e",
        result=b"r",
        truncated=frozenset({"stdout", "result"}),
    )
    assert of_plain(pickle.loads(pickle.dumps(as_plain(outcome)))) == outcome


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
    assert {call.method for call in nodes.calls()} >= {"find", "prepare", "start", "one"}
    assert all(group.over.is_set() for groups in nodes.groups.values() for group in groups)
    nodes.is_only_this = True
    with CodeEnvironment(config, nodes=nodes.cluster) as here:
        here.step(logs[:1], [task])
        assert len(here._pool.process_ids()) == 1, "without the way through the cluster"


def test_nodes_below_the_minimum_are_refused_with_their_addresses_before_any_program():
    found = {"1": Tier.FULL, "2": Tier.SECCOMP_ONLY, "3": None}
    nodes = PretendedNodes("1", "2", "3", found=found)
    with pytest.raises(ConfigError) as caught:
        open_pool_on(SandboxConfig(num_workers=1), nodes.cluster)
    said = str(caught.value)
    assert "10.0.0.1" not in said
    assert "node 10.0.0.2 (2): sandbox tier D (no namespaces: EPERM" in said
    assert "For a better one: allow user namespaces" in said
    assert "wants at least tier C" in said
    assert "node 10.0.0.3 (3): programs cannot be run here" in said
    assert all(group.over.is_set() for groups in nodes.groups.values() for group in groups)
    assert not {call.method for call in nodes.calls()} & {"start", "one", "pair"}


def test_nodes_that_cannot_be_opened_end_the_others():
    nodes = PretendedNodes("1", "2", found={"1": Tier.FULL, "2": Tier.FULL})
    nodes.broken["2"] = "other versions"
    with pytest.raises(ConfigError, match=r"node 10\.0\.0\.2 \(2\): other versions"):
        open_pool_on(SandboxConfig(), nodes.cluster)
    assert nodes.newest("1").over.is_set()


@pytest.mark.slow
def test_a_result_has_the_tier_of_its_node_and_the_pool_that_of_the_worst(tier, caplog):
    caplog.set_level(logging.INFO)
    worse = Tier.SECCOMP_ONLY
    if tier is worse:
        pytest.skip("this machine gives nothing better")
    nodes = PretendedNodes("1", "2", found={"1": tier, "2": worse})
    config = SandboxConfig(num_workers=1, min_tier="D")
    with open_pool_on(config, nodes.cluster) as pool:
        assert pool.tier is worse
        results = pool.run(jobs(8, 0.2))
    assert {one.tier for one in results} == {tier.value, worse.value}
    assert "node 10.0.0.2 (2): sandbox tier D" in caplog.text
    assert "2 sandbox workers on 2 nodes" in caplog.text


def test_a_node_that_lost_a_layer_runs_nothing(tier):
    """What it said is better than what its zygotes turn out to have."""
    nodes = PretendedNodes("1", found={"1": tier})
    with open_pool_on(SandboxConfig(num_workers=1, min_tier="D"), nodes.cluster) as pool:
        (zygote,) = nodes.newest("1").worker._zygotes
        zygote.wanted = frozenset()
        (result,) = pool.run(jobs(1))
    assert result.status is Status.SANDBOX_ERROR
    assert "lost a layer" in result.reason


def test_a_zygote_that_comes_back_with_less_runs_nothing(tier):
    worker = NodeWorker(RankPlace(role="sandbox"))
    worker.prepare(tier.value, 1, "auto")
    program = (0, {"kind": "script"}, (b"print(1)",), LONG.message(), b"")
    kind, (said,) = worker.one(*program)
    assert (kind, said["stdout"]) == ("ran", b"1\n")
    worker._zygotes[0].wanted = frozenset()
    worker.discard(0)
    kind, said = worker.one(*program)
    assert kind == "not started"
    assert "lost a layer" in said
    worker.shutdown()
    assert worker.start(0) == ("not started", "the sandbox has been shut down")


@pytest.mark.slow
def test_a_program_that_leaves_its_tests_is_waited_for_where_it_runs(tier):
    code = "import os, time\ndef f():\n    os.closerange(3, 64)\n    time.sleep(1)\n    os._exit(7)"
    header = {"kind": "tests", "entry": "f", "reply_kb": 64}
    worker = NodeWorker(RankPlace(role="sandbox"))
    worker.prepare(tier.value, 1, "auto")
    kind, ended = worker.pair(
        0, code.encode(), header, (b"assert f() == 1", b""), Limits(wall_s=30).message()
    )
    worker.shutdown()
    assert kind == "ran"
    assert (ended[1]["ended_by"], ended[1]["exit_code"]) == ("exit", 7)


@pytest.mark.slow
def test_a_zygote_that_dies_is_replaced_where_it_was(opened):
    pool, nodes = opened("1")
    future = pool.submit(jobs(1, 2.0)[0])
    wait_until(lambda: is_running(nodes, "1"))
    (first,) = nodes.zygotes("1")
    os.kill(first, signal.SIGKILL)
    result = future.result(END)
    assert (result.status, result.attempt) == (Status.OK, 2)
    assert len(nodes.groups["1"]) == 1, "its process went on"


def test_a_process_that_dies_in_the_middle_is_started_again_and_no_result_is_lost(opened, caplog):
    pool, nodes = opened("1", "2", each=2)
    futures = [pool.submit(job) for job in jobs(16, 0.5)]
    wait_until(lambda: is_running(nodes, "2"))
    lost = nodes.newest("2")
    lost.end("died")
    results = [future.result(END) for future in futures]
    assert_all_right(results)
    assert 1 <= sum(one.attempt == 2 for one in results) <= 2
    assert len(nodes.groups["2"]) == 2
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
    assert pool.report().statuses == {"ok": 2, "sandbox_error": 6}


def test_a_node_that_does_not_answer_is_lost(opened, monkeypatch):
    for name in ("START_SECONDS", "GRACE_SECONDS", "MARGIN_SECONDS"):
        monkeypatch.setattr(node_runner, name, 0.5)
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
    assert not [t for t in pool._threads if t.is_alive()], "none of them may still ask a node"
    assert [len(nodes.newest(name).calls) for name in nodes.names] == counts
    assert [len(nodes.groups[name]) for name in nodes.names] == [1, 1], "none was started again"
    assert pool.run(jobs(1))[0].reason == "the sandbox has been shut down"


@pytest.mark.slow
def test_one_runner_can_be_closed_alone(tier):
    nodes = PretendedNodes("1", found={"1": tier})
    node_set = node_set_of(nodes, tier, each=2)
    first, second = node_set.make_runner(), node_set.make_runner()
    ended: list[str] = []

    def run():
        try:
            first.one({"kind": "script"}, b"import time; time.sleep(1000)", limits=LONG)
        except SandboxLostError as error:
            ended.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: is_running(nodes, "1"))
    nodes.newest("1").lag = 0.5
    first.close()
    assert ended, "it has waited for the call"
    thread.join()
    with pytest.raises(SandboxStartError, match="shut down"):
        first.start()
    assert second.one({"kind": "script"}, b"print(1)", limits=LONG).stdout == b"1\n"
    node_set.close()


@pytest.mark.slow
def test_a_run_in_one_process_has_nothing_of_ray():
    program = (
        "import sys\n"
        "from laurel.environments.code_environment import CodeEnvironment\n"
        "environment = CodeEnvironment({'num_workers': 1, 'sandbox': {'min_tier': 'D'}})\n"
        "log = [{'role': 'assistant', 'content': '<code>6 * 7</code>'}]\n"
        "print(environment.step([log], [None]).answers)\n"
        "environment.shutdown()\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'ray'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "['42']\n[]\n", done.stderr
