"""A worker group of one, in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from laurel.distributed.rendezvous import Place
from laurel.distributed.worker_calls import Call, Failure, GroupCalls, Outcome, attempt, error_of
from laurel.errors import WorkerError

_log = logging.getLogger(__name__)


class LocalGroup(GroupCalls):
    """A `WorkerGroup` whose one worker is an object of this process and lives in its thread.

    What is started is done before `start` returns, so deadlines cannot be kept: nobody is there
    to notice. Arguments and results are handed over as they are, not copied. More than one rank
    needs processes, and those are Ray's: `RayCluster` starts them on a laptop, too.
    """

    def __init__(
        self, role: str, worker_class: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Make the worker: `worker_class(place, *args, **kwargs)`.

        Raises:
            WorkerError: It could not be made.
        """
        self.role = role
        self.size = 1
        made = attempt(worker_class, Call("", (Place(role=role), *args), kwargs), rank=0)
        self._worker: Any = _Done(role, "", made).wait()[0]
        self._is_open = True

    def _submit(self, calls: Mapping[int, Call]) -> _Done:
        if not self._is_open:
            raise WorkerError(f"{self.role}: the group has been shut down", role=self.role)
        call = calls[0]
        return _Done(self.role, call.method, attempt(self._worker, call, rank=0))

    def alive(self) -> list[bool]:
        """See `WorkerGroup.alive`."""
        return [self._is_open]

    def shutdown(self) -> None:
        """See `WorkerGroup.shutdown`."""
        if not self._is_open:
            return
        self._is_open = False
        worker, self._worker = self._worker, None
        if hasattr(worker, "shutdown"):
            outcome = attempt(worker, Call("shutdown"), rank=0)
            if isinstance(outcome, Failure):
                _log.warning("%s did not shut down cleanly: %s", self.role, outcome.summary)


class _Done:
    """Work that was over when it was started."""

    def __init__(self, role: str, method: str, outcome: Outcome) -> None:
        self._role = role
        self._method = method
        self._outcome = outcome

    def done(self) -> bool:
        return True

    def wait(self, *, timeout: float | None = None) -> list[Any]:
        if isinstance(self._outcome, Failure):
            raise error_of(self._role, 1, self._method, [self._outcome], limit=0)
        return [self._outcome.value]
