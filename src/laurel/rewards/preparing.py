"""Processes that render and tokenise conversations, so that this one has its hands free."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from laurel.distributed.rendezvous import Place
from laurel.distributed.worker_calls import again
from laurel.errors import WorkerError
from laurel.models.scoring import ScoringContract
from laurel.protocols import WorkerGroup
from laurel.rewards.to_tokens import Prepared, prepared_by
from laurel.types import Group

_log = logging.getLogger(__name__)

WORKER = "reward_worker"
MAX_RESTARTS = 8
"""Of all workers together."""


class PreparingWorker:
    """The worker of one such process."""

    def __init__(self, place: Place, contract: ScoringContract) -> None:
        """Hold a contract, with a tokenizer of its own."""
        self._contract = contract

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `ContractScorer.prepare`."""
        return prepared_by(self._contract, groups)


class Preparers:
    """Several workers that share what is to be prepared. May be asked from several threads.

    One that is lost is replaced, and another does what it had: preparing changes nothing.
    """

    def __init__(
        self,
        contract: ScoringContract,
        num_workers: int,
        make_group: Callable[..., WorkerGroup],
        *,
        say: Callable[[str], None] = _log.warning,
    ) -> None:
        """Start them.

        Args:
            contract: What they render by.
            num_workers: At least one.
            make_group: Makes a group of one; called with the class and its arguments.
            say: Told of those that are replaced.

        Raises:
            WorkerError: One cannot be made.
        """
        self._make = partial(make_group, PreparingWorker, contract)
        self._say = say
        self._num_restarts = 0
        self._failure: WorkerError | None = None
        """Why nobody can be asked any more."""
        self._counting = threading.Lock()
        self._threads = ThreadPoolExecutor(num_workers, "laurel-preparing")
        self.groups: list[WorkerGroup] = []
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        try:
            # Each is known as soon as it is there: where one cannot be made, all others are ended.
            for _ in self._threads.map(lambda _: self._add(), range(num_workers)):
                pass
        except BaseException:
            self.close()
            raise
        for index in range(num_workers):
            self._idle.put(index)

    def _add(self) -> None:
        self.groups.append(self._make())

    def prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        """See `ContractScorer.prepare`.

        Raises:
            WorkerError: Too many were lost, or one could not be replaced; `is_lost`.
        """
        if self._failure is not None:
            raise again(self._failure)
        share = -(-len(groups) // len(self.groups))
        parts = [groups[first : first + share] for first in range(0, len(groups), share or 1)]
        return [one for done in self._threads.map(self._prepare, parts) for one in done]

    def _prepare(self, groups: Sequence[Group]) -> list[Prepared]:
        index = self._idle.get()
        try:
            while True:
                try:
                    found: list[Prepared] = self.groups[index].call_one(0, "prepare", groups)
                    return found
                except WorkerError as error:
                    if not error.is_lost:
                        raise (error.__cause__ or error) from None
                    self._replace(index, error)
        finally:
            self._idle.put(index)

    def _replace(self, index: int, error: WorkerError) -> None:
        reason = str(error).partition("\n")[0]
        told = f"{WORKER} {index} was lost ({reason})"
        with self._counting:
            if self._num_restarts >= MAX_RESTARTS:
                self._failure = _ended(f"{told}, and {MAX_RESTARTS} were replaced before it")
                raise self._failure from error
            self._num_restarts += 1
            count = f"{self._num_restarts} of {MAX_RESTARTS} at most"
        self._say(f"{told}; it is replaced, {count}")
        self.groups[index].shutdown()
        try:
            self.groups[index] = self._make()
        except Exception as refusal:
            self._failure = _ended(f"{told} and cannot be replaced: {refusal}")
            raise self._failure from refusal

    def close(self) -> None:
        """End them. Idempotent."""
        self._threads.shutdown(cancel_futures=True)
        for group in self.groups:
            group.shutdown()


def _ended(why: str) -> WorkerError:
    """Who renders is gone: no conversation is to blame, and none can be scored any more."""
    return WorkerError(
        f"{why}. Processes that render are ended most often for want of memory: lower num_workers, "
        "or set it to 0 and let the run itself render",
        role=WORKER, exit_code=WorkerError.LOST_EXIT_CODE,
    )  # fmt: skip
