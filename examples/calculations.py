"""Writes sums and differences of two numbers, for GRPO with known answers.

    python examples/calculations.py DIRECTORY [LARGEST]

`tasks_test.jsonl` has 200 problems with their answers, `demonstrations.jsonl` has 64 others with an
answer in the form that is asked for: enough to learn the form from, too few to learn to calculate;
and `tasks.jsonl` has the rest. No problem is in two files. Numbers are from 1 to LARGEST (20), and
differences may be negative. `system.txt` says what is asked for.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_TEST, NUM_DEMONSTRATIONS = 200, 64
ASK = "Calculate, and put the result in \\boxed{}."


def main(directory: Path, largest: int = 20) -> None:
    """Write the files."""
    numbers = range(1, largest + 1)
    problems = [(a, sign, b) for a in numbers for b in numbers for sign in "+-"]
    random.Random(0).shuffle(problems)
    parts = {
        "tasks_test": problems[:NUM_TEST],
        "demonstrations": problems[NUM_TEST : NUM_TEST + NUM_DEMONSTRATIONS],
        "tasks": problems[NUM_TEST + NUM_DEMONSTRATIONS :],
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "system.txt").write_text(ASK, encoding="utf-8")
    for name, part in parts.items():
        lines = []
        for a, sign, b in part:
            question, answer = f"{a} {sign} {b}", str(a + b if sign == "+" else a - b)
            row: dict[str, object] = {"question": question, "answer": answer}
            if name == "demonstrations":
                said = f"{question} = \\boxed{{{answer}}}"
                turns = (("system", ASK), ("user", question), ("assistant", said))
                row = {"messages": [{"role": role, "content": text} for role, text in turns]}
            lines.append(json.dumps(row) + "\n")
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
