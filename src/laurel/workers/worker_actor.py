"""The process of one rank of a worker group."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

from laurel.workers.calls import Outcome, Success, WorkerCall, attempt, failure_of, with_shared
from laurel.workers.rendezvous import RankPlace, bind_master, leave

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

COMPARED = ("laurel-rl", "torch", "transformers")
"""Packages whose versions must be the same on all nodes."""


class Packed(NamedTuple):
    """A pickled value, with the buffers of its arrays kept apart."""

    head: bytes
    buffers: list[npt.NDArray[np.uint8]]

    def value(self) -> Any:
        """Unpickle the value, with arrays that may be written into."""
        return pickle.loads(self.head, buffers=[bytearray(buffer) for buffer in self.buffers])


class WorkerActor:
    """The actor of one rank. It holds the worker, which does not know it."""

    def __init__(self, rank: int, paths: list[str]) -> None:
        """Set up the process.

        Args:
            paths: Module search path of the process that made the group: the worker's module may be
                there.
        """
        sys.path += [path for path in paths if path not in sys.path]
        self._rank = rank
        self._worker: Any = None

    def about(self) -> tuple[int, dict[str, str]]:
        """Return the process id, and the versions that must be the same everywhere."""
        return os.getpid(), package_versions()

    def bind(self, address: str) -> tuple[int, int]:
        """Bind the master's port, as `bind_master`."""
        return bind_master(address)

    def build(
        self, payload: bytes, place: RankPlace, environment: Mapping[str, str | None]
    ) -> bytes:
        """Make the worker.

        Args:
            environment: Environment variables of this process; those that are None are unset.
        """
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        outcome = self._attempt(None, payload, (place,))
        if isinstance(outcome, Success):
            self._worker = outcome.value
            outcome = Success(None)
        return pickle.dumps(outcome)

    def run(self, payload: bytes | Packed, *shared: Any) -> bytes:
        """Call a method of the worker and pickle its outcome.

        Args:
            payload: The pickled call, without its shared values.
            *shared: The values of its `Shared` arguments, which Ray transfers separately.
        """
        outcome = self._attempt(self._worker, payload, (), shared)
        try:
            return pickle.dumps(outcome)
        except Exception as error:  # a result of the user's that cannot travel
            return pickle.dumps(failure_of(error, rank=self._rank))

    def close(self) -> bytes:
        """Shut the worker down."""
        worker, self._worker = self._worker, None
        end = getattr(worker, "shutdown", lambda: None)
        outcome = attempt(end, WorkerCall(""), rank=self._rank)
        leave()
        return pickle.dumps(Success(None) if isinstance(outcome, Success) else outcome)

    def _attempt(
        self,
        target: Any,
        payload: bytes | Packed,
        first: tuple[Any, ...],
        shared: tuple[Any, ...] = (),
    ) -> Outcome:
        try:
            made, call = payload.value() if isinstance(payload, Packed) else pickle.loads(payload)
        except Exception as error:  # a class or a value that this node does not know
            return failure_of(error, rank=self._rank)
        if shared:
            call = with_shared(call, shared)
        call = WorkerCall(call.method, (*first, *call.args), call.kwargs)
        return attempt(made if target is None else target, call, rank=self._rank)


def package_versions() -> dict[str, str]:
    """Collect the versions of the installed packages that processes compare."""
    found = {}
    for package in COMPARED:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
