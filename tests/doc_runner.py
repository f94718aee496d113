"""Runs the blocks of a page in a folder of its own, with this checkout's `laurel` and `python`."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from doc_blocks import ROOT, Block, Document, same
from doc_settings import check_settings

SCRIPTS = ROOT / "tests" / "docs"
PATIENCE = 300.0
"""Seconds for one block."""
BESIDE = ("examples", "recipes", "benchmarks", "LICENSE")
"""What a page of a checkout may name, at the same place in the page's folder."""
WIDTH = 100


class BlockFailed(AssertionError):
    """A block that did not run, or said something else than its page shows."""


@dataclass
class WarmServer:
    """The process that the others are forked from, and where it listens."""

    socket: Path
    programs: Path
    """A folder with a program `laurel` that asks it."""


@contextmanager
def warm_server() -> Iterator[WarmServer]:
    """Started once for all pages of a test process."""
    with tempfile.TemporaryDirectory(prefix="laurel-docs-") as name:
        server = WarmServer(socket=Path(name) / "s", programs=Path(name) / "bin")
        server.programs.mkdir()
        program = server.programs / "laurel"
        program.write_text(
            f'#!/bin/sh\nexec {sys.executable} -S -E {SCRIPTS / "ask_warm_server.py"} "$@"\n'
        )
        program.chmod(0o755)
        process = subprocess.Popen(
            [sys.executable, SCRIPTS / "warm_server.py", server.socket],
            env=_environment(Path(name), server),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "the warm server did not start"
            yield server
        finally:
            process.kill()
            process.communicate()


def _environment(folder: Path, server: WarmServer) -> dict[str, str]:
    kept = {
        name: os.environ[name] for name in ("LANG", "TMPDIR", "LAUREL_DATA") if name in os.environ
    }
    return {
        **kept,
        "PATH": os.pathsep.join(
            (
                str(server.programs),
                str(Path(sys.executable).parent),
                os.environ.get("PATH", os.defpath),
            )
        ),
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT / "tests"))),
        "HOME": str(folder / ".home"),
        "LAUREL_WARM_SERVER": str(server.socket),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "COLUMNS": str(WIDTH),
        "NO_COLOR": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@dataclass
class PageRun:
    """A page while its blocks are run."""

    document: Document
    folder: Path
    server: WarmServer
    said: dict[int, str] = field(default_factory=dict)
    """By a block's line: what it wrote to stdout and stderr."""
    _started: list[int] = field(default_factory=list)
    """Process groups of the page's shells: what they left running ends with the page."""
    _session: PythonSession | None = None

    def all(self) -> None:
        """Its hidden scripts, then its blocks, up to the first that fails."""
        (self.folder / ".home").mkdir(parents=True)
        for name in BESIDE if self.document.name != "README.md" else ():  # an empty folder
            (self.folder / name).symlink_to(ROOT / name)
        try:
            for script in self.document.setups:
                self._setup(script)
            for block in self.document.blocks:
                self._one(block)
        finally:
            self._end()

    def _setup(self, script: str) -> None:
        path = SCRIPTS / script
        if not path.is_file():
            raise BlockFailed(f"{self.document.name}: hidden setup: there is no {path}")
        output = self.folder / ".home" / "setup.txt"
        with output.open("w") as stream:
            status = _asked(self.server, self, "script", [str(path)], stream).wait()
        if status:
            raise BlockFailed(f"{script} for {self.document.name}: {status}\n{output.read_text()}")

    def _one(self, block: Block) -> None:
        if block.kind == "file":
            path = self.folder / block.value
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        if block.language == "yaml" and block.kind in ("run", "file"):
            check_settings(block)
        elif block.kind == "run" and block.language == "bash":
            self._shell(block)
        elif block.kind == "run" and block.language == "python":
            self._python(block)

    def _shell(self, block: Block) -> None:
        output = self._output(block)
        with output.open("wb") as stream:
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", block.text],
                cwd=self.folder,
                env=_environment(self.folder, self.server),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._started.append(process.pid)
            try:
                status = process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                raise BlockFailed(f"{block.place}: not done after {PATIENCE:.0f} s") from None
        self._heard(block, output, status)

    def _python(self, block: Block) -> None:
        self._session = self._session or PythonSession(self)
        output = self._output(block)
        status = self._session.run(block, output)
        self._heard(block, output, status)

    def _output(self, block: Block) -> Path:
        return self.folder / ".home" / f"{block.line}.txt"

    def _heard(self, block: Block, output: Path, status: int) -> None:
        text = output.read_bytes().decode(errors="replace")
        for place in (self.folder, self.folder.resolve(), ROOT):
            text = text.replace(f"{place}/", "").replace(str(place), ".")
        self.said[block.line] = text
        if status:
            raise BlockFailed(f"{block.place}: exit status {status}\n{block.text}\n{text[-6000:]}")

    def _end(self) -> None:
        if self._session is not None:
            self._session.end()
        for group in self._started:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGTERM)

    def differences(self) -> list[str]:
        """Outputs that the page shows and that are others."""
        found = []
        for command, shown in outputs(self.document):
            if not same(shown.text, self.said.get(command.line, "")):
                found.append(
                    f"{shown.place}: run `python tests/test_docs.py`; it said\n"
                    f"{self.said.get(command.line, '')}"
                )
        return found


