"""A pool of processes: what an item can do to the process that has it, and to nobody else."""

import gc
import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe

import psutil
import pytest

from laurel.errors import ConfigError, EnvironmentFailedError
from laurel.workers.process_pool import ProcessDiedError, ProcessPool, ProcessPoolSpec
from sandbox_processes import END, is_gone, wait_until

WORK = """
import ctypes, os, struct, subprocess, sys, time
from laurel.errors import ConfigError

SECRET = os.environ.get("SOME_TOKEN")

def prepare(settings):
    if settings == "wrong":
        raise ConfigError("the key is wrong")
    if settings == "broken":
        raise ImportError("a wheel is missing")
    return opened if settings != "refuses" else refuse

def refuse():
    raise ConfigError("not in this process")

def opened():
    return lambda item: globals()[item[0]](*item[1:])

def where():
    return os.getpid(), os.getppid()

def secret():
    return SECRET

def hang():
    (lambda n: n ** n ** n)(9)  # holds the interpreter's lock

def leave():
    os._exit(3)

def crash():
    ctypes.string_at(0)

def swell(mb):
    return len(bytearray(mb << 20))

def forge(reply):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, struct.pack("!i", len(reply)) + reply.encode())
        except OSError:
            pass

def forks_and_leaves(path):
    if os.fork() == 0:
        with open(path, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(1000)
    while not os.path.exists(path) or not os.path.getsize(path):
        time.sleep(0.01)
    os._exit(3)

def raises():
    raise ValueError("nobody catches this")

def start_another(path):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    with open(path, "w") as file:
        file.write(str(child.pid))
    time.sleep(1000)
"""


def spec_of(*, num_workers=1, timeout_seconds=END, **given):
    return ProcessPoolSpec(
        name="the pool",
        prepare="work_of_the_test:prepare",
        num_workers=num_workers,
        timeout_seconds=timeout_seconds,
        **given,
    )


@pytest.fixture
def opened(tmp_path, monkeypatch):
    (tmp_path / "work_of_the_test.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    pools = []

    def make(**given):
        pools.append(ProcessPool(spec_of(**given)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def done(pool, *item):
    return pool.submit(item).result(END)


def test_items_are_done_side_by_side_in_processes_of_one_zygote(opened):
    pool = opened(num_workers=2)
    assert pool.process_ids() == []
    pool.start()
    zygote, first = pool.process_ids()
    assert done(pool, "where") == [first, zygote]
    futures = [pool.submit(["where"]) for _ in range(50)]
    assert {future.result(END)[1] for future in futures} == {zygote}
    assert 1 <= len(pool.process_ids()) - 1 <= 2


@pytest.mark.parametrize("item", ["leave", "crash", "raises"])
def test_a_process_that_dies_costs_its_item_alone(opened, item):
    pool = opened()
    futures = [pool.submit([name]) for name in ("where", item, "where", item, "where")]
    for future in futures[1::2]:
        with pytest.raises(ProcessDiedError, match="the pool: the process died"):
            future.result(END)
    assert len({future.result(END)[0] for future in futures[::2]}) == 3


def test_an_item_that_takes_too_long_is_ended_and_what_waits_is_done(opened):
    pool = opened(num_workers=2, timeout_seconds=3.0)
    futures = [pool.submit([name]) for name in ("hang", *["where"] * 8, "hang", "where")]
    for number in (0, 9):
        with pytest.raises(TimeoutError, match="more than 3 s"):
            futures.pop(number - (number > 0)).result(END)
    assert len([future.result(END) for future in futures]) == 9


def test_an_idle_process_that_is_killed_costs_no_item(opened):
    """Nor does a zygote: no item had been given to either."""
    pool = opened()
    for number in (1, 0):
        done(pool, "where")
        ids = pool.process_ids()
        os.kill(ids[number], signal.SIGKILL)
        wait_until(lambda ids=ids: is_gone(ids[1]))
        assert done(pool, "where")[0] not in ids


@pytest.mark.slow
def test_what_an_item_has_started_ends_with_it(opened, tmp_path):
    path = tmp_path / "pid"
    pool = opened(timeout_seconds=6.0)
    with pytest.raises(TimeoutError):
        done(pool, "start_another", str(path))
    wait_until(lambda: is_gone(int(path.read_text())))


def test_a_process_that_dies_is_missed_at_once_though_what_it_forked_lives(opened, tmp_path):
    path = tmp_path / "pid"
    pool = opened()
    with pytest.raises(ProcessDiedError):
        done(pool, "forks_and_leaves", str(path))
    wait_until(lambda: is_gone(int(path.read_text())))


def test_memory_is_limited_and_a_process_that_has_filled_half_is_replaced(opened):
    pool = opened(memory_limit=1 << 30)
    assert done(pool, "swell", 1) == 1 << 20
    first = done(pool, "where")
    assert done(pool, "where") == first
    assert done(pool, "swell", 600) == 600 << 20
    assert done(pool, "where") != first
    with pytest.raises(ProcessDiedError):
        done(pool, "swell", 2_000)


def test_a_process_is_replaced_after_its_share_of_items(opened):
    pool = opened(items_of_a_life=2)
    found = [done(pool, "where") for _ in range(6)]
    assert found[::2] == found[1::2]
    assert len({one[0] for one in found}) == 3


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        ('{"number": 1, "result": "forged", "is_full": false}', "forged"),
        ('{"number": 1, "result": "forged"}', None),
        ('{"number": 0, "result": "forged", "is_full": false}', None),
        ("[1]", None),
        ("no JSON", None),
        ("[" * 20_000, None),
    ],
)
def test_a_process_whose_item_writes_its_reply_lives_no_longer(opened, reply, result):
    pool = opened(items_of_a_life=1)
    pool.start()
    (_, first) = pool.process_ids()
    if result is None:
        with pytest.raises(ProcessDiedError):
            done(pool, "forge", reply)
    else:
        assert done(pool, "forge", reply) == result
    assert is_gone(first)
    assert done(pool, "where")[0] != first


def test_variables_are_those_that_are_given_and_settings_are_on_no_command_line(
    opened, monkeypatch
):
    monkeypatch.setenv("SOME_TOKEN", "secret")
    with_all, with_few = opened(settings="hidden"), opened(environment={"PATH": os.environ["PATH"]})
    assert done(with_all, "secret") == "secret"
    assert done(with_few, "secret") is None
    for pid in with_all.process_ids():
        assert "hidden" not in " ".join(psutil.Process(pid).cmdline())


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ("wrong", ConfigError, "^the key is wrong$"),
        ("refuses", ConfigError, "^not in this process$"),
        ("broken", EnvironmentFailedError, "^the pool does not start: ImportError: a wheel is"),
    ],
)
def test_what_cannot_be_ready_says_why_every_time(opened, settings, kind, said):
    pool = opened(settings=settings)
    for _ in range(2):
        with pytest.raises(kind, match=said):
            pool.start()
        with pytest.raises(kind, match=said):
            done(pool, "where")


