"""Does the sandbox judge real programs as they have been judged before?

    python benchmarks/code_verdicts.py [--only mbpp] [--sample 200]

Known solutions of HumanEval and MBPP pass, the solutions of HumanEvalPack that people have put bugs
into fail, and the completions that CodeGen-16B once wrote for HumanEval get their recorded
verdicts. Each difference is printed.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import gzip
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from rounds import machine, table, write_json

from laurel.extensions.code.sandbox.control_group import chosen_place
from laurel.extensions.code.sandbox.detection import detect
from laurel.extensions.code.sandbox.jobs import Limits, SandboxJob, SandboxResult, Status
from laurel.extensions.code.sandbox.pool import SandboxPool

DATA_DIR = Path(os.environ.get("LAUREL_DATA", "../shared/data"))
LIMITS = Limits(cpu_s=10, wall_s=120)
SAMPLE_LIMITS = Limits(cpu_s=4, wall_s=60, mem_mb=1024)
"""Those under which the completions were judged before, but for the wall clock."""
DETAIL = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A program whose verdict is known."""

    job: SandboxJob
    passes: bool


def humaneval_job(task: Mapping[str, Any], code: str, limits: Limits = LIMITS) -> SandboxJob:
    """A whole program for a task of HumanEval's form."""
    return SandboxJob(
        id=task["task_id"],
        code=code,
        mode="tests",
        entry=task["entry_point"],
        test_setup=task["prompt"],
        test_code=f"{task['test']}\ncheck({task['entry_point']})\n",
        limits=limits,
    )


def mbpp_job(task: Mapping[str, Any], code: str) -> SandboxJob:
    """A program for a task of MBPP. What its setup makes is of classes of the program."""
    lines = [task["test_setup_code"], *task["test_list"]]
    return SandboxJob(
        id=f"MBPP/{task['task_id']}",
        code=code,
        mode="tests",
        entry=first_called(task["test_list"]),
        test_code="\n".join(lines),
        limits=LIMITS,
    )


def first_called(tests: Sequence[str]) -> str:
    """The function that asserts are about: the one of the program that all of them call."""
    names = [
        {
            node.func.id
            for node in ast.walk(ast.parse(test))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        for test in tests
    ]
    common = set.intersection(*names) - set(dir(builtins)) or set.union(*names)
    return min(common)


def humaneval() -> list[Judged]:
    return [
        Judged(job=humaneval_job(one, one["prompt"] + one["canonical_solution"]), passes=True)
        for one in read("humaneval/HumanEval.jsonl.gz")
    ]


def mbpp() -> list[Judged]:
    parts = ("prompt", "train", "validation", "test")
    tasks = [one for part in parts for one in read(f"mbpp/{part}.jsonl.gz")]
    return [Judged(job=mbpp_job(one, one["code"]), passes=True) for one in tasks]


def buggy() -> list[Judged]:
    return [
        Judged(job=humaneval_job(one, one["prompt"] + one["buggy_solution"]), passes=False)
        for one in read("humanevalpack/humanevalpack_python.jsonl.gz")
    ]


def samples() -> list[Judged]:
    """Each distinct completion once."""
    tasks = {one["task_id"]: one for one in read("humaneval/HumanEval.jsonl.gz")}
    return [
        Judged(
            job=humaneval_job(tasks[group["task_id"]], group["prompt"] + text, SAMPLE_LIMITS),
            passes=passes,
        )
        for group in read("humaneval_codegen_samples/groups.jsonl.gz")
        for text, passes in zip(group["completions"], group["passed"], strict=True)
    ]


def sample_counts() -> list[int]:
    """How often each of `samples` was drawn."""
    groups = read("humaneval_codegen_samples/groups.jsonl.gz")
    return [count for group in groups for count in group["counts"]]


SETS: Mapping[str, tuple[str, Callable[[], list[Judged]]]] = {
    "humaneval": ("HumanEval, known solutions", humaneval),
    "mbpp": ("MBPP, known solutions", mbpp),
    "buggy": ("HumanEvalPack, solutions with a bug", buggy),
    "samples": ("HumanEval, distinct completions of CodeGen-16B", samples),
}


def read(name: str) -> list[dict[str, Any]]:
    with gzip.open(DATA_DIR / name, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def differences(
    judged: Sequence[Judged], results: Sequence[SandboxResult]
) -> list[tuple[Judged, SandboxResult]]:
    """Those whose verdict is not the known one; a failure of the sandbox is none."""
    return [
        (one, result)
        for one, result in zip(judged, results, strict=True)
        if not result.status.is_verdict or (result.status is Status.OK) != one.passes
    ]


def describe(one: Judged, result: SandboxResult) -> str:
    known = "passes" if one.passes else "fails"
    detail = "; ".join(test.detail for test in result.tests) or result.reason
    said = result.stderr.strip().splitlines()[-1:] or [""]
    return f"{result.id}: known: {known}; here: {result.status.value} {detail} {said[0]}"[
        : 2 * DETAIL
    ]


def main() -> None:
    options = read_options()
    found = detect()
    if found.tier is None:
        raise SystemExit(found.sentence())
    rows, raw = [], {}
    with SandboxPool(
        tier=found.tier, num_workers=options.workers, place=chosen_place("auto")[0]
    ) as pool:
        for name in options.only:
            label, load = SETS[name]
            judged = load()
            counts = sample_counts() if name == "samples" else [1] * len(judged)
            chosen = list(range(len(judged)))
            if options.sample and options.sample < len(judged):
                chosen = sorted(random.Random(0).sample(chosen, options.sample))
            judged, counts = [judged[i] for i in chosen], [counts[i] for i in chosen]
            started = time.monotonic()
            results = pool.run([one.job for one in judged])
            seconds = time.monotonic() - started
            different = differences(judged, results)
            lines = [describe(*pair) for pair in different]
            wrong = {id(one) for one, _ in different}
            agree = sum(n for n, one in zip(counts, judged, strict=True) if id(one) not in wrong)
            statuses = dict(Counter(one.status.value for one in results))
            raw[name] = {
                "programs": len(judged),
                "drawn": sum(counts),
                "drawn_and_agreed": agree,
                "seconds": seconds,
                "differences": lines,
                "statuses": statuses,
            }
            same = len(judged) - len(different)
            rows.append(
                [label, f"{same} of {len(judged)}", f"{agree} of {sum(counts)}", f"{seconds:.0f}"]
            )
            print("\n".join([f"{label}: {statuses}", *lines]), flush=True)
    header = ["programs", "verdict as known", "weighted by how often drawn", "seconds"]
    print(f"\nsandbox tier {found.tier.value}\n")
    print(table(header, rows, as_markdown=options.markdown), flush=True)
    write_json(options.json, {"machine": machine(), "options": vars(options), "sets": raw})


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="*", choices=list(SETS), default=list(SETS))
    add("--sample", type=int, default=0, help="so many programs of each set; 0: all")
    add("--workers", type=int, default=len(os.sched_getaffinity(0)))
    add("--quick", action="store_true", help="20 programs of each set")
    add("--markdown", action="store_true")
    add("--json", type=Path, default=Path("benchmark_results/code_verdicts.json"))
    options = parser.parse_args()
    if options.quick:
        options.sample = 20
    return options


if __name__ == "__main__":
    main()
