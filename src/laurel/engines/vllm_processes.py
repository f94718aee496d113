"""The life of a vLLM that was started here, and the processes that it has started."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

WATCH_SECONDS = 0.2
"""How often it is asked whether vLLM is alive."""
SEGMENTS = ("/dev/shm/psm_", "/dev/shm/vllm_dist_")
"""How the files of vLLM's shared memory begin: its queues, and its sums on a CPU."""
DIED = "vLLM died; what it wrote is above. Without a word: most likely out of memory (see dmesg)"


async def death_of(llm: Any) -> None:
    """Return when it has died."""
    while not llm.errored:
        await asyncio.sleep(WATCH_SECONDS)


def end(llm: Any, processes: Iterable[Any], segments: Iterable[str] = ()) -> None:
    """End it and its processes, whatever state they are in.

    Args:
        llm: The engine; None where it was never made.
        processes: Of `processes_of`.
        segments: Of `segments_of`; vLLM 0.32 leaves some of them behind.
    """
    if llm is not None:
        with suppress(Exception):
            llm.shutdown()
            llm.engine_core.resources.ctx.term()  # its sockets are closed by now
    for process in processes:  # those that still run: their parent died before them
        with suppress(Exception):
            process.kill()
            process.wait(5)
    remove(segments)


def processes_of(llm: Any) -> list[Any]:
    """All of them, as psutil's processes."""
    psutil: Any = importlib.import_module("psutil")  # vLLM needs it too
    started = [psutil.Process(p.pid) for p in llm.engine_core.resources.engine_manager.processes]
    return started + [child for process in started for child in process.children(recursive=True)]


def segments_of(processes: Iterable[Any]) -> set[str]:
    """Files of the shared memory that they have just now; of `processes_of`."""
    found: set[str] = set()
    for process in processes:
        with suppress(Exception):  # it has ended
            found.update(one.path for one in process.memory_maps())
    return {path for path in found if path.startswith(SEGMENTS)}


def remove(segments: Iterable[str]) -> None:
    """Remove those that are still there; memory is given back when nobody has them any more."""
    for path in segments:
        with suppress(OSError):
            os.unlink(path)
