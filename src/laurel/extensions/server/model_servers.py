"""The servers of a model: started, watched, started again, and ended with the run."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import torch

from laurel import plugins
from laurel.config.environments import ModelServerConfig
from laurel.errors import ConfigError, EngineError, WorkerError, counted
from laurel.extensions.server.model_router import RequestRouter
from laurel.plugins import Engine, EngineThatServes, ScorerServices
from laurel.sandbox.scratch import ScratchFolder
from laurel.workers.process import choose_device
from laurel.workers.rendezvous import LOOPBACK, RankPlace
from laurel.workers.supervisor import Replica, Restarts, Supervisor, in_parallel

LAUNCH = Path(__file__).with_name("launch.py")
_LOOK, _PROBE, _ASKED = 0.25, 10.0, 60.0
"""Seconds between two looks at a process, of a request for its health, and of a call of a node."""
START_SECONDS, SILENT_SECONDS = 3600.0, 600.0
"""Seconds until a server answers, as a large model may have to be fetched, and how many of them in
a row it may show no progress. A process that ends is noticed at once."""
_WORK_SECONDS, _WORK_BYTES = 30.0, 1 << 20
"""What a process computes, or reads and writes, in `SILENT_SECONDS` at the least if it makes
progress: one that waits for a connection polls."""
MAX_RESTARTS = 3
"""Servers that are started again after they were lost, all together."""
_HEALTH_SECONDS, _DEAF = 5.0, 6
"""Seconds between two requests for health, and how many in a row without an answer mean that a
server hangs."""
_TAIL = 3000


class ServerProcess:
    """The process of one server, on the machine where its worker is; its output is in a file.

    It listens where the run reaches it: at the loopback address on the run's own machine, and
    elsewhere at the address that the machine has in the cluster. Of the GPUs that this
    process sees it gets those whose turn it is by the rank of its place.
    """

    def __init__(
        self,
        place: RankPlace,
        section: ModelServerConfig,
        *,
        device: str,
        near: str = LOOPBACK,
    ) -> None:
        """Start it on its part of the devices here; `near` is the run's own machine."""
        host = LOOPBACK if place.host == near else place.host
        with socket.socket() as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        engine = plugins.find(Engine, section.backend)
        assert isinstance(engine, EngineThatServes), "the section has checked it"
        on_gpu = choose_device(device).type != "cpu"
        rests = on_gpu and not section.resources.are_own
        command, added = engine.serve_command(section, host, port, on_gpu=on_gpu, rests=rests)
        if on_gpu:
            gpus = _gpus_of(place.rank, section.tensor_parallel_size)
            added = {**added, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        self._facts = f"{host}:{port}", rests
        self._folder = ScratchFolder("servers")
        self._log = self._folder.path / "server.log"
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(LAUNCH), *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={**os.environ, **added},
            )

    def facts(self) -> tuple[str, bool]:
        """Return its `HOST:PORT`, and whether it sleeps while the policy needs its GPUs."""
        return self._facts

    def loss(self) -> str | None:
        """Return how it ended; None: it runs."""
        code = self._process.poll()
        return None if code is None else f"it ended with exit code {code}"

    def log(self) -> str:
        """Return the file that it writes to, and its machine."""
        return f"{self._log} on {socket.gethostname()}"

    def work(self) -> tuple[int, float, int] | None:
        """Return the bytes that it wrote to its log, and what its processes have done.

        That is the seconds that they have computed, and the bytes that they have read and written.
        None where the system does not say.
        """
        work = _work_of(self._process.pid)
        return None if work is None else (self._log.stat().st_size, *work)

    def tail(self) -> str:
        """Return the last that it wrote."""
        return self._log.read_bytes()[-_TAIL:].decode(errors="replace").strip() or "nothing"

    def shutdown(self) -> None:
        """Kill it and what it started. Idempotent."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.remove()


def _work_of(launcher: int) -> tuple[float, int] | None:
    """Return the seconds and bytes of all processes that a `launch.py` started; None: unknown."""
    seconds, moved = 0.0, 0
    try:
        session = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[:1]
    except OSError:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another account's
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if fields[3:4] == session:
                # With what its children took that have ended.
                seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                counts = (process / "io").read_text().split()
                moved += int(counts[1]) + int(counts[3])
    return seconds, moved


def _gpus_of(number: int, each: int) -> list[str]:
    """Return the GPUs of a server, `each` of those that this process sees, by its number."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]
    first = number % max(1, len(gpus) // each) * each
    return gpus[first : first + each]


def _is_progress(before: tuple[int, float, int] | None, now: tuple[int, float, int] | None) -> bool:
    """Report whether a server did something; also where its node did not say."""
    if before is None or now is None:
        return True
    written, seconds, moved = (one - other for one, other in zip(now, before, strict=True))
    # Sums fall where a process has ended, which is progress, too.
    return written > 0 or not (0 <= seconds < _WORK_SECONDS and 0 <= moved < _WORK_BYTES)


class _Server:
    """A server that was started: its process, here or on another node, and its address."""

    def __init__(self, process: Any) -> None:
        self._process = process  # a ServerProcess, or a worker group of one
        # One for all looks, because another for each would read the certificates again. A
        # connection for each, because the server may close an idle one as it is used.
        no_connections = httpx2.Limits(max_keepalive_connections=0)
        self._client = httpx2.Client(trust_env=False, limits=no_connections)
        self.address, self.rests = self._call("facts")
        self.log: str = self._call("log")

    def _call(self, method: str) -> Any:
        if isinstance(self._process, ServerProcess):
            return getattr(self._process, method)()
        return self._process.call_one(0, method, timeout=_ASKED)

    def loss(self) -> str | None:
        """Return how it, or the node that it was on, ended; None: it runs."""
        try:
            loss: str | None = self._call("loss")
        except WorkerError as error:
            return str(error).partition("\n")[0]
        return loss

    def wait_until_ready(self, is_closed: Callable[[], bool]) -> None:
        """Wait until it is healthy.

        Raises:
            EngineError: It ended, made no progress, or did not answer in time; the message has its
                last lines.
        """
        begun = seen = time.monotonic()
        before = self._work()
        while not self.is_healthy():
            lost, now = self.loss(), time.monotonic()
            if lost is None and now > seen + SILENT_SECONDS:
                work = self._work()
                if not _is_progress(before, work):
                    lost = f"it wrote nothing and did next to nothing for {SILENT_SECONDS:g} s"
                before, seen = work, now
            if lost is None and (now > begun + START_SECONDS or is_closed()):
                lost = f"it did not answer within {now - begun:.0f} s"
            if lost is not None:
                with contextlib.suppress(WorkerError):
                    lost = f"{lost}. It wrote: {self._call('tail')}"
                raise EngineError(lost)
            time.sleep(_LOOK)

    def _work(self) -> tuple[int, float, int] | None:
        with contextlib.suppress(WorkerError):
            work: tuple[int, float, int] | None = self._call("work")
            return work
        return None

    def is_healthy(self) -> bool:
        """Report whether it answers."""
        with contextlib.suppress(httpx2.HTTPError):
            url = f"http://{self.address}/health"
            return self._client.get(url, timeout=_PROBE).status_code == 200
        return False

    def ask(self, path: str) -> None:
        """Post an empty request, and wait for the answer.

        Nothing is asked of a server that has ended: another is started in its place.

        Raises:
            EngineError: It refuses, or does not answer.
        """
        try:
            reply = self._client.post(f"http://{self.address}{path}", timeout=_ASKED)
            reply.raise_for_status()
        except httpx2.HTTPError as error:
            if self.loss() is None:
                reason = str(error).partition("\n")[0]
                raise EngineError(
                    f"the server at {self.address} did not leave its GPU's memory to the policy, "
                    f"or take it back (POST {path}): {reason or type(error).__name__}"
                ) from error

    def end(self) -> None:
        """Kill it and what it started. Idempotent."""
        self._process.shutdown()


class ModelServers:
    """The servers of one model behind one address (`plugins.ModelEndpoint`)."""

    def __init__(self, section: ModelServerConfig, services: ScorerServices) -> None:
        """Start all servers, and wait until they answer.

        Raises:
            ConfigError: A server does not start.
            MissingDependencyError: The engine is not installed.
        """
        where = services.where
        if services.make_server is None:  # other nodes have their own packages
            plugins.find(Engine, section.backend).check_installed(
                f"{where}.backend={section.backend}"
            )
        self.section = section
        self._services = services
        self._closing = threading.Event()
        # Held while they sleep, and while one starts: asleep they leave no memory for it, and one
        # that starts has memory that nobody else may take.
        self._memory = threading.Lock()
        # After the timeout of a call nobody awaits the answer but a thread that is left behind.
        source = services.source
        hedges, patience = False, START_SECONDS
        if source is not None and source.function is not None:
            hedges, patience = source.hedge, source.function.timeout
        self._router = RequestRouter(patience=patience, hedge=hedges)
        replicas = [
            Replica[_Server](index, f"server {index} of {section.model_name}")
            for index in range(section.replicas)
        ]
        self._watchers: list[threading.Thread] = []
        try:
            self._supervisor = Supervisor(
                self._start,
                replicas,
                end=_Server.end,
                restarts=Restarts(MAX_RESTARTS, services.say),
            )
        except BaseException as error:
            self._router.close()
            if isinstance(error, EngineError):
                raise ConfigError(
                    f"{where}: {section.model_name} was not served: {error}"
                ) from error
            raise
        atexit.register(self.close)
        for replica in replicas:
            self._router.add(replica.index, replica.value.address)
            watch = threading.Thread(target=self._watch, args=(replica,), daemon=True)
            watch.start()
            self._watchers.append(watch)
        by = f"{counted(len(replicas), 'server')} ({section.backend})"
        services.say(f"{section.model_name} is served at {self.address} by {by}")

    @property
    def address(self) -> str:
        """Return `HOST:PORT` of the one address."""
        return self._router.address

    def _start(self, index: int) -> _Server:
        device, make = str(self._services.device), self._services.make_server
        process: Any
        if make is None:
            process = ServerProcess(
                RankPlace(role="server", rank=index), self.section, device=device
            )
        else:
            process = make(index)(ServerProcess, self.section, device=device)
        try:
            server = _Server(process)
            self._services.say(
                f"server {index} of {self.section.model_name} starts; it has "
                f"{START_SECONDS / 60:g} minutes, of which it may show no progress for "
                f"{SILENT_SECONDS / 60:g}. Its log: {server.log}"
            )
            server.wait_until_ready(self._closing.is_set)
        except BaseException:
            process.shutdown()
            raise
        return server

    def _watch(self, replica: Replica[_Server]) -> None:
        """Start a server again where it ended or hangs, as long as that is allowed."""
        deaf, probed = 0, time.monotonic()
        while not self._closing.wait(_LOOK):
            loss = replica.value.loss()
            if loss is None and time.monotonic() > probed + _HEALTH_SECONDS:
                deaf = 0 if replica.value.is_healthy() else deaf + 1
                probed = time.monotonic()
                if deaf == _DEAF:
                    loss = "it does not answer"
            if loss is None:
                continue
            self._router.remove(replica.index)
            with self._kept_awake(replica.value):
                lost = self._supervisor.restart(replica, EngineError(loss))
            if lost is not None:
                if not self._router.has_any():
                    self._router.fail(f"no server of {self.section.model_name} is left: {loss}")
                return
            deaf = 0
            if not self._closing.is_set():
                replica.last_failure = None
                self._router.add(replica.index, replica.value.address)

    @contextlib.contextmanager
    def _kept_awake(self, server: _Server) -> Iterator[None]:
        """Wait until they are awake, if they ever sleep, and keep them so within the context."""
        is_kept = False
        while server.rests and not is_kept and not self._closing.is_set():
            is_kept = self._memory.acquire(timeout=_LOOK)
        try:
            yield
        finally:
            if is_kept:
                self._memory.release()

    @property
    def rests(self) -> bool:
        """Whether a server has GPUs of the policy's, and frees their memory for it."""
        return any(replica.value.rests for replica in self._supervisor.replicas)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Free the servers' memory of devices while the context is open, if they have a way.

        Requests wait meanwhile: a server that slept would break off or lose what it computes.
        """
        if not self.rests:
            yield
            return
        with self._memory:
            try:
                self._router.pause()
                self._ask_all("/sleep?level=1")
                yield
            finally:
                if not self._closing.is_set():
                    try:
                        self._ask_all("/wake_up")
                    finally:
                        self._router.resume()

    def _ask_all(self, path: str) -> None:
        servers = [each.value for each in self._supervisor.replicas if each.value.rests]
        in_parallel(lambda server: server.ask(path), servers)

    def close(self) -> None:
        """End all servers. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        self._router.close()
        self._supervisor.close(patience=15.0)
        for watch in self._watchers:
            watch.join(15.0)
