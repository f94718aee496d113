"""Opens the sandbox pool that a configuration requires."""

from __future__ import annotations

import logging

from laurel.errors import ConfigError
from laurel.extensions.code.sandbox.control_group import chosen_place, group_words
from laurel.extensions.code.sandbox.detection import Detection, detect
from laurel.extensions.code.sandbox.jobs import Limits
from laurel.extensions.code.sandbox.pool import SandboxPool, affordable_workers
from laurel.extensions.code.sandbox.tiers import Tier
from laurel.extensions.code.settings import SandboxConfig
from laurel.sandbox.limits import available_cores

_log = logging.getLogger(__name__)


BACKLOG = 1024
"""Programs that may wait for their turn; a further one is taken in when one of them has begun."""


def open_pool(
    config: SandboxConfig, *, num_workers: int = 8, detection: Detection | None = None
) -> SandboxPool:
    """Open a pool in the best tier that this machine supports, and log the tier.

    Args:
        num_workers: Programs at a time, at most; one per core, and as many as fit into memory.
        detection: The isolation that this machine supports; by default it is detected now, which
            takes a few seconds.

    Raises:
        ConfigError: The machine has no tier that the configuration accepts, or lacks the control
            group that the configuration names.
    """
    found = detection or detect()
    tier = accepted_tier(config, found)
    wanted = min(num_workers, available_cores())
    workers = affordable_workers(wanted, config.memory_mb + config.disk_mb)
    place, reason = chosen_place(config.cgroup)
    say_tier(found, tier, beside=f" Control group: {group_words(place, reason)}.")
    return SandboxPool(tier=tier, num_workers=workers, backlog=BACKLOG, place=place)


def say_tier(found: Detection, tier: Tier, *, where: str = "", beside: str = "") -> None:
    """Log how programs are isolated.

    `where` stands before the sentence, and `beside` after it.
    """
    _log.log(
        logging.INFO if tier is Tier.FULL else logging.WARNING,
        "%s%s%s",
        where,
        found.sentence(),
        beside,
    )
    if tier is Tier.LIMITS_ONLY:
        _log.warning(
            "%sUNSAFE: programs of the model run without a sandbox (sandbox.min_tier=none) "
            "and can do whatever this account can",
            where,
        )


def accepted_tier(config: SandboxConfig, found: Detection) -> Tier:
    """Return the tier to run in; raise `ConfigError` if the configuration does not accept it."""
    if found.tier is None:
        raise ConfigError(f"programs cannot be run here: {found.sentence()}")
    if config.min_tier == "none":
        return found.tier
    if found.tier is Tier.LIMITS_ONLY:
        raise ConfigError(
            f"{found.sentence()} Programs of a model are only run like this with "
            "sandbox.min_tier=none"
        )
    if not found.tier.is_at_least(Tier(config.min_tier)):
        raise ConfigError(
            f"{found.sentence()} The configuration wants at least tier {config.min_tier} "
            f"(sandbox.min_tier); set it to {found.tier.value} to run nevertheless"
        )
    return found.tier


def program_limits(config: SandboxConfig) -> Limits:
    """Return the limits of a program."""
    return Limits(
        cpu_s=config.cpu_seconds,
        wall_s=config.wall_seconds,
        mem_mb=config.memory_mb,
        disk_mb=config.disk_mb,
    )
