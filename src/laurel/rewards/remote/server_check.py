"""What a server that somebody else has started must show before its first score is believed."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from laurel.errors import ConfigError, ScoringContractError, about, setting_of
from laurel.models.scoring import ScoringContract
from laurel.rewards.remote.foreign import sigmoid
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

_MAY_PASS = ("connection", "timeout", "busy", "5xx")
"""Faults that a server may have while it starts."""
_PROBE_SECONDS = 5.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_SECONDS_BETWEEN_WORDS = 10.0
_QUESTION = Group(id="opening", prompt=CANARY.prompt, completions_G=CANARY.completions_G[:1])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCheck:
    """Waits until servers answer, and sees whether they can score, and score as they should."""

    patience: float
    """Seconds to wait for each."""
    limit: float
    """Seconds of one request."""
    say: Callable[[str], None]
    """Told of the wait, and of what was found."""
    where: str
    """The section, for messages."""
    contract: ScoringContract | None = None
    """Of the model that they should have, if that is known: its golden scores are compared."""
    has_canary: bool = False
    """Whether the router will trust only those that have a score for a plain question."""
    version: str = ""
    """The only one of the model whose scores are wanted; empty: any."""
    clock: Callable[[], float] = time.monotonic
    """Seconds."""

    async def check_all(self, replicas: Sequence[Replica]) -> None:
        """Check servers side by side, so that several which are absent are waited for once.

        Raises:
            UserError: See `check`; of the first that fails.
        """
        checks = [asyncio.ensure_future(self.check(replica)) for replica in replicas]
        try:
            await asyncio.gather(*checks)
        finally:
            for one in checks:
                one.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    async def check(self, replica: Replica) -> None:
        """Check one server. Its connections are closed at the end.

        Raises:
            ConfigError: It cannot be reached, or cannot score.
            ScoringContractError: It gives other scores than its model should.
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
        if self.version and (found := replies[0].version) != self.version:
            said = repr(found[:80]) if found else "an unknown one: its answers do not say"
            raise ConfigError(
                f"{setting_of(f'{self.where}.model_version', self.version)}: {replica.name} has "
                f"{said}"
            )
        if self.contract is not None and golden:
            worst = _compare(replica.name, self.contract, replies)
            self.say(f"checked golden scores agree with {replica.name} (at most {worst:.1e} off)")
            return
        failure = replies[0].scores[0][0].failure
        if failure is not None:
            told = f"{replica.name} has no score for a plain question: {failure}"
            if self.has_canary:
                raise ConfigError(f"{about(self.where)}{told}; it could score nothing else either")
            self.say(f"warning: {told}")
        if self.contract is not None:
            self.say(
                f"note    no golden scores that those of {replica.name} could be compared with"
            )

    async def _ask(self, replica: Replica, group: Group) -> ReplicaReply:
        async with asyncio.timeout(self.limit):
            reply = await replica.attempt([group], request_id=uuid.uuid4().hex, timeout=self.limit)
        check_scores([group], reply.scores, name=replica.name)
        return reply

    async def _patiently(
        self, replica: Replica, ask: Callable[[], Coroutine[Any, Any, T]], end: float
    ) -> T:
        """What a server answers, as soon as it does.

        A refused connection is waited for as long as any other fault: a server that is started
        together with the run has no open port for as long as it imports and, with vLLM, loads. So a
        wrong port cannot be told from that before `patience` is over; the first words, at once, say
        what is waited for.
        """
        pause, speaks_at = _FIRST_PAUSE, self.clock()
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
                    f"{about(self.where)}{replica.name} answers something else than its protocol "
                    "says: "
                    f"{fault}"
                ) from fault
            if left <= 0:
                given = f" It was given {self.patience:g} s (connect_patience)."
                raise ConfigError(
                    f"{about(self.where)}{replica.name} does not answer: {fault}."
                    f"{given if self.patience else ''} Is the address right, and the server "
                    "started?"
                ) from fault
            if self.clock() >= speaks_at:
                self.say(
                    f"waiting for {replica.name}, {left:.0f} s more at most (connect_patience): "
                    f"{fault}"
                )
                speaks_at = self.clock() + _SECONDS_BETWEEN_WORDS
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _refused(self, replica: Replica, why: RefusedError | ReplicaFault) -> ConfigError:
        said = why.message.removeprefix(f"{replica.name} ")
        if isinstance(why, RefusedError):  # nothing in it says what to do
            said += ". Are the address, the protocol and the name of the model right?"
        return ConfigError(f"{about(self.where)}{replica.name} refuses to score: {said}")


def _compare(name: str, contract: ScoringContract, replies: Sequence[ReplicaReply]) -> float:
    """The largest difference from a golden score, in units of max(1, |score|)."""
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
    """What most likely made the scores of a server others than they should be."""
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
        "it has another model or another chat template, or pools at another token than the last. "
        "Start it with the directory that model_name names"
    )
