"""The worker's end of a benchmark: JSON lines in and out, and what a piece of work cost.

Only the standard library, because it runs under the interpreter of every program compared. All
workers are measured by this same code.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

MIB = 1024 * 1024
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or the meter would not see what the engine costs
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Set before vLLM is imported by a worker that is measured."""


class Channel:
    """Commands on the standard input, answers on the standard output.

    Whatever the library prints goes to the standard error, so it cannot come between the lines.
    """

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def say(self, **answer: Any) -> None:
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def next_command(self) -> dict[str, Any]:
        """The next command; `stop` when the driver is gone."""
        line = sys.stdin.readline()
        return json.loads(line) if line else {"do": "stop"}


class Meter:
    """Cost of the work between `start` and `read`."""

    def start(self) -> None:
        self._usage = resource.getrusage(resource.RUSAGE_SELF)
        self._started = time.perf_counter()

    def read(self) -> dict[str, float]:
        """Seconds by the clock, processor seconds, page faults; and the memory peak so far."""
        seconds = time.perf_counter() - self._started
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "seconds": seconds,
            "user_seconds": usage.ru_utime - self._usage.ru_utime,
            "system_seconds": usage.ru_stime - self._usage.ru_stime,
            "page_faults": usage.ru_minflt - self._usage.ru_minflt,
            "peak_mib": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / MIB,
        }


def serve_steps(channel: Channel, step: Callable[[], None]) -> None:
    """Answer `{"do": "steps", "count": n}` with the cost of n steps, until `stop`."""
    meter = Meter()
    while (command := channel.next_command())["do"] == "steps":
        meter.start()
        for _ in range(command["count"]):
            step()
        channel.say(**meter.read())
