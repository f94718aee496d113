"""Rows of benchmarks made for tests of `laurel eval`, and what is read of its answers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

Laurel = Callable[[Sequence[str]], CompletedProcess[str]]

SUBSETS = ("mt-bench-easy", "llmbar-natural", "donotanswer", "hep-go")
"""One of each section."""
WORDS = ("the laurel", "bread and wine", "an old man", "the western gate", "no", "river")


def pair_rows() -> list[dict[str, Any]]:
    return [
        {
            "id": i,
            "subset": SUBSETS[i % 4],
            "prompt": f"Where is {WORDS[i % 6]} of {i}?",
            "chosen": f"By {WORDS[(i + 1) % 6]}.",
            "rejected": f"By {WORDS[(i + 2) % 6]}, not {i}.",
        }
        for i in range(24)
    ]


def list_rows() -> list[dict[str, Any]]:
    domains = ("Factuality", "Precise IF", "Math", "Safety", "Focus")
    rows = [
        {
            "id": str(i),
            "subset": domains[i % 5],
            "prompt": f"Where, {i}?",
            "num_correct": 1,
            "total_completions": 4,
            "chosen": [WORDS[i % 6]],
            "rejected": [f"{WORDS[(i + k) % 6]} or {k}" for k in (1, 2, 3)],
        }
        for i in range(10)
    ]
    for n in range(2):
        common = {"subset": "Ties", "prompt": f"Name one of {n}."}
        rows.append({**common, "id": f"ref:{n}", "chosen": ["wine"], "rejected": ["gate", "no"]})
        rows.append(
            {
                **common,
                "id": f"tied:{n}",
                "chosen": ["wine", "bread", "river"],
                "rejected": ["gate", "no"],
            }
        )
    return rows


def write(path: Path, rows: list[Any]) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    data = text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def accuracies(found: dict[str, Any]) -> dict[str, float | None]:
    return {one["name"]: one["value"] for one in found["subsets"]}


def evaluate(
    laurel: Laurel, name: str, model: Path | str, data: Path, *more: str
) -> CompletedProcess[str]:
    return laurel(["eval", name, "-m", str(model), "-d", str(data), *more])


def refused(laurel: Laurel, arguments: list[str]) -> str:
    done = laurel(["eval", *arguments])
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return done.stderr
