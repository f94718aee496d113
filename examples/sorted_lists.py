"""Writes pairs of lists, of which one is sorted and the other has two numbers swapped.

    python examples/sorted_lists.py DIRECTORY [NUM_TRAIN] [NUM_TEST]

Both lists have the same words and the same length, so only their order tells which is right. No
prompt of `train.jsonl` is in `test.jsonl`. recipes/judge_cpu.yaml learns from them.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SIZE = 5
"""The numbers of a list, which are digits."""


def pairs(num_train: int, num_test: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return rows with `prompt`, `chosen` and `rejected`, to train on and to test."""
    chance = random.Random(0)
    found: dict[str, dict[str, str]] = {}
    while len(found) < num_train + num_test:
        numbers = chance.sample(range(10), SIZE)
        prompt = "Sort " + " ".join(map(str, numbers))
        right = sorted(numbers)
        one, other = sorted(chance.sample(range(SIZE), 2))
        wrong = list(right)
        wrong[one], wrong[other] = wrong[other], wrong[one]
        row = {
            "prompt": prompt,
            "chosen": " ".join(map(str, right)),
            "rejected": " ".join(map(str, wrong)),
        }
        found.setdefault(prompt, row)
    rows = list(found.values())
    return rows[:num_train], rows[num_train:]


def main(directory: Path, num_train: int = 6000, num_test: int = 500) -> None:
    """Write the two files."""
    train, test = pairs(num_train, num_test)
    directory.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"{directory}: {num_train} pairs to train on, {num_test} to test")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
