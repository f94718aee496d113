"""Any scorer, for callers that have no event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Self, TypeVar

from laurel.errors import EngineError, EnvironmentFailedError
from laurel.generation.waiting import BackgroundLoop, cancel_others
from laurel.protocols import Scorer
from laurel.rewards.remote.replica import close_scorer
from laurel.types import Group, Score

_log = logging.getLogger(__name__)

_SECONDS_TO_END = 5.0
"""How long a scorer that is closed may take to give up what it has under way."""
_SECONDS_TO_LET_GO = 60.0
"""And how long to end processes and connections."""
T = TypeVar("T")


class BlockingScorer:
    """Waits for the scores of a scorer; may be asked from several threads at once.

    All calls run in one event loop in a thread of its own, so a scorer that holds connections keeps
    them from call to call, and callers may have a loop of theirs or none.
    """

    def __init__(self, scorer: Scorer) -> None:
        """Take over a scorer, and start the thread.

        Args:
            scorer: It ends when this one is closed.
        """
        self.scorer = scorer
        self._under_way: set[Future[Any]] = set()
        self._background = BackgroundLoop("laurel-scorer")

    def score_now(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer.score`.

        Raises:
            EnvironmentFailedError: It is closed, or was before the scores came.
        """
        return self.wait_for(lambda: self.scorer.score(groups))

    def score_afresh(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """The same, of a scorer that remembers what it was asked as well.

        Raises:
            EnvironmentFailedError: See `score_now`.
        """
        return self.wait_for(lambda: afresh(self.scorer, groups))

    def resting(self) -> AbstractContextManager[None]:
        """See `ContractScorer.resting`; nothing of a scorer that cannot."""
        rest: Callable[[], AbstractContextManager[None]] = getattr(
            self.scorer, "resting", nullcontext
        )
        return rest()

    def wait_for(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What a coroutine returns that runs where the scorer does.

        Raises:
            EnvironmentFailedError: See `score_now`.
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
        """End the scorer, if it has a way to end, and the thread. What is under way fails.

        What does not end although it is told to is left behind after a while. Idempotent.
        """
        limit = 2 * _SECONDS_TO_END + _SECONDS_TO_LET_GO
        try:
            self._background.close(self._end(), patience=0.0, limit=limit)
        except TimeoutError:  # something holds up the event loop itself
            self._leave_behind()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _end(self) -> None:
        await cancel_others(_SECONDS_TO_END)  # else whoever waits for them would wait for ever
        self._leave_behind()
        ending = asyncio.ensure_future(close_scorer(self.scorer))
        await asyncio.wait((ending,), timeout=_SECONDS_TO_LET_GO)
        if ending.done():
            ending.result()
        else:
            _log.warning(
                "a scorer has not ended within %g s; it is left behind", _SECONDS_TO_LET_GO
            )

    def _leave_behind(self) -> None:
        """Let those go who wait for what does not end."""
        left = list(self._under_way)  # at once: other threads are at it
        for future in (one for one in left if not one.done()):
            _log.warning("a scorer that was closed does not end what it was asked")
            with suppress(InvalidStateError):  # it has ended in this moment
                future.set_exception(
                    EnvironmentFailedError(
                        "the scorer was closed, and what it was asked has not ended "
                        f"{_SECONDS_TO_END:g} s after it was told to; it is left behind"
                    )
                )


async def afresh(scorer: Scorer, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
    """What a scorer says that remembers nothing of what it was asked."""
    score = getattr(scorer, "score_afresh", scorer.score)
    found: list[tuple[Score, ...]] = await score(groups)
    return found
