"""Wraps any scorer for callers that have no event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Self, TypeVar

from laurel.errors import EngineError, EnvironmentFailedError
from laurel.protocols import Scorer
from laurel.rewards.remote.replica import close_scorer
from laurel.types import Group, Score
from laurel.workers.threads import BackgroundLoop, cancel_others

_log = logging.getLogger(__name__)

_CANCEL_SECONDS = 5.0  # time that a closed scorer has to cancel its running calls
_CLOSE_SECONDS = 60.0  # time that it then has to end processes and connections
T = TypeVar("T")


class BlockingScorer:
    """Waits for the scores of a scorer; thread-safe."""

    def __init__(self, scorer: Scorer) -> None:
        """Take over a scorer, and start the thread.

        Args:
            scorer: The wrapped scorer, which is closed with this one.
        """
        self.scorer = scorer
        self._under_way: set[Future[Any]] = set()
        # All calls run in one event loop in a thread of its own, so a scorer keeps its connections
        # from call to call, and callers may have an event loop of their own or none.
        self._background = BackgroundLoop("laurel-scorer")

    def score_now(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups, and wait for the scores.

        Raises:
            EnvironmentFailedError: The scorer is closed, or was before the scores came.
        """
        return self.wait_for(lambda: self.scorer.score(groups))

    def score_afresh(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups without the scorer's cache.

        Raises:
            EnvironmentFailedError: The scorer is closed, or was before the scores came.
        """
        return self.wait_for(lambda: afresh(self.scorer, groups))

    def resting(self) -> AbstractContextManager[None]:
        """Free the scorer's device memory within the context, if the scorer supports that."""
        rest: Callable[[], AbstractContextManager[None]] = getattr(
            self.scorer, "resting", nullcontext
        )
        return rest()

    def wait_for(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the scorer's event loop and return its result.

        Raises:
            EnvironmentFailedError: The scorer is closed, or was before the coroutine ended.
        """
        try:
            future = self._background.submit(begin())
        except EngineError:
            raise EnvironmentFailedError("the scorer was closed") from None
        self._under_way.add(future)
        try:
            return future.result()
        except CancelledError as error:
            raise EnvironmentFailedError("the scorer was closed meanwhile") from error
        finally:
            self._under_way.discard(future)

    def close(self) -> None:
        """Close the scorer, if it has a way to, and end the thread; running calls fail.

        Calls that do not end when cancelled are abandoned after a while. Idempotent.
        """
        limit = 2 * _CANCEL_SECONDS + _CLOSE_SECONDS
        try:
            self._background.close(self._end(), patience=0.0, limit=limit)
        except TimeoutError:  # something blocks the event loop itself
            self._abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _end(self) -> None:
        await cancel_others(_CANCEL_SECONDS)  # otherwise their callers would wait forever
        self._abandon()
        ending = asyncio.ensure_future(close_scorer(self.scorer))
        await asyncio.wait((ending,), timeout=_CLOSE_SECONDS)
        if ending.done():
            ending.result()
        else:
            _log.warning("a scorer did not close within %g s and is abandoned", _CLOSE_SECONDS)

    def _abandon(self) -> None:
        """Fail the calls that did not end when cancelled, so that their callers go on."""
        left = list(self._under_way)  # a copy: other threads change the set
        for future in (one for one in left if not one.done()):
            _log.warning("a call of a closed scorer did not end when it was cancelled")
            with suppress(InvalidStateError):  # it has just ended
                future.set_exception(
                    EnvironmentFailedError(
                        "the scorer was closed, and a call did not end "
                        f"{_CANCEL_SECONDS:g} s after it was cancelled; it is abandoned"
                    )
                )


async def afresh(scorer: Scorer, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
    """Score groups without the scorer's cache, if it has one."""
    score = getattr(scorer, "score_afresh", scorer.score)
    found: list[tuple[Score, ...]] = await score(groups)
    return found
