"""A task made here, for recipes and tests: functions of one line, judged by calling them.

A sentence says what a function is to do with a number, and what it is to be called. Whoever shows
how it is done is often careless, and takes another operation or number: a model that is warmed up
on that knows how a function is written, and is left to find out from the tests which one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

OPERATIONS = {"plus": "+", "minus": "-", "times": "*"}
NUMBERS = range(2, 22)
NAMES = ("f", "g", "h")
REQUESTS = ("Write {name}(x): x {word} {number}.", "{name}(x) should give x {word} {number}.")
ARGUMENTS = (0, 1, 7, -3)
"""What the tests call it with. No two functions agree on all of them."""
NUM_HELD_OUT = 60
"""Requests of the 360 that are in no training row."""

_Request = tuple[str, str, str, int]


class FunctionTasks:
    """Rows for `data.dataset_name=laurel.data.synthetic_code.FunctionTasks`.

    Each has `messages` with the answer that was shown, for fine-tuning; and `entry`, `call_tests`
    and `reference_solution`, for `data.processor=code_data_processor`. `formatted_ds` has them by
    split: `train`, and `validation` with the held-out requests and right answers.
    """

    def __init__(self, seed: int = 0, count: int = 6000, share_wrong: float = 0.6) -> None:
        """Draw the rows.

        Args:
            seed: Draws them.
            count: Rows of the split `train`.
            share_wrong: Probability that one of those shows a wrong answer.
        """
        self.formatted_ds = {
            "train": list(function_tasks(count, seed=seed, share_wrong=share_wrong)),
            "validation": [_row(request, (request[2], request[3])) for request in _split(True)],
        }


def function_tasks(count: int, *, seed: int, share_wrong: float) -> Iterator[dict[str, Any]]:
    """Training rows; see `FunctionTasks`."""
    generator = random.Random(f"{seed}-functions")
    requests = _split(False)
    for _ in range(count):
        request = generator.choice(requests)
        right = shown = (request[2], request[3])
        if generator.random() < share_wrong:
            while shown == right:
                shown = (generator.choice(list(OPERATIONS)), generator.choice(NUMBERS))
        yield _row(request, shown)


def _split(held_out: bool) -> list[_Request]:
    requests = [
        (request, name, word, number)
        for request in REQUESTS
        for name in NAMES
        for word in OPERATIONS
        for number in NUMBERS
    ]
    kept_back = set(random.Random(0).sample(range(len(requests)), NUM_HELD_OUT))
    return [one for i, one in enumerate(requests) if (i in kept_back) == held_out]


def _row(request: _Request, shown: tuple[str, int]) -> dict[str, Any]:
    text, name, word, number = request
    right = _function(name, word, number)
    return {
        "messages": [
            {"role": "user", "content": text.format(name=name, word=word, number=number)},
            {"role": "assistant", "content": _function(name, *shown)},
        ],
        "entry": name,
        "call_tests": [{"args": [x], "expected": _value(x, word, number)} for x in ARGUMENTS],
        "reference_solution": right,
    }


def _value(x: int, word: str, number: int) -> int:
    return {"plus": x + number, "minus": x - number, "times": x * number}[word]


def _function(name: str, word: str, number: int) -> str:
    return f"def {name}(x): return x {OPERATIONS[word]} {number}"
