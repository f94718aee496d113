"""Python imports this as it starts, where this folder is in PYTHONPATH.

A process that would import torch has itself forked from one that has done so (`server.py`), and
waits for the fork's end: its own imports would take seconds. Such processes are Ray's workers,
those of spawned groups, those that multiprocessing spawns, the reward servers of
`serve_processes.py`, the kernels of `test_notebooks.py`, and the steps of a day on a GPU
(`test_gpu_day.py`).
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
    if words[:2] == ["-m", "ipykernel_launcher"] and "LAUREL_WARM_KERNELS" in os.environ:
        return words
    if words[:2] == ["-m", "laurel.workers.spawned"] or "--multiprocessing-fork" in words:
        return words
    if "LAUREL_WARM_SERVE" in os.environ and words[2:3] in (["serve"], ["serve-null"]):
        return words
    is_step = words[:2] == ["-m", "laurel"] or (
        words[:1] and words[0].endswith("benchmarks/gpu.py")
    )
    if "LAUREL_WARM_STEPS" in os.environ and is_step:
        return words
    return None


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
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(os.environ["LAUREL_WARM"])
    except OSError:
        return  # the server has gone with its tests: this process does it by itself
    job = {
        "arguments": words,
        "folder": os.getcwd(),
        "environment": dict(os.environ),
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
