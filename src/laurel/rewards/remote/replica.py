"""One place that scores, one try at it, and the ways in which a try fails.

Every failure of a `Score` that comes from a replica begins with a word of `REASONS` and a colon,
so that failures can be counted by their reason (`failure_reason`).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from laurel.types import Group, Score

FaultKind = Literal[
    "connection",
    "timeout",
    "5xx",
    "busy",
    "nan",
    "count",
    "reply",
    "version",
    "canary",
    "error",
    "4xx",
]
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
class ReplicaReply:
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

    async def attempt(
        self, groups: Sequence[Group], *, request_id: str, timeout: float
    ) -> ReplicaReply:
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


def failure_reason(failure: str) -> str:
    """The word that a failure is counted under; `other` for what a model says of its own."""
    word = failure.partition(":")[0]
    return word if word in REASONS else "other"


# --------------------------------------------------------------------------------------------------
# What a router knows of one replica: what it has under way, and whether to trust it.
#
# A replica is trusted once a probe of it has succeeded. Faults in a row, or one that leaves no
# doubt,
# end the trust: it is left alone for a rest, then probed. If the probe succeeds it is on trial and
# gets one request at a time: the first success ends the trial, the first fault means a longer rest.

Clock = Callable[[], float]

FAULTS_TO_TRIP = 3
"""Faults in a row that end the trust."""
FIRST_REST, LONGEST_REST = 0.5, 15.0
"""Seconds of a rest; it doubles with each that no success has followed."""
LONGEST_BUSY = 30.0
"""Seconds that a replica may ask to be left alone for."""
_NO_DOUBT = ("version", "canary", "4xx")
_REMEMBERED = 128
_TO_JOIN = 0.5
_LEAST_PATIENCE = 0.05
_ENOUGH_TO_TELL = 20


class ReplicaHealth:
    """The record of one replica. Times are of a monotonic clock."""

    def __init__(
        self, replica: Replica, *, window: int, clock: Clock, has_canary: bool = False
    ) -> None:
        """Begin a record.

        Args:
            replica: Whose; it is probed before it gets anything.
            window: Requests that it may have at once; fewer while it says that it is busy.
            clock: Seconds.
            has_canary: Whether a probe asks for known scores. Then a lost connection is reason
                enough for one: what listens there may be another server by now.
        """
        self.replica = replica
        self.clock = clock
        self.tokens = 0
        """Outstanding, roughly."""
        self.in_flight = 0
        self.needs_probe = True
        self.is_on_trial = False
        self.probing_since: float | None = None
        """When the probe that is under way began."""
        self.probed_at = -float("inf")
        self.last_fault = ""
        """Of those since the latest success."""
        self._num_dangerous = 0
        self._has_canary = has_canary
        self._most = float(window)
        self._window = float(window)
        self._faults_in_a_row = 0
        self._rests = 0
        self._trusted_since = -float("inf")
        """What it got before is no news of how it is."""
        self._not_before = -float("inf")
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    @property
    def is_usable(self) -> bool:
        """Whether it is trusted and takes requests; perhaps it has all it may have at once."""
        return not self.needs_probe and self.clock() >= self._not_before

    @property
    def has_room(self) -> bool:
        """Whether it may get one more request."""
        return self.in_flight < (1 if self.is_on_trial else max(1, int(self._window)))

    @property
    def wants_probe(self) -> bool:
        """Whether a probe is due that nobody has begun."""
        is_due = self.needs_probe and self.clock() >= self._not_before
        return is_due and self.probing_since is None

    @property
    def joins_until(self) -> float | None:
        """Until when its first probe is worth a short wait, or the others would get everything."""
        if self.probing_since is None or self.probed_at > -float("inf"):
            return None
        until = self.probing_since + _TO_JOIN
        return until if self.clock() < until else None

    @property
    def refuses_us(self) -> bool:
        """Whether it lives, and wants nothing from this address or with this key."""
        return self.needs_probe and self.last_fault.startswith("4xx")

    @property
    def rests_until(self) -> float:
        """When it may be asked again."""
        return self._not_before

    @property
    def seconds(self) -> Sequence[float]:
        """How long its latest answers took."""
        return self._seconds

    @property
    def has_dangerous(self) -> bool:
        """Whether it has a request that may take it down. It gets no second one: then its end tells
        which of them is to blame."""
        return self._num_dangerous > 0

    def begin(self, tokens: int, *, is_dangerous: bool = False) -> Callable[[], None]:
        """A request goes to it. To be called when it has come back, however: what this returns."""
        self.in_flight += 1
        self.tokens += tokens
        self._num_dangerous += is_dangerous

        def end() -> None:
            self.in_flight -= 1
            self.tokens -= tokens
            self._num_dangerous -= is_dangerous

        return end

    def succeeded(self, seconds: float) -> None:
        """It answered, and well."""
        self._seconds.append(seconds)
        if self.needs_probe:  # begun before it went wrong: no news of how it is now
            return
        self.last_fault = ""
        self.is_on_trial = False
        self._faults_in_a_row = 0
        self._rests = 0
        self._window = min(self._most, self._window + 1 / self._window)

    def failed(self, fault: ReplicaFault, *, began: float) -> None:
        """It is to blame for a request that was not scored.

        Args:
            fault: How.
            began: When it got the request. What it got before it was last trusted does not count,
                or the many requests that one death ends would be as many deaths.
        """
        if fault.kind == "busy":  # as it should be: no mark against it
            self.last_fault = str(fault)
            self._window = max(1.0, self._window / 2)
            self._leave_alone(fault)
            return
        if self.needs_probe or began < self._trusted_since:
            return
        self.last_fault = str(fault)
        self._faults_in_a_row += 1
        is_enough = self.is_on_trial or self._faults_in_a_row >= FAULTS_TO_TRIP
        if is_enough or fault.kind in _NO_DOUBT:
            self._rest()
        elif fault.kind == "connection" and self._has_canary:
            self.needs_probe = True

    def proved(self) -> None:
        """A probe of it succeeded."""
        self.probed_at = self.clock()
        if self.needs_probe:
            self.needs_probe = False
            self.is_on_trial = self._rests > 0
            self._faults_in_a_row = 0
            self._trusted_since = self.clock()

    def failed_probe(self, fault: ReplicaFault, *, began: float) -> None:
        """A probe of it failed."""
        self.probed_at = self.clock()
        if began < self._trusted_since:
            return
        if not self.needs_probe:
            self.failed(fault, began=began)
            return
        self.last_fault = str(fault)
        if fault.kind == "busy" and fault.retry_after is not None:
            self._leave_alone(fault)
        else:
            self._rest()

    def _leave_alone(self, fault: ReplicaFault) -> None:
        if fault.retry_after is not None:
            self._not_before = self.clock() + min(fault.retry_after, LONGEST_BUSY)

    def _rest(self) -> None:
        self.needs_probe = True
        self.is_on_trial = False
        self._not_before = self.clock() + min(LONGEST_REST, FIRST_REST * 2**self._rests)
        self._rests = min(self._rests + 1, 16)


def patience(replica_health: Collection[ReplicaHealth]) -> float | None:
    """Seconds after which an answer is slow: twice what 95 % of the latest took.

    None: there is only one replica, or too few answers are known to tell.
    """
    known = sorted(seconds for health in replica_health for seconds in health.seconds)
    if len(replica_health) < 2 or len(known) < _ENOUGH_TO_TELL:
        return None
    return max(_LEAST_PATIENCE, 2 * known[int(0.95 * (len(known) - 1))])
