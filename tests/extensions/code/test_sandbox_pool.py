"""Programs in the pool: verdicts, order, and what happens when a sandbox itself is lost."""

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress

import psutil
import pytest

from laurel.extensions.code.nodes import NodePool
from laurel.extensions.code.sandbox.inside.monitor import RUNNING
from laurel.extensions.code.sandbox.jobs import CallTest, Limits, SandboxJob, Status, StdioTest
from laurel.extensions.code.sandbox.pool import SandboxPool, affordable_workers
from laurel.extensions.code.sandbox.tiers import Tier
from laurel.extensions.code.settings import SandboxConfig
from sandbox_nodes import PretendedNodes
from sandbox_processes import END, below, busy, is_gone, running_programs, wait_until

SLEEP = "import time\nprint('here', flush=True)\ntime.sleep(1000)"
LONG = Limits(wall_s=600, cpu_s=600)


@pytest.fixture(scope="module", params=["here", "on nodes"])
def pool(tier, request):
    """What holds of verdicts holds wherever programs run."""
    if request.param == "here":
        pool = SandboxPool(tier=tier, num_workers=2)
    else:
        nodes = PretendedNodes("1", "2", found={"1": tier, "2": tier})
        config = SandboxConfig(min_tier="none")
        pool = NodePool(config, nodes.cluster, num_workers=1)
    with pool:
        yield pool


def run(pool, code, **fields):
    return pool.run([SandboxJob(code=code, **fields)])[0]


def test_sets_have_the_same_order_in_every_process(tier):
    code = "print(list({'a', 'b', 'c', 'd', 'e', 'f'}), hash('a'))"
    said = set()
    for _ in range(3):
        with SandboxPool(tier=tier, num_workers=1) as pool:
            said |= {result.stdout for result in pool.run([SandboxJob(code=code)] * 2)}
    assert len(said) == 1
    assert "'a'" in said.pop()


def test_results_come_in_the_order_of_the_jobs(pool):
    jobs = [
        SandboxJob(id=str(n), code=f"import time\ntime.sleep({0.2 if n == 0 else 0})\nprint({n})")
        for n in range(12)
    ]
    results = pool.run(jobs)
    assert [result.id for result in results] == [str(n) for n in range(12)]
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(12)]
    assert {result.status for result in results} == {Status.OK}
    assert {result.tier for result in results} == {pool.tier.value}


def test_a_result_says_what_was_used(pool):
    result = run(
        pool, "x = sum(range(10**6))\nimport sys\nprint('e', file=sys.stderr)\nsys.exit(7)"
    )
    assert result.status is Status.RUNTIME_ERROR
    assert (result.exit_code, result.signal, result.stderr) == (7, None, "e\n")
    assert 0 < result.cpu_s < 5
    assert result.wall_s > 0
    assert result.max_rss_kb > 1000


def test_outputs_are_cut(pool):
    result = run(pool, "print('x' * 5000)", limits=Limits(stdout_kb=1))
    assert result.status is Status.OUTPUT_LIMIT
    assert result.stdout == "x" * 1024
    assert result.stdout_truncated
    assert not result.stderr_truncated


def test_a_program_reads_its_input(pool):
    long = "line\n" * 100_000
    assert run(pool, "import sys\nprint(len(sys.stdin.read()))", stdin=long).stdout == "500000\n"
    assert run(pool, "print('not read')", stdin=long).status is Status.OK


def test_nothing_is_left_from_one_program_to_the_next(own_pool):
    first = run(own_pool, "import json\njson.x = 1\nopen('file', 'w').write('x')\nprint('done')")
    assert first.stdout == "done\n"
    second = run(own_pool, "import json, os\nprint(hasattr(json, 'x'), os.listdir('.'))")
    assert second.stdout == "False []\n"