def test_what_json_cannot_carry_is_refused_at_once(opened):
    with pytest.raises(TypeError):
        opened().submit([object()])


def test_closing_fails_what_runs_and_waits(opened):
    pool = opened(num_workers=2)
    futures = [pool.submit(["hang"]) for _ in range(4)]
    wait_until(lambda: len(pool.process_ids()) == 3)
    ids = pool.process_ids()
    pool.close()
    assert all(map(is_gone, ids))
    for future in futures:
        with pytest.raises(EnvironmentFailedError, match="the pool has been shut down"):
            future.result(END)
    with pytest.raises(EnvironmentFailedError, match="shut down"):
        pool.submit(["where"])


@pytest.mark.slow
def test_a_forgotten_pool_takes_its_processes_with_it(tmp_path, opened):
    pool = ProcessPool(spec_of())
    done(pool, "where")
    ids = pool.process_ids()
    del pool
    gc.collect()
    assert all(map(is_gone, ids))


def test_a_late_end_of_a_process_spares_another_one_of_the_same_number(opened):
    pool = opened()
    first = done(pool, "where")
    (process,) = pool._processes.idle
    earlier = process._replace(link=Pipe()[0])  # one that had this number before
    pool._processes.end(earlier)
    assert done(pool, "where") == first
    pool._processes.end(process)
    assert is_gone(process.pid)


PROGRAM = """
import sys, time
from laurel.workers.process_pool import ProcessPool, ProcessPoolSpec
spec = ProcessPoolSpec(
    name="the pool", prepare="work_of_the_test:prepare", num_workers=2, timeout_seconds=1000.0
)
pool = ProcessPool(spec)
pool.submit(["hang"])
pool.submit(["start_another", sys.argv[1]])
while not open(sys.argv[1]).read():
    time.sleep(0.05)
print(*pool.process_ids(), flush=True)
time.sleep(1000 * (sys.argv[2] == "stays"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stays", "ends"])
def test_nothing_is_left_of_a_program_that_is_killed_or_ends_in_the_middle_of_an_item(
    opened, tmp_path, how
):
    """Nor does it wait for the item; its main part has no guard."""
    path, program = tmp_path / "pid", tmp_path / "program.py"
    path.touch()
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), str(path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        ids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(ids) == 3
        if how == "stays":
            time.sleep(0.2)
            owner.kill()
        else:
            assert owner.wait(END) == 0
    for pid in (*ids, int(path.read_text())):
        wait_until(lambda pid=pid: is_gone(pid))
