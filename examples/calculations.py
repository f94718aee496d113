"""Writes sums and differences of two numbers, for GRPO with known answers.

    python examples/calculations.py DIRECTORY [LARGEST]

`tasks.jsonl` has 2,000 problems with their answers, `tasks_test.jsonl` has 200 others, and
`demonstrations.jsonl` has 64 more with the answer in the form that is asked for: enough to learn
the form from, too few to learn to calculate. No problem is in two files. Numbers are from 10 to
LARGEST (99), and differences may be negative.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SIZES = {"tasks_test": 200, "demonstrations": 64, "tasks": 2000}
ASK = "What is {}? Answer with the number in \\boxed{{}}."


def main(directory: Path, largest: int = 99) -> None:
    """Write the three files."""
    chance = random.Random(0)
    numbers = range(10, largest + 1)
    problems = chance.sample(
        [(a, sign, b) for a in numbers for b in numbers for sign in "+-"], sum(SIZES.values())
    )
    directory.mkdir(parents=True, exist_ok=True)
    for name, size in SIZES.items():
        lines = []
        for a, sign, b in (problems.pop() for _ in range(size)):
            answer = a + b if sign == "+" else a - b
            question = ASK.format(f"{a} {sign} {b}")
            row: dict[str, object] = {"question": question, "answer": str(answer)}
            if name == "demonstrations":
                said = f"\\boxed{{{answer}}}"
                turns = (("user", question), ("assistant", said))
                row = {"messages": [{"role": role, "content": text} for role, text in turns]}
            lines.append(json.dumps(row) + "\n")
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
