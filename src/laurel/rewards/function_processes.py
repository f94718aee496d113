"""Processes that run a function that scores; each can be killed in the middle of a call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from laurel.config.scorers import FunctionConfig
from laurel.errors import ConfigError, EnvironmentFailedError
from laurel.rewards.remote.replica import failed
from laurel.rewards.user_function import late
from laurel.types import Score

START_SECONDS = 120.0
"""Limit for a process to be ready: the function may import a large library."""
_AT_ONCE = 1 << 16


class FunctionProcesses:
    """Runs calls side by side. Processes start with the first call, or with `start`.

    A process that is killed takes with it whatever the function has started. They all end with
    `close`, and soon after this process, however that ends.
    """

    def __init__(self, config: FunctionConfig, *, num_workers: int, where: str) -> None:
        """Start nothing yet.

        Args:
            config: The function; its timeout is that of one call.
            num_workers: Processes.
            where: The section, for messages.
        """
        self._config = config
        self._where = where
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._living: dict[int, _Process] = {}
        self._closed = False
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="laurel-function")

    async def call(self, arguments: Mapping[str, Any], *, count: int) -> tuple[Score, ...]:
        """The verdicts of one call on so many completions."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, arguments, count)

    def start(self) -> None:
        """Start a process, to see whether that can be done.

        Raises:
            ConfigError: The function cannot be found there.
        """
        self._threads.submit(self._process).result()

    def process_ids(self) -> list[int]:
        """The processes alive now."""
        with self._lock:
            return list(self._living)

    def close(self) -> None:
        """Kill the processes; calls under way fail. Idempotent."""
        with self._lock:
            self._closed = True
            living = list(self._living.values())
        for process in living:
            self._end(process)
        self._threads.shutdown(cancel_futures=True)

    def _call(self, arguments: Mapping[str, Any], count: int) -> tuple[Score, ...]:
        """In a thread of the pool, which has at most one process at a time."""
        limit = self._config.timeout
        try:
            message = json.dumps({"arguments": dict(arguments), "count": count})
        except (TypeError, ValueError) as error:
            reason = f"error: what the function is given cannot go to another process ({error})"
            return (failed(f"{reason}; set num_workers=0"),) * count
        process = self._process()
        try:
            reply = process.ask(message, time.monotonic() + limit)
        except TimeoutError:
            self._end(process)
            return (late(limit),) * count
        except OSError:
            self._end(process)
            if self._closed:
                raise EnvironmentFailedError("the scorer was closed meanwhile") from None
            return (failed("error: the process died while it ran the function"),) * count
        return tuple(Score(**{**one, "values_K": tuple(one["values_K"])}) for one in reply["found"])

    def _process(self) -> _Process:
        process: _Process | None = getattr(self._mine, "process", None)
        # By itself and not by its id, which another process may have by now.
        if process is not None and self._living.get(process.pid) is process:
            return process
        process = _Process()
        with self._lock:
            if self._closed:
                process.kill()
                raise EnvironmentFailedError("the scorer was closed")
            self._living[process.pid] = process
        self._mine.process = process
        config = {**self._config.model_dump(mode="json"), "where": self._where}
        try:
            said = process.ask(json.dumps(config), time.monotonic() + START_SECONDS)
        except OSError as error:
            self._end(process)
            raise EnvironmentFailedError(
                f"{self._where}: the process for the function does not start ({error})"
            ) from error
        if said["refused"] is not None:
            self._end(process)
            raise ConfigError(said["refused"])
        return process

    def _end(self, process: _Process) -> None:
        with self._lock:
            if self._living.get(process.pid) is not process:
                return
            del self._living[process.pid]
        process.kill()


class _Process:
    """One process, seen from here."""

    def __init__(self) -> None:
        self._link, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from laurel.rewards.function_worker import main\n"
            f"main({there.fileno()}, {os.getpid()})"
        )
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # so that all it starts can be killed with it
            )
        self.pid = self._process.pid

    def ask(self, message: str, deadline: float) -> dict[str, Any]:
        """The reply; TimeoutError where it is late, OSError where the process is gone."""
        self._link.settimeout(max(deadline - time.monotonic(), 1e-3))
        self._link.sendall(message.encode() + b"\n")
        received = bytearray()
        while not received.endswith(b"\n"):
            self._link.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._link.recv(_AT_ONCE)
            if not part:
                raise ConnectionResetError("the process is gone")
            received += part
        reply: dict[str, Any] = json.loads(received)
        return reply

    def kill(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._link.close()
