"""What a reply must be to be believed: whole, finite, of the right model, and in time."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from laurel.errors import is_lost_worker
from laurel.rewards.remote.replica import (
    RefusedError,
    Replica,
    ReplicaFault,
    Reply,
    check_scores,
)
from laurel.rewards.remote.requests import parts
from laurel.rewards.remote.router_options import Canary
from laurel.types import Group

T = TypeVar("T")


class ReplyChecks:
    """Asks replicas, and lets through what can be believed."""

    def __init__(self, *, version: str, canary: Canary | None) -> None:
        """Begin.

        Args:
            version: Of the model; empty: that of the first answer.
            canary: A group whose scores are known, if there is one.
        """
        self.version = version
        self._is_wanted = bool(version)
        self.canary = canary
        self._expected = canary.values_G if canary is not None else None

    async def ask(
        self, replica: Replica, groups: Sequence[Group], *, request_id: str, limit: float
    ) -> Reply:
        """A reply that can be believed.

        Raises:
            ReplicaFault: There is none within `limit` seconds.
            RefusedError: The replica blames the request.
        """
        asked = replica.attempt(groups, request_id=request_id, timeout=limit)
        reply = await _in_time(asked, replica, limit)
        check_scores(groups, reply.scores, name=replica.name)
        if reply.version and self.version and reply.version != self.version:
            message = f"{replica.name} has {reply.version[:80]!r}, not {self.version!r}"
            raise ReplicaFault("version", message)
        if self._is_wanted and not reply.version and _has_a_score(reply):
            message = f"{replica.name} does not say its version, which is to be {self.version!r}"
            raise ReplicaFault("version", message)
        self.version = self.version or reply.version
        return reply

    async def prove(self, replica: Replica, *, limit: float) -> None:
        """See whether a replica lives, and whether it gives the scores that it should.

        Raises:
            ReplicaFault: It does not.
        """
        if self.canary is None:
            return await _in_time(replica.probe(timeout=limit), replica, limit)
        try:
            await self._prove_scores(replica, self.canary, limit)
        except RefusedError as refusal:
            raise ReplicaFault(
                "canary", f"{replica.name} refused a known conversation: {refusal}"
            ) from refusal

    async def _prove_scores(self, replica: Replica, canary: Canary, limit: float) -> None:
        most = replica.max_completions or len(canary.group.completions_G)
        found: list[float] = []
        for _, part in parts(canary.group, most):
            # An id of its own each time: a server may answer one that it knows without computing.
            reply = await self.ask(replica, [part], request_id=uuid.uuid4().hex, limit=limit)
            for score in reply.scores[0]:
                if score.value is None:
                    raise ReplicaFault(
                        "canary",
                        f"{replica.name} has no score for a known conversation: {score.failure}",
                    )
                found.append(score.value)
        self._expected = self._expected or tuple(found)
        for value, expected in zip(found, self._expected, strict=True):
            if not abs(value - expected) <= canary.tolerance * max(1.0, abs(expected)):
                raise ReplicaFault(
                    "canary",
                    f"{replica.name} scores a known conversation {value:.6g}, not {expected:.6g}: "
                    "it has another model, or it is broken",
                )


def _has_a_score(reply: Reply) -> bool:
    """Whether any model is behind it: who finds that there is nothing to ask asks none."""
    return any(score.value is not None for scores_G in reply.scores for score in scores_G)


async def _in_time(asked: Awaitable[T], replica: Replica, limit: float) -> T:
    try:
        async with asyncio.timeout(limit):
            return await asked
    except (ReplicaFault, RefusedError):
        raise
    except TimeoutError as error:
        message = f"{replica.name} did not answer in {limit:.3g} s"
        raise ReplicaFault("timeout", message) from error
    except Exception as error:  # whatever is wrong with one replica, the others go on
        if is_lost_worker(error):  # it renders for all of them
            raise
        message = f"{replica.name}: {type(error).__name__}: {error}"
        raise ReplicaFault("error", message, in_mid_request=True) from error
