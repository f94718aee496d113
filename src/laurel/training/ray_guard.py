"""Runs a process on Ray under a parent, because Ray silently ends one that loses the cluster."""

from __future__ import annotations

import atexit
import ctypes
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress

from laurel.errors import WorkerError
from laurel.training import stopping

LOST = (
    "error: this run lost its Ray cluster, and Ray ended it: the head of the cluster, or Ray's "
    "process on this node (raylet), is gone or cannot be reached. Look at `ray status`, then run "
    "the same command: it goes on from its newest checkpoint"
)
_RAYS_EXIT_CODE = 1
# The seconds in which a signal, as from a terminal or Slurm, may reach the child directly.
_PASSING_ON = 0.5
_PR_SET_PDEATHSIG = 1


def guard() -> None:
    """Fork, and continue in the child; the parent waits, and exits as the child does.

    If a process loses its raylet, or its connection to the cluster for a minute, Ray's core ends it
    by `_exit(1)` at any point, without an exception or a handler. Only another process can report
    what happened, with a suitable exit code.

    Returns:
        Only in the child, which dies with the parent. If no child can be forked, this does nothing.
    """
    if sys.platform != "linux" or threading.active_count() > 1:
        return
    heard = stopping.count_signals()
    reads, writes = os.pipe()
    parent = os.getpid()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    child = os.fork()
    if child:
        os.close(writes)
        _end_like(child, reads, heard)
    os.close(reads)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call
        os._exit(WorkerError.LOST_EXIT_CODE)
    atexit.register(_say_goodbye, writes, os.getpid())


def _say_goodbye(writes: int, process: int) -> None:
    # This runs only when Python itself exits, whatever the exit code is.
    if os.getpid() == process:  # and not in a process that was forked from it
        with suppress(OSError):
            os.write(writes, b".")


def _end_like(child: int, reads: int, heard: stopping.SignalCount) -> None:
    # Signals that did not reach the child are passed on to it.
    passed_on = {*stopping.SIGNALS, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, {*passed_on, signal.SIGCHLD})
    received, due = 0, list[tuple[float, int, int]]()
    while True:
        timeout = 1.0 if not due else max(0.0, due[0][0] - time.monotonic())
        info = signal.sigtimedwait({*passed_on, signal.SIGCHLD}, timeout)
        if info is not None and info.si_signo in passed_on:
            received += 1
            due.append((time.monotonic() + _PASSING_ON, received, info.si_signo))
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        while due and due[0][0] <= time.monotonic():
            _, number_of_it, number = due.pop(0)
            if heard.count < number_of_it:
                with suppress(ProcessLookupError):
                    os.kill(child, number)
    is_orderly = bool(select.select([reads], [], [], 0)[0]) and os.read(reads, 1) == b"."
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with suppress(OSError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    code = os.waitstatus_to_exitcode(status)
    if code == _RAYS_EXIT_CODE and not is_orderly:
        print(LOST, file=sys.stderr, flush=True)
        code = WorkerError.LOST_EXIT_CODE
    os._exit(code if code >= 0 else 128 - code)
