"""`laurel`, Python scripts and Python blocks of pages, each in a process forked from this one.

This one has loaded torch already, which saves four seconds a command. It listens on a Unix
socket (its argument). A request is one message: JSON, and the caller's stdin, stdout and stderr.
The answer is the process's id, and at its end its exit status. So whoever asks sees a process of
its own: with its streams, its folder, its environment, its signals and its status.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable
from typing import Any

from laurel.cli.main import main as laurel
from warm_cli import HEAVY


def main() -> None:
    for module in (*HEAVY, "laurel.training.sft", "datasets"):
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for the jobs
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(sys.argv[1])
        listener.listen()
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if listener not in ready:  # whoever started this one has ended, however it did
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                watch(connection)
            connection.close()


def watch(connection: socket.socket) -> None:
    """Start the job, tell who it is and how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, descriptors, _, _ = socket.recv_fds(connection, 2**20, 3)
    child = os.fork()
    if child == 0:
        connection.close()
        run(json.loads(message), descriptors)
    for descriptor in (0, 1, 2, *descriptors):
        os.close(descriptor)  # a reader of what the job writes waits for the job alone
    connection.send(f"{child}\n".encode())
    _, status = os.waitpid(child, 0)
    connection.send(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def run(job: dict[str, Any], descriptors: list[int]) -> None:
    """Become the process that was asked for."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    kinds: dict[str, Callable[[list[str]], None]] = {
        "laurel": command,
        "script": script,
        "blocks": blocks,
    }
    status = 0
    try:
        kinds[job["kind"]](job["arguments"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def command(arguments: list[str]) -> None:
    sys.argv = ["laurel", *arguments]
    sys.path.insert(0, "")
    laurel()


def script(arguments: list[str]) -> None:
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


def blocks(arguments: list[str]) -> None:
    """Files of Python, named on stdin one after the other, in one namespace."""
    sys.path.insert(0, "")
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    for line in sys.stdin:
        job = json.loads(line)
        code = compile(job["code"], job["name"], "exec")
        exec(code, vars(module))
        sys.stdout.flush()
        sys.stderr.flush()
        with open(job["done"], "w", encoding="utf-8"):
            pass


if __name__ == "__main__":
    main()
