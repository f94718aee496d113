"""A Python function as a scorer."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from laurel.config.scorers import FunctionConfig
from laurel.rewards.function_processes import FunctionProcesses
from laurel.rewards.remote.replica import failed
from laurel.rewards.user_function import (
    Function,
    arguments_of,
    check_call,
    failure_of,
    find_function,
    is_async,
    late,
    served_arguments,
    verdicts_of,
)
from laurel.types import Group, Score

MOST_AT_ONCE = 16
"""Calls of a function that is not async, in as many threads."""
MOST_WAITING = 256
"""Calls of one that is."""
MOST_HUNG = 32
"""Threads left behind by calls that took too long, above which no more are begun."""


class FunctionScorer:
    """Scores by calling a function, in threads here or in processes that can be killed.

    What it raises, returns instead of a finite number, or does not return in time is the failure of
    that completion. Example::

        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

        scorer = FunctionScorer(FunctionConfig(path="my_rewards.py:compute_score"))
    """

    reads_metadata = True
    noise = 0.0
    """What it says of equal completions is its own affair; nothing is rounded here."""

    def __init__(
        self,
        config: FunctionConfig,
        *,
        function: Function | None = None,
        num_workers: int = 0,
        where: str = "env.reward_model.function",
    ) -> None:
        """Find the function, and see whether it takes what it will be given.

        Args:
            config: See there.
            function: Instead of that which `config.path` names; in threads only.
            num_workers: Processes; 0: threads.
            where: The section, for messages.

        Raises:
            ConfigError: There is no such function, or it takes something else.
        """
        self.config = config
        self.judges_groups = config.group
        self._processes: FunctionProcesses | None = None
        self._hung = 0
        self._counting = threading.Lock()
        self._gate_of: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._rates = [
            _Rate(per_minute, each)
            for per_minute, each in (
                (config.max_rpm, 1.0),
                (config.max_tpm, config.estimated_tokens_per_request),
            )
            if per_minute is not None
        ]
        self._is_async = False
        if num_workers and function is None:
            # It is not even imported here: that may take a library that shall not be in this one.
            self._processes = FunctionProcesses(config, num_workers=num_workers, where=where)
            try:
                self._processes.start()
            except BaseException:
                self._processes.close()
                raise
            return
        self._function = function or find_function(config.path, where=f"{where}.path")
        self._served = served_arguments(self._function, config, where=where)
        check_call(
            self._function, config.kwargs | self._served, judges_groups=config.group, where=where
        )
        self._is_async = is_async(self._function)

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`."""
        return list(await asyncio.gather(*map(self._scored, groups)))

    async def _scored(self, group: Group) -> tuple[Score, ...]:
        calls = arguments_of(
            group,
            self.config.kwargs,
            judges_groups=self.judges_groups,
            data_source=self.config.data_source,
        )
        count = len(group.completions_G) if self.judges_groups else 1
        found = await asyncio.gather(*(self._called(call, count) for call in calls))
        return tuple(score for scores in found for score in scores)

    async def _called(self, arguments: Mapping[str, Any], count: int) -> tuple[Score, ...]:
        wait = max((rate.reserve(time.monotonic()) for rate in self._rates), default=0.0)
        if wait > 0:
            await _pause(wait)
        async with self._gate():
            if self._processes is not None:
                return await self._processes.call(arguments, count=count)
            arguments = {**arguments, **self._served}
            limit = self.config.timeout
            try:
                async with asyncio.timeout(limit) as clock:
                    if self._is_async:
                        result = await self._function(**arguments)
                    elif self._hung >= MOST_HUNG:
                        return (failed(self._why_hung()),) * count
                    else:
                        result = await self._in_thread(arguments)
            except _RaisedError as error:
                return (failure_of(error.raised),) * count
            except Exception as error:  # a TimeoutError may be the function's own
                return (late(limit) if clock.expired() else failure_of(error),) * count
            return verdicts_of(result, count=count, judges_groups=self.judges_groups)

    async def _in_thread(self, arguments: Mapping[str, Any]) -> Any:
        """The result of a call in a thread of its own, which is left behind if it is late."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def tell(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                with self._counting:
                    self._hung -= 1
            elif error is not None:
                future.set_exception(_RaisedError(error))
            else:
                future.set_result(result)

        def run() -> None:
            result, raised = None, None
            try:
                result = self._function(**arguments)
            except BaseException as error:
                raised = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(tell, result, raised)

        threading.Thread(target=run, name="laurel-function", daemon=True).start()
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():  # else the call has ended, and has told so
                with self._counting:
                    self._hung += 1
            raise

    def _why_hung(self) -> str:
        return (
            f"timeout: {self._hung} calls of the function hang in threads, which cannot be ended; "
            "set env.reward_model.num_workers, and its processes are killed"
        )

    def _gate(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._gate_of is None or self._gate_of[0] is not loop:
            # Processes have a queue of their own.
            is_open = self._is_async or self._processes is not None
            most = self.config.max_concurrent or (MOST_WAITING if is_open else MOST_AT_ONCE)
            self._gate_of = loop, asyncio.Semaphore(most)
        return self._gate_of[1]

    def close(self) -> None:
        """End the processes. Idempotent."""
        if self._processes is not None:
            self._processes.close()


_pause = asyncio.sleep
"""Until it is a call's turn."""


class _Rate:
    """So much a minute, evenly: what has not been used for a second is lost. For any thread."""

    def __init__(self, per_minute: float, each: float) -> None:
        """Let the first call begin at once.

        Args:
            per_minute: How much.
            each: Of it for a call.
        """
        self._interval = 60.0 * each / per_minute
        self._at_once = max(self._interval, 1.0)
        self._lock = threading.Lock()
        self._until = -math.inf
        """When all that was begun will have been paid for."""

    def reserve(self, now: float) -> float:
        """Seconds until the next call may begin, which it does."""
        with self._lock:
            self._until = max(self._until, now) + self._interval
            return max(0.0, self._until - self._at_once - now)


class _RaisedError(Exception):
    """What the function raised in its thread; a future does not take everything as it is."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(str(raised))
        self.raised = raised
