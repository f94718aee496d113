"""Workers in processes of their own, measured in turn; medians, tables and raw values.

Every worker is a process with its own interpreter, model and memory. All of them are started first
and wait; then each round asks each of them, one after another, for the same work. Whatever slows
the machine for a while slows all of them, so ratios hold where times do not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@dataclass(slots=True, kw_only=True)
class Worker:
    """One program under measurement."""

    name: str
    process: subprocess.Popen[str]
    facts: dict[str, Any] = field(default_factory=dict)
    repeats: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def start(
        cls, name: str, script: str, python: str, settings: Mapping[str, Any], log_dir: Path
    ) -> Worker:
        threads = str(settings["threads"])
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with (log_dir / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [python, str(HERE / "peers" / script), json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        return cls(name=name, process=process)

    def listen(self, log_dir: Path) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            log = (log_dir / f"{self.name}.log").read_text(errors="replace").strip()
            raise SystemExit(f"{self.name} ended early; the end of its log:\n{log[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, log_dir: Path, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.listen(log_dir)

    def stop(self) -> None:
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def values(self, key: str) -> list[float]:
        return [repeat[key] for repeat in self.repeats]


def run_rounds(
    workers: Sequence[Worker], *, steps: int, rounds: Mapping[str, int], log_dir: Path
) -> None:
    """Warm every worker up with the same steps, then measure them in turn.

    `rounds` says how often each is measured; the first rounds measure all of them. Who goes first
    changes from round to round, so that none always follows another.
    """
    for index in range(max(rounds.values()) + 1):
        for worker in workers if index % 2 else reversed(workers):
            if index > rounds[worker.name]:
                continue
            cost = worker.ask(log_dir, do="steps", count=steps)
            what = "warm-up" if index == 0 else f"round {index}"
            print(f"  {what:8} {worker.name:24} {cost['seconds']:7.1f} s", file=sys.stderr)
            if index:
                worker.repeats.append(cost)


def add_clock(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clock",
        default="wall",
        choices=["wall", "cpu"],
        help="cpu: processor time, for a busy machine; only honest with --threads 1, because "
        "threads that wait for each other count as working",
    )


def seconds_of(cost: Mapping[str, float], clock: str) -> float:
    """How long a piece of work took, by the clock that was asked for."""
    return cost["seconds"] if clock == "wall" else cost["user_seconds"] + cost["system_seconds"]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, and the range in brackets."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plain(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [header, *rows]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, as_markdown: bool) -> str:
    return markdown(header, rows) if as_markdown else plain(header, rows)


def machine() -> dict[str, Any]:
    """What it ran on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_at_start": load,
    }


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    print(f"raw values: {path}", file=sys.stderr)
