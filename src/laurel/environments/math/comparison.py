"""The call of math-verify. The only file that imports it; runs in processes that can be killed.

Its own timeouts are switched off: they are alarms, which cannot interrupt a long computation in C
and would take the alarm of whoever else uses one. The process that asked owns the clock.
"""

from __future__ import annotations

import ctypes
import functools
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
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from laurel.environments.math.answers import Candidate, Checked, is_unevaluated, solved_as_interval
from laurel.environments.math.pool import receive_message, send_message

SELF_TEST: tuple[tuple[str, str, bool], ...] = (
    ("4", "4", True),
    ("4", "5", False),
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac{1}{2}", r"\frac{2}{3}", False),
    (r"2\sqrt{3}", r"\sqrt{12}", True),
    (r"\{1,2\}", r"\{2,1\}", True),
    ("(1,2)", "(2,1)", False),
    ("(x+1)^2", "x^2+2x+1", True),
    (r"(-\infty,3]", r"(-\infty,3)", False),
    ("5", "x=5", True),
    (r"(-\infty,3)", "x<3", True),
    (r"(-\infty,3)", r"x\le 3", False),
    ("18", "(16-3-4)*2", False),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}", False),
    (r"\text{Evelyn}", r"\text{Evelyn}", True),
)
"""Known answer, given answer, whether they are the same. A checker that fails one is not used: one
that always says no is the worst failure there is, for nobody sees it."""


def answers_match(gold: str, candidate: Candidate, *, forbid_unevaluated: bool) -> Checked:
    """Whether math-verify takes the candidate for the known answer. May take for ever."""
    known = _known_answer(gold)
    if not known:
        return Checked(verdict="error", reason=f"the known answer {gold!r} cannot be read")
    text = rf"\boxed{{{candidate.text}}}" if candidate.boxed else candidate.text
    given = _parsed(text, (ExprExtractionConfig(), LatexExtractionConfig()))
    if not given:
        return Checked(verdict="unparseable")
    written = next((one for one in reversed(given) if isinstance(one, str)), candidate.text)
    answer = candidate.text if candidate.boxed else written
    if forbid_unevaluated and is_unevaluated(answer) and not is_unevaluated(gold):
        return Checked(verdict="incorrect", answer=answer)
    same = verify(list(known), given, timeout_seconds=None)
    if not same and (interval := solved_as_interval(answer)) is not None:
        if forbid_unevaluated and is_unevaluated(interval) and not is_unevaluated(gold):
            return Checked(verdict="incorrect", answer=answer)
        said = _parsed(rf"\boxed{{{interval}}}", (LatexExtractionConfig(),))
        same = verify(list(known), said, timeout_seconds=None)
    return Checked(verdict="correct" if same else "incorrect", answer=answer)


@functools.lru_cache(maxsize=512)
def _known_answer(gold: str) -> tuple[Any, ...]:
    return tuple(_parsed(rf"\boxed{{{gold}}}", (LatexExtractionConfig(),)))


def _parsed(text: str, extraction: tuple[Any, ...]) -> list[Any]:
    return list(parse(text, extraction, parsing_timeout=0))  # 0: none


def failed_self_test() -> list[str]:
    """The known pairs that do not come out as they must."""
    failed = []
    for gold, text, expected in SELF_TEST:
        checked = answers_match(gold, Candidate(text=text), forbid_unevaluated=True)
        if checked.verdict != ("correct" if expected else "incorrect"):
            failed.append(f"{text} for {gold}: {checked.verdict}")
    return failed


# --------------------------------------------------------------------------------------------------
# The process that checking processes are forked from, and what runs in them.
#
# It has imported math-verify (over a second) before the first is asked for, so that another one
# takes
# milliseconds. It is a program of its own, not a fork of the trainer: it holds no model, no thread
# and no secret. It ends when the trainer does, however that ends, and its workers end with it::
#
#     trainer ==control socket==> zygote --fork--> worker
#        \============== a socket for each worker ===/

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

    send_message(control, {"failed": failed_self_test()})
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
                send_message(control, {"pid": pid})
            else:
                _end_worker(request["pid"], workers)
                send_message(control, {})
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

    send_message(link, {"failed": failed_self_test()})
    while True:
        item = receive_message(link)
        candidate = Candidate(text=item["text"], boxed=item["boxed"])
        forbid = item["forbid_unevaluated"]
        try:
            checked = answers_match(item["gold"], candidate, forbid_unevaluated=forbid)
        except MemoryError:
            checked = Checked(verdict="timeout", answer=item["text"] if item["boxed"] else None)
        except Exception as error:
            checked = Checked(verdict="error", reason=f"{type(error).__name__}: {error}"[:500])
        swollen = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MEMORY_LIMIT // 2 // 1024
        send_message(
            link,
            {
                "verdict": checked.verdict,
                "answer": checked.answer,
                "reason": checked.reason,
                "retire": swollen,
            },
        )
