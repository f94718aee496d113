"""The tests that docs/reward_loop.md names for faults and rules exist, and no case is left out."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
NAMED = re.compile(r"`(test_\w+)::(test_\w+)`")


def section():
    text = (TESTS.parent / "docs" / "reward_loop.md").read_text(encoding="utf-8")
    return text.partition("\n## Faults and their tests\n")[2].partition("\n## ")[0]


def test_every_test_that_the_tables_name_is_there():
    named = set(NAMED.findall(section()))
    assert len(named) > 60
    for file, test in sorted(named):
        texts = [path.read_text("utf-8") for path in TESTS.rglob(f"{file}.py")]
        defined = re.compile(rf"^(async )?def {test}\(", re.M)
        assert sum(bool(defined.search(text)) for text in texts) == 1, (file, test)


def test_every_case_of_the_matrix_has_its_row():
    rows = [line for line in section().splitlines() if line.startswith("| ")]
    numbers = [
        int(number)
        for row in rows
        if (cases := re.match(r"\| ([\d, ]+): ", row))
        for number in re.findall(r"\d+", cases[1])
    ]
    assert sorted(numbers) == list(range(1, 31))
    for row in rows:
        if not row.startswith(("| what happens", "| rule")):
            assert NAMED.search(row), row
