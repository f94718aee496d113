"""Waiting for something that may die without a word."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from laurel.errors import LaurelError

Result = TypeVar("Result")


class Lifeline:
    """Whether an engine is still of use, and an end for whoever waits for one that is not.

    Of one event loop.
    """

    def __init__(self) -> None:
        self.failure: LaurelError | None = None
        """Why it is of no use any more: the first reason that was given."""
        self._is_cut = asyncio.Event()

    def cut(self, failure: LaurelError) -> None:
        """Say why it is of no use any more."""
        self.failure = self.failure or failure
        self._is_cut.set()

    async def hold(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of work on the engine; the failure, where the engine dies before."""
        doing = asyncio.ensure_future(work)
        cut = asyncio.ensure_future(self._is_cut.wait())
        try:
            await asyncio.wait({doing, cut}, return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                return doing.result()
            assert self.failure is not None
            raise self.failure
        finally:
            doing.cancel()
            cut.cancel()
