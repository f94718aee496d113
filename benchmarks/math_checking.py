"""How many answers are checked per second, and does the checker say what it should?

    python benchmarks/math_checking.py

Solutions of the test set of MATH (Hendrycks et al., 2021) against their own known answers, in a
fresh checker each time, so that nothing is remembered; then the known answers as answers to the
parser alone; then wrong answers: those of other problems, and those of the same with a digit
changed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from material import DATA_DIR
from rounds import machine, table, write_json

from laurel.extensions.math.answers import Checked
from laurel.extensions.math.environment import AnswerChecker

WRONG = 1_000


def main() -> None:
    options = read_options()
    path = DATA_DIR / "math_test" / "math_test.jsonl.gz"
    if not path.exists():
        raise SystemExit(f"{path} is not there: set LAUREL_DATA; nothing was measured")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines][: 200 if options.quick else None]
    cases = cases_of(rows)
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    verdicts: dict[str, Counter[str]] = {}
    for _ in range(options.rounds):
        for name, (check, texts, golds) in cases.items():
            took, found = run(check, texts, golds, options)
            seconds[name].append(took)
            verdicts[name] = Counter(one.verdict for one in found)
    print(report(cases, seconds, verdicts, options))
    write_json(
        options.json,
        {
            "machine": machine(),
            "options": vars(options),
            "seconds": seconds,
            "verdicts": {name: dict(counts) for name, counts in verdicts.items()},
        },
    )


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    add("--workers", type=int, default=len(os.sched_getaffinity(0)))
    add("--quick", action="store_true", help="200 problems, one round: does it run, not how fast")
    add("--markdown", action="store_true", help="print tables for docs/benchmarks.md")
    add("--json", type=Path, default=Path("benchmark_results/math_checking.json"))
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    return options


Check = Callable[[AnswerChecker, Sequence[str], Sequence[str]], list[Checked]]
Case = tuple[Check, list[str], list[str]]


def cases_of(rows: Sequence[dict[str, Any]]) -> dict[str, Case]:
    """What is checked: how, which texts, against which known answers."""
    golds = [row["answer"] for row in rows]
    drawn = random.Random(0)
    others, changed = [], []
    while len(others) < min(WRONG, len(rows)):
        one, other = drawn.sample(rows, 2)
        if plain(one["answer"]) != plain(other["answer"]):
            others.append((other["solution"], one["answer"]))
    with_digits = [gold for gold in golds if re.search(r"\d", gold)]
    for gold in drawn.choices(with_digits, k=min(WRONG, len(rows))):
        changed.append((rf"\boxed{{{one_digit_more(gold)}}}", gold))

    def whole(checker: AnswerChecker, texts: Sequence[str], of: Sequence[str]) -> list[Checked]:
        return checker.check(texts, of)

    def parser_alone(
        checker: AnswerChecker, texts: Sequence[str], of: Sequence[str]
    ) -> list[Checked]:
        return checker.check_gold(texts)

    return {
        "solutions, own answers": (whole, [row["solution"] for row in rows], golds),
        "known answers, by the parser alone": (parser_alone, golds, golds),
        "solutions of other problems": (whole, [t for t, _ in others], [g for _, g in others]),
        "a digit changed": (whole, [t for t, _ in changed], [g for _, g in changed]),
    }


def plain(answer: str) -> str:
    """Without what changes nothing."""
    return re.sub(r"[\s$,]|\\(?:text|mbox|left|right|!|,|dfrac|tfrac|frac)", "", answer)


def one_digit_more(answer: str) -> str:
    """The last digit is another one."""
    return re.sub(r"\d(?=\D*$)", lambda found: str((int(found[0]) + 1) % 10), answer, count=1)


def run(
    check: Check, texts: Sequence[str], golds: Sequence[str], options: argparse.Namespace
) -> tuple[float, list[Checked]]:
    """Seconds, and what was found; processes are there already."""
    checker = AnswerChecker(num_workers=options.workers, timeout_seconds=3.0)
    try:
        checker.check_gold(["1", "2"] * options.workers)
        started = time.perf_counter()
        found = check(checker, texts, golds)
        return time.perf_counter() - started, found
    finally:
        checker.close()


def report(
    cases: dict[str, Case],
    seconds: dict[str, list[float]],
    verdicts: dict[str, Counter[str]],
    options: argparse.Namespace,
) -> str:
    lines = []
    for name, (_, texts, _) in cases.items():
        median = statistics.median(seconds[name])
        counts = verdicts[name]
        others = {k: n for k, n in counts.items() if k not in ("correct", "incorrect")}
        lines.append(
            [
                name,
                f"{len(texts):,}",
                f"{len(texts) / median:,.0f}",
                f"{len(texts) / median / options.workers:,.0f}",
                f"{counts['correct']:,}",
                f"{counts['incorrect']:,}",
                ", ".join(f"{n} {kind}" for kind, n in sorted(others.items())) or "-",
            ]
        )
    header = [
        "what",
        "answers",
        "per second",
        "per second and process",
        "correct",
        "incorrect",
        "other",
    ]
    return table(header, lines, as_markdown=options.markdown)


if __name__ == "__main__":
    main()
