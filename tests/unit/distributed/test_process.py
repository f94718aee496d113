"""What a process is prepared for."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

FREED = """
import sys
import numpy as np
from laurel.distributed.process import give_back_freed_memory

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
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told")
def test_what_is_freed_goes_back_to_the_system() -> None:
    kept = {
        how: float(subprocess.check_output([sys.executable, "-c", FREED, how]))
        for how in ("back", "as it is")
    }
    assert kept["back"] < 16, "MiB that are held after all 160 were freed"
    assert kept["as it is"] > 100, "else there is nothing to be mended"
