"""Processes that compute one model together, started and ended by a test."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from processes import forked

DEADLINE = 60.0


class RankError(AssertionError):
    """A process failed: its rank and what it said."""


def together(work: Callable[..., Any], ranks: int, *given: Any, deadline: float = DEADLINE) -> list:
    """What `work(*given)` returns in each of several processes of one gloo group, in rank order.

    `work` lies in a module of the folder `tests`, which processes can import. When one fails, or
    the time is over, all are killed.
    """
    context = multiprocessing.get_context("forkserver")
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run, args=(work, rank, ranks, folder, given), daemon=True)
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            _wait(processes, Path(folder), time.monotonic() + deadline)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                if process.pid is not None:
                    process.join(10)
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(ranks)]


def start_server() -> None:
    """The process that all others are forked from, which has imported what they need."""
    forkserver.set_forkserver_preload(["parallel_runs", "rank_imports"])
    with pytest.MonkeyPatch.context() as environment:
        # Its imports look here alone (Python 3.11 does not tell it where the tests lie).
        tests = Path(__file__).resolve().parent
        environment.setenv("PYTHONPATH", os.pathsep.join(map(str, (tests, tests.parent / "src"))))
        with forked():
            forkserver.ensure_running()


def _wait(processes: list, folder: Path, end: float) -> None:
    """Until all have ended well.

    Raises:
        RankError: One has not.
    """
    while True:
        failed = [r for r, process in enumerate(processes) if process.exitcode not in (None, 0)]
        if failed:
            # Where one fails, others fail at the lost connection: the first has the cause.
            said = sorted(folder.glob("*.error"), key=lambda path: int(path.stem.split("-")[0]))
            rank = int(said[0].stem.split("-")[1]) if said else failed[0]
            text = said[0].read_text() if said else f"exit code {processes[rank].exitcode}"
            raise RankError(f"rank {rank} of {len(processes)}: {text}")
        if all(process.exitcode == 0 for process in processes):
            return
        if time.monotonic() > end:
            waiting = [rank for rank, process in enumerate(processes) if process.is_alive()]
            raise RankError(f"ranks {waiting} of {len(processes)} have not ended in time")
        time.sleep(0.02)


def _run(work: Callable[..., Any], rank: int, ranks: int, folder: str, given: tuple) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=30),
        )
        torch.save(work(*given), Path(folder, f"{rank}.pt"))
        # Who closes its connections ends the last collective of a rank that is a moment behind.
        while not all(Path(folder, f"{other}.pt").exists() for other in range(ranks)):
            time.sleep(0.01)
        dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{time.monotonic_ns()}-{rank}.error").write_text(traceback.format_exc())
        raise
