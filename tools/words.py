"""Words that only this project would use, each with the field's word for it: `make check`.

    python tools/words.py [PATH ...]     what is found under these paths, or everywhere

The exit code is 1 where one is found. A whole word counts, also as a part of a name such as
`is_told`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHERE = ("src", "docs", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "recipes")
SUFFIXES = (".py", ".md", ".yaml", ".html", ".css", ".js")

BETTER = {
    "mend mends mended mending": "fix",
    "misfit misfits": "conflict, setting that does not fit",
    "fate fates": "status, outcome",
    "told untold": "given, informed, logged, reported, distinguished",
    "draw draws drawn drew": "sample, sampled (a picture is plotted)",
    "judged": "scored, graded, checked",
    "seat seats": "worker, slot",
    "crew crews": "replica set, workers",
    "shelf shelves": "block",
    "desk": "queue, backend",
    "lender lent": "writer, shared",
    "heed heeds heeded": "follow, check",
    "surroundings": "environment, services",
    "whom whomever whoever": "who, the caller, the user, a process that ...",
    "lest": "so that ... not",
    "tidings": "status",
    "plant plants planted": "build, insert",
    "witness witnesses": "probe",
    "unfit": "unsuitable, invalid",
}
PHRASES = ("let go", "of no use", "stays away", "has its way", "in its stead", "no more at a time")
KEPT: dict[str, tuple[str, ...]] = {
    # Keys of what `--json` prints.
    "src/laurel/extensions/plan/plan.py": ("misfits", "mends"),
    "src/laurel/extensions/starter/starter.py": ("misfit",),
    "src/laurel/extensions/doctor/machine.py": ("misfits",),
}
"""By path, the words that stay there because files or programs of users hold them."""

_WORDS = {word: better for words, better in BETTER.items() for word in words.split()}
_FOUND = re.compile(
    r"(?<![A-Za-z])(?:" + "|".join([*_WORDS, *PHRASES]) + r")(?![a-z])", flags=re.IGNORECASE
)


def found_in(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, word) of every private word in a file."""
    kept = KEPT.get(str(path.relative_to(ROOT)), ())
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for match in _FOUND.finditer(line):
            if match[0].lower() not in kept:
                yield number, match[0]


def main() -> int:
    """Print what is found under the given paths."""
    paths = [Path(one).resolve() for one in sys.argv[1:]] or [ROOT / one for one in WHERE]
    count = 0
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix not in SUFFIXES:
                continue
            for number, word in found_in(file):
                count += 1
                better = _WORDS.get(word.lower(), "say it plainly")
                print(f"{file.relative_to(ROOT)}:{number}: {word!r}: {better}")
    if count:
        print(f"{count} private words: use the field's", file=sys.stderr)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
