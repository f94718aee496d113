"""Replicas of a reward model as processes of this machine: started, watched, started again.

They listen on free ports of loopback, with a key that only this process knows. They end with this
process, however it ends, because they read from a pipe that it holds.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import secrets
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from http.client import HTTPException
from types import TracebackType
from typing import Any

import laurel.errors
from laurel.errors import (
    BusyError,
    ConfigError,
    EngineError,
    LaurelError,
    Terms,
    UserError,
    spoken_in,
    terms_in_use,
)
from laurel.rewards.remote.foreign import LaurelDialect
from laurel.rewards.remote.http import HttpReplica
from laurel.rewards.remote.replica import ReplicaFault, ReplicaReply
from laurel.rewards.remote.router import Router, RouterOptions
from laurel.rewards.server.service import (
    ModelSettings,
    RewardService,
    ServedModel,
    open_served,
)
from laurel.rewards.spec import Say
from laurel.sandbox.limits import available_cores
from laurel.types import Group, Score

MOST_RESTARTS = 8
"""Of one replica that dies before it is ready, or ends by itself; then it stays away.

A ready one that a signal has ended is started again at once, however often: it has shown that it
can work, so whoever kills it is to blame. Where it is its work, as a lack of memory may be, a
completion that takes replicas down is found and left out by the router.
"""
_LONG_ENOUGH = 600.0
"""Seconds of life after which one that ended by itself begins to count anew."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
"""Seconds before one that counts is started again; the first time at once."""
_START_SECONDS = 1800.0
_SECONDS_TO_END = 40.0
_ADMIN_SECONDS = 60.0


