"""The zygotes of one node, held by a process on it, for runners in the process of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from laurel.distributed.limits import available_cores
from laurel.environments.sandbox.detection import detect
from laurel.environments.sandbox.grading import lacked_answer
from laurel.environments.sandbox.group_trial import chosen_place
from laurel.environments.sandbox.jobs import Limits
from laurel.environments.sandbox.pool import affordable_workers
from laurel.environments.sandbox.runner import Outcome, SandboxLostError, SandboxStartError
from laurel.environments.sandbox.tiers import Tier
from laurel.environments.sandbox.zygote_process import ZygoteProcess

if TYPE_CHECKING:
    from laurel.distributed.rendezvous import Place

Kind = Literal["ran", "lost", "not started"]
Answer = tuple[Kind, Any]
"""What became of a call: plain data where it ran, and else why not."""


class NodeWorker:
    """Runs programs where it is. It knows neither Ray nor what answers are expected.

    Each zygote is used by one thread at a time; `discard` and `shutdown` may come from another.
    """

    def __init__(self, place: Place) -> None:
        """Have no zygote yet.

        Args:
            place: Where it is.
        """
        self._tier = Tier.LIMITS_ONLY
        self._zygotes: list[ZygoteProcess] = []

    def find(self, num_workers: int, limits_mb: int) -> dict[str, Any]:
        """How well this node locks programs in, and how many it runs at a time.

        Args:
            num_workers: As many as are wanted.
            limits_mb: Memory and disk of one program.

        Returns:
            `tier` (its letter, or None) and `reasons` as in `Detection`, and `num_workers`.
        """
        found = detect()
        return {
            "tier": None if found.tier is None else found.tier.value,
            "reasons": dict(found.reasons),
            "num_workers": affordable_workers(min(num_workers, available_cores()), limits_mb),
        }

    def prepare(self, tier: str, num_workers: int, cgroup: str) -> None:
        """Have zygotes, which start with their first program.

        Args:
            tier: The letter of the one that was found here, whose layers each must have.
            num_workers: How many.
            cgroup: See `SandboxConfig.cgroup`.

        Raises:
            ConfigError: This node has no such control group.
        """
        self._tier = Tier(tier)
        place, _ = chosen_place(cgroup)
        self._zygotes = [ZygoteProcess(self._tier.layers, place=place) for _ in range(num_workers)]

    def start(self, index: int) -> Answer:
        """Start a zygote, unless it lives.

        Returns:
            The names of its layers.
        """
        return _answer(lambda: sorted(self._ready(index).layers))

    def one(
        self,
        index: int,
        header: Mapping[str, Any],
        parts: tuple[bytes, ...],
        limits: Mapping[str, Any],
        stdin: bytes,
    ) -> Answer:
        """See `Runner.one`.

        Returns:
            The outcome, in a list.
        """
        return _answer(
            lambda: [
                as_plain(self._ready(index).one(header, *parts, limits=Limits(**limits),
                                                stdin=stdin))
            ]
        )  # fmt: skip

    def pair(
        self,
        index: int,
        code: bytes,
        header: Mapping[str, Any],
        parts: tuple[bytes, ...],
        limits: Mapping[str, Any],
    ) -> Answer:
        """See `Runner.pair`.

        Returns:
            How the tests ended, and how the program did.
        """
        given = Limits(**limits)

        def ran() -> list[dict[str, Any]]:
            ended = self._ready(index).pair(
                code, header, *parts, limits=given,
                is_waiting=lambda verdict: lacked_answer(verdict, given),
            )  # fmt: skip
            return [as_plain(outcome) for outcome in ended]

        return _answer(ran)

    def discard(self, index: int) -> None:
        """End a zygote and what it runs; the next program starts it again."""
        self._zygotes[index].discard()

    def shutdown(self) -> None:
        """End all of them for good, with what they run."""
        for zygote in self._zygotes:
            zygote.close()

    def _ready(self, index: int) -> ZygoteProcess:
        """A zygote that lives, in all layers of this node's tier."""
        zygote = self._zygotes[index]
        zygote.start()
        if not self._tier.layers <= zygote.layers:
            missing = ", ".join(sorted(self._tier.layers - zygote.layers))
            raise SandboxStartError(f"it has lost a layer that it had: {missing}")
        return zygote


def as_plain(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain data."""
    plain = {field.name: getattr(outcome, field.name) for field in fields(Outcome)}
    return plain | {"truncated": sorted(outcome.truncated)}


def of_plain(said: Mapping[str, Any]) -> Outcome:
    """The outcome that plain data is."""
    return Outcome(**{**said, "truncated": frozenset(said["truncated"])})


def _answer(work: Callable[[], Any]) -> Answer:
    try:
        return "ran", work()
    except SandboxLostError as error:
        return "lost", str(error)
    except SandboxStartError as error:
        return "not started", str(error)
