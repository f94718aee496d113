"""How a router asks, how long it waits, and what it probes replicas with."""

from __future__ import annotations

from dataclasses import dataclass

from laurel.types import Group, Message, group_of

CANARY = group_of(
    (Message("user", "How many are two and two?"),), ("Four.", "Five."), group_id="canary"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """A group whose scores tell whether a replica computes what it should."""

    group: Group = CANARY
    values_G: tuple[float, ...] | None = None
    """Its scores; None: those that the first replica gives."""
    tolerance: float = 5e-2
    """Allowed difference, in units of max(1, |score|)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """How long a router waits, and how it asks."""

    timeout: float = 120.0
    """Seconds for everything that one call asks; what has no score then has failed."""
    attempt_timeout: float = 30.0
    """Seconds of one try."""
    completions_per_request: int = 64
    """Of one group at most; a longer one is asked in parts."""
    window: int = 32
    """Requests that one replica may have at once."""
    hedge: bool = False
    """Ask another replica as well where an answer takes twice as long as 95 % of them."""
    canary: Canary | None = None
    """What replicas are probed with, besides whether they live. None: their scores may vary."""
    probe_seconds: float = 5.0
    """How often a replica with a canary is probed while there is work."""
    version: str = ""
    """Of the model; scores of another are not believed. Empty: that of the first answer."""
