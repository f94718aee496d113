"""Forks processes from this one, which has loaded torch; see `sitecustomize.py`.

Its argument is the path of its socket. It ends with the process that started it. Where vLLM is
installed, a fork of it loads that as well, and listens at the same path with `.vllm` behind it.
Ray's workers are forked without vLLM, which imports Ray: that then reads a worker's settings.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import selectors
import signal
import socket
import struct
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from warm_cli import HEAVY, end_with, load, run

PARALLEL = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel")
VLLM = (
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.entrypoints.openai.api_server",
    "laurel.extensions.vllm.worker",
)

IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""What a process sends to its parent: for a fork, that is this one."""


def take_parent_of(asker):
    """Let `os.getppid` say here what it says in the process that asked: some kill their parent."""
    own, real = os.getpid(), os.getppid

    def parent():
        if os.getpid() != own:  # a child of this one
            return real()
        return int(Path(f"/proc/{asker}/stat").read_text().rpartition(")")[2].split()[1])

    os.getppid = parent


def put(descriptors, places):
    """Give descriptors these numbers."""
    above = [fcntl.fcntl(one, fcntl.F_DUPFD, 100 + max(places)) for one in descriptors]
    for one in descriptors:
        os.close(one)
    for one, place in zip(above, places, strict=True):
        os.dup2(one, place)
        os.close(one)


def open_streams():
    """Python's of what they are now, such as a pipe: those of this server are of its log."""
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )


class Jobs:
    """The forks, each with the connection of the process that asked for it."""

    def __init__(self, listening, selector):
        self._listening = listening
        self._selector = selector
        self._links = {}
        self._notes = {}

    def accept(self):
        """Fork for one that asks."""
        link, _ = self._listening.accept()
        message, descriptors, _, _ = socket.recv_fds(link, 1 << 20, 250)
        part = message
        while part and not message.endswith(b"\n"):
            part = link.recv(1 << 20)
            message += part
        if not part:  # it has been killed
            for descriptor in (link.detach(), *descriptors):
                os.close(descriptor)
            return
        credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        asker = struct.unpack("3i", credentials)[0]
        child = os.fork()
        if child == 0:
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._selector.close()
            link.close()
            for one in IGNORED:
                signal.signal(one, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            take_parent_of(asker)
            job = json.loads(message)
            if job["leads_session"]:
                os.setsid()
            else:
                os.setpgid(0, 0)  # Ray ends the group of a worker, which may not be this server's
            put(descriptors, job["descriptors"])
            open_streams()
            if job["is_base"]:
                run(job)
                sys.exit()  # its forks come here too, and end as Python ends
            end_with(lambda: run(job))
        for descriptor in descriptors:
            os.close(descriptor)
        self._links[child] = link
        note = Path(f"{sys.argv[1]}.{asker}")  # `processes.py` reads it, whole or not at all
        note.with_suffix(".new").write_text(str(child))
        note.with_suffix(".new").replace(note)
        self._notes[child] = note
        self._selector.register(os.pidfd_open(child), selectors.EVENT_READ, ("ended", child))
        self._selector.register(link, selectors.EVENT_READ, ("gone", child))

    def ended(self, key, child):
        """Tell the one that waits how its fork has ended."""
        self._selector.unregister(key.fd)
        os.close(key.fd)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        link = self._links.pop(child)
        self._notes.pop(child).unlink(missing_ok=True)
        if link in self._selector.get_map():
            self._selector.unregister(link)
        with contextlib.suppress(OSError):  # it has ended too
            link.sendall(str(status).encode())
        link.close()

    def gone(self, child):
        """End the fork of one that has ended."""
        if child not in self._links:
            return
        self._selector.unregister(self._links[child])
        os.kill(child, signal.SIGKILL)


def listen(path):
    """A socket, whose callers wait until the modules are there."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    return listening


def main():
    for one in IGNORED:
        signal.signal(one, signal.SIG_IGN)
    owner = os.pidfd_open(os.getppid())
    of_vllm = listen(f"{sys.argv[1]}.vllm") if importlib.util.find_spec("vllm") else None
    listening = listen(sys.argv[1])
    load((*HEAVY, *PARALLEL))
    if of_vllm is not None:
        know_forks()
        if os.fork() == 0:
            listening, of_vllm = of_vllm, listening
            load(VLLM)
        of_vllm.close()
    serve(owner, listening)


def know_forks():
    """An engine of vLLM that a fork starts takes what is forked for it as its own."""
    os.environ["LAUREL_WARM"] = sys.argv[1]
    from laurel.extensions.vllm import processes
    from processes import with_forks

    processes.processes_of = with_forks(processes.processes_of)


def serve(owner, listening):
    """Fork for those that ask, until the owner ends."""
    selector = selectors.DefaultSelector()
    selector.register(owner, selectors.EVENT_READ, ("over", 0))
    selector.register(listening, selectors.EVENT_READ, ("asked", 0))
    jobs = Jobs(listening, selector)
    while True:
        for key, _ in selector.select():
            what, child = key.data
            if what == "over":
                return
            if what == "asked":
                jobs.accept()
            elif what == "ended":
                jobs.ended(key, child)
            else:
                jobs.gone(child)


if __name__ == "__main__":
    main()
