"""Servers of sessions in processes of their own, which tests start, kill and start again."""

import socket
import subprocess
import sys
from pathlib import Path

from sandbox_processes import wait_until

HERE = Path(__file__).parent


class ServerProcess:
    """A program of this directory that serves at a port, and logs its sessions.

    Leaving it kills it.
    """

    def __init__(self, program: str, directory: Path, *arguments: str) -> None:
        self.log = directory / "sessions.log"
        self.log.touch()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._errors = directory / "server.log"
        self._command = [sys.executable, HERE / program, str(self.port), self.log, *arguments]
        self.start()

    def start(self) -> None:
        with self._errors.open("ab") as file:
            self.process = subprocess.Popen(list(map(str, self._command)), stderr=file, stdout=file)
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, self._errors.read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def counts(self) -> tuple[int, int]:
        """How many sessions have begun, and ended."""
        lines = self.log.read_text().split()
        return lines.count("begin"), lines.count("end")

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
