"""`laurel`, scripts and pages, each in a process forked from this one, which has loaded torch.

It listens on a Unix socket (its argument). A request is one message: JSON, and the caller's stdin,
stdout and stderr. The answer is the process's id, and at its end its exit status. So whoever asks
sees a process of its own: with its streams, its folder, its environment, its signals, its status.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

from doc_pages import run_page
from laurel.cli.main import main as laurel
from warm_cli import HEAVY, end_with, load


def main() -> None:
    load((*HEAVY, "datasets"))
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
    sys.argv = [job["kind"], *job["arguments"]]
    sys.path[:0] = ["", str(Path(__file__).parent)]
    if job["kind"] == "laurel":
        end_with(laurel)
    elif job["kind"] == "page":
        end_with(partial(run_page, Path(sys.argv[1])))
    else:
        end_with(partial(runpy.run_path, sys.argv[1], run_name="__main__"))


if __name__ == "__main__":
    main()