def test_stdio(pool):
    tests = [StdioTest(stdin="2 3", stdout="5\n"), StdioTest(stdin="1 1", stdout="2")]
    right = "a, b = map(int, input().split())\nprint(a + b)"
    assert run(pool, right, mode="stdio", tests=tests).status is Status.OK
    only_one = run(pool, "input()\nprint(5)", mode="stdio", tests=tests)
    assert only_one.status is Status.WRONG_ANSWER
    assert [test.status for test in only_one.tests] == [Status.OK, Status.WRONG_ANSWER]
    broken = run(pool, "print(", mode="stdio", tests=tests)
    assert [test.status for test in broken.tests] == [Status.SYNTAX_ERROR] * 2


def test_calls(pool):
    tests = [
        CallTest(args=[[3, 1, 2]], expected=[1, 2, 3]),
        CallTest(args=[[]], expected=[]),
        CallTest(args=[["b", "a"]], kwargs={"reverse": True}, expected=["b", "a"]),
    ]
    right = "def sort(items, reverse=False):\n    return sorted(items, reverse=reverse)"
    assert run(pool, right, mode="call", entry="sort", tests=tests).status is Status.OK
    method = (
        "class Solution:\n    def sort(self, items, reverse=False):\n"
        "        return sorted(items, reverse=reverse)"
    )
    assert run(pool, method, mode="call", entry="Solution.sort", tests=tests).status is Status.OK
    raises = "def sort(items, reverse=False):\n    return sorted(items) if items else 1 / 0"
    result = run(pool, raises, mode="call", entry="sort", tests=tests)
    assert [test.status for test in result.tests] == [
        Status.OK,
        Status.RUNTIME_ERROR,
        Status.WRONG_ANSWER,
    ]
    assert result.tests[1].detail == "ZeroDivisionError: division by zero"


CHECK = """
def check(candidate):
    items = [3, 1, 2]
    assert candidate(items) is None
    assert items == [1, 2, 3]
    nested = {"a": [2, 1]}
    try:
        candidate(nested)
        raise RuntimeError
    except AttributeError:
        pass
    assert helper(1) == 2
check(sort)
"""


def test_asserts_see_changed_arguments_and_exceptions(pool):
    code = "def sort(items):\n    items.sort()\ndef helper(x):\n    return x + 1\n"
    fields = {"mode": "tests", "entry": "sort", "test_code": CHECK}
    assert run(pool, code, **fields).status is Status.OK
    wrong = run(pool, code.replace("items.sort()", "items.reverse() if 1 else 0"), **fields)
    assert wrong.status is Status.WRONG_ANSWER
    assert wrong.tests[0].detail == "AssertionError in line 5 of the tests"


def test_helpers_of_the_task_are_not_those_of_the_program(pool):
    """Else a program would choose the measure that it is measured with."""
    setup = "def close(a, b):\n    return abs(a - b) < 0.1\n"
    fields = {
        "mode": "tests",
        "entry": "root",
        "test_setup": setup,
        "test_code": "assert close(root(4), 2)",
    }
    cheat = "def close(a, b):\n    return True\ndef root(x):\n    return 0\n"
    assert run(pool, cheat, **fields).status is Status.WRONG_ANSWER
    assert run(pool, "def root(x):\n    return x ** 0.5", **fields).status is Status.OK


def test_a_program_that_raises_in_the_asserts(pool):
    fields = {"mode": "tests", "entry": "f", "test_code": "assert f() == 1"}
    assert run(pool, "def f():\n    return [][0]", **fields).status is Status.RUNTIME_ERROR
    assert run(pool, "def f(", **fields).status is Status.SYNTAX_ERROR
    assert run(pool, "f = bytearray(8 << 30)", **fields).status is Status.MEMORY_LIMIT
    assert run(pool, "def f():\n    return object()", **fields).status is Status.BAD_RESULT
    assert run(pool, "def g():\n    return 1", **fields).status is Status.RUNTIME_ERROR


