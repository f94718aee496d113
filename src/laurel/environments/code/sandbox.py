"""A pool as a configuration asks for it, or the reason why not."""

from __future__ import annotations

import logging

from laurel.config.environments import SandboxConfig
from laurel.errors import ConfigError
from laurel.sandbox.detection import Detection, detect
from laurel.sandbox.group_trial import chosen_place, group_words
from laurel.sandbox.jobs import Limits
from laurel.sandbox.limits import available_cores
from laurel.sandbox.pool import SandboxPool, affordable_workers
from laurel.sandbox.tiers import Tier

_log = logging.getLogger(__name__)


def open_pool(config: SandboxConfig, *, detection: Detection | None = None) -> SandboxPool:
    """A pool in the best tier that this machine gives; says which in the log.

    Args:
        config: What is asked for.
        detection: What was found on this machine; by default it is found out now (a few seconds).

    Raises:
        ConfigError: The machine gives no tier that the configuration accepts, or lacks the control
            group that the configuration names.
    """
    found = detection or detect()
    tier = accepted_tier(config, found)
    wanted = min(config.num_workers, available_cores())
    workers = affordable_workers(wanted, config.memory_mb + config.disk_mb)
    place, reason = chosen_place(config.cgroup)
    say_tier(found, tier, beside=f" Control group: {group_words(place, reason)}.")
    return SandboxPool(tier=tier, num_workers=workers, backlog=config.backlog, place=place)


def say_tier(found: Detection, tier: Tier, *, where: str = "", beside: str = "") -> None:
    """Log what programs are locked in by.

    Args:
        found: What a machine was found to give.
        tier: The one that they run in.
        where: The machine, before the sentence.
        beside: What else is to be said, after it.
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
            "%sUNSAFE: programs of the model run without a sandbox (sandbox.allow_unsafe=true) "
            "and can do whatever this account can",
            where,
        )


def accepted_tier(config: SandboxConfig, found: Detection) -> Tier:
    """The tier to run in; `ConfigError` where the configuration does not accept it."""
    if found.tier is None:
        raise ConfigError(f"programs cannot be run here: {found.sentence()}")
    if found.tier is Tier.LIMITS_ONLY:
        if config.allow_unsafe:
            return found.tier
        raise ConfigError(
            f"{found.sentence()} Programs of a model are not run like this unless "
            "sandbox.allow_unsafe=true says so"
        )
    if not found.tier.is_at_least(Tier(config.min_tier)):
        raise ConfigError(
            f"{found.sentence()} The configuration wants at least tier {config.min_tier} "
            f"(sandbox.min_tier); set it to {found.tier.value} to run nevertheless"
        )
    return found.tier


def program_limits(config: SandboxConfig) -> Limits:
    """The limits of a program."""
    return Limits(
        cpu_s=config.cpu_seconds,
        wall_s=config.wall_seconds,
        mem_mb=config.memory_mb,
        disk_mb=config.disk_mb,
        stdout_kb=config.stdout_kb,
        stderr_kb=config.stderr_kb,
        result_kb=config.result_kb,
    )
