"""The seams between rooms. Read this file second.

Each has at least two implementations or a fake in the tests, and one suite in `tests/contracts`
that every implementation passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from laurel.types import Group, Score


class Scorer(Protocol):
    """Gives completions their rewards."""

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """One score per completion of each group, in order.

        A completion that cannot be scored gets a `Score` with a failure; the others are not
        affected. Scores do not depend on what else is in the call.
        """