@pytest.mark.slow
def test_a_program_that_leaves_its_tests_is_waited_for(pool):
    code = "import os, time\ndef f():\n    os.closerange(3, 64)\n    time.sleep(1)\n    os._exit(7)"
    result = run(pool, code, mode="tests", entry="f", test_code="assert f() == 1")
    assert (result.status, result.exit_code) == (Status.RUNTIME_ERROR, 7)


def test_asserts_may_use_modules_that_only_the_program_imports(pool):
    fields = {"mode": "tests", "entry": "f"}
    code = "import sys\ndef f(x):\n    return sys.getsizeof(x)\ndef copy(x):\n    return x + 1"
    test_code = "assert f(()) == sys.getsizeof(())\nassert copy(1) == 2"
    assert run(pool, code, test_code=test_code, **fields).status is Status.OK


def test_a_zygote_that_dies_in_the_middle_of_a_job_is_replaced(own_pool):
    future = own_pool.submit(
        SandboxJob(code="import time\ntime.sleep(2)\nprint('done')", limits=LONG)
    )
    wait_until(lambda: running_programs(own_pool))
    (first,) = own_pool.process_ids()
    os.kill(first, signal.SIGKILL)
    result = future.result(END)
    assert (result.status, result.attempt, result.stdout) == (Status.OK, 2, "done\n")
    assert own_pool.process_ids() != [first]


def test_a_job_whose_sandbox_dies_twice_is_a_failure_of_ours(own_pool):
    future = own_pool.submit(SandboxJob(id="x", code=SLEEP, limits=LONG))
    for _ in range(2):
        wait_until(lambda: running_programs(own_pool))
        (zygote,) = own_pool.process_ids()
        (program,) = running_programs(own_pool)
        os.kill(zygote, signal.SIGKILL)
        wait_until(lambda program=program: is_gone(program.pid))
    result = future.result(END)
    assert (result.id, result.status, result.attempt) == ("x", Status.SANDBOX_ERROR, 2)
    assert result.reason
    assert run(own_pool, "print(1)").status is Status.OK


