"""Writes solutions of running sums in steps, most of them with one wrong step.

    python examples/arithmetic_steps.py DIRECTORY [NUM_TRAIN] [NUM_TEST]

`train.jsonl` has rows of TRL's stepwise form. Steps after the wrong one are not labelled, because
they follow from a wrong number. `validation.jsonl` and `test.jsonl` have other problems in the form
of ProcessBench; half of their solutions have a wrong step, and 9 in 10 of those to train on.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

LARGEST = 9
"""The largest number in a solution."""


def solution(chance: random.Random, share_wrong: float) -> tuple[str, list[str], int]:
    """Return a problem, the steps of a solution, and the index of the wrong step or -1."""
    value = start = chance.randint(1, LARGEST)
    size = chance.randint(3, 5)
    wrong = chance.randrange(size) if chance.random() < share_wrong else -1
    asked, steps = [], []
    for index in range(size):
        change = chance.choice([n for n in range(-3, 4) if n and 0 <= value + n <= LARGEST])
        sign, right = "+" if change > 0 else "-", value + change
        said = right
        if index == wrong:
            said = chance.choice([n for n in range(LARGEST + 1) if 0 < abs(n - right) <= 3])
        asked.append(f"{sign} {abs(change)}")
        steps.append(f"{value} {sign} {abs(change)} = {said}")
        value = said
    return f"Start with {start}. {', '.join(asked)}.", steps, wrong


def rows(
    count: int, *, seed: int, share_wrong: float, but: frozenset[str] = frozenset()
) -> list[dict[str, Any]]:
    """Return solutions of different problems in the form of ProcessBench.

    Args:
        count: The number of rows.
        seed: The seed of the random numbers.
        share_wrong: The share of solutions with a wrong step.
        but: Problems that must not occur.
    """
    chance = random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < count:
        problem, steps, wrong = solution(chance, share_wrong)
        if problem not in but:
            row = {"id": str(len(found)), "problem": problem, "steps": steps, "label": wrong}
            found.setdefault(problem, row)
    return list(found.values())


def labelled(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of TRL's stepwise form."""
    steps, wrong = row["steps"], row["label"]
    labels = [None if index > wrong >= 0 else index != wrong for index in range(len(steps))]
    return {"prompt": row["problem"], "completions": steps, "labels": labels}


def main(directory: Path, num_train: int = 6000, num_test: int = 500) -> None:
    """Write the three files; no problem is in two of them."""
    train = rows(num_train, seed=0, share_wrong=0.9)
    seen = frozenset(row["problem"] for row in train)
    validation = rows(num_test, seed=1, share_wrong=0.5, but=seen)
    seen |= {row["problem"] for row in validation}
    test = rows(num_test, seed=2, share_wrong=0.5, but=seen)
    directory.mkdir(parents=True, exist_ok=True)
    files = {"train": [labelled(row) for row in train], "validation": validation, "test": test}
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"{directory}: solutions for training {num_train}, validation and test {num_test} each")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
