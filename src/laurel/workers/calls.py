"""The calls of worker groups, and how their failures become one error."""

from __future__ import annotations

import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NoReturn, Self

from laurel.errors import LaurelError, WorkerError
from laurel.observe.user_code import ForkGuard
from laurel.protocols import Pending

ENDING = 10.0
"""Seconds for a worker to shut down by itself, after which it is killed."""
GOING_ON = (
    "A training run that is started again goes on from its newest checkpoint "
    "(checkpointing.resume=auto, the default)."
)


class WorkerCall(NamedTuple):
    """A method call of one worker."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}


class Shared:
    """An argument for several groups that is serialized once rather than once per group.

    It is passed by position. Workers get the value itself, and must not modify it.
    """

    def __init__(self, value: Any) -> None:
        """Wrap the value; it is serialized when a group first needs it."""
        self.value = value
        self._carried: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Shared, (self.value,)

    def carried(self, carry: Callable[[Any], Any]) -> Any:
        """Serialize the value with `carry`, which is called once."""
        if self._carried is None:
            self._carried = carry(self.value)
        return self._carried


def without_shared(call: WorkerCall) -> tuple[WorkerCall, list[Shared]]:
    """Separate a call from its shared values."""
    shared = [argument for argument in call.args if isinstance(argument, Shared)]
    return with_shared(call, [Shared(None)] * len(shared)) if shared else call, shared


def with_shared(call: WorkerCall, values: Iterable[Any]) -> WorkerCall:
    """Put values in the place of a call's shared arguments."""
    rest = iter(values)
    args = (next(rest) if isinstance(argument, Shared) else argument for argument in call.args)
    return WorkerCall(call.method, tuple(args), call.kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The reason why a worker gave no result, picklable."""

    kind: Literal["raised", "died", "late"]
    rank: int
    summary: str = ""
    traceback: str = ""
    cause: BaseException | None = None
    """Exception of the worker, where it can be pickled."""


@dataclass(frozen=True, slots=True)
class Success:
    """The result of a worker."""

    value: Any


Outcome = Success | Failure


def attempt(target: Any, call: WorkerCall, *, rank: int) -> Outcome:
    """Call a method of a worker, or the worker's class itself where the method is ''."""
    try:
        function = getattr(target, call.method) if call.method else target
        with ForkGuard():
            return Success(function(*call.args, **call.kwargs))
    except (Exception, SystemExit) as error:
        return failure_of(error, rank=rank)


def failure_of(error: BaseException, *, rank: int) -> Failure:
    """Convert an exception caught in this process to a failure."""
    # The first frame is Laurel's own call of the method.
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    return Failure(
        kind="raised",
        rank=rank,
        summary="".join(traceback.format_exception_only(error)).strip(),
        traceback="".join(traceback.format_exception(type(error), error, frames)).rstrip()
        if frames
        else "",
        cause=error if _can_travel(error) else None,
    )


def _can_travel(error: BaseException) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # an exception may do anything when it is copied
        return False


def error_of(
    role: str, size: int, call: str, failures: Sequence[Failure], *, limit: float
) -> WorkerError:
    """Combine all failures of a call into one error.

    A death explains the exceptions of others, and an exception explains late workers, so the error
    reports the gravest kind and mentions the rest.

    Args:
        call: Name of the method, '' for the making of the workers.
        failures: In the order in which they were seen, at least one.
        limit: Seconds that were waited, for those who are late.
    """
    doing = f"in {call}" if call else "while it was made"
    kinds = ("died", "raised", "late")
    kind = next(kind for kind in kinds if any(failure.kind == kind for failure in failures))
    guilty = [failure for failure in failures if failure.kind == kind]
    first = guilty[0]
    ranks = tuple(sorted(failure.rank for failure in guilty))
    rest = [failure for failure in failures if failure.kind != kind]
    if kind == "late":
        message = (
            f"{role}: no answer from {_ranks(ranks)} of {size} {doing} within {limit:g} s; "
            "the group was ended"
        )
    else:
        verb = "died" if kind == "died" else "failed"
        message = f"{role} rank {first.rank} of {size} {verb} {doing}: {first.summary}"
        others = [failure.rank for failure in guilty[1:]]
        if others:
            message += f"\n({_ranks(others)} {verb} too)"
        late = [failure.rank for failure in rest if failure.kind == "late"]
        if late:
            message += f"\n(no answer from {_ranks(late)}, ended with the group)"
    if first.traceback and not isinstance(first.cause, LaurelError):
        message += f"\n\nIn the worker:\n{first.traceback}"
    exit_code = WorkerError.exit_code
    if isinstance(first.cause, LaurelError):
        exit_code = first.cause.exit_code
    elif kind != "raised":
        message += f"\n{GOING_ON}"
        exit_code = WorkerError.LOST_EXIT_CODE
    error = WorkerError(
        message, role=role, ranks=ranks, worker_traceback=first.traceback, exit_code=exit_code
    )
    error.__cause__ = first.cause
    return error


def again(error: WorkerError) -> WorkerError:
    """Copy an error, to be raised once more without its first traceback."""
    found = copy(error)
    found.__cause__ = error.__cause__
    return found


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"


class GroupCalls(ABC):
    """The calls of a `WorkerGroup` over one way to submit them.

    A group whose worker died, or is late, has failed: its workers are killed, and every later call
    raises the same error. No group restarts a worker, whose state would be lost; where that can be
    had again, a `Supervisor` makes another group.
    """

    role: str
    size: int
    _failure: WorkerError | None = None
    _is_open = True

    @abstractmethod
    def _submit(self, calls: Mapping[int, WorkerCall]) -> Pending:
        """Submit the call of each of these ranks."""

    def _close(self) -> None:  # noqa: B027
        """Shut every worker down; called once."""

    def _kill(self) -> None:  # noqa: B027
        """Kill every worker, whatever it does."""

    def _check_open(self) -> None:
        if self._failure is not None:
            raise again(self._failure)
        if not self._is_open:
            raise WorkerError(f"{self.role}: the group has been shut down", role=self.role)

    def _raise(self, method: str, failures: Sequence[Failure], *, limit: float) -> NoReturn:
        error = error_of(self.role, self.size, method, failures, limit=limit)
        if any(failure.kind != "raised" for failure in failures):
            self._failure = self._failure or error
            self._kill()
        raise error from error.__cause__

    def shutdown(self) -> None:
        """Shut every worker down. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._close()

    def start(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method on every worker without waiting."""
        return self._submit(dict.fromkeys(range(self.size), WorkerCall(method, args, kwargs)))

    def start_each(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> Pending:
        """Call a method on each worker with its own arguments, without waiting."""
        if len(per_rank_args) != self.size:
            raise ValueError(
                f"{self.role} has {self.size} ranks; arguments came for {len(per_rank_args)}"
            )
        return self._submit({r: WorkerCall(method, args) for r, args in enumerate(per_rank_args)})

    def start_one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method on one worker without waiting; the result list has one entry."""
        if not 0 <= rank < self.size:
            raise ValueError(f"{self.role} has ranks 0 to {self.size - 1}, not {rank}")
        return self._submit({rank: WorkerCall(method, args, kwargs)})

    def call(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method on every worker and wait."""
        return self.start(method, *args, **kwargs).wait(timeout=timeout)

    def call_each(
        self,
        method: str,
        per_rank_args: Sequence[tuple[Any, ...]],
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a method on each worker with its own arguments, and wait."""
        return self.start_each(method, per_rank_args).wait(timeout=timeout)

    def call_one(
        self, rank: int, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call a method on one worker, and wait for its result."""
        return self.start_one(rank, method, *args, **kwargs).wait(timeout=timeout)[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
