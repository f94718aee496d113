"""A pool as a configuration asks for it, or the reason why not."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from functools import partial

from laurel.config.environments import SandboxConfig
from laurel.errors import ConfigError
from laurel.sandbox.detection import Detection, detect
from laurel.sandbox.group_trial import chosen_place, group_words
from laurel.sandbox.jobs import CallTest, Limits, SandboxJob, Status, StdioTest
from laurel.sandbox.limits import available_cores
from laurel.sandbox.pool import SandboxPool, affordable_workers
from laurel.sandbox.tiers import Tier

_log = logging.getLogger(__name__)

_ADDS = "def f(x): return x + 1"
_KNOWN: tuple[tuple[SandboxJob, Status], ...] = (
    (SandboxJob(code="print(6 * 7)", mode="stdio", tests=(StdioTest(stdout="42"),)), Status.OK),
    (
        SandboxJob(code="print(6 * 6)", mode="stdio", tests=(StdioTest(stdout="42"),)),
        Status.WRONG_ANSWER,
    ),
    (
        SandboxJob(code=_ADDS, mode="call", entry="f", tests=(CallTest(args=(1,), expected=2),)),
        Status.OK,
    ),
    (SandboxJob(code=_ADDS, mode="tests", entry="f", test_code="assert f(1) == 2"), Status.OK),
    (
        SandboxJob(code=_ADDS, mode="tests", entry="f", test_code="assert f(1) == 3"),
        Status.WRONG_ANSWER,
    ),
)
"""What a server is asked before it is believed."""


def open_pool(config: SandboxConfig, *, detection: Detection | None = None) -> SandboxPool:
    """A pool in the best tier that this machine gives; says which in the log.

    Args:
        config: What is asked for.
        detection: What was found on this machine; by default it is found out now (a few seconds).

    Raises:
        ConfigError: It gives no tier that the configuration accepts, or not the control group that
            it names; or the server that is to run
            programs does not answer, or answers wrongly.
    """
    if config.url is not None:
        return _elsewhere(config, config.url)
    found = detection or detect()
    tier = accepted_tier(config, found)
    wanted = min(config.num_workers, available_cores())
    workers = affordable_workers(wanted, config.memory_mb + config.disk_mb)
    place, reason = chosen_place(config.cgroup)
    say_tier(found, tier, beside=f" Control group: {group_words(place, reason)}.")
    return SandboxPool(tier=tier, num_workers=workers, backlog=config.backlog, place=place)


def _elsewhere(config: SandboxConfig, url: str) -> SandboxPool:
    """A pool of a server, which has shown that it runs programs of every kind."""
    from laurel.sandbox.remote import RemoteRunner

    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url):
        raise ConfigError(f"sandbox.url={url}: not an address such as http://127.0.0.1:8080")
    key = None
    if config.api_key_env is not None:
        key = os.environ.get(config.api_key_env, "").strip()
        if not key:
            raise ConfigError(
                f"sandbox.api_key_env={config.api_key_env}: there is no such environment variable, "
                "or it is empty"
            )
    pool = SandboxPool(
        tier=Tier.REMOTE,
        num_workers=config.num_workers,
        backlog=config.backlog,
        make_runner=partial(RemoteRunner, url, api_key=key),
    )
    limits = limits_of(config)
    results = pool.run([replace(job, limits=limits) for job, _ in _KNOWN])
    for (job, expected), result in zip(_KNOWN, results, strict=True):
        if result.status is not expected:
            pool.close()
            raise ConfigError(
                f"sandbox.url={url} cannot be used: of a program (mode {job.mode}) that is "
                f"{expected.value} it makes {result.status.value}"
                + (f" ({result.reason})" if result.reason else "")
            )
    _log.warning("%s", Tier.REMOTE.sentence({}))
    return pool


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


def limits_of(config: SandboxConfig) -> Limits:
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