class ReplicaProcesses:
    """Processes that score. It is a context manager that ends them.

    Example::

        with ReplicaProcesses(ModelSettings(model=directory), 2) as replicas:
            scorer = BlockingScorer(replicas.scorer)
    """

    def __init__(
        self,
        settings: ModelSettings,
        num_replicas: int,
        *,
        say: Say = lambda _: None,
        options: RouterOptions | None = None,
    ) -> None:
        """Start them, and wait until each has loaded its model and proven it.

        Args:
            settings: Of each. Without `cpu_threads` they share the cores.
            num_replicas: At least 1.
            say: Told what the first of them loads, and what dies. From any thread.
            options: Of the router.

        Raises:
            UserError: The model cannot be used.
            EngineError: One of them died while it started.
        """
        if num_replicas < 1:
            raise ConfigError(f"num_replicas={num_replicas}: at least one is needed")
        if settings.cpu_threads is None:
            settings = replace(settings, cpu_threads=max(1, available_cores() // num_replicas))
        options = options or RouterOptions()
        api_key = secrets.token_urlsafe(32)
        self._replicas = [
            _Process(index, settings, api_key, options, say) for index in range(num_replicas)
        ]
        try:
            deadline = time.monotonic() + _START_SECONDS
            for process in self._replicas:
                process.wait_until_ready(deadline)
        except BaseException:
            self.close()
            raise
        self.scorer = Router(self._replicas, options)
        """Of one event loop."""
        for process in self._replicas:
            process.on_ready = partial(self.scorer.came_back, process.name)

    @property
    def model(self) -> str:
        """What they call it."""
        return self._replicas[0].model

    @property
    def version(self) -> str:
        """Of the model."""
        return self._replicas[0].version

    @property
    def pids(self) -> list[int]:
        """Of the processes that live."""
        return [replica.pid for replica in self._replicas if replica.pid]

    @property
    def num_ready(self) -> int:
        """How many can be asked: they live, and have loaded the model."""
        return sum(replica.is_ready for replica in self._replicas)

    @property
    def are_lost(self) -> bool:
        """Whether all of them have died too often."""
        return all(replica.is_lost for replica in self._replicas)

    def sleep(self) -> None:
        """Have them finish what they have, and give the memory of devices back.

        Raises:
            EngineError: One of them could not; those that did not sleep still score.
        """
        self._tell_all("sleep")

    def wake(self) -> None:
        """Have them score again; see `sleep`."""
        self._tell_all("wake")

    def _tell_all(self, command: str) -> None:
        failures: list[str] = []

        def tell(replica: _Process) -> None:
            try:
                replica.tell(command)
            except (OSError, HTTPException) as error:
                failures.append(f"{replica.name}: {error}")

        threads = [threading.Thread(target=tell, args=(one,)) for one in self._replicas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise EngineError(f"{command} of the reward model failed: {'; '.join(failures)}")

    def close(self) -> None:
        """Have them finish what they have, and end. Idempotent."""
        for replica in self._replicas:
            replica.begin_to_end()
        for replica in self._replicas:
            replica.end()

    def __enter__(self) -> ReplicaProcesses:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class _Process:
    """One replica, whichever process it is at the moment; for the router a `Replica`."""

    max_completions = None

    def __init__(
        self, index: int, settings: ModelSettings, api_key: str, options: RouterOptions, say: Say
    ) -> None:
        self.name = f"replica {index}"
        self.model = self.version = ""
        self.is_lost = False
        self.on_ready: Callable[[], None] = lambda: None
        """Called where it can be asked again, in the thread that watches it."""
        self._index = index
        self._order = {
            "settings": asdict(settings),
            "terms": [asdict(one) for one in terms_in_use()],
            "api_key": api_key,
            "index": index,
            "request_seconds": options.attempt_timeout,
        }
        self._api_key = api_key
        self._connections = options.window + 2
        self._say = say
        self._error: Exception | None = None
        self._process: subprocess.Popen[str] | None = None
        self._http: HttpReplica | None = None
        self._url = ""
        self._old: list[HttpReplica] = []
        self._is_asleep = False
        self._settled = threading.Event()
        """Ready for the first time, or never."""
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._keep, name=f"laurel-{self.name}", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------ for the router

    async def attempt(
        self, groups: Sequence[Group], *, request_id: str, timeout: float
    ) -> ReplicaReply:
        """See `Replica`."""
        http = await self._current()
        return await http.attempt(groups, request_id=request_id, timeout=timeout)

    async def probe(self, *, timeout: float) -> None:
        """See `Replica`."""
        await (await self._current()).probe(timeout=timeout)

    async def aclose(self) -> None:
        """See `Replica`. The process goes on."""
        if self._http is not None:
            self._old.append(self._http)
        while self._old:
            await self._old.pop().aclose()

    async def _current(self) -> HttpReplica:
        while self._old:
            await self._old.pop().aclose()
        if self._http is None:
            raise ReplicaFault("connection", f"{self.name} is being started again")
        return self._http

    # ----------------------------------------------------------------------- for the parent

    @property
    def pid(self) -> int:
        """Of the process; 0: there is none."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    @property
    def is_ready(self) -> bool:
        """Whether it can be asked."""
        return self._http is not None

    def wait_until_ready(self, deadline: float) -> None:
        """Wait for the first process; raises why there is none."""
        if not self._settled.wait(deadline - time.monotonic()):
            raise EngineError(f"{self.name} was not ready in {_START_SECONDS:g} s")
        if self._error is not None:
            raise self._error

    def tell(self, command: str) -> None:
        """Ask for a change of state. One that is being started gets to know in time."""
        with self._lock:
            self._is_asleep = command == "sleep"
            if self._http is not None:
                self._admin(command)

    def _admin(self, command: str) -> None:
        request = urllib.request.Request(
            f"{self._url}/admin/{command}",
            method="POST",
            headers={"Authorization": f"Bearer {self._api_key}"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=_ADMIN_SECONDS) as response:
            response.read()

    def begin_to_end(self) -> None:
        """Ask the process to finish what it has."""
        self._closing.set()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        """Wait for the process, not for ever."""
        self._thread.join(_SECONDS_TO_END)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        self._thread.join()

    # -------------------------------------------------------------------------- the watcher

    def _keep(self) -> None:
        """Start the process, and again when it dies."""
        deaths = 0
        while not self._closing.is_set():
            began = time.monotonic()
            status, was_ready = self._live()
            if self._closing.is_set() or self._error is not None:
                break
            if not self._settled.is_set():
                self._error = EngineError(f"{self.name} died while it started ({_said(status)})")
                break
            if was_ready and status < 0:
                deaths = 0
            elif was_ready and time.monotonic() - began > _LONG_ENOUGH:
                deaths = 1
            else:
                deaths += 1
            if deaths > MOST_RESTARTS:
                self.is_lost = True
                self._say(f"warning: {self.name} died {deaths} times and stays away")
                break
            self._say(f"warning: {self.name} died ({_said(status)}); it is started again")
            if deaths > 1:
                self._closing.wait(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** (deaths - 2)))
        self._settled.set()

    def _live(self) -> tuple[int, bool]:
        """One process from its start to its end; its status, and whether it became ready."""
        with subprocess.Popen(
            [sys.executable, "-m", "laurel.rewards.server.replicas"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            self._process = process
            assert process.stdin is not None
            assert process.stdout is not None
            if self._closing.is_set():
                process.kill()
            try:
                process.stdin.write(json.dumps(self._order) + "\n")
                process.stdin.flush()
                for line in process.stdout:
                    self._hear(json.loads(line))
            except BrokenPipeError:
                pass
            with self._lock:
                was_ready = self._http is not None
                if self._http is not None:
                    self._old.append(self._http)
                self._http = None
            return process.wait(), was_ready

    def _hear(self, said: dict[str, Any]) -> None:
        if "say" in said:
            if self._index == 0 and not self._settled.is_set():
                self._say(said["say"])
        elif "error" in said:
            kind = getattr(laurel.errors, said["error"], UserError)
            if self._settled.is_set():
                self._say(f"warning: {self.name} cannot be started again: {said['message']}")
            else:
                self._error = kind(said["message"])
        else:
            self._url = f"http://127.0.0.1:{said['port']}"
            with self._lock:
                self.model, self.version = said["model"], said["version"]
                try:
                    if self._is_asleep:
                        self._admin("sleep")
                except OSError:  # it may have died again; if not, it would hold memory
                    assert self._process is not None
                    self._process.kill()
                    return
                self._http = HttpReplica(
                    self._url,
                    LaurelDialect(),
                    api_key=self._api_key,
                    connections=self._connections,
                )
            self._settled.set()
            self.on_ready()


def _said(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit code {status}"


# --------------------------------------------------------------------------------------------------
# The process of one replica: a reward server on a free port of loopback that its parent watches.
#
# Its parent writes one line of JSON to its standard input and keeps that open: when it closes, the
# parent has died, and so does the replica. What it has to say goes to its standard output, a line
# of
# JSON each: `{"say": text}`, `{"port", "model", "version"}` when it is ready, `{"error",
# "message"}`.

_BROKEN_EXIT_CODE = 70
"""What sysexits.h calls an internal error. The parent starts it again."""


def main() -> None:
    """Serve until told to end."""
    lines = os.fdopen(os.dup(1), "w", buffering=1, encoding="ascii")
    os.dup2(2, 1)  # whatever libraries print must not look like what we say

    def tell(**said: Any) -> None:
        try:
            lines.write(json.dumps(said) + "\n")
        except OSError:
            os._exit(1)  # nobody reads any more

    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        _serve(order, tell)
    except LaurelError as error:
        tell(error=type(error).__name__, message=str(error))
        sys.exit(error.exit_code)
    gc.freeze()  # all is done: looking through what is left for garbage would take a second


def _serve(order: dict[str, Any], tell: Any) -> None:
    from laurel.rewards.server.app import GateOptions, make_app
    from laurel.rewards.server.run import ServerRun, in_thread, listen

    settings = ModelSettings(**order["settings"])
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    service = RewardService(request_seconds=order["request_seconds"])
    app = make_app(service, GateOptions(api_key=order["api_key"], hosts=("127.0.0.1",)))

    def load() -> ServedModel:
        _choose_device(settings, order["index"])
        terms = [Terms(**one) for one in order["terms"]]
        return spoken_in(terms, open_served, settings, say=lambda text: tell(say=text))

    async def open_model() -> ServedModel:
        return await in_thread(load, name="loading")

    def on_ready(model: ServedModel) -> None:
        threading.Thread(target=_end_when_broken, args=(service,), daemon=True).start()
        tell(port=port, model=model.name, version=model.version)

    ServerRun(app, service, listener).run(open_model, on_ready=on_ready)


def _choose_device(settings: ModelSettings, index: int) -> None:
    """Of several GPUs each replica takes one, by turns. In the thread that loads."""
    if not settings.model or settings.device == "cpu":
        return
    import torch

    if (count := torch.cuda.device_count()) > 1:
        torch.cuda.set_device(index % count)


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


def _end_when_broken(service: RewardService) -> None:
    """A device that fails at everything comes back only with a new process."""
    while service.state != "broken":
        time.sleep(1.0)
    os._exit(_BROKEN_EXIT_CODE)


if __name__ == "__main__":
    main()


# --------------------------------------------------------------------------------------------------
# Processes of a reward model as what a server serves: with an end to the queue, and figures.


@dataclass(slots=True, kw_only=True)
class ReplicasStats:
    """What happened so far."""

    requests: int = 0
    completions: int = 0
    scored: int = 0
    failed: int = 0
    """Completions that got a failure."""
    refused: int = 0
    """Requests that found the queue full."""
    cancelled: int = 0
    """Requests that nobody waited for any more."""
    attempts: int = 0
    """Requests to replicas."""
    faults: int = 0
    """Attempts and probes of which a replica made nothing."""
    waiting: int = 0
    """Completions that wait or are under way now."""
    ready: int = 0
    """Replicas that can be asked now."""


class ServedReplicas:
    """A `ServedScorer` over processes, in one event loop."""

    def __init__(self, replicas: ReplicaProcesses, *, max_waiting: int) -> None:
        """Take over processes; `aclose` ends them.

        Args:
            replicas: Those that score.
            max_waiting: Completions that may wait or be under way.
        """
        self._replicas = replicas
        self._max_waiting = max_waiting
        self._stats = ReplicasStats()
        self._began = time.monotonic()

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`.

        Raises:
            BusyError: Too much waits already.
        """
        stats = self._stats
        size = sum(len(group.completions_G) for group in groups)
        if stats.waiting and stats.waiting + size > self._max_waiting:
            stats.refused += 1
            rate = stats.scored / (time.monotonic() - self._began)
            message = f"{stats.waiting} completions wait; no more than {self._max_waiting} may"
            raise BusyError(message, retry_after=min(60.0, stats.waiting / max(rate, 1.0)))
        stats.requests += 1
        stats.completions += size
        stats.waiting += size
        try:
            scores = await self._replicas.scorer.score(groups)
        except asyncio.CancelledError:
            stats.cancelled += 1
            raise
        finally:
            stats.waiting -= size
        failed = sum(score.failure is not None for scores_G in scores for score in scores_G)
        stats.failed += failed
        stats.scored += size - failed
        return scores

    def stats(self) -> ReplicasStats:
        """What happened so far; a copy."""
        counts = self._replicas.scorer.counts
        faults = sum(count for name, count in counts.items() if name.startswith("fault_"))
        ready = self._replicas.num_ready
        return replace(self._stats, attempts=counts["attempts"], faults=faults, ready=ready)

    @property
    def is_broken(self) -> bool:
        """Whether nobody is left who could score."""
        return self._replicas.are_lost

    @property
    def is_lost(self) -> bool:
        """The same, and nobody is started again."""
        return self._replicas.are_lost

    async def sleep(self) -> None:
        """See `ReplicaProcesses`."""
        await asyncio.to_thread(self._replicas.sleep)

    async def wake(self) -> None:
        """See `ReplicaProcesses`."""
        await asyncio.to_thread(self._replicas.wake)

    async def aclose(self) -> None:
        """End the router, then the processes."""
        await self._replicas.scorer.aclose()
        await asyncio.to_thread(self._replicas.close)
