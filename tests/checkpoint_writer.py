"""A process that saves checkpoints until it is done, told to stop, or dies where it was told to.

Run as `python checkpoint_writer.py '<JSON>'`; see `main` for the keys. It prints a line when it is
ready and one for each save. The contents follow from step and generation, so that a reader knows
what a checkpoint must hold.
"""

import hashlib
import json
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path

from laurel.errors import CheckpointError
from laurel.models.checkpoint.store import Background, CheckpointStore
from saved_steps import save_step

WORK = bytes(200_000)
"""What is computed meanwhile, other threads being free to run, as in torch."""
NAMES = ("model.safetensors", "optimizer.safetensors", "policy/tokenizer.json")


def content(name, step, generation, size):
    line = f"{name} of step {step}, generation {generation}\n".encode()
    return (line * (size // len(line) + 1))[:size]


def writer(step, generation, size, *, frozen_folder=False):
    def write(directory):
        for name in NAMES:
            file = directory / name
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content(name, step, generation, size))
        if frozen_folder:
            (directory / "policy").chmod(0o555)

    return write


def save_behind(store, step, write, **options):
    """Save as training does that goes on meanwhile."""
    background = Background("writing")

    def begin(directory):
        background.start(lambda: write(directory))
        return lambda is_awaited: background.outcome(is_awaited=is_awaited)

    save = store.begin(step, begin, **options)
    while not save.ready():
        hashlib.sha256(WORK)
    return save.finish()


def die_at(phase):
    def on_phase(now):
        if now == phase:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_phase


def print_disk_operations():
    """Print each fsync and rename as it happens, with the paths."""
    fsync = os.fsync

    def traced_fsync(descriptor):
        print("fsync", os.readlink(f"/proc/self/fd/{descriptor}"), flush=True)
        fsync(descriptor)

    def audit(event, arguments):
        if event == "os.rename":
            print("rename", arguments[0], arguments[1], flush=True)

    os.fsync = traced_fsync
    sys.addaudithook(audit)


def main(job):
    logging.basicConfig(stream=sys.stdout, format="warning: %(message)s")
    if "largest_file" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["largest_file"],) * 2)
    if job.get("trace"):
        print_disk_operations()
    root = Path(job["root"])
    if "root_mode" in job:
        root.chmod(job["root_mode"])
    size, generation = job.get("size", 1000), job.get("generation", 1)
    store = CheckpointStore(
        root, keep_top_k=job.get("keep_top_k"), on_phase=die_at(job.get("die_at"))
    )
    try:
        with store:
            if job.get("fork"):
                here, there = os.pipe()
                child = os.fork()
                if child == 0:
                    os.write(there, b"!")
                    time.sleep(600)
                    os._exit(0)
                os.read(here, 1)  # else it may be killed before what is done after a fork
                print("child", child, flush=True)
            print("ready", os.getpid(), flush=True)
            step = job.get("first_step", 0)
            while step in job.get("steps", []) or job.get("endless"):
                frozen = step in job.get("frozen", [])
                save = save_behind if job.get("in_background") else save_step
                save(
                    store,
                    step,
                    writer(step, generation, size, frozen_folder=frozen),
                    metric=float(-step),
                    info={"total_steps": step},
                )
                print("saved", step, flush=True)
                step += 1
            time.sleep(job.get("linger", 0))
    except CheckpointError as error:
        print("refused", error, flush=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
