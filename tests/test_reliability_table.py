"""The tests that docs/reliability.md names for faults exist, and every row names its proof."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
NAMED = re.compile(r"`(test_\w+)::(test_\w+)`")


def rows():
    text = (TESTS.parent / "docs" / "reliability.md").read_text(encoding="utf-8")
    section = text.partition("\n## What survives what\n")[2].partition("\n## ")[0]
    return [line for line in section.splitlines() if line.startswith("| ")][1:]


def test_every_test_that_the_table_names_is_there():
    named = {pair for row in rows() for pair in NAMED.findall(row)}
    assert len(named) > 25
    for file, test in sorted(named):
        texts = [path.read_text("utf-8") for path in TESTS.rglob(f"{file}.py")]
        defined = re.compile(rf"^(async )?def {test}\(", re.M)
        assert sum(bool(defined.search(text)) for text in texts) == 1, (file, test)


def test_every_row_says_what_proves_it():
    for row in rows():
        proof = row.rstrip(" |").rsplit(" | ", 1)[-1]
        places = re.findall(r"\((\w+\.md)\)", proof), re.findall(r"`(tests/\S+\.py)`", proof)
        assert NAMED.search(proof) or any(places) or list(TESTS.rglob(f"{proof.strip('`')}.py")), (
            row
        )
        assert all((TESTS.parent / "docs" / page).is_file() for page in places[0]), row
        assert all((TESTS.parent / file).is_file() for file in places[1]), row
