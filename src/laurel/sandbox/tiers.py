"""How well this machine can lock a program in, in words.

A tier is what was *seen to hold* when the canaries ran (`detection.py`), not what the system says
of itself.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

LAYERS = ("namespaces", "landlock", "seccomp")
"""Beside what every tier has: a process of its own, started afresh; no environment, no open files;
resource limits; a kill by the wall clock; caps of outputs; its own account, for root."""


@dataclass(frozen=True, slots=True)
class _Words:
    layers: frozenset[str]
    stops: str
    lost: str
    remedy: str


_NAMESPACES_REMEDY = (
    "allow user namespaces: in Docker a seccomp profile that lets unshare and mount through "
    "(or Podman), on Ubuntu 24.04 the sysctl kernel.apparmor_restrict_unprivileged_userns=0, "
    "elsewhere user.max_user_namespaces above 0"
)
_LANDLOCK_REMEDY = "a kernel of 5.13 or later with landlock among its security modules (lsm=)"


class Tier(enum.Enum):
    """Best first. The value is the letter that configurations and results carry."""

    FULL = "A"
    NO_NAMESPACES = "B"
    NO_LANDLOCK = "C"
    SECCOMP_ONLY = "D"
    LIMITS_ONLY = "0"

    @property
    def layers(self) -> frozenset[str]:
        """The layers that it has."""
        return _WORDS[self].layers

    @property
    def stops(self) -> str:
        """What a hostile program cannot do in it."""
        return _WORDS[self].stops

    @property
    def lost(self) -> str:
        """What it does not stop, against the best one; empty for the best."""
        return _WORDS[self].lost

    @property
    def remedy(self) -> str:
        """What to change for a better one; empty for the best."""
        return _WORDS[self].remedy

    def is_at_least(self, other: Tier) -> bool:
        """Whether it is as good as another one, or better."""
        order = list(Tier)
        return order.index(self) <= order.index(other)

    @classmethod
    def of(cls, layers: frozenset[str]) -> Tier:
        """The best tier whose layers are all there."""
        return next(tier for tier in cls if tier.layers <= layers)

    def sentence(self, reasons: Mapping[str, str]) -> str:
        """One line for a log.

        Args:
            reasons: Why a layer is missing, by its name.
        """
        said = f"sandbox tier {self.value}"
        missing = [name for name in LAYERS if name not in self.layers]
        if not missing:
            return f"{said}: {self.stops}."
        why = "; ".join(
            f"no {name}" + (f": {reasons[name]}" if reasons.get(name) else "") for name in missing
        )
        return f"{said} ({why}). Lost: {self.lost}. For a better one: {self.remedy}."


_WORDS: Mapping[Tier, _Words] = {
    Tier.FULL: _Words(
        frozenset(LAYERS),
        "it sees no file, process or network of the machine and may make no process; time, memory, "
        "disk and output are limited",
        "",
        "",
    ),
    Tier.NO_NAMESPACES: _Words(
        frozenset({"landlock", "seccomp"}),
        "it can open no file of the machine beside Python's own, reach no network and make no "
        "process; time, memory, disk and output are limited",
        "a file system and a process table of its own",
        _NAMESPACES_REMEDY,
    ),
    Tier.NO_LANDLOCK: _Words(
        frozenset({"namespaces", "seccomp"}),
        "what the best tier stops, with one lock on files instead of two",
        "the second lock on files",
        _LANDLOCK_REMEDY,
    ),
    Tier.SECCOMP_ONLY: _Words(
        frozenset({"seccomp"}),
        "it can reach no network and make no process; time, memory and output are limited",
        "files: it can read and write whatever the account can",
        f"{_NAMESPACES_REMEDY}; or {_LANDLOCK_REMEDY}",
    ),
    Tier.LIMITS_ONLY: _Words(
        frozenset(),
        "accidents: endless loops, too much memory or output",
        "everything else: files, network, processes of this account",
        "run on Linux (x86_64 or aarch64) with seccomp filters, which containers have by default",
    ),
}
