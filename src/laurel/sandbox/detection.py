"""Finds the tier that this machine supports: the best one in which no canary escapes."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from laurel.sandbox.canaries import CANARIES, Sighting, claims_of, small_world, try_canary
from laurel.sandbox.runner import SandboxLostError, SandboxStartError
from laurel.sandbox.tiers import LAYERS, Tier
from laurel.sandbox.zygote_process import ZygoteProcess


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """The tier that this machine supports, and the evidence for it."""

    tier: Tier | None
    """The tier; None if no program can run here at all."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """The reason why each layer is missing or did not hold, and other remarks."""
    sightings: tuple[Sighting, ...] = ()
    """The results of the canaries in this tier."""

    def sentence(self) -> str:
        """Return a description of the result in one line, for logs."""
        if self.tier is None:
            return f"no sandbox: {'; '.join(self.reasons.values())}"
        line = self.tier.sentence(self.reasons)
        notes = [self.reasons[name] for name in ("account", "files") if name in self.reasons]
        return line + "".join(f" Note: {note}." for note in notes)


def detect(
    *,
    without: frozenset[str] = frozenset(),
    interpreter: str | None = None,
    scratch: str | None = None,
) -> Detection:
    """Find the best tier in which no canary escapes.

    Args:
        without: The layers to leave out, to see what holds without them.
        interpreter: The Python that runs programs; by default the one that runs this.
        scratch: The directory for temporary directories; by default the system's.
    """
    if sys.platform != "linux":
        return Detection(
            tier=None, reasons={"system": f"it needs Linux, and this is {sys.platform}"}
        )
    wanted = frozenset(LAYERS) - without
    reasons: dict[str, str] = dict.fromkeys(without, "it is switched off")
    while True:
        zygote = ZygoteProcess(wanted, interpreter=interpreter, scratch=scratch)
        try:
            zygote.start()
            tier = Tier.of(zygote.layers)
            reasons = {**zygote.reasons, **reasons}
            if zygote.layers != tier.layers:  # try it as it will be used
                wanted = tier.layers
                continue
            claims = claims_of(tier)
            with small_world() as world:
                sightings = tuple(
                    try_canary(canary, zygote, world)
                    for canary in CANARIES
                    if canary.claim in claims
                )
        except (SandboxStartError, SandboxLostError) as error:
            if not wanted:
                return Detection(tier=None, reasons={**reasons, "sandbox": str(error)})
            reasons |= dict.fromkeys(wanted, f"it did not work when it was tried: {error}")
            wanted = frozenset()
            continue
        finally:
            zygote.close()
        escaped = [one for one in sightings if not one.held]
        if not escaped:
            return Detection(tier=tier, reasons=reasons, sightings=sightings)
        why = f"'{escaped[0].canary.name}': {escaped[0].detail}"
        if tier is Tier.LIMITS_ONLY:
            return Detection(tier=None, reasons={**reasons, "limits": why}, sightings=sightings)
        # The layers are there and do not hold, so none of them is relied on.
        reasons |= dict.fromkeys(tier.layers, f"it did not hold: {why}")
        wanted = frozenset()
