"""Makes tables of what `day.py` measured, for docs/gpu.md, and holds them against predictions.

    python benchmarks/gpu_day/report.py DIRECTORY...

`x predicted` is the measured time over that of `laurel plan` (of the head: its counted bytes and
products at the device's peaks). What is more than 1.5 times off is marked: it is news.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rounds import markdown

NEWS = 1.5
"""The ratio of measured and predicted time, either way, from which it is news."""
GOALS = {"training": 0.40, "scoring": 0.45}
"""Shares of the peak that are wanted in bfloat16, at 0.9G parameters on an H100."""
TOKENS_GOAL = 10_000
"""Tokens a second that are wanted of sampling in process, with 64 running completions."""
SHOWN = 300
"""Characters of a failure's last line that are shown."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIRECTORY")
    folders = parser.parse_args().directories
    if not any(folder.glob("steps.jsonl") for folder in folders):
        parser.error(f"no steps.jsonl in {', '.join(map(str, folders))}: day.py writes it")
    parts = (steps, tests, trial, speed, kernels, engines, runs)
    print("\n\n".join(text for part in parts if (text := part(folders))))


def lines(folders: Sequence[Path], name: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of all files of a name; a last line that was cut off is left out."""
    for folder in folders:
        for file in sorted(folder.glob(name)):
            for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
                try:
                    yield {"file": file.stem, **json.loads(line)}
                except json.JSONDecodeError:
                    print(f"{file}:{number} is cut off, and left out", file=sys.stderr)


def steps(folders: Sequence[Path]) -> str:
    """Return a table of how each step ended; one that only began was cut off with the machine."""
    last = {line["step"]: line for line in lines(folders, "steps.jsonl")}
    rows = [
        [
            name,
            "cut off with the machine" if line["status"] == "begun" else line["status"],
            number(line.get("seconds")),
            line.get("why", ""),
        ]
        for name, line in last.items()
    ]
    return markdown(["step", "ended", "seconds", ""], rows)


def tests(folders: Sequence[Path]) -> str:
    """Return a table of the tests by file, and the last line of each failure."""
    found = {line["test"]: line for line in lines(folders, "tests.jsonl")}
    if not found:
        return ""
    counts: dict[str, Counter[str]] = {}
    for test, line in found.items():
        counts.setdefault(test.partition("::")[0], Counter())[line["outcome"]] += 1
    kinds = ("passed", "failed", "error", "skipped")
    rows = [[file, *(str(counted[kind]) for kind in kinds)] for file, counted in counts.items()]
    broken = [
        f"- `{test}`: {line['text'].strip().splitlines()[-1][:SHOWN] if line['text'] else ''}"
        for test, line in found.items()
        if line["outcome"] in ("failed", "error")
    ]
    return "\n".join([markdown(["tests", *kinds], rows), *([""] if broken else []), *broken])


def trial(folders: Sequence[Path]) -> str:
    """Return the table of the trial's checks."""
    rows = [
        [check["name"], check["status"], check["detail"]]
        for folder in folders
        for file in folder.glob("trial.json")
        for check in json.loads(file.read_text(encoding="utf-8"))["checks"]
    ]
    return markdown(["check", "result", "measured"], rows) if rows else ""


def speed(folders: Sequence[Path]) -> str:
    """Return a table of the phases that were measured, beside predictions and goals."""
    rows, devices = [], {}
    for row in lines(folders, "speed.jsonl"):
        devices[f"{row['device']}, torch {row['torch']}, {row['precision']}"] = True
        what = f"V {row['vocabulary']:,}" if "vocabulary" in row else ""
        what += f", D {row['width']:,}" if "width" in row else ""
        what += f", {row['groups']} of {row['tokens']}, {row['way']}" if "way" in row else ""
        rows.append(
            [
                row["phase"],
                f"{row['layers']}{' ' + row['attention'] if row['attention'] else ''}",
                what,
                number(row.get("first")),
                number(row.get("seconds")),
                against(row.get("seconds"), row.get("predicted")),
                percent(row.get("share_of_peak"), GOALS.get(row["phase"])),
                tokens(row),
                row.get("error", ""),
            ]
        )
    header = ["phase", "layers", "what", "first call, s", "seconds"]
    header += ["x predicted", "of the peak", "tokens/s", ""]
    return f"{'; '.join(devices)}\n\n{markdown(header, rows)}" if rows else ""


def kernels(folders: Sequence[Path]) -> str:
    """Return a table of milliseconds and launches by kind of kernel."""
    found = [row for row in lines(folders, "speed.jsonl") if row.get("kernels")]
    kinds = sorted({kind for row in found for kind in row["kernels"]})
    rows = []
    for row in found:
        took = [row["kernels"].get(kind) for kind in kinds]
        launches = sum(one[1] for one in took if one)
        name = f"{row['phase']}, V {row['vocabulary']:,}, {row['layers']}"
        cells = [f"{one[0]:.3g}" if one else "" for one in took]
        rows.append([name, *cells, str(launches), f"{1e3 * row['seconds']:.3g}"])
    header = ["one call, ms", *kinds, "launches", "without the profiler"]
    return markdown(header, rows) if rows else ""


def engines(folders: Sequence[Path]) -> str:
    """Return a table of the engine in process beside transformers' `generate_batch`."""
    rows = [
        [what, ", ".join(f"{one:,.0f} tokens/s" for one in found) if key == "speeds" else found]
        for folder in folders
        for file in folder.glob("generate_batch.json")
        for key, values in json.loads(file.read_text(encoding="utf-8")).items()
        if key in ("speeds", "promises")
        for what, found in values.items()
    ]
    return markdown(["sampling in process, generate_batch", "found"], rows) if rows else ""


def runs(folders: Sequence[Path]) -> str:
    """Return the last metrics of the runs: losses, rewards, accuracies and times."""
    last = {line["file"]: line for line in lines(folders, "metrics-*.jsonl")}
    rows = [
        [name.removeprefix("metrics-"), key, number(value)]
        for name, line in last.items()
        for key, value in line.items()
        if isinstance(value, float)
        and key.startswith(("timing/", "train/loss", "train/reward", "val"))
    ]
    return markdown(["run", "metric of the last step", ""], rows) if rows else ""


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def against(seconds: float | None, predicted: float | None) -> str:
    if not seconds or not predicted:
        return ""
    ratio = seconds / predicted
    return f"{ratio:.2g}{' (news)' if not 1 / NEWS <= ratio <= NEWS else ''}"


def percent(share: float | None, goal: float | None) -> str:
    if share is None:
        return ""
    return f"{share:.0%}{f' (goal {goal:.0%})' if goal else ''}"


def tokens(row: dict[str, Any]) -> str:
    if row["phase"] != "generation" or "error" in row:
        return ""
    goal = f" (goal {TOKENS_GOAL:,})" if row["groups"] == "4 x 16" else ""
    return f"{row['completion_tokens_per_second']:,.0f}{goal}"


if __name__ == "__main__":
    main()
