"""Processes that a process has started, also those that were forked elsewhere (`warm_python`)."""

import os
from contextlib import suppress
from pathlib import Path

import psutil


def descendants(pid):
    """The living processes below one; what a warm server forked for one of them is below it."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children():
            found += [child, *descendants(child.pid)]
        if (place := Path(f"{os.environ.get('LAUREL_WARM', '')}.{pid}")).exists():
            fork = psutil.Process(int(place.read_text()))
            found += [fork, *descendants(fork.pid)]
    return found
