"""One place that scores, one try at it, and the ways in which a try fails.

Every failure of a `Score` that comes from a replica begins with a word of `REASONS` and a colon,
so that failures can be counted by their reason (`reason_of`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from laurel.errors import BusyError
from laurel.protocols import Scorer
from laurel.types import Group, Score

FaultKind = Literal[
    "connection", "timeout", "5xx", "busy", "nan", "count", "reply", "version", "canary", "error",
    "4xx",
]  # fmt: skip
REASONS = (*get_args(FaultKind), "poison", "text")
"""What failures begin with. `poison`: it takes down whoever scores it; `text`: not Unicode."""


class ReplicaFault(Exception):
    """The replica is to blame, not what it was given: another try, or another one, may do."""

    def __init__(
        self,
        kind: FaultKind,
        message: str,
        *,
        retry_after: float | None = None,
        in_mid_request: bool = False,
    ) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        """Without the word that it is counted under."""
        self.retry_after = retry_after
        """Seconds that it wants to be left alone for; `busy` only."""
        self.in_mid_request = in_mid_request
        """Whether it was lost while it had the request, which may be why."""


class RefusedError(Exception):
    """What was asked is to blame. The same is never asked again, of nobody."""

    def __init__(self, message: str, *, may_be_one_item: bool) -> None:
        super().__init__(f"4xx: {message}")
        self.message = message
        """See `ReplicaFault`."""
        self.may_be_one_item = may_be_one_item
        """Whether a part of the request may be welcome without the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What a replica said to one try."""

    scores: list[tuple[Score, ...]]
    version: str = ""
    """Of the model that scored; empty where the replica does not say."""


class Replica(Protocol):
    """Scores what it is given, once, and says whose fault it is if it cannot."""

    @property
    def name(self) -> str:
        """For messages; different from those of the others."""

    @property
    def max_completions(self) -> int | None:
        """Of one request; None: as many as anybody wants."""

    async def attempt(self, groups: Sequence[Group], *, request_id: str, timeout: float) -> Reply:
        """One try. A score with a failure is the verdict on that completion.

        Args:
            groups: With at least one completion each.
            request_id: Of all tries of the same request: whoever has it done may answer again
                without computing.
            timeout: Seconds.

        Raises:
            ReplicaFault: Nothing of it was scored.
            RefusedError: Likewise, and the request is why.
        """

    async def probe(self, *, timeout: float) -> None:
        """Look whether it lives.

        Raises:
            ReplicaFault: It does not.
        """

    async def aclose(self) -> None:
        """Let connections go. Idempotent."""


class ScorerReplica:
    """Any scorer as a replica. Its error, whatever it is, is a fault of the replica."""

    def __init__(self, scorer: Scorer, name: str) -> None:
        self._scorer = scorer
        self._name = name

    @property
    def name(self) -> str:
        """See `Replica`."""
        return self._name

    @property
    def max_completions(self) -> None:
        """See `Replica`."""
        return None

    async def attempt(self, groups: Sequence[Group], *, request_id: str, timeout: float) -> Reply:
        """See `Replica`."""
        try:
            async with asyncio.timeout(timeout):
                scores = await self._scorer.score(groups)
        except TimeoutError as error:
            raise ReplicaFault("timeout", f"{self.name} took more than {timeout:.3g} s") from error
        except BusyError as error:
            message = f"{self.name}: {error}"
            raise ReplicaFault("busy", message, retry_after=error.retry_after) from error
        except Exception as error:  # a scorer may be anybody's
            message = f"{self.name}: {type(error).__name__}: {error}"
            raise ReplicaFault("error", message, in_mid_request=True) from error
        check_scores(groups, scores, name=self.name)
        return Reply(scores=scores)

    async def probe(self, *, timeout: float) -> None:
        """See `Replica`. Only its scores can tell."""

    async def aclose(self) -> None:
        """See `Replica`."""
        await close_scorer(self._scorer)


async def close_scorer(scorer: object) -> None:
    """End a scorer by whatever way it has: `aclose`, `close`, or none; then who prepares for it."""
    if callable(end := getattr(scorer, "aclose", None)):
        await end()
    elif callable(end := getattr(scorer, "close", None)):
        await asyncio.to_thread(end)
    if (preparers := getattr(scorer, "preparers", None)) is not None:
        await asyncio.to_thread(preparers.close)


def check_scores(groups: Sequence[Group], scores: Sequence[Sequence[Score]], *, name: str) -> None:
    """Refuse a whole reply for anything in it that is no verdict on what was asked.

    Raises:
        ReplicaFault: Too few, too many, or neither a finite number nor a failure.
    """
    asked = [len(group.completions_G) for group in groups]
    given = [len(scores_G) for scores_G in scores]
    if asked != given:
        raise ReplicaFault("count", f"{name} gave {given} scores to groups of {asked}")
    for scores_G in scores:
        for score in scores_G:
            if score.failure is None and (score.value is None or not math.isfinite(score.value)):
                raise ReplicaFault("nan", f"{name} gave {score.value!r} for a score")
            if score.failure is not None and score.value is not None:
                raise ReplicaFault("reply", f"{name} gave a score and a failure in one")


def failed(reason: str) -> Score:
    """The verdict on a completion that could not be scored."""
    return Score(value=None, failure=reason)


def reason_of(failure: str) -> str:
    """The word that a failure is counted under; `other` for what a model says of its own."""
    word = failure.partition(":")[0]
    return word if word in REASONS else "other"
