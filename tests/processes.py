"""Processes that are forked from one that has loaded torch, and how they are found."""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

FOLDER = Path(__file__).with_name("warm_python")


class _Server:
    """The one of this process, which starts when it is first needed; a fork has that it is from."""

    def __init__(self) -> None:
        self._socket = os.environ.get("LAUREL_WARM")

    def socket(self) -> str:
        """Where it listens."""
        if self._socket is None:
            folder = tempfile.mkdtemp(prefix="laurel-warm-")
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            self._socket = f"{folder}/socket"
            with open(f"{folder}/log", "w") as log:
                process = subprocess.Popen(
                    [sys.executable, FOLDER / "server.py", self._socket],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            atexit.register(process.kill)
            end = time.monotonic() + 60
            while not os.path.exists(self._socket):
                assert time.monotonic() < end, Path(folder, "log").read_text()
                time.sleep(0.01)
        return self._socket


_server = _Server()


def forking(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with which a process is forked that would load torch, beside these."""
    path = filter(None, (str(FOLDER), environment.get("PYTHONPATH")))
    return {"LAUREL_WARM": _server.socket(), "PYTHONPATH": os.pathsep.join(path)}


@contextmanager
def forked() -> Iterator[None]:
    """What starts meanwhile and would load torch is forked, and is no child of its parent."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in forking(os.environ).items():
            environment.setenv(name, value)
        yield


def fork_of(pid: int) -> psutil.Process | None:
    """What does the work of a process, where it has been forked elsewhere and still runs."""
    with suppress(FileNotFoundError, psutil.NoSuchProcess):
        return psutil.Process(int(Path(f"{_server.socket()}.{pid}").read_text()))
    return None


def with_forks(processes_of: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """`processes_of` of `laurel.extensions.vllm`, with what was forked for those processes."""

    def found(engine: Any) -> list[Any]:
        return [
            one for process in processes_of(engine) for one in (process, *descendants(process.pid))
        ]

    return found


def descendants(pid: int) -> list[psutil.Process]:
    """The living processes below one; what was forked for one of them is below it."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            found += [child, *descendants(child.pid)]
    fork = fork_of(pid)
    return found if fork is None else [*found, fork, *descendants(fork.pid)]
