"""Writes solutions of running sums in steps, most of them with one wrong step.

    python examples/arithmetic_steps.py DIRECTORY [NUM_TRAIN] [NUM_TEST]

`train.jsonl` has rows of TRL's stepwise form. Steps after the wrong one are not labelled, because
they follow from a wrong number. `validation.jsonl` and `test.jsonl` have other problems in the form
of ProcessBench; half of their solutions have a wrong step, and 9 in 10 of those to train on.

    python examples/arithmetic_steps.py DIRECTORY --careless [NUM_TRAIN] [NUM_TEST]

writes longer problems for GRPO with process rewards. `demonstrations.jsonl` has solutions whose
form is right, and of whose steps more than a third are wrong. `graded.jsonl` has others with a
label for every step: whether it does what the problem asks for next, with the number that stands
before it. `graded_test.jsonl` has other problems in the form of ProcessBench. `tasks.jsonl` and
`tasks_validation.jsonl` have problems with their answers; no problem is in two files.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

SEPARATOR = "\n\n"
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


# Longer problems, and solutions of someone who is careless.

NUM_STEPS = (5, 6)
"""The least and the most steps of a problem."""
SHARE_WRONG = 0.4
SHARE_WRONG_LENGTH = 0.1
"""The share of solutions that end early, or go on for another step."""

Change = tuple[str, int]
"""A step as the problem names it, such as `("+", 3)`."""


def problem(chance: random.Random) -> tuple[str, int, list[Change]]:
    """Return a problem, the number that it starts with, and its steps."""
    value = start = chance.randint(0, LARGEST)
    changes: list[Change] = []
    for _ in range(chance.randint(*NUM_STEPS)):
        change = chance.choice([n for n in range(-3, 4) if n and 0 <= value + n <= LARGEST])
        changes.append(("+" if change > 0 else "-", abs(change)))
        value += change
    asked = ", ".join(f"{sign} {size}" for sign, size in changes)
    return f"Start with {start}. {asked}.", start, changes


def after(value: int, change: Change) -> int:
    """Return the number after a step."""
    sign, size = change
    return value + size if sign == "+" else value - size


def careless(
    chance: random.Random, start: int, changes: list[Change], *, forgets: bool = False
) -> tuple[list[str], list[bool]]:
    """Return the steps of a solution, and whether each is right.

    A wrong step has a wrong result, or does something else than the problem says. The last step of
    a solution that ends early is wrong, and so is a step after the last.

    Args:
        chance: The random numbers.
        start: The number that the problem starts with.
        changes: The steps of the problem.
        forgets: Whether a wrong step may also begin with another number than the one before it.
    """
    end = len(changes)
    if chance.random() < SHARE_WRONG_LENGTH:
        end = chance.choice([*range(1, end), end + 1])
    steps, labels, value = list[str](), list[bool](), start
    for index in range(end):
        other = ("+-"[chance.randrange(2)], chance.randint(1, 3))
        change = changes[index] if index < len(changes) else other
        forgot = forgets and chance.random() < SHARE_WRONG / 4
        if forgot:
            value += chance.choice([-3, -2, -1, 1, 2, 3])
        said, right = change, after(value, change)
        result = right
        if chance.random() < SHARE_WRONG:
            if chance.random() < 0.5:
                said, result = other, after(value, other)
            else:
                result = right + chance.choice([-3, -2, -1, 1, 2, 3])
        is_last = index + 1 == end
        fits = index < len(changes) and not (is_last and end < len(changes))
        labels.append(fits and not forgot and said == change and result == right)
        steps.append(f"{value} {said[0]} {said[1]} = {result}")
        value = result
    return steps, labels


def write_careless(directory: Path, num_train: int = 8000, num_test: int = 256) -> None:
    """Write the files for GRPO."""
    chance = random.Random(0)
    counts = {
        "demonstrations": num_train,
        "graded": 3 * num_train,  # the reward model must know better than the policy
        "tasks": num_train,
        "graded_test": num_test,
        "tasks_validation": num_test,
    }
    problems: dict[str, tuple[int, list[Change]]] = {}
    while len(problems) < sum(counts.values()):
        text, start, changes = problem(chance)
        problems.setdefault(text, (start, changes))
    left = iter(problems.items())
    files: dict[str, list[dict[str, Any]]] = {}
    for name, count in counts.items():
        lines = files[name] = []
        for number in range(count):
            text, (start, changes) = next(left)
            # The policy comes upon mistakes that no demonstration shows. A reward model that has
            # never seen them is gamed by them.
            forgets = name.startswith("graded")
            steps, labels = careless(chance, start, changes, forgets=forgets)
            if name == "demonstrations":
                said = {"user": text, "assistant": SEPARATOR.join(steps)}
                lines.append({"messages": [{"role": r, "content": c} for r, c in said.items()]})
            elif name == "graded":
                lines.append({"prompt": text, "completions": steps, "labels": labels})
            elif name == "graded_test":
                wrong = labels.index(False) if False in labels else -1
                row = {"id": str(number), "problem": text, "steps": steps, "label": wrong}
                lines.append(row)
            else:
                value = start
                for change in changes:
                    value = after(value, change)
                lines.append({"input": text, "output": str(value)})
    write(directory, files)
    print(
        f"{directory}: solutions for training {num_train}, graded {3 * num_train}, tests {num_test}"
    )


def write(directory: Path, files: dict[str, list[dict[str, Any]]]) -> None:
    """Write rows as JSON lines."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, lines in files.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


def main(directory: Path, num_train: int = 6000, num_test: int = 500) -> None:
    """Write the three files; no problem is in two of them."""
    train = rows(num_train, seed=0, share_wrong=0.9)
    seen = frozenset(row["problem"] for row in train)
    validation = rows(num_test, seed=1, share_wrong=0.5, but=seen)
    seen |= {row["problem"] for row in validation}
    test = rows(num_test, seed=2, share_wrong=0.5, but=seen)
    write(
        directory,
        {"train": [labelled(row) for row in train], "validation": validation, "test": test},
    )
    print(f"{directory}: solutions for training {num_train}, validation and test {num_test} each")


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[2:] if word != "--careless"]
    (write_careless if "--careless" in sys.argv else main)(Path(sys.argv[1]), *numbers)
