"""The processes of a model's servers: started, watched, started again, and ended with the run."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx2

from laurel import plugins
from laurel.config.environments import ModelServerConfig
from laurel.errors import ConfigError, EngineError
from laurel.plugins import Engine, EngineThatServes
from laurel.rewards.serving.router import RequestRouter
from laurel.workers.supervisor import Replica, Restarts, Supervisor, in_parallel

_log = logging.getLogger(__name__)
LAUNCH = Path(__file__).with_name("launch.py")
_LOOK, _PROBE = 0.2, 10.0
"""Seconds between two looks at a process, and of a request for its health."""
_DEAF = 6
"""Requests for the health of a server, one after the other, without an answer: it hangs."""
_TAIL = 3000

Command = Callable[[int, int], tuple[Sequence[str], Mapping[str, str]]]
"""Returns the command and the environment variables of a replica, by its number and port."""


def open_servers(
    section: ModelServerConfig, *, device: str, say: Callable[[str], None], where: str
) -> ModelServers:
    """Start the servers of a model on this machine's last GPUs, or on its CPU.

    Raises:
        ConfigError: There are fewer GPUs, or a server does not start.
        MissingDependencyError: The engine is not installed.
    """
    import torch

    engine = plugins.find(Engine, section.backend)
    assert isinstance(engine, EngineThatServes), "the section has checked it"
    engine.check_installed(f"{where}.backend={section.backend}")
    each, own = section.tensor_parallel_size, section.resources.gpus_per_node
    there = 0 if device == "cpu" else torch.cuda.device_count()
    if there and own is not None and own >= there:
        raise ConfigError(
            f"{where}.resources.gpus_per_node={own}: this machine has {there}, and the policy "
            "needs one"
        )
    if there and own is None and section.replicas * each > there:
        raise ConfigError(f"{where}.replicas={section.replicas} of {each}: there are {there} GPUs")
    rests, first = bool(there) and own is None, 0 if own is None else there - own

    def command(index: int, port: int) -> tuple[Sequence[str], Mapping[str, str]]:
        begin = first + index * each
        devices = range(begin, begin + each) if there else None
        return engine.serve_command(section, port, devices, rests=rests)

    return ModelServers(section, command, say=say, rests=rests, where=where)


class ServerProcess:
    """One server; its output is in a file."""

    def __init__(
        self, name: str, command: Sequence[str], added: Mapping[str, str], port: int, log: Path
    ) -> None:
        self.name = name
        self.address = f"127.0.0.1:{port}"
        self.log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(LAUNCH), *command],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={**os.environ, **added},
            )

    def wait_until_ready(self, seconds: float, is_closed: Callable[[], bool]) -> None:
        """Wait until it is healthy.

        Raises:
            EngineError: It ended, or did not answer in time; the message has its last lines.
        """
        end = time.monotonic() + seconds
        while not self.is_healthy():
            if (lost := self.loss()) is not None:
                raise EngineError(f"{lost}. It wrote: {self._tail()}")
            if time.monotonic() > end or is_closed():
                self.end()
                raise EngineError(
                    f"it did not answer within {seconds:g} s. It wrote: {self._tail()}"
                )
            time.sleep(_LOOK)

    def is_healthy(self) -> bool:
        """Report whether it answers."""
        with contextlib.suppress(httpx2.HTTPError):
            return httpx2.get(f"http://{self.address}/health", timeout=_PROBE).status_code == 200
        return False

    def loss(self) -> str | None:
        """Return how it ended; None: it runs."""
        code = self._process.poll()
        return None if code is None else f"{self.name} ended with exit code {code}"

    def ask(self, path: str) -> None:
        """Post an empty request, and wait for the answer.

        Nothing is asked of a server that has ended: the one that is started in its place is awake.

        Raises:
            EngineError: It refuses, or does not answer.
        """
        try:
            reply = httpx2.post(f"http://{self.address}{path}", timeout=60.0)
            reply.raise_for_status()
        except httpx2.HTTPError as error:
            if self.loss() is not None:
                return
            raise EngineError(f"{self.name} did not take {path}: {error}") from error

    def end(self) -> None:
        """Kill it and what it started. Idempotent."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tail(self) -> str:
        return self.log.read_bytes()[-_TAIL:].decode(errors="replace").strip() or "nothing"


class ModelServers:
    """The servers of one model behind one address. Leaving it, or `close`, ends them."""

    def __init__(
        self,
        section: ModelServerConfig,
        command: Command,
        *,
        say: Callable[[str], None],
        rests: bool = False,
        where: str = "env.reward_model.server",
    ) -> None:
        """Start all servers, and wait until they answer.

        Args:
            section: The settings.
            command: Makes the command of a replica.
            say: Called with a line on what was started, and started again.
            rests: Whether they have a sleep mode, which `resting` uses.
            where: The section, for messages.

        Raises:
            ConfigError: A server does not start.
        """
        self.section = section
        self.rests = rests
        self._command = command
        self._folder = tempfile.TemporaryDirectory(prefix="laurel-servers-")
        self._closing = threading.Event()
        self._router = RequestRouter(patience=section.start_timeout, hedge=section.hedge)
        replicas = [
            Replica[ServerProcess](index, f"server {index} of {section.model_name}")
            for index in range(section.replicas)
        ]
        self._watchers: list[threading.Thread] = []
        try:
            self._supervisor = Supervisor(
                self._start,
                replicas,
                end=ServerProcess.end,
                restarts=Restarts(section.max_restarts, say),
            )
        except BaseException as error:
            self._router.close()
            self._folder.cleanup()
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
        by = f"{len(replicas)} of {section.backend}"
        say(f"{section.model_name} is served at {self.address} by {by}")

    @property
    def address(self) -> str:
        """Return `HOST:PORT` of the one address."""
        return self._router.address

    def _start(self, index: int) -> ServerProcess:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command, added = self._command(index, port)
        name, log = f"server {index}", Path(self._folder.name) / f"server_{index}.log"
        process = ServerProcess(name, command, added, port, log)
        try:
            process.wait_until_ready(self.section.start_timeout, self._closing.is_set)
        except BaseException:
            process.end()
            raise
        return process

    def _watch(self, replica: Replica[ServerProcess]) -> None:
        """Start a server again where it ended or hangs, as long as that is allowed."""
        deaf, looks = 0, 0
        while not self._closing.wait(_LOOK):
            loss, looks = replica.value.loss(), looks + 1
            if loss is None and looks % 25 == 0:  # every five seconds
                deaf = 0 if replica.value.is_healthy() else deaf + 1
                if deaf == _DEAF:
                    loss = f"{replica.value.name} does not answer"
            if loss is None:
                continue
            self._router.remove(replica.index)
            if self._supervisor.restart(replica, EngineError(loss)) is not None:
                if not self._router.has_any():
                    self._router.fail(f"no server of {self.section.model_name} is left: {loss}")
                return
            deaf = 0
            if not self._closing.is_set():
                replica.last_failure = None
                self._router.add(replica.index, replica.value.address)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Free the servers' memory of devices while the context is open, if they have a way."""
        values = [one.value for one in self._supervisor.replicas] if self.rests else []
        in_parallel(lambda one: one.ask("/sleep?level=1"), values)
        try:
            yield
        finally:
            in_parallel(lambda one: one.ask("/wake_up"), values)

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
        self._folder.cleanup()
