"""A worker group of one whose worker is an object in this process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from laurel.workers.calls import (
    Failure,
    GroupCalls,
    Outcome,
    Shared,
    WorkerCall,
    attempt,
    with_shared,
)
from laurel.workers.rendezvous import RankPlace

_log = logging.getLogger(__name__)


class LocalGroup(GroupCalls):
    """A `WorkerGroup` whose one worker is an object in this process and thread.

    Calls run to their end within `start`, so deadlines are not enforced. Arguments and results are
    passed without copies.
    """

    def __init__(
        self, role: str, worker_class: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> None:
        """Make the worker: `worker_class(place, *args, **kwargs)`.

        Raises:
            WorkerError: It could not be made.
        """
        self.role, self.size = role, 1
        made = attempt(worker_class, WorkerCall("", (RankPlace(role=role), *args), kwargs), rank=0)
        self._worker: Any = _Done(self, "", made).wait()[0]

    def _submit(self, calls: Mapping[int, WorkerCall]) -> _Done:
        self._check_open()
        call = calls[0]
        call = with_shared(call, [a.value for a in call.args if isinstance(a, Shared)])
        return _Done(self, call.method, attempt(self._worker, call, rank=0))

    def alive(self) -> list[bool]:
        """Report whether the worker exists."""
        return [self._is_open]

    def _close(self) -> None:
        worker, self._worker = self._worker, None
        if hasattr(worker, "shutdown"):
            outcome = attempt(worker, WorkerCall("shutdown"), rank=0)
            if isinstance(outcome, Failure):
                _log.warning("%s did not shut down cleanly: %s", self.role, outcome.summary)


class _Done:
    def __init__(self, group: LocalGroup, method: str, outcome: Outcome) -> None:
        self._group, self._method, self._outcome = group, method, outcome

    def done(self) -> bool:
        return True

    def wait(self, *, timeout: float | None = None) -> list[Any]:
        if isinstance(self._outcome, Failure):
            self._group._raise(self._method, [self._outcome], limit=0)
        return [self._outcome.value]