@pytest.mark.slow
def test_a_zygote_that_is_stuck_is_replaced(own_pool, monkeypatch):
    from laurel.extensions.code.sandbox import zygote_process

    assert run(own_pool, "print(1)").status is Status.OK
    (zygote,) = own_pool.process_ids()
    os.kill(zygote, signal.SIGSTOP)
    monkeypatch.setattr(zygote_process, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(zygote_process, "END_SECONDS", 0.1)
    future = own_pool.submit(SandboxJob(code="print(2)", limits=Limits(cpu_s=1, wall_s=1)))
    wait_until(lambda: is_gone(zygote))
    monkeypatch.undo()
    assert future.result(END).attempt == 2
    assert run(own_pool, "print(3)").stdout == "3\n"


def test_a_monitor_that_dies_takes_its_program_along(own_pool):
    future = own_pool.submit(SandboxJob(code=SLEEP, limits=LONG))
    for _ in range(2):
        wait_until(lambda: running_programs(own_pool))
        (program,) = running_programs(own_pool)
        program.parent().kill()
        wait_until(lambda program=program: is_gone(program.pid))
    assert future.result(END).status is Status.SANDBOX_ERROR


def test_nothing_outlives_the_process_that_asked(tier):
    code = (
        "import sys\n"
        "from laurel.extensions.code.sandbox.jobs import Limits, SandboxJob\n"
        "from laurel.extensions.code.sandbox.pool import SandboxPool\n"
        "from laurel.extensions.code.sandbox.tiers import Tier\n"
        f"pool = SandboxPool(tier=Tier({tier.value!r}), num_workers=1)\n"
        f"pool.run([SandboxJob(code={SLEEP!r}, limits=Limits(wall_s=600, cpu_s=600))])\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    processes = []

    def started():
        processes[:] = below(parent.pid)
        with suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
            return any(one.name() == RUNNING for one in processes)

    wait_until(started)
    parent.kill()
    parent.wait()
    for process in processes:
        wait_until(lambda process=process: is_gone(process.pid))


def test_closing_ends_what_runs_and_what_waits(tier):
    pool = SandboxPool(tier=tier, num_workers=1)
    futures = [pool.submit(SandboxJob(id=str(n), code=SLEEP, limits=LONG)) for n in range(3)]
    wait_until(lambda: running_programs(pool))
    (program,) = running_programs(pool)
    pool.close()
    pool.close()
    results = [future.result(END) for future in futures]
    assert {result.status for result in results} == {Status.SANDBOX_ERROR}
    wait_until(lambda: is_gone(program.pid))  # the kernel ends it after its keeper
    assert pool.run([SandboxJob(code="")])[0].reason == "the sandbox has been shut down"


@pytest.mark.slow
def test_a_pool_that_nobody_holds_ends(tier):
    pool = SandboxPool(tier=tier, num_workers=1)
    pool.run([SandboxJob(code="")])
    (zygote,) = pool.process_ids()
    gone = weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    wait_until(lambda: is_gone(zygote))


@pytest.mark.slow
def test_jobs_that_are_late_are_not_begun(own_pool):
    busy = own_pool.submit(SandboxJob(code="import time\ntime.sleep(4)"))
    wait_until(lambda: running_programs(own_pool))
    late = own_pool.run([SandboxJob(id="late", code="")], timeout_s=0.1)
    assert [(one.status, one.id) for one in late] == [(Status.SANDBOX_ERROR, "late")]
    assert "in time" in late[0].reason
    assert busy.result(END).status is Status.OK


SLEEPS = "import time\ntime.sleep(60)"
PRINTS = "print(input())"


def stdio_job(code, count, **fields):
    tests = [StdioTest(stdin=f"{i}\n", stdout=f"{i}\n") for i in range(count)]
    return SandboxJob(code=code, mode="stdio", tests=tests, **fields)


@pytest.mark.slow
def test_slow_programs_cost_themselves_and_never_their_neighbours(tier):
    """The case that was seen: six right programs became failures behind two sleepers."""
    jobs = [stdio_job(SLEEPS, 10, id=f"slow {i}") for i in range(2)]
    jobs += [stdio_job(PRINTS, 10, id=f"right {i}") for i in range(6)]
    with SandboxPool(tier=tier, num_workers=2) as pool:
        pool.run([stdio_job(PRINTS, 1)])  # zygotes are there
        began = time.monotonic()
        found = {result.id: result for result in pool.run(jobs, timeout_s=20.0)}
        assert time.monotonic() - began < END  # the bound tells a hang, not a speed
    for i in range(6):
        assert found[f"right {i}"].status is Status.OK
        assert len(found[f"right {i}"].tests) == 10
    for i in range(2):  # they were not let to their own limit, so that there is no verdict on them
        assert found[f"slow {i}"].status is Status.SANDBOX_ERROR
        assert "deadline" in found[f"slow {i}"].reason or "turn" in found[f"slow {i}"].reason


@pytest.mark.slow
def test_a_program_that_had_its_share_is_tried_again_with_all_the_time_there_is(tier):
    slow = SandboxJob(code="import time\ntime.sleep(2)\nprint(1)", id="slow")
    jobs = [slow, *(SandboxJob(code="print(2)", id=str(i)) for i in range(40))]
    with SandboxPool(tier=tier, num_workers=1) as pool:
        found = {result.id: result for result in pool.run(jobs, timeout_s=60.0)}
    assert {result.status for result in found.values()} == {Status.OK}
    assert found["slow"].stdout == "1\n"


@pytest.mark.slow_parameters("on nodes")
def test_after_a_failure_nothing_is_run_where_only_all_tests_count(pool):
    limits = Limits(wall_s=2.0)
    (result,) = pool.run([stdio_job(SLEEPS, 6, limits=limits, stop_at_failure=True)])
    assert result.status is Status.TIMEOUT_WALL
    assert [one.status for one in result.tests] == [Status.TIMEOUT_WALL, *[Status.NOT_RUN] * 5]
    assert result.wall_s < 6 * limits.wall_s, "each had its time"
    (result,) = pool.run([stdio_job("print(7)", 3, stop_at_failure=False)])
    assert [one.status for one in result.tests] == [Status.WRONG_ANSWER] * 3


@pytest.mark.slow_parameters("on nodes")
def test_all_tests_together_have_a_time_of_their_own(pool):
    limits = Limits(wall_s=2.0)
    (result,) = pool.run([stdio_job(SLEEPS, 10, limits=limits, total_s=3.0)])
    assert {one.status for one in result.tests} == {Status.TIMEOUT_WALL}
    assert len(result.tests) == 10
    assert result.wall_s < 10 * limits.wall_s, "each had its time"


@pytest.mark.slow_parameters("on nodes")
def test_asserts_that_are_run_one_by_one_have_the_same_time_together(pool):
    """And the reply shows what the first that failed said."""
    code = "import os, time\ndef f(n):\n    os.write(2, b'asked %d' % n)\n    time.sleep(n)"
    job = SandboxJob(
        code=code,
        mode="tests",
        entry="f",
        total_s=4.0,
        limits=Limits(wall_s=3.0),
        tests=["f(0)", "f(100)", "f(200)", *["f(300)"] * 7],
    )
    (result,) = pool.run([job])
    assert [one.status for one in result.tests] == [Status.OK, *[Status.TIMEOUT_WALL] * 9]
    assert result.tests[-1].detail == "the time of all tests together was spent"
    assert result.stderr == "asked 100"
    with pytest.raises(ValueError, match="tests that are code"):
        SandboxJob(code="", mode="tests", entry="f", tests=["", "f(1)"])


def test_whoever_fills_the_backlog_waits(tier):
    with SandboxPool(tier=tier, num_workers=1, backlog=1) as pool:
        first = pool.submit(SandboxJob(code=SLEEP, limits=LONG))
        wait_until(lambda: running_programs(pool))
        second = pool.submit(SandboxJob(code="", limits=LONG))
        soon = time.monotonic() + 0.2
        refused = pool.submit(SandboxJob(code=""), deadline=soon).result(0)
        assert refused.status is Status.SANDBOX_ERROR
        assert not first.done()
        assert not second.done()


def test_a_job_never_runs_in_less_than_its_pool_was_told(tier, monkeypatch):
    """A machine may lose a layer after it was looked at."""
    from laurel.extensions.code.sandbox import pool as pool_module

    class Poorer(pool_module.ZygoteProcess):
        def __init__(self, layers, **options):
            super().__init__(frozenset(), **options)

    monkeypatch.setattr(pool_module, "ZygoteProcess", Poorer)
    with SandboxPool(tier=tier, num_workers=1) as pool:
        result = run(pool, "print(1)")
    assert result.status is Status.SANDBOX_ERROR
    assert "lost a layer" in result.reason


@pytest.mark.slow
def test_without_layers_jobs_still_end():
    with SandboxPool(tier=Tier.LIMITS_ONLY, num_workers=1) as unsafe:
        spin = run(unsafe, "while True: pass", limits=Limits(cpu_s=1, wall_s=END))
        assert (spin.status, spin.tier) == (Status.TIMEOUT_CPU, "0")
        left = run(
            unsafe,
            "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)\n"
            "print('done')",
        )
        assert left.status is Status.OK
        (zygote,) = unsafe.process_ids()
        wait_until(lambda: not busy(zygote))


def test_workers_fit_into_memory(monkeypatch):
    from laurel.extensions.code.sandbox import pool as pool_module

    monkeypatch.setattr(pool_module, "available_memory", lambda: 10_000 << 20)
    assert affordable_workers(4, 500) == 4
    assert affordable_workers(100, 500) == 7
    assert affordable_workers(100, 50_000) == 1
    monkeypatch.setattr(pool_module, "available_memory", lambda: None)
    assert affordable_workers(100, 500) == 100
