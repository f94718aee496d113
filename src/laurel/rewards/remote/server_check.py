"""Checks a running reward server before its first score is used."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from laurel.errors import ConfigError, ScoringContractError, about, setting_of
from laurel.models.scoring import ScoringContract, sigmoid
from laurel.rewards.remote.replica import (
    RefusedError,
    Replica,
    ReplicaFault,
    ReplicaReply,
    check_scores,
)
from laurel.rewards.remote.router import CANARY
from laurel.rewards.scorer import LOW_PRECISION_TOLERANCE, conversation_group
from laurel.types import Group

T = TypeVar("T")

# Faults that a server may have while it starts.
_MAY_PASS = ("connection", "timeout", "busy", "5xx")
_PROBE_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_SECONDS_BETWEEN_NOTES = 10.0
_QUESTION = Group(id="opening", prompt=CANARY.prompt, completions_G=CANARY.completions_G[:1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCheck:
    """Waits until servers answer, and checks that they score as their model should."""

    patience: float
    """Seconds to wait for each server."""
    limit: float
    """Time limit of one request, in seconds."""
    say: Callable[[str], None]
    """Called with lines on the wait and on the result."""
    where: str
    """Name of the section, for messages."""
    contract: ScoringContract | None = None
    """Contract of the expected model, if known, whose golden scores are compared."""
    has_canary: bool = False
    """Whether the router will trust only servers that can score a plain conversation."""
    version: str = ""
    """Required version of the model; empty: any."""
    clock: Callable[[], float] = time.monotonic
    """Returns monotonic seconds."""

    async def check_all(self, replicas: Sequence[Replica]) -> list[str]:
        """Check servers concurrently, so that several absent ones are waited for once.

        Returns:
            The version of each server's model; empty where its answers do not say.

        Raises:
            UserError: The first error of `check`.
        """
        checks = [asyncio.ensure_future(self.check(replica)) for replica in replicas]
        try:
            return await asyncio.gather(*checks)
        finally:
            for one in checks:
                one.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    async def check(self, replica: Replica) -> str:
        """Check one server, close its connections, and return the version of its model, if said.

        Raises:
            ConfigError: It cannot be reached, or cannot score.
            ScoringContractError: Its scores differ from those of its model.
        """
        end = self.clock() + self.patience
        golden = self.contract.rules.golden if self.contract is not None else ()
        groups = [conversation_group(entry.messages) for entry in golden] or [_QUESTION]
        try:
            await self._patiently(
                replica, lambda: replica.probe(timeout=min(self.limit, _PROBE_SECONDS)), end
            )
            replies = [
                await self._patiently(replica, partial(self._ask, replica, group), end)
                for group in groups
            ]
        finally:
            await replica.aclose()
        found = replies[0].version
        if self.version and found != self.version:
            has = repr(found[:80]) if found else "an unknown one: its answers do not say"
            raise ConfigError(
                f"{setting_of(f'{self.where}.model_version', self.version)}: {replica.name} has "
                f"{has}"
            )
        if self.contract is not None and golden:
            worst = _compare(replica.name, self.contract, replies)
            self.say(f"checked golden scores agree with {replica.name} (at most {worst:.1e} off)")
            return found
        failure = replies[0].scores[0][0].failure
        if failure is not None:
            problem = f"{replica.name} has no score for a plain question: {failure}"
            if self.has_canary:
                raise ConfigError(f"{about(self.where)}{problem}; it would score nothing else")
            self.say(f"warning: {problem}")
        if self.contract is not None:
            self.say(f"note    there are no golden scores to compare with those of {replica.name}")
        return found

    async def _ask(self, replica: Replica, group: Group) -> ReplicaReply:
        async with asyncio.timeout(self.limit):
            reply = await replica.attempt([group], request_id=uuid.uuid4().hex, timeout=self.limit)
        check_scores([group], reply.scores, name=replica.name)
        return reply

    async def _patiently(
        self, replica: Replica, ask: Callable[[], Coroutine[Any, Any, T]], end: float
    ) -> T:
        """Ask a server until it answers, for at most `patience` seconds."""
        # A refused connection is waited for as long as any other fault: a server that is started
        # together with the run has no open port while it imports and, with vLLM, loads. A wrong
        # port can therefore not be distinguished before `patience` is over; the first note says at
        # once what is waited for.
        pause, notes_at = _FIRST_PAUSE, self.clock()
        while True:
            try:
                return await ask()
            except RefusedError as error:
                raise self._refused(replica, error) from error
            except TimeoutError:
                fault = ReplicaFault("timeout", f"no answer in {self.limit:.3g} s")
            except ReplicaFault as error:
                fault = error
            left = end - self.clock()
            if fault.kind == "4xx":
                raise self._refused(replica, fault) from fault
            if fault.kind not in _MAY_PASS:
                raise ConfigError(
                    f"{about(self.where)}{replica.name} does not follow its protocol: {fault}"
                ) from fault
            if left <= 0:
                waited = f" It was given {self.patience:g} s (connect_patience)."
                raise ConfigError(
                    f"{about(self.where)}{replica.name} does not answer: {fault}."
                    f"{waited if self.patience else ''} Is the address right, and the server "
                    "started?"
                ) from fault
            if self.clock() >= notes_at:
                self.say(
                    f"waiting for {replica.name}, {left:.0f} s more at most (connect_patience): "
                    f"{fault}"
                )
                notes_at = self.clock() + _SECONDS_BETWEEN_NOTES
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _refused(self, replica: Replica, why: RefusedError | ReplicaFault) -> ConfigError:
        reason = why.message.removeprefix(f"{replica.name} ")
        if isinstance(why, RefusedError):  # nothing in it says what to do
            reason += ". Are the address, the protocol and the name of the model right?"
        return ConfigError(f"{about(self.where)}{replica.name} refuses to score: {reason}")


def _compare(name: str, contract: ScoringContract, replies: Sequence[ReplicaReply]) -> float:
    expected = [contract.scalar(entry.values_K) for entry in contract.rules.golden]
    found: list[float] = []
    for reply in replies:
        ((score,),) = reply.scores
        if score.value is None:
            raise ScoringContractError(
                f"{name} has no score for a golden conversation: {score.failure}"
            )
        found.append(score.value)
    differences = [_difference(f, e) for f, e in zip(found, expected, strict=True)]
    worst = max(range(len(differences)), key=differences.__getitem__)
    if not differences[worst] <= LOW_PRECISION_TOLERANCE:
        raise ScoringContractError(
            f"{name} scores a golden conversation {found[worst]:.6g}, and its model scored "
            f"{expected[worst]:.6g} when it was saved: {_cause(found, expected)}"
        )
    return differences[worst]


def _difference(found: float, expected: float) -> float:
    return abs(found - expected) / max(1.0, abs(expected))


def _cause(found: Sequence[float], expected: Sequence[float]) -> str:
    squashed = [sigmoid(value) for value in expected]
    if all(
        _difference(f, s) <= LOW_PRECISION_TOLERANCE for f, s in zip(found, squashed, strict=True)
    ):
        return (
            "this is the sigmoid of the score. The server applies an activation: switch it off "
            "(vLLM: use_activation or activation false in --pooler-config)"
        )
    if len(found) > 1 and max(found) - min(found) <= 1e-6 < max(expected) - min(expected):
        return (
            "it gives every conversation the same score, so it reads it at a token that all share. "
            "The server must pool at the last token"
        )
    return (
        "it has another model or chat template, or does not pool at the last token. "
        "Start it with the directory that model_name names"
    )
