"""What makes the calls of a function that scores (`laurel.reward_managers`)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from laurel.errors import ConfigError
from laurel.extensions.reward_functions.settings import RateLimits, VerlManagerConfig
from laurel.plugins import ManagedFunction, RewardManager

if TYPE_CHECKING:
    from laurel.config.environments import FunctionConfig
    from laurel.types import Score

Arguments = Mapping[str, Any]
Call = Callable[[Arguments], "Awaitable[tuple[Score, ...]]"]
Scored = Callable[[Arguments, Call], "Awaitable[tuple[Score, ...]]"]


class RateLimited(RewardManager):
    """Calls begin no faster than a service allows; `max_concurrent` limits those at a time.

    The time that a call waits for its turn is no part of its timeout.
    """

    section = RateLimits

    def make(self, section: RateLimits, function: ManagedFunction) -> Scored:
        """Return what waits for the turn of each call."""
        interval, free = 60.0 / section.max_rpm, float("-inf")

        async def scored(arguments: Arguments, call: Call) -> tuple[Score, ...]:
            nonlocal free
            now = asyncio.get_running_loop().time()
            turn = max(now, free)
            free = turn + interval
            if turn > now:
                await asyncio.sleep(turn - now)
            return await call(arguments)

        return scored


class VerlManager(RewardManager):
    """Calls `run_single` of a class that was written for verl, which calls the function."""

    section = VerlManagerConfig

    def check(self, settings: FunctionConfig) -> None:
        """Refuse a function of whole groups, which such a class does not call."""
        if settings.group:
            raise ValueError("group=true: a manager of verl scores one completion; leave it out")

    def make(self, section: VerlManagerConfig, function: ManagedFunction) -> Scored:
        """Find the class, and the tokenizer that it is given."""
        if function.function is None:
            raise ConfigError(
                f"{function.where}.manager=verl calls the function itself, in this process: leave "
                "num_workers out"
            )
        from laurel.extensions.reward_functions.verl_class import scored_by

        return scored_by(section, function)
