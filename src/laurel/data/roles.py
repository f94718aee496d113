"""Who speaks in the rows of a data set: roles that are probably misspelt are noted.

Templates such as ChatML render any role, so that nothing else would tell of `usr`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from laurel.observe.counts import counted_that
from laurel.types import Message

USUAL_ROLES = (
    "system", "user", "assistant", "tool", "developer", "function", "ipython", "environment",
    "observation",
)  # fmt: skip
"""Those that chat templates give a meaning of their own."""
_MOST_NAMED = 3


@dataclass(slots=True)
class UnusualRoles:
    """Counts the rows that have a role which is none of `USUAL_ROLES`; nothing is refused."""

    num_rows: int = 0
    first: dict[str, str] = field(default_factory=dict)
    """The source of the first row with each such role."""

    def look(self, source: str, messages: Iterable[Message]) -> None:
        """Take note of one row."""
        unusual = dict.fromkeys(m.role for m in messages if m.role not in USUAL_ROLES)
        self.num_rows += bool(unusual)
        for role in unusual:
            self.first.setdefault(role, source)

    def notes(self) -> list[str]:
        """One note on all of them; none where there are none."""
        if not self.num_rows:
            return []
        named = [_named(role, source) for role, source in self.first.items()][:_MOST_NAMED]
        more = len(self.first) - len(named)
        return [
            f"{counted_that(self.num_rows, 'row', 'have')} a role that is none of "
            f"{', '.join(USUAL_ROLES)}: {', '.join(named)}{f' and {more} more' if more else ''}"
        ]


def _named(role: str, source: str) -> str:
    near = difflib.get_close_matches(role.lower(), USUAL_ROLES, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{role[:40]!r} (first in {source}{meant})"
