"""Does the memory of `laurel serve` stay flat over 100,000 different requests?

    python benchmarks/server_memory.py

A client process of its own sends groups of 8 completions, none of them twice, over 32 connections.
After every tenth of them the server's resident memory is read, its replicas' included.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import psutil
from reward_server import ask, laurel_serve, server
from rounds import machine, table, write_json

MIB = 2**20
PARTS, SIZE = 10, 8
WAYS = {"one process": (), "two replicas": ("--replicas", "2")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="1,000 requests: does it run")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("benchmark_results/server_memory.json"))
    options = parser.parse_args()
    if options.quick:
        options.requests = 1000
    result: dict[str, Any] = {"machine": machine(), "requests": options.requests}
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, arguments in WAYS.items():
            found = measure(arguments, options, Path(scratch))
            result[name] = found
            held = found["mib"]
            rows.append(
                [
                    name,
                    f"{held[0]:.0f}",
                    f"{held[1]:.0f}",
                    f"{held[PARTS // 2]:.0f}",
                    f"{held[-1]:.0f}",
                    f"{options.requests / found['seconds']:.0f}",
                ]
            )
    header = ["server", "MiB before", "after a tenth", "after half", "after all", "requests/s"]
    title = (
        f"a server without a model, {options.requests:,} different requests of {SIZE} completions"
    )
    print(f"\n{title}\n\n{table(header, rows, as_markdown=options.markdown)}\n")
    write_json(options.json, result)


def measure(
    arguments: tuple[str, ...], options: argparse.Namespace, scratch: Path
) -> dict[str, Any]:
    """MiB before, and after each part of the requests."""
    count = options.requests // PARTS
    bodies = scratch / "bodies.jsonl"
    seconds = 0.0
    command = laurel_serve("--access-log", "none", *arguments, command="serve-null")
    with server(command, scratch) as (url, root):
        held = [memory_of(root)]
        for part in range(PARTS):
            write_bodies(bodies, range(part * count, (part + 1) * count))
            seen = ask(url, "/v1/score", bodies, connections=options.connections, requests=count)
            seconds += seen["seconds"]
            held.append(memory_of(root))
            left = seconds / (part + 1) * (PARTS - part - 1)
            print(
                f"{(part + 1) * count:,} requests, {held[-1]:.0f} MiB, "
                f"{count / seen['seconds']:.0f}/s, left {left:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return {"mib": held, "seconds": seconds}


def write_bodies(path: Path, numbers: range) -> None:
    with path.open("w") as file:
        for number in numbers:
            completions = [f"Completion {i} of {number} is about this. " * 3 for i in range(SIZE)]
            group = {"id": str(number), "prompt": f"Q {number}? " * 20, "completions": completions}
            file.write(json.dumps({"groups": [group]}) + "\n")


def memory_of(root: psutil.Process) -> float:
    family = [root, *root.children(recursive=True)]
    return sum(process.memory_info().rss for process in family) / MIB


if __name__ == "__main__":
    main()
