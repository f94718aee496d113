"""A replica of a reward model, one attempt at it, and the ways in which an attempt fails.

Every failure of a `Score` that comes from a replica begins with a word of `REASONS` and a colon, so
that failures can be counted by their reason (`failure_reason`).
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
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
"""First words of failures. `poison`: it takes down every replica that scores it; `text`: it is not
Unicode.
"""


class ReplicaFault(Exception):
    """Raised when a replica is at fault, and not the request: another attempt may succeed."""

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
        """Message without the word that it is counted under."""
        self.retry_after = retry_after
        """Seconds to wait before the next request; `busy` only."""
        self.in_mid_request = in_mid_request
        """Whether the replica was lost during the request, which may be the cause."""


class RefusedError(Exception):
    """Raised when the request is at fault; it is not sent again to any replica."""

    def __init__(self, message: str, *, may_be_one_item: bool) -> None:
        super().__init__(f"4xx: {message}")
        self.message = message
        """Message without the word that it is counted under."""
        self.may_be_one_item = may_be_one_item
        """Whether a part of the request may be accepted without the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReply:
    """Holds the reply of a replica to one attempt."""

    scores: list[tuple[Score, ...]]
    version: str = ""
    """Version of the model that scored; empty where the replica gives none."""


class Replica(Protocol):
    """Scores groups once, and says which side is at fault if it cannot."""

    @property
    def name(self) -> str:
        """Unique name, for messages."""

    @property
    def max_completions(self) -> int | None:
        """Limit of completions in one request; None: no limit."""

    async def attempt(
        self, groups: Sequence[Group], *, request_id: str, timeout: float
    ) -> ReplicaReply:
        """Make one attempt; a score with a failure is final for that completion.

        Args:
            groups: Groups with at least one completion each.
            request_id: Id of all attempts at the same request, so that a server that has scored it
                may answer again without computing.
            timeout: Time limit in seconds.

        Raises:
            ReplicaFault: Nothing was scored, and the replica is at fault.
            RefusedError: Nothing was scored, and the request is at fault.
        """

    async def probe(self, *, timeout: float) -> None:
        """Ask whether the replica is alive.

        Raises:
            ReplicaFault: It is not.
        """

    async def aclose(self) -> None:
        """Close its connections. Idempotent."""


async def close_scorer(scorer: object) -> None:
    """Close a scorer with its `aclose` or `close`, if it has one, and then its preparers."""
    if callable(end := getattr(scorer, "aclose", None)):
        await end()
    elif callable(end := getattr(scorer, "close", None)):
        await asyncio.to_thread(end)
    if (preparers := getattr(scorer, "preparers", None)) is not None:
        await asyncio.to_thread(preparers.close)


def check_scores(groups: Sequence[Group], scores: Sequence[Sequence[Score]], *, name: str) -> None:
    """Reject a reply unless it has one valid score for each completion.

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
    """Return a failed score."""
    return Score(value=None, failure=reason)


def failure_reason(failure: str) -> str:
    """Return the word that a failure is counted under; `other` for a model's own failures."""
    word = failure.partition(":")[0]
    return word if word in REASONS else "other"


# The health of one replica: its running requests, and whether it is trusted.
#
# A replica is trusted once a probe of it has succeeded. Faults in a row, or a conclusive one, end
# the trust: it gets nothing for a rest, and is then probed. If the probe succeeds it is on trial
# and gets one request at a time: the first success ends the trial, a fault means a longer rest.

Clock = Callable[[], float]

FAULTS_TO_TRIP = 3
"""Number of faults in a row that end the trust."""
FIRST_REST, LONGEST_REST = 0.5, 15.0
"""Bounds of a rest in seconds; it doubles each time without a success in between."""
LONGEST_BUSY = 30.0
"""Longest time in seconds for which a replica may ask to get no requests."""
_CONCLUSIVE = ("version", "canary", "4xx")
_REMEMBERED = 128
_TO_JOIN = 0.5
_LEAST_PATIENCE = 0.05
_ENOUGH_TO_TELL = 20


