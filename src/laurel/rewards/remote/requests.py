"""Groups on their way to replicas: cut into requests, asked again, halved, and put together."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from laurel.rewards.remote.replica import ReplicaFault
from laurel.types import Completion, Group, Score

FAULTS_TO_SPLIT = 2
"""Faults after which the completions of a request are asked in halves."""
DEATHS_TO_CONDEMN = 3
"""Replicas that a completion may take down, or hang, before it is taken for the cause. Those that
were lost while they had another one that is suspected do not count: that may have done it."""
ANSWERS_TO_CONDEMN = 12
"""Bad answers to one completion by itself after which no better one is expected: of a replica that
fails at random, 30 times in 100, so many in a row come once in two million."""
_WRONG_ANSWERS = ("nan", "count", "reply")
_BAD_ANSWERS = (*_WRONG_ANSWERS, "5xx")
_DEATHS = ("timeout",)
"""Kinds that are like the end of a replica, as far as what it was given is concerned."""


@dataclass(slots=True, kw_only=True)
class Job:
    """A request: completions of one group, and what has become of it so far."""

    group: Group
    row: int
    """The group's index in the call."""
    first: int
    """Index of its first completion in that group."""
    deadline: float
    began: float
    """When it was first asked, or became a part of its own."""
    request_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tries: int = 0
    deaths: int = 0
    deaths_alone: int = 0
    """Those that nothing else is suspected of."""
    losses: int = 0
    """Those that ended a connection, and with it whatever else the replica had."""
    bad_answers: int = 0
    errors: int = 0
    """Of the bad answers those that were an error of the server."""
    is_part_of_suspect: bool = False
    is_part_of_dangerous: bool = False
    reason: str = ""
    """Why the latest try failed."""
    avoided: frozenset[str] = frozenset()
    """Replicas that have failed with it."""
    refused_by: frozenset[str] = frozenset()
    """Those that want nothing from this address or with this key; never asked again."""

    @property
    def num_completions(self) -> int:
        """Of the request."""
        return len(self.group.completions_G)

    @property
    def got_an_answer(self) -> bool:
        """Whether the latest try ended with a wrong answer, rather than with none."""
        return self.reason.startswith(_WRONG_ANSWERS)

    @property
    def is_dangerous(self) -> bool:
        """Whether it may be what takes replicas down, with all that they have."""
        return self.is_part_of_dangerous or self.losses >= FAULTS_TO_SPLIT

    @property
    def tokens(self) -> int:
        """Roughly: four letters each."""
        said = (*self.group.prompt, *(m for c in self.group.completions_G for m in c.messages))
        return 1 + sum(len(message.content) for message in said) // 4

    def failed_at(self, name: str, fault: ReplicaFault) -> None:
        """A replica has failed with it: go elsewhere next, if there is an elsewhere."""
        self.avoided |= {name}
        if fault.kind == "4xx":
            self.refused_by |= {name}

    def is_to_blame_for(self, fault: ReplicaFault) -> bool:
        """Whether a fault may be due to what is asked: there was a bad answer to it before.

        It is not held against the replica then, or bad items would have good replicas set aside.
        """
        return fault.kind in _BAD_ANSWERS and (self.is_part_of_suspect or self.bad_answers > 0)

    def blame(self, fault: ReplicaFault) -> None:
        """Remember why a try failed."""
        self.tries += 1
        self.reason = str(fault)
        is_late = fault.kind in _DEATHS
        self.deaths += fault.in_mid_request or is_late
        self.deaths_alone += is_late or (fault.in_mid_request and self.is_dangerous)
        self.losses += fault.in_mid_request
        self.bad_answers += fault.kind in _BAD_ANSWERS
        self.errors += fault.kind == "5xx"

    def is_suspect(self, last_success: float) -> bool:
        """Whether what it holds may be the cause, rather than whoever was asked.

        Where nobody has scored anything since it began it is an outage, which says nothing of it:
        deaths do not count then, nor do errors of servers. A wrong answer does, for it is one.
        """
        is_outage = last_success <= self.began
        if self.num_completions > 1:
            spoiled = self.bad_answers >= FAULTS_TO_SPLIT
            return spoiled or (self.deaths >= FAULTS_TO_SPLIT and not is_outage)
        counted = self.bad_answers - self.errors if is_outage else self.bad_answers
        return counted >= ANSWERS_TO_CONDEMN or (self._is_poison and not is_outage)

    @property
    def _is_poison(self) -> bool:
        return self.deaths_alone >= DEATHS_TO_CONDEMN

    @property
    def verdict_of_suspect(self) -> str:
        """Why one completion by itself is given up."""
        if not self._is_poison:
            return self.reason
        return f"poison: {self.deaths} replicas were lost while they scored it ({self.reason})"

    def put(self, verdicts: list[list[Score | None]], score: Score) -> None:
        """The same verdict on every completion."""
        self.put_all(verdicts, [(score,) * self.num_completions])

    def put_all(
        self, verdicts: list[list[Score | None]], scores: Sequence[Sequence[Score]]
    ) -> None:
        """The verdicts of a reply."""
        (scores_G,) = scores
        for index, score in enumerate(scores_G, start=self.first):
            assert verdicts[self.row][index] is None, "a completion got two verdicts"
            verdicts[self.row][index] = score


def divide(groups: Sequence[Group], most: int, *, deadline: float, began: float) -> list[Job]:
    """The requests that groups make, of so many completions at most."""
    return [
        Job(group=part, row=row, first=first, deadline=deadline, began=began)
        for row, group in enumerate(groups)
        for first, part in parts(group, most)
    ]


def parts(group: Group, most: int) -> list[tuple[int, Group]]:
    """A group in parts of so many completions at most, each with the index of its first."""
    number = len(group.completions_G)
    if 0 < number <= most:
        return [(0, group)]
    return [
        (first, replace(group, completions_G=group.completions_G[first : first + most]))
        for first in range(0, number, most)
    ]


def halves(job: Job, *, began: float) -> list[Job]:
    """A request that may hold something bad as two, with the same deadline."""
    middle = job.num_completions // 2
    completions = job.group.completions_G
    return [
        Job(
            group=replace(job.group, completions_G=part),
            row=job.row, first=first, deadline=job.deadline, began=began,
            avoided=job.refused_by, refused_by=job.refused_by, is_part_of_suspect=True,
            is_part_of_dangerous=job.is_dangerous,
        )
        for first, part in ((job.first, completions[:middle]),
                            (job.first + middle, completions[middle:]))
    ]  # fmt: skip


def spread(
    group: Group, distinct: Sequence[Completion], verdicts: Sequence[Score | None]
) -> tuple[Score, ...]:
    """The verdicts on all completions of a group, from those on its different ones."""
    given = [score for score in verdicts if score is not None]
    assert len(given) == len(distinct), "a completion was left without a verdict"
    of = dict(zip(distinct, given, strict=True))
    return tuple(of[completion] for completion in group.completions_G)
