"""Probes of this machine, each of which may fail by itself."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laurel import SLEEPING_THREADS, WAITING_OF_THREADS, __version__
from laurel.errors import DISTRIBUTION, counted, install_command
from laurel.observe.console import format_number

if TYPE_CHECKING:
    from packaging.requirements import Requirement

FAST_TYPES = ("avx512_bf16", "amx_bf16", "bf16")
"""Names of bfloat16 arithmetic in a CPU's flags (the last one on ARM)."""
GIB = 2**30
LEAST_PRODUCTS = 5
"""Matrix products of each size that are timed to choose the size of the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFinding:
    """The findings of a probe, for programs and for people."""

    facts: dict[str, Any]
    """Values that JSON can hold."""
    lines: tuple[str, ...]


Probe = Callable[[], ProbeFinding]


def system_versions() -> ProbeFinding:
    """Identify Laurel, Python and the system."""
    facts = {
        "laurel": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
    }
    return ProbeFinding(
        facts=facts,
        lines=(
            f"laurel {__version__}, Python {facts['python']} ({sys.executable})",
            facts["system"],
        ),
    )


def libraries() -> ProbeFinding:
    """Check the libraries that Laurel needs against their supported versions."""
    versions: dict[str, str | None] = {}
    unsuitable: list[str] = []
    for extra, requirement in _requirements():
        if extra:
            continue
        versions[requirement.name] = installed = _installed(requirement.name)
        specifier = requirement.specifier
        if installed is None or not specifier.contains(installed, prereleases=True):
            unsuitable.append(
                f"{requirement.name} {installed or 'is missing'}, {specifier} is needed"
            )
    present = [f"{name} {version}" for name, version in versions.items() if version is not None]
    repair = [f"MISMATCH {line}; fix with: {install_command()}" for line in unsuitable]
    rows = [", ".join(present[first : first + 5]) for first in range(0, len(present), 5)]
    return ProbeFinding(facts={**versions, "misfits": unsuitable}, lines=(*rows, *repair))


def extras() -> ProbeFinding:
    """List optional packages, and the commands that install missing ones."""
    packages: dict[str, dict[str, str | None]] = {}
    for extra, requirement in _requirements():
        if extra:
            packages.setdefault(extra, {})[requirement.name] = _installed(requirement.name)
    facts: dict[str, Any] = {}
    lines: list[str] = []
    width = max(map(len, packages), default=0)
    for extra, versions in packages.items():
        absent = [name for name, version in versions.items() if version is None]
        command = install_command(extra) if absent else None
        facts[extra] = {"packages": versions, "install": command}
        if command is None:
            lines.append(f"{extra:{width}} {', '.join(f'{n} {v}' for n, v in versions.items())}")
        else:
            lines.append(f"{extra:{width}} without {', '.join(absent)}: {command}")
    return ProbeFinding(facts=facts, lines=tuple(lines))


def cpu() -> ProbeFinding:
    """Describe the processor, and how much of it this process may use."""
    from laurel.sandbox.limits import available_cores, cpu_quota
    from laurel.workers.process import threads_of_each

    table = _table(Path("/proc/cpuinfo"))
    model = table.get("model name") or platform.processor() or platform.machine()
    flags = set((table.get("flags") or table.get("Features") or "").split())
    cores, quota = available_cores(), cpu_quota()
    waiting = {name: os.environ[name] for name in WAITING_OF_THREADS if name in os.environ}
    fast = [flag for flag in FAST_TYPES if flag in flags]
    facts = {
        "model": model,
        "cores": os.cpu_count(),
        "usable_cores": cores,
        "quota": quota,
        "threads": threads_of_each(),
        "bfloat16": fast,
        "waiting_threads": waiting,
    }
    limited = f"; the container's quota is {quota:g}" if quota is not None else ""
    return ProbeFinding(
        facts=facts,
        lines=(
            f"{model}: {cores} of {os.cpu_count()} cores usable{limited}",
            f"bfloat16 instructions: {', '.join(fast) or 'none'}",
            _waiting(waiting),
        ),
    )


def _waiting(settings: Mapping[str, str]) -> str:
    # Whether threads spin or sleep while they wait for others, and which setting decided.
    values = " ".join(f"{name}={value}" for name, value in settings.items())
    if settings == SLEEPING_THREADS:
        return f"threads that wait sleep: other processes can compute meanwhile ({values})"
    return f"threads wait as the environment says: {values}. Unset, Laurel has them sleep"


def memory() -> ProbeFinding:
    """Describe main memory."""
    from laurel.sandbox.limits import memory_limit

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    table = _table(Path("/proc/meminfo"))
    kilobytes = table.get("MemAvailable", "").split()
    available = int(kilobytes[0]) * 1024 if kilobytes else None
    limit = memory_limit()
    facts = {"total": total, "available": available, "limit": limit}
    words = [f"{total / GIB:.1f} GiB"]
    if available is not None:
        words.append(f"{available / GIB:.1f} GiB available")
    if limit is not None and limit < total:
        words.append(f"the container may use {limit / GIB:.1f} GiB")
    return ProbeFinding(facts=facts, lines=(", ".join(words),))


def gpus() -> ProbeFinding:
    """Describe the GPUs that torch can use."""
    import torch

    devices = [
        torch.cuda.get_device_properties(i)
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    ]
    facts: list[dict[str, Any]] = [
        {"name": d.name, "memory": d.total_memory, "capability": f"{d.major}.{d.minor}"}
        for d in devices
    ]
    lines = tuple(
        f"{index}: {fact['name']}, {fact['memory'] / GIB:.0f} GiB, capability {fact['capability']}"
        for index, fact in enumerate(facts)
    )
    build = torch.version.cuda or torch.version.hip
    none = f"none that torch can use (torch {torch.__version__} is built " + (
        f"for CUDA {build})" if build else "without CUDA)"
    )
    return ProbeFinding(facts={"devices": facts, "torch_build": build}, lines=lines or (none,))


def disk() -> ProbeFinding:
    """Measure the free space for checkpoints and logs, which go under the working directory."""
    here = os.getcwd()
    usage = shutil.disk_usage(here)
    return ProbeFinding(
        facts={"directory": here, "free": usage.free, "total": usage.total},
        lines=(f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {here}",),
    )


def hub() -> ProbeFinding:
    """Locate the cache of the Hugging Face hub, and whether the hub may be contacted."""
    from huggingface_hub import constants

    cache, is_offline = Path(constants.HF_HUB_CACHE), bool(constants.HF_HUB_OFFLINE)
    models = sorted(cache.glob("models--*")) if cache.is_dir() else []
    state = "offline (HF_HUB_OFFLINE is set)" if is_offline else "HF_HUB_OFFLINE is not set"
    return ProbeFinding(
        facts={"cache": str(cache), "offline": is_offline, "models": len(models)},
        lines=(f"{cache}: {counted(len(models), 'model')}; {state}",),
    )


def sandbox_advice() -> ProbeFinding:
    """Point to the command that reports on sandbox isolation."""
    return ProbeFinding(facts={}, lines=("laurel sandbox check tries what holds here",))


def speed(seconds: float = 0.2) -> ProbeFinding:
    """Time matrix products in both types on the device that will be used.

    On a CPU one core is measured: threads that wait for each other would measure the load of the
    machine.
    """
    import torch

    from laurel.workers.process import choose_device

    device = choose_device("auto")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rates = measure_products(("float32", "bfloat16"), device.type, seconds=seconds)
    finally:
        torch.set_num_threads(threads)
    numbers = ", ".join(f"{name} {format_number(rate)} GFLOP/s" for name, rate in rates.items())
    what = "one core" if device.type == "cpu" else device.type
    return ProbeFinding(
        facts={"device": device.type, "gflops": rates},
        lines=(f"matrix products on {what}: {numbers}",),
    )


def measure_products(
    dtypes: Sequence[str],
    device: str,
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Time square matrix products: billions of additions and multiplications a second, by dtype.

    The types alternate on matrices of one size, for `seconds` each, and the fastest product of each
    counts: others were delayed by other processes. The size is the one at which a product of the
    first type takes a hundredth of the time, so that a slow machine is not kept waiting and a fast
    one is kept busy.
    """
    import torch

    def timed(matrix: torch.Tensor) -> float:
        started = clock()
        torch.mm(matrix, matrix)
        if device == "cuda":
            torch.cuda.synchronize()
        return clock() - started

    def square(dtype: str, size: int) -> torch.Tensor:
        value = 1.0 / size
        return torch.full((size, size), value, dtype=getattr(torch, dtype), device=device)

    for size in (128, 256, 512, 1024, 2048, 4096, 8192):
        matrix = square(dtypes[0], size)
        if min(timed(matrix) for _ in range(LEAST_PRODUCTS)) > seconds / 100:
            break
    matrices = {dtype: square(dtype, size) for dtype in dtypes}
    times: dict[str, list[float]] = {dtype: [timed(matrices[dtype])] for dtype in dtypes}
    while sum(map(sum, times.values())) < seconds * len(dtypes):
        for dtype, matrix in matrices.items():
            times[dtype].append(timed(matrix))
    return {dtype: 2 * size**3 / min(durations) / 1e9 for dtype, durations in times.items()}


def _requirements() -> Iterator[tuple[str, Requirement]]:
    # What the installed distribution of Laurel asks for, each with its extra (or '').
    from packaging.requirements import Requirement

    for text in metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        extra = re.search(r"extra == ['\"]([^'\"]+)['\"]", str(requirement.marker or ""))
        yield (extra[1] if extra else ""), requirement


def _installed(name: str) -> str | None:
    for distribution in (name, f"{name}-cpu"):  # the build of vLLM for CPUs has a name of its own
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return None


def _table(path: Path) -> dict[str, str]:
    # The `key: value` lines of a file of the kernel, the first of each key; empty without it.
    table: dict[str, str] = {}
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            table.setdefault(key.strip(), value.strip())
    return table
