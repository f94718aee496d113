"""What a process is prepared for."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import threads
from laurel.workers import process

one_thread = threads.one_thread

EXAMPLES = Path(__file__).parents[3] / "examples"

FREED = """
import sys
import numpy as np
from laurel.workers.process import trim_heap, give_back_freed_memory

def held():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024

if sys.argv[1] == "back":
    give_back_freed_memory()
np.ones(24 * 2**20, np.uint8)  # freed at once, and glibc has learned to keep blocks of this size
before = held()
blocks, pins = [], []
for _ in range(10):  # 160 MiB, and after each a little that stays
    blocks.append(np.ones(16 * 2**20, np.uint8))
    pins.append(bytearray(200_000))
blocks.clear()
print(held() - before)
trim_heap()
print(held() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_what_is_freed_goes_back_to_the_system() -> None:

    def held(how: str, **chosen: str) -> list[float]:
        command = [sys.executable, "-c", FREED, how]
        said = subprocess.check_output(command, env={**os.environ, **chosen})
        return [float(number) for number in said.split()]

    assert max(held("back")) < 16, "MiB that are held after all 160 were freed"
    kept, trimmed = held("as it is")
    assert kept > 100, "else there is nothing to be given back"
    assert trimmed < 16
    of_user, _ = held("back", MALLOC_MMAP_THRESHOLD_=str(32 * 2**20))
    assert of_user > 100, "a size that the user set stays"


NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def openmp_says(**chosen: str) -> str:
    """What the OpenMP of torch prints of its settings when torch is loaded behind any module."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", "import laurel.workers, torch"],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        env={**environment, **chosen, "OMP_DISPLAY_ENV": "VERBOSE", "KMP_SETTINGS": "1"},
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has another OpenMP here than GNU's")
    return done.stderr


def test_threads_that_wait_sleep_however_torch_is_reached() -> None:
    assert "GOMP_SPINCOUNT = '2000'" in openmp_says()


@pytest.mark.slow
def test_how_threads_wait_is_left_to_whoever_has_said_it() -> None:
    said = openmp_says(OMP_WAIT_POLICY="ACTIVE")
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in said
    assert "GOMP_SPINCOUNT = '2000'" not in said


@pytest.mark.parametrize(
    ("said", "processes", "threads"),
    [
        *((None, 1, 6), (None, 4, 1), (None, 8, 1), ("", 2, 3)),
        *(("2", 1, 2), ("8", 4, 8), ("3,1", 1, 3), ("0", 1, 6), ("many", 1, 6)),
    ],
)
def test_threads_are_an_equal_share_of_the_cores_or_what_openmp_is_told(
    monkeypatch: pytest.MonkeyPatch, said: str | None, processes: int, threads: int
) -> None:
    monkeypatch.setattr(process, "available_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if said is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert process.threads_of_each(processes) == threads


@pytest.mark.parametrize(("chosen", "threads"), [(None, 3), (2, 2)])
def test_torch_has_the_threads_that_are_chosen_or_else_those_of_each_process(
    monkeypatch: pytest.MonkeyPatch, chosen: int | None, threads: int
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    process.prepare("cpu", cpu_threads=chosen, seed=0)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_no_example_loads_torch_before_laurel(path: Path) -> None:
    imported = re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
    assert "torch" not in imported or imported.index("laurel") < imported.index("torch")
