"""Laurel trains, evaluates and serves reward models, and trains policies with GRPO."""

import os

__version__ = "0.1.0"

__all__ = ["__version__"]

SLEEPING_THREADS = {"GOMP_SPINCOUNT": "2000", "KMP_BLOCKTIME": "0"}
"""Settings that make waiting threads of torch sleep. Spinning threads take the processor from the
process they wait for as soon as another process computes: `benchmarks/busy_machine.py`. They spin
2,000 times before: most waits are over by then, and to sleep at once made training alone 9 %
slower.
"""
# Not OMP_WAIT_POLICY=PASSIVE: with the threads of the backward pass there are more than cores, and
# then it has them sleep at once whatever the count says.
WAITING_OF_THREADS = ("OMP_WAIT_POLICY", *SLEEPING_THREADS)
"""Environment variables that decide how threads wait."""

# OpenMP reads these once, when torch is loaded: so here, before any module that imports it. They
# pass to processes that this one starts. Who has set one of them has decided about all.
if not os.environ.keys() & set(WAITING_OF_THREADS):
    os.environ.update(SLEEPING_THREADS)
