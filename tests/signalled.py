"""`laurel rm` in a process that sends itself a signal: from outside it may come after the run.

Run as `python signalled.py '<JSON>' [OVERRIDES]`; see `main` for the keys.
"""

import itertools
import json
import os
import re
import sys
import threading
from functools import partial

from laurel.cli.main import main as laurel
from laurel.models.checkpoint import store
from laurel.training.learner import LocalLearner

LATEST = 20
"""Updates after which a kill comes, however late its timer."""


def before_update(number, do):
    """Do something when the update of this number begins, counted from 1."""
    update, updates = LocalLearner.update, itertools.count(1)

    def update_and_do(*given):
        if next(updates) == number:
            do()
        return update(*given)

    LocalLearner.update = update_and_do


def before_sealing(first, do):
    """Do something when the files of a checkpoint are written, of this step or a later one."""
    seal = store.seal_files

    def do_and_seal(directory, **given):
        if int(re.match(r"\.tmp-step_(\d+)-", directory.name)[1]) >= first:
            do()
        return seal(directory, **given)

    store.seal_files = do_and_seal


def main(job):
    send = partial(os.kill, os.getpid(), job["signal"])
    if "save" in job:
        before_sealing(job["save"], send)
    elif "seconds" in job:
        before_update(job["update"], threading.Timer(job["seconds"], send).start)
        before_update(job["update"] + LATEST, send)
    else:
        before_update(job["update"], send)
    sys.argv = ["laurel", "rm", *sys.argv[2:]]
    laurel()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