class PythonSession:
    """The process in which the Python blocks of a page run, one after the other."""

    def __init__(self, page: PageRun) -> None:
        self._log = page.folder / ".home" / "python.txt"
        self._done = page.folder / ".home" / "python.done"
        self._seen = 0
        reader, writer = os.pipe()
        with self._log.open("wb") as stream, open(reader, "rb") as stdin:
            self._job = _asked(page.server, page, "blocks", [], stream, stdin)
        self._stdin = open(writer, "w", encoding="utf-8")  # noqa: SIM115 - closed by end()

    def run(self, block: Block, output: Path) -> int:
        """The exit status; 0 while it goes on."""
        # Lines of tracebacks are those of the page.
        code = "\n" * block.line + block.text
        job = {"code": code, "name": block.page, "done": str(self._done)}
        self._stdin.write(json.dumps(job) + "\n")
        self._stdin.flush()
        status = self._job.wait_for(self._done)
        said = self._log.read_bytes()
        output.write_bytes(said[self._seen :])
        self._seen = len(said)
        return status

    def end(self) -> None:
        with suppress(BrokenPipeError):
            self._stdin.close()
        self._job.kill()


class _Job:
    """A process of the warm server."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lines = connection.makefile()
        self._process = int(self._lines.readline())
        connection.settimeout(PATIENCE)

    def wait(self) -> int:
        status = int(self._lines.readline())
        self._close()
        return status

    def wait_for(self, file: Path) -> int:
        """0 when the file is there, which is taken away; the exit status where it ended before."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if file.exists():
                file.unlink()
                return 0
            if _is_over(self._connection):
                return self.wait() or 1
            time.sleep(0.01)
        return 124

    def kill(self) -> None:
        if self._connection.fileno() >= 0:
            with suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
            self._close()

    def _close(self) -> None:
        self._lines.close()
        self._connection.close()


def _is_over(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(PATIENCE)


def _asked(
    server: WarmServer,
    page: PageRun,
    kind: str,
    arguments: list[str],
    output: IO[str] | IO[bytes],
    stdin: IO[bytes] | None = None,
) -> _Job:
    job = {
        "kind": kind,
        "arguments": arguments,
        "folder": str(page.folder),
        "environment": _environment(page.folder, server),
    }
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(server.socket))
    with open(os.devnull, "rb") as nothing:
        streams = [(stdin or nothing).fileno(), output.fileno(), output.fileno()]
        socket.send_fds(connection, [json.dumps(job).encode()], streams)
        return _Job(connection)


def outputs(document: Document) -> Iterator[tuple[Block, Block]]:
    """Blocks that are run, and those that show what they said."""
    for command, shown in zip(document.blocks, document.blocks[1:], strict=False):
        if shown.kind == "output":
            yield command, shown


def refreshed(document: Document, said: dict[int, str]) -> str:
    """The page with the outputs that differ written anew."""
    text = document.path.read_text(encoding="utf-8")
    for command, shown in reversed(list(outputs(document))):
        real = said.get(command.line, "")
        if not same(shown.text, real):
            lines = "".join(f"{line.rstrip()}\n" for line in real.strip("\n").splitlines())
            text = text[: shown.start] + lines + text[shown.start + len(shown.text) :]
    return text
