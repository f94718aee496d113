"""The processes of a Ray cluster of our own: whose end is theirs, and which are left over."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def in_a_thread_that_stays(start: Callable[[], None], *, until: threading.Event) -> None:
    """Start processes that are to live longer than the calling thread.

    On Linux, Ray has its processes killed when the thread that started them ends, and a process
    whose cluster is gone is ended by Ray a minute later, without a word. The main thread lasts as
    long as the process; for any other, one that waits stands in.

    Args:
        start: Starts them.
        until: Set when they are needed no more.

    Raises:
        BaseException: What `start` raised.
    """
    if threading.current_thread() is threading.main_thread():
        start()
        return
    done, errors = threading.Event(), list[BaseException]()

    def stay() -> None:
        try:
            start()
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()
        if not errors:
            until.wait()

    threading.Thread(target=stay, name="laurel-ray", daemon=True).start()
    done.wait()
    if errors:
        raise errors[0]


def end_those_of(folder: str) -> None:
    """End processes that this one has started for a cluster that did not come up, and that Ray
    would keep to the end: those with the cluster's folder in their command line."""
    psutil: Any = importlib.import_module("psutil")
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if any(folder in argument for argument in process.cmdline()):
                process.kill()
                process.wait(5)
