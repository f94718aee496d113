"""How long does `laurel --help` take to answer? Whole processes, one after the other.

python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

TARGET_SECONDS = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    command = [sys.executable, "-m", "laurel.cli.main", "--help"]
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - started)
    counted = seconds[1:]  # the first one reads the files from the disk
    print(
        f"laurel --help: median {statistics.median(counted):.3f} s, {min(counted):.3f} to "
        f"{max(counted):.3f} s over {repeats} processes; the first {seconds[0]:.3f} s; target "
        f"{TARGET_SECONDS} s; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
