"""The process that checking processes are forked from, and what runs in them.

It has imported math-verify (over a second) before the first is asked for, so that another one takes
milliseconds. It is a program of its own, not a fork of the trainer: it holds no model, no thread
and no secret. It ends when the trainer does, however that ends, and its workers end with it::

    trainer ==control socket==> zygote --fork--> worker
       \\============== a socket for each worker ===/
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import warnings

from laurel.environments.math_answers.messages import receive, send
from laurel.environments.math_answers.verdicts import Candidate, Checked

MEMORY_LIMIT = 2 << 30
"""Address space of a worker, in bytes."""
_LOOK_FOR_PARENT_SECONDS = 1.0
_LONGEST_REQUEST = 1_000
_PR_SET_PDEATHSIG = 1


def main(control_fd: int) -> None:
    """Serve the trainer at the other end of the socket until it is gone."""
    # A fork of the trainer may hold its end of the socket open, so that is not all we look at.
    trainer = os.getppid()
    control = socket.socket(fileno=control_fd)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    from laurel.environments.math_answers.comparison import failed_self_test

    send(control, {"failed": failed_self_test()})
    with open(os.devnull, "wb") as nowhere:  # what a parser says of each bad answer
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
    gc.collect()
    gc.freeze()
    workers: set[int] = set()
    try:
        while os.getppid() == trainer:
            if not select.select([control], [], [], _LOOK_FOR_PARENT_SECONDS)[0]:
                continue
            message, descriptors, _, _ = socket.recv_fds(control, _LONGEST_REQUEST, 1)
            if not message:
                return
            request = json.loads(message)
            if request["do"] == "start":
                pid = _start_worker(control, descriptors[0])
                workers.add(pid)
                send(control, {"pid": pid})
            else:
                _end_worker(request["pid"], workers)
                send(control, {})
    finally:
        for pid in list(workers):
            _end_worker(pid, workers)


def _start_worker(control: socket.socket, descriptor: int) -> int:
    zygote = os.getpid()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            control.close()
            _confine(zygote)
            _work(socket.socket(fileno=descriptor))
            status = 0
        finally:
            os._exit(status)
    os.close(descriptor)
    return pid


def _end_worker(pid: int, workers: set[int]) -> None:
    """Kill a worker and bury it. Until then its number is not given to another process, so nobody
    else can be hit."""
    if pid in workers:
        workers.discard(pid)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _confine(zygote: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            os._exit(1)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _work(link: socket.socket) -> None:
    """Answer one question after the other."""
    from laurel.environments.math_answers.comparison import compare, failed_self_test

    send(link, {"failed": failed_self_test()})
    while True:
        item = receive(link)
        candidate = Candidate(text=item["text"], boxed=item["boxed"])
        forbid = item["forbid_unevaluated"]
        try:
            checked = compare(item["gold"], candidate, forbid_unevaluated=forbid)
        except MemoryError:
            checked = Checked(verdict="timeout", answer=item["text"] if item["boxed"] else None)
        except Exception as error:
            checked = Checked(verdict="error", reason=f"{type(error).__name__}: {error}"[:500])
        swollen = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MEMORY_LIMIT // 2 // 1024
        send(
            link,
            {
                "verdict": checked.verdict,
                "answer": checked.answer,
                "reason": checked.reason,
                "retire": swollen,
            },
        )
