"""Many programs of every kind, one after another and side by side: nothing is left of them.

LAUREL_SOAK_JOBS says how many; 150 by default, 10,000 before a release.
"""

import os
import random
import time
from pathlib import Path

import psutil
import pytest

from laurel.extensions.code.sandbox.control_group import chosen_place
from laurel.extensions.code.sandbox.detection import detect
from laurel.extensions.code.sandbox.jobs import CallTest, Limits, SandboxJob, Status
from laurel.extensions.code.sandbox.pool import SandboxPool
from sandbox_processes import below, is_gone, is_idle, wait_until

JOBS = int(os.environ.get("LAUREL_SOAK_JOBS", "150"))
LIMITS = Limits(cpu_s=1, wall_s=120, disk_mb=8, inodes=256)
SHORT = Limits(cpu_s=1, wall_s=0.3, disk_mb=8, inodes=256)
HOSTILE = {
    "forks": "import os\nwhile True: os.fork()",
    "threads": "from threading import Thread\nfrom time import sleep\n"
    "while True: Thread(target=sleep, args=(9,)).start()",
    "daemon": "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(1000)",
    "memory": "x = []\nwhile True: x.append(bytearray(1 << 24))",
    "flood": "while True: print('x' * 1000)",
    "errors": "import os\nwhile True: os.write(2, b'x' * 9999)",
    "disk": "i = 0\nwhile True:\n    open(str(i), 'wb').write(b'x' * (1 << 20))\n    i += 1",
    "inodes": "i = 0\nwhile True:\n    open(str(i), 'w').close()\n    i += 1",
    "deep": "import os\nfor _ in range(100):\n    os.mkdir('d')\n    os.chdir('d')",
    "kill": "import os\nos.kill(-1, 9)",
    "parent": "import os\nos.kill(os.getppid(), 9)",
    "suicide": "import os\nos.kill(os.getpid(), 9)",
    "crash": "import ctypes\nctypes.string_at(0)",
    "shared": "from multiprocessing import shared_memory as s\ns.SharedMemory('left', True, 4096)",
    "socket": "import socket\nsocket.create_connection(('127.0.0.1', 1), 1)",
    "exit": "import os\nos._exit(0)",
    "loop": "while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
}
ALLOWED_OK = {"daemon", "deep", "exit"}
"""What does no harm where it is done, if it can be done."""


def job(index, dice):
    """An honest job and its answer, or a hostile one."""
    a, b = dice.randrange(10**6), dice.randrange(10**6)
    kind = dice.randrange(8)
    if kind < 2:
        code = f"print({a} + {b})"
        return SandboxJob(id="script", code=code, limits=LIMITS), f"{a + b}\n"
    if kind == 2:
        code = "open('f', 'w').write(input())\nprint(open('f').read()[::-1])"
        return SandboxJob(id="file", code=code, stdin=str(a), limits=LIMITS), f"{a}"[::-1] + "\n"
    if kind == 3:
        right = dice.random() < 0.5
        tests = [CallTest(args=(a, b), expected=a + b)]
        code = f"def add(a, b):\n    return a + b + {int(not right)}"
        made = SandboxJob(
            id="call", code=code, mode="call", entry="add", tests=tests, limits=LIMITS
        )
        return made, Status.OK if right else Status.WRONG_ANSWER
    if kind == 4:
        right = dice.random() < 0.5
        code = f"def add(a, b):\n    return a + b + {int(not right)}"
        test_code = f"assert add({a}, {b}) == {a + b}"
        made = SandboxJob(
            id="tests", code=code, mode="tests", entry="add", test_code=test_code, limits=LIMITS
        )
        return made, Status.OK if right else Status.WRONG_ANSWER
    names = [name for name in HOSTILE if name != "loop" or index % 20 == 0]
    name = dice.choice(names)
    limits = SHORT if name == "sleep" else LIMITS
    return SandboxJob(id=name, code=HOSTILE[name], limits=limits), None


def fault_in(made, expected, result):
    """What is wrong with a result; empty where nothing is."""
    said = f"{made.id}: {result.status.value} {result.stdout[:99]!r} {result.stderr[-200:]!r}"
    if not result.status.is_verdict:
        # A program may end while it is made ready, at most; then it has no verdict.
        return f"{said} {result.reason}"
    if isinstance(expected, str):
        return "" if (result.status, result.stdout) == (Status.OK, expected) else said
    if expected is None:
        return said if result.status is Status.OK and made.id not in ALLOWED_OK else ""
    return "" if result.status is expected else said


def groups_of_this_process():
    place, _ = chosen_place("auto")
    for one in place.hierarchies if place else ():
        yield from one.folder.glob(f"laurel-{os.getpid()}-*")


def traces(scratch):
    """What programs could leave on this machine."""
    return {
        "shared memory": sorted(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else [],
        "files": sorted(os.listdir(scratch)),
        "control groups": sorted(map(str, groups_of_this_process())),
        "mounts": len(Path("/proc/self/mountinfo").read_text().splitlines()),
    }


@pytest.mark.slow
def test_nothing_is_left_of_many_programs(tmp_path):
    found = detect()
    if found.tier is None or "seccomp" not in found.tier.layers:
        pytest.skip(found.sentence())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = traces(scratch)
    dice = random.Random(20)
    started, faults, honest = time.monotonic(), [], 0
    place, _ = chosen_place("auto")
    with SandboxPool(tier=found.tier, num_workers=2, scratch=str(scratch), place=place) as pool:
        pool.run([SandboxJob(code="")] * 4)
        zygotes = pool.process_ids()
        for pid in zygotes:
            wait_until(lambda pid=pid: is_idle(pid))
        descriptors = [psutil.Process(pid).num_fds() for pid in zygotes]
        memory = [psutil.Process(pid).memory_info().rss for pid in zygotes]
        ours = psutil.Process().num_fds()
        for first in range(0, JOBS, 100):
            made = [job(index, dice) for index in range(first, min(first + 100, JOBS))]
            results = pool.run([one for one, _ in made])
            honest += sum(expected is not None for _, expected in made)
            faults += [
                fault
                for (one, expected), result in zip(made, results, strict=True)
                if (fault := fault_in(one, expected, result))
            ]
        assert faults == []
        assert pool.process_ids() == zygotes
        for pid in zygotes:
            wait_until(lambda pid=pid: is_idle(pid))
        assert [psutil.Process(pid).num_fds() for pid in zygotes] == descriptors
        # Fewer, where what tests before this one left in the process has been collected since.
        assert psutil.Process().num_fds() <= ours
        growth = [
            psutil.Process(pid).memory_info().rss - was
            for pid, was in zip(zygotes, memory, strict=True)
        ]
        assert max(growth) < 8 << 20
        processes = [one for pid in zygotes for one in below(pid)]
    for one in processes:
        wait_until(lambda one=one: is_gone(one.pid))
    assert honest > JOBS / 3
    after = traces(scratch)
    assert after["files"] == before["files"]
    assert after["mounts"] == before["mounts"]
    assert "left" not in after["shared memory"]
    seconds = time.monotonic() - started
    print(f"{JOBS} jobs, {honest} honest, {seconds:.0f} s, zygotes +{max(growth) >> 10} kB")
