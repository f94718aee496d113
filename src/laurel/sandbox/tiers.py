"""The tiers of isolation, and their descriptions.

A tier is what was *seen to hold* when the canaries ran (`detection.py`), not what the system
claims.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

LAYERS = ("namespaces", "landlock", "seccomp")
"""Optional layers. Every tier has: a fresh process of its own; no environment, no open files;
resource limits; a wall clock limit; output caps; and, for root, an account of its own.
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
    """The tiers, best first. The value is the letter in configurations and results."""

    FULL = "A"
    NO_NAMESPACES = "B"
    NO_LANDLOCK = "C"
    SECCOMP_ONLY = "D"
    LIMITS_ONLY = "0"

    @property
    def layers(self) -> frozenset[str]:
        """Layers of the tier."""
        return _WORDS[self].layers

    @property
    def stops(self) -> str:
        """Description of what a hostile program cannot do in it."""
        return _WORDS[self].stops

    @property
    def lost(self) -> str:
        """Description of what it does not stop, compared with the best one; empty for the best."""
        return _WORDS[self].lost

    @property
    def remedy(self) -> str:
        """Description of how to get a better one; empty for the best."""
        return _WORDS[self].remedy

    def is_at_least(self, other: Tier) -> bool:
        """Whether it is as good as another one, or better."""
        order = list(Tier)
        return order.index(self) <= order.index(other)

    @classmethod
    def of(cls, layers: frozenset[str]) -> Tier:
        """Return the best tier whose layers are all there."""
        return next(tier for tier in cls if tier.layers <= layers)

    def sentence(self, reasons: Mapping[str, str]) -> str:
        """Describe the tier in one line for a log.

        Args:
            reasons: Why a layer is missing, by its name.
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
