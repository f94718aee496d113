"""Writes lists of five numbers, whose largest is asked for: GRPO with known answers.

    python examples/largest_number.py DIRECTORY

Numbers have two digits. `tasks.jsonl` has 2,000 lists with their answers, `tasks_test.jsonl` has
200 others, and `demonstrations.jsonl` has 32 more with an answer in the form that is asked for:
enough for a chat model to learn the form. No list is in two files. `system.txt` says what is asked.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SIZES = {"tasks_test": 200, "demonstrations": 32, "tasks": 2000}
ASK = "Find the largest number, and put it in \\boxed{}."


def main(directory: Path) -> None:
    """Write the files."""
    chance = random.Random(0)
    seen: set[tuple[int, ...]] = set()
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "system.txt").write_text(ASK, encoding="utf-8")
    for name, size in SIZES.items():
        lines = []
        while len(lines) < size:
            numbers = tuple(chance.sample(range(10, 100), 5))
            if numbers in seen:
                continue
            seen.add(numbers)
            question, answer = ", ".join(map(str, numbers)), str(max(numbers))
            row: dict[str, object] = {"question": question, "answer": answer}
            if name == "demonstrations":
                said = f"\\boxed{{{answer}}}"
                turns = (("system", ASK), ("user", question), ("assistant", said))
                row = {"messages": [{"role": role, "content": text} for role, text in turns]}
            lines.append(json.dumps(row) + "\n")
        (directory / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
