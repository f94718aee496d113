"""Writes sums and products of two-digit numbers, for a chat model that may call a calculator.

    python examples/calculator_sums.py DIRECTORY

`tasks.jsonl` has 2,000 problems with their answers, and `tasks_test.jsonl` has 64 others.
`demonstrations.jsonl` has 32 more: half of them call `laurel.demo.data.calculate` in the form of
Laurel's template `hermes`, the others guess a number at once, as a chat model does. So GRPO can
find out that calling pays. No problem is in two files.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any, Literal

from transformers.utils.chat_template_utils import get_json_schema

from laurel.demo.data import calculate
from laurel.models.tool_calls import FORMS, ToolCall

Problem = tuple[int, Literal["+", "-", "*"], int]
SIGNS: tuple[Literal["+", "-", "*"], ...] = ("+", "-", "*")
SIZES = {"tasks_test": 64, "demonstrations": 32, "tasks": 2000}
ASK = "Put the result in \\boxed{}."


def main(directory: Path) -> None:
    """Write the files."""
    chance = random.Random(0)
    seen: set[Problem] = set()
    directory.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        lines: list[str] = []
        while len(lines) < size:
            problem = chance.randrange(10, 100), chance.choice(SIGNS), chance.randrange(10, 100)
            if problem in seen:
                continue
            seen.add(problem)
            question = f"{problem[0]} {problem[1]} {problem[2]} = ? {ASK}"
            row: dict[str, Any] = {"question": question, "answer": str(calculate(*problem))}
            if name == "demonstrations":
                guess = None if len(lines) % 2 else str(chance.randrange(10, 1000))
                row = shown(question, problem, guess)
            lines.append(json.dumps(row) + "\n")
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def shown(question: str, problem: Problem, guess: str | None) -> dict[str, Any]:
    """Return a demonstration: a guess, or where there is none a call and its result."""
    turns = [{"role": "user", "content": question}]
    if guess is None:
        arguments = dict(zip(("left", "sign", "right"), problem, strict=True))
        guess = str(calculate(*problem))
        turns += [
            {
                "role": "assistant",
                "content": FORMS["hermes"].write([ToolCall("calculate", arguments)]),
            },
            {"role": "tool", "content": guess},
        ]
    turns.append({"role": "assistant", "content": f"\\boxed{{{guess}}}"})
    return {"messages": turns, "tools": [get_json_schema(calculate)]}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
