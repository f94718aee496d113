"""Requests on their way through replicas, and one replica as those who give it work see it.

All of it belongs to one event loop, except where it says otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from laurel.engines.engine_worker import Event
from laurel.errors import EngineError, LaurelError, UserError
from laurel.protocols import WorkerGroup
from laurel.types import Generated, GenerationRequest

Deliver = Callable[[Generated | LaurelError], None]


class Order:
    """A request, and which of its completions have not come yet."""

    def __init__(self, request: GenerationRequest, deliver: Deliver) -> None:
        """Made in the thread of whoever asks.

        Args:
            request: With at least one seed.
            deliver: Is told every completion, or one error instead of the rest. Must not block.
        """
        self.request = request
        self.is_over = False
        """Nothing will be delivered any more. May be read by any thread."""
        self.is_aborted = False
        self.over = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._deliver = deliver
        self._missing = list(range(len(request.seeds_G)))
        self._asked: list[int] = []
        """Of the latest attempt: which completion each of its own is."""

    @property
    def num_missing(self) -> int:
        """Completions that have not come yet."""
        return len(self._missing)

    def rest(self) -> GenerationRequest:
        """What is still to be asked for."""
        self._asked = list(self._missing)
        seeds_G = tuple(self.request.seeds_G[index] for index in self._asked)
        return replace(self.request, seeds_G=seeds_G)

    def take(self, generated: Generated) -> None:
        """Hand on a completion of the latest attempt.

        Raises:
            EngineError: It was not asked for, or has come before.
        """
        known = 0 <= generated.index < len(self._asked)
        index = self._asked[generated.index] if known else generated.index
        if index not in self._missing:
            raise EngineError(f"it gave completion {index} of {self.request.id!r} unasked")
        self._missing.remove(index)
        if not self._missing:
            self.end()
        if not self.is_aborted:
            self._deliver(replace(generated, index=index))

    def fail(self, error: LaurelError) -> None:
        """Deliver an error instead of what is missing."""
        if not self.is_over:
            self.end()
            self._deliver(error)

    def end(self) -> None:
        """Note that nobody works on it any more."""
        self.is_over = True
        self.over.set()


State = Literal["ready", "starting", "waiting"]


class Replica:
    """One engine in a group of one worker, and the orders that it works on."""

    def __init__(self, index: int, group: WorkerGroup) -> None:
        """Begin without work.

        Args:
            index: Among the replicas.
            group: Of one `EngineWorker`.
        """
        self.index = index
        self.group = group
        self.name = f"{group.role} replica {index}"
        self.state: State = "ready"
        """`waiting`: for weights that nobody can give it now."""
        self.settled = asyncio.Event()
        """It is not starting."""
        self.settled.set()
        self.has_work = asyncio.Event()
        self.has_all_weights = False
        """It has been given them since it was started, and since then those that change."""
        self.last_failure: str | None = None
        """Why it was started again, as long as it has brought nothing since."""
        self._orders: dict[int, Order] = {}
        self._new: list[tuple[int, GenerationRequest]] = []
        self._aborted: list[int] = []

    @property
    def load(self) -> int:
        """Completions under way."""
        return sum(order.num_missing for order in self._orders.values())

    def give(self, order: Order, number: int) -> None:
        """Give it an order, under a number that no other attempt has."""
        self._orders[number] = order
        self._new.append((number, order.rest()))
        self.has_work.set()

    def abort(self, order: Order) -> bool:
        """Begin to take an order back; it ends when the engine has let go. False: not here."""
        number = next((n for n, mine in self._orders.items() if mine is order), None)
        if number is None:
            return False
        if any(n == number for n, _ in self._new):  # the engine has not heard of it
            self._new = [(n, request) for n, request in self._new if n != number]
            del self._orders[number]
            order.end()
            return True
        self._aborted.append(number)
        self.has_work.set()
        return True

    def take_news(self) -> tuple[list[tuple[int, GenerationRequest]], list[int]]:
        """What the engine has not heard yet: new requests, and aborted ones."""
        news = self._new, self._aborted
        self._new, self._aborted = [], []
        return news

    def hear(self, events: Sequence[Event]) -> LaurelError | None:
        """Hand on what has happened. Why the engine is of no use any more, where it is not."""
        failure: LaurelError | None = None
        for number, what in events:
            order = self._orders.get(number)
            if order is None:  # it is over
                continue
            if isinstance(what, Generated):
                self.last_failure = None
                try:
                    order.take(what)
                except EngineError as error:
                    return error
            elif isinstance(what, UserError):
                order.fail(what)
            elif what is not None and not order.is_aborted:
                failure = failure or what
            elif order.is_aborted:
                order.end()
            else:
                failure = EngineError(
                    f"it ended {order.request.id!r} without {order.num_missing} of its completions"
                )
            if order.is_over:
                del self._orders[number]
        if not self._orders:
            self.has_work.clear()
        return failure

    def give_up(self) -> list[Order]:
        """Forget all work; the orders that somebody else must finish, in order."""
        orders = list(self._orders.values())
        self._orders.clear()
        self.take_news()
        self.has_work.clear()
        for order in orders:
            if order.is_aborted:
                order.end()
        return [order for order in orders if not order.is_over]
