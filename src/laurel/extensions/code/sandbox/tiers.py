"""Defines the tiers of isolation, and their descriptions.

A machine has the tier that was *seen to hold* when the canaries ran (`detection.py`), not the one
that the system claims.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

LAYERS = ("namespaces", "landlock", "seccomp")
"""The optional layers. Every tier runs each program in a new process, without an environment and
open files, with limits of resources, wall time and output, and under another account than root's.
"""


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
    """The tiers, best first; the value is the letter in configurations and results."""

    FULL = "A"
    NO_NAMESPACES = "B"
    NO_LANDLOCK = "C"
    SECCOMP_ONLY = "D"
    LIMITS_ONLY = "0"

    @property
    def layers(self) -> frozenset[str]:
        """The layers of the tier."""
        return _WORDS[self].layers

    @property
    def stops(self) -> str:
        """A description of what a hostile program cannot do in this tier."""
        return _WORDS[self].stops

    @property
    def lost(self) -> str:
        """A description of what this tier does not stop but the best does; empty for the best."""
        return _WORDS[self].lost

    @property
    def remedy(self) -> str:
        """A description of how to get a better tier; empty for the best."""
        return _WORDS[self].remedy

    def is_at_least(self, other: Tier) -> bool:
        """Report whether this tier is at least as good as another."""
        order = list(Tier)
        return order.index(self) <= order.index(other)

    @classmethod
    def of(cls, layers: frozenset[str]) -> Tier:
        """Return the best tier whose layers are all available."""
        return next(tier for tier in cls if tier.layers <= layers)

    def sentence(self, reasons: Mapping[str, str]) -> str:
        """Return a description of the tier in one line, for logs.

        Args:
            reasons: The reason why a layer is missing, by its name.
        """
        name = f"sandbox tier {self.value}"
        missing = [layer for layer in LAYERS if layer not in self.layers]
        if not missing:
            return f"{name}: {self.stops}."
        why = "; ".join(
            f"no {layer}" + (f": {reasons[layer]}" if reasons.get(layer) else "")
            for layer in missing
        )
        return f"{name} ({why}). Lost: {self.lost}. For a better one: {self.remedy}."


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
