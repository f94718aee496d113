"""Python imports this as it starts, where this folder is in PYTHONPATH.

A process that would import torch has itself forked from one that has done so (`server.py`), and
waits for the fork's end: its own imports would take seconds. Such processes are Ray's workers,
those of spawned groups, those that multiprocessing spawns, vLLM's servers, what vLLM asks about the
class of a model, the two that others of the tests are forked from, and the commands, modules and
programs that `LAUREL_WARM_COMMANDS` names, with spaces between them.
"""

import os
import sys


def _arguments():
    """Those of a process that is to be forked, without `python`; None: it is another one."""
    words = sys.orig_argv[1:]
    while words and words[0].startswith("-") and words[0] not in ("-c", "-m"):
        if words[0] not in ("-u", "-B", "-s"):
            return None  # an option of Python that a fork would not follow
        words = words[1:]
    if words and words[0].endswith("ray/_private/workers/default_worker.py"):
        return words
    if _is_base(words) or _is_of_vllm(words) or words[:2] == ["-m", "laurel.workers.spawned"]:
        return words
    # `-m laurel NAME`, `laurel NAME`, `-m NAME`, `NAME`
    named = os.environ.get("LAUREL_WARM_COMMANDS", "").split()
    return words if any(os.path.basename(word) in named for word in words[:3]) else None


def _is_of_vllm(words):
    """Whether it may be a process of vLLM: its engines are started by multiprocessing."""
    return (
        "--multiprocessing-fork" in words
        or words[:2] == ["-m", "vllm.model_executor.models.registry"]
        or (words[:1] == ["-c"] and "vllm.entrypoints" in words[1])
    )


def _is_base(words):
    """Whether other processes of the tests are forked from this one, which do not know of us."""
    if words[:1] == ["-c"]:
        return words[1].startswith("from multiprocessing.forkserver import main;")
    return bool(words) and words[0].endswith("/tests/warm_cli.py")


def _environment(words):
    """The variables of the fork."""
    if not _is_base(words):
        return dict(os.environ)
    folder, path = os.path.dirname(__file__), os.environ["PYTHONPATH"].split(os.pathsep)
    others = os.pathsep.join(one for one in path if one != folder)
    return {name: value for name, value in os.environ.items() if name != "LAUREL_WARM"} | {
        "PYTHONPATH": others
    }


def _inherited():
    """The open descriptors beside the standard ones, in order."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
        except OSError:
            continue  # it was that of the list itself
        found.append(int(name))
    return sorted(one for one in found if one > 2)


def _fork_elsewhere(words):
    import json
    import signal
    import socket

    descriptors = _inherited()
    server = os.environ["LAUREL_WARM"]
    if _is_of_vllm(words) and os.path.exists(f"{server}.vllm"):
        server += ".vllm"
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(server)
    except OSError:
        return  # the server has gone with its tests: this process does it by itself
    job = {
        "arguments": words,
        "folder": os.getcwd(),
        "environment": _environment(words),
        "is_base": _is_base(words),
        "descriptors": [0, 1, 2, *descriptors],
        "leads_session": os.getsid(0) == os.getpid(),
    }
    message = json.dumps(job).encode() + b"\n"
    sent = socket.send_fds(link, [message], job["descriptors"])
    link.sendall(message[sent:])
    for descriptor in descriptors:
        os.close(descriptor)  # whoever reads from the other end waits for the fork alone
    status = b""
    while part := link.recv(16):
        status += part
    code = int(status or b"1")
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if "LAUREL_WARM" in os.environ and (_words := _arguments()):
    _fork_elsewhere(_words)
