"""What a process is prepared for."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
if sys.argv[1] == "at once":
    trim_heap()
print(held() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_what_is_freed_goes_back_to_the_system() -> None:
    kept = {
        how: float(subprocess.check_output([sys.executable, "-c", FREED, how]))
        for how in ("back", "at once", "as it is")
    }
    assert kept["back"] < 16, "MiB that are held after all 160 were freed"
    assert kept["at once"] < 16
    assert kept["as it is"] > 100, "else there is nothing to be given back"
    chosen = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20)}
    of_user = subprocess.check_output([sys.executable, "-c", FREED, "back"], env=chosen)
    assert float(of_user) > 100, "a size that the user set stays"


NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
ENTRIES = {
    "the command": "import laurel.cli.main, laurel.run.train, torch",
    "the api": "import laurel.api, torch",
    "a spawned worker": "import laurel.workers.spawned, torch",
    "a Ray actor": "import laurel.workers.worker_actor, torch",
}


def openmp_says(code: str, **chosen: str) -> str:
    """What the OpenMP of torch prints of its settings when torch is loaded."""
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        env={**environment, **chosen, "OMP_DISPLAY_ENV": "VERBOSE", "KMP_SETTINGS": "1"},
    )
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("torch has another OpenMP here than GNU's")
    return done.stderr


@pytest.mark.slow_parameters("the command", "the api", "a Ray actor")
@pytest.mark.parametrize("entry", ENTRIES)
def test_threads_that_wait_sleep_however_torch_is_reached(entry: str) -> None:
    said = openmp_says(ENTRIES[entry])
    assert "GOMP_SPINCOUNT = '2000'" in said


@pytest.mark.slow
def test_how_threads_wait_is_left_to_whoever_has_said_it() -> None:
    said = openmp_says(ENTRIES["the api"], OMP_WAIT_POLICY="ACTIVE")
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in said
    assert "GOMP_SPINCOUNT = '2000'" not in said


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_no_example_loads_torch_before_laurel(path: Path) -> None:
    imported = re.findall(r"^(?:import|from) (\w+)", path.read_text(), re.MULTILINE)
    assert "torch" not in imported or imported.index("laurel") < imported.index("torch")