class ReplicaHealth:
    """Records the health of one replica; times are of a monotonic clock."""

    def __init__(
        self, replica: Replica, *, window: int, clock: Clock, has_canary: bool = False
    ) -> None:
        """Begin a record.

        Args:
            replica: Replica, which is probed before its first request.
            window: Limit of concurrent requests; lowered while the replica is busy.
            clock: Returns monotonic seconds.
            has_canary: Whether probes ask for known scores. A lost connection is then reason enough
                for one: another server may listen there by now.
        """
        self.replica = replica
        self.clock = clock
        self.tokens = 0  # outstanding, roughly
        self.in_flight = 0
        self.needs_probe = True
        self.is_on_trial = False
        self.probing_since: float | None = None  # start of the running probe
        self.probed_at = -float("inf")
        self.last_fault = ""  # since the latest success
        self._num_dangerous = 0
        self._has_canary = has_canary
        self._most = float(window)
        self._window = float(window)
        self._faults_in_a_row = 0
        self._rests = 0
        # Results of requests sent before say nothing about its health now.
        self._trusted_since = -float("inf")
        self.rests_until = -float("inf")  # then it may be asked again
        self.seconds: deque[float] = deque(maxlen=_REMEMBERED)  # durations of its latest answers

    @property
    def is_usable(self) -> bool:
        """Whether it is trusted and takes requests, even if it is full at the moment."""
        return not self.needs_probe and self.clock() >= self.rests_until

    @property
    def has_room(self) -> bool:
        """Whether it may get one more request."""
        return self.in_flight < (1 if self.is_on_trial else max(1, int(self._window)))

    @property
    def wants_probe(self) -> bool:
        """Whether a probe is due that has not begun."""
        is_due = self.needs_probe and self.clock() >= self.rests_until
        return is_due and self.probing_since is None

    @property
    def joins_until(self) -> float | None:
        """Time to wait for its first probe, so that it gets its share of the first requests."""
        if self.probing_since is None or self.probed_at > -float("inf"):
            return None
        until = self.probing_since + _TO_JOIN
        return until if self.clock() < until else None

    @property
    def refuses_us(self) -> bool:
        """Whether it is alive but refuses this client or its key."""
        return self.needs_probe and self.last_fault.startswith("4xx")

    @property
    def has_dangerous(self) -> bool:
        """Whether it has a request that may take it down. It gets no second one, so that its loss
        shows which of them is at fault.
        """
        return self._num_dangerous > 0

    def begin(self, tokens: int, *, is_dangerous: bool = False) -> Callable[[], None]:
        """Record the start of a request; return a function to call when the request has ended."""
        self.in_flight += 1
        self.tokens += tokens
        self._num_dangerous += is_dangerous

        def end() -> None:
            self.in_flight -= 1
            self.tokens -= tokens
            self._num_dangerous -= is_dangerous

        return end

    def succeeded(self, seconds: float) -> None:
        """Record a valid answer."""
        self.seconds.append(seconds)
        if self.needs_probe:  # sent before the fault: says nothing about now
            return
        self.last_fault = ""
        self.is_on_trial = False
        self._faults_in_a_row = 0
        self._rests = 0
        self._window = min(self._most, self._window + 1 / self._window)

    def failed(self, fault: ReplicaFault, *, began: float) -> None:
        """Record a fault of the replica.

        Args:
            began: Time at which the request was sent. Requests sent before the replica was last
                trusted do not count, or the many requests that one death ends would be as many
                deaths.
        """
        if fault.kind == "busy":  # normal behaviour, which does not count against it
            self.last_fault = str(fault)
            self._window = max(1.0, self._window / 2)
            self._postpone(fault)
            return
        if self.needs_probe or began < self._trusted_since:
            return
        self.last_fault = str(fault)
        self._faults_in_a_row += 1
        is_enough = self.is_on_trial or self._faults_in_a_row >= FAULTS_TO_TRIP
        if is_enough or fault.kind in _CONCLUSIVE:
            self._rest()
        elif fault.kind == "connection" and self._has_canary:
            self.needs_probe = True

    def proved(self) -> None:
        """Record a successful probe."""
        self.probed_at = self.clock()
        if self.needs_probe:
            self.needs_probe = False
            self.is_on_trial = self._rests > 0
            self._faults_in_a_row = 0
            self._trusted_since = self.clock()

    def failed_probe(self, fault: ReplicaFault, *, began: float) -> None:
        """Record a failed probe."""
        self.probed_at = self.clock()
        if began < self._trusted_since:
            return
        if not self.needs_probe:
            self.failed(fault, began=began)
            return
        self.last_fault = str(fault)
        if fault.kind == "busy" and fault.retry_after is not None:
            self._postpone(fault)
        else:
            self._rest()

    def _postpone(self, fault: ReplicaFault) -> None:
        if fault.retry_after is not None:
            self.rests_until = self.clock() + min(fault.retry_after, LONGEST_BUSY)

    def _rest(self) -> None:
        self.needs_probe = True
        self.is_on_trial = False
        self.rests_until = self.clock() + min(LONGEST_REST, FIRST_REST * 2**self._rests)
        self._rests = min(self._rests + 1, 16)


def patience(replica_health: Collection[ReplicaHealth]) -> float | None:
    """Return the seconds after which another replica is asked besides.

    None: there is only one replica, or too few answers are known.
    """
    if len(replica_health) < 2:
        return None
    return slow_after(seconds for health in replica_health for seconds in health.seconds)


def slow_after(seconds: Iterable[float]) -> float | None:
    """Return the seconds after which an answer counts as slow: twice what 95 % of the latest took.

    None: too few answers are known.
    """
    known = sorted(seconds)
    if len(known) < _ENOUGH_TO_TELL:
        return None
    return max(_LEAST_PATIENCE, 2 * known[int(0.95 * (len(known) - 1))])
