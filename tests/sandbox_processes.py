"""The isolation of programs here, and the processes of a pool of sandboxes, from outside."""

import contextlib
import time

import psutil

from laurel.extensions.code.sandbox.detection import detect
from laurel.extensions.code.sandbox.inside.monitor import ARMED, RUNNING

END = 120.0
"""Seconds in which everything ends even on a machine that is busy with other things."""


def isolation(without=frozenset()):
    """What this machine has. A layer that the kernel has and that fails is a fault of ours.

    Tests of a layer that is not there are skipped, and so would be those of one that we broke.
    """
    found = detect(without=without)
    failed = [why for why in found.reasons.values() if why.startswith("it did not ")]
    assert not failed, found.sentence()
    return found


def wait_until(condition):
    end = time.monotonic() + END
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not happen")


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def named(pid):
    """Processes below one, however deep, each with its name; those that just end are left out."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for one in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append((one, one.name()))
    return found


def below(pid, *names):
    """Processes below one; of some names only."""
    return [one for one, name in named(pid) if not names or name in names]


def running_programs(pool):
    """Processes below the zygotes that run a program."""
    return [one for pid in pool.process_ids() for one in below(pid, RUNNING)]


def is_idle(pid):
    """Whether a zygote has nothing but two monitors, each with its program, that wait for jobs."""
    return [name for _, name in named(pid)] == [ARMED] * 4


def busy(pid):
    """Processes of jobs below a zygote, not those that wait for one."""
    return [one for one, name in named(pid) if name != ARMED]
