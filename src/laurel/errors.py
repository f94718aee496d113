"""Every error Laurel raises on purpose, drawn as one tree.

::

    LaurelError
    |-- UserError                     something you gave us cannot be used; exit code 2
    |   |-- ConfigError (ValueError)          a key, a value or an override
    |   |-- DataError (ValueError)            a file or a row
    |   |-- ModelError (ValueError)           a model, tokenizer or chat template
    |   |   `-- ScoringContractError          a model does not give the scores it was saved with
    |   |-- CheckpointError (OSError)         a directory that is torn, altered or foreign
    |   |   `-- UnsavedError                  a run that ended, and whose end is nowhere
    |   `-- MissingDependencyError (ImportError)   an extra is not installed
    |-- ProtocolError (ValueError)    a request or a reply that does not keep to its protocol
    |-- BusyError (RuntimeError)      a queue or a server that can take no more at the moment
    `-- TrainingError (RuntimeError)  the run itself went wrong; exit code 1
        |-- NonFiniteError            loss or gradient were NaN or infinite too often
        |-- EngineError               a generator died, or draws from other weights than it should
        |   `-- BroadcastError        weights did not all come from the learner's process
        |-- EnvironmentFailedError    an environment broke, or judged too few of its samples
        `-- WorkerError               a worker of a group failed; or died or is late: exit code 75

Each is also the standard class a caller would expect, is picklable (it may cross a process), and
its message says what was wrong, where, and what to do.
"""

from __future__ import annotations

from typing import Any, Literal


class LaurelError(Exception):
    """Root of the tree."""

    exit_code = 1


class UserError(LaurelError):
    """Something the user gave cannot be used; the message says how to mend it."""

    exit_code = 2


class ConfigError(UserError, ValueError):
    """A configuration key, value or override that cannot be used."""


class DataError(UserError, ValueError):
    """A data file or row that cannot be used."""


class ModelError(UserError, ValueError):
    """A model, tokenizer or chat template that cannot be used."""


class ScoringContractError(ModelError):
    """A model whose scores differ from those it was saved with."""


class CheckpointError(UserError, OSError):
    """A checkpoint directory that is torn, altered, foreign or busy."""


class UnsavedError(CheckpointError):
    """A run that ended, and whose last weights could not be saved."""

    def __init__(self, message: str, *, outcome: Any = None) -> None:
        super().__init__(message)
        self.outcome = outcome
        """How it ended else: see `algorithms.training_loop.Outcome`."""


class MissingDependencyError(UserError, ImportError):
    """An optional package that is needed here and not installed."""

    @classmethod
    def of(cls, package: str, *, extra: str, purpose: str) -> MissingDependencyError:
        """The error with the command that mends it."""
        return cls(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: pip install 'laurel-rl[{extra}]'"
        )


class ProtocolError(LaurelError, ValueError):
    """A request or a reply that does not keep to its protocol."""

    def __init__(
        self, message: str, *, kind: Literal["reply", "nan", "count", "version"] = "reply"
    ) -> None:
        super().__init__(message)
        self.kind = kind
        """What is wrong: a number that is not finite, another count or another version than
        asked, or anything else."""


class BusyError(LaurelError, RuntimeError):
    """A queue or a server that can take no more at the moment; asked again later, it may."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which it is worth asking again."""

    def __reduce__(self) -> tuple[object, ...]:
        return _busy, (str(self), self.retry_after)


def _busy(message: str, retry_after: float) -> BusyError:
    return BusyError(message, retry_after=retry_after)


class TrainingError(LaurelError, RuntimeError):
    """A run that cannot go on."""


class NonFiniteError(TrainingError):
    """The loss or the gradient was NaN or infinite for too many steps."""


class EngineError(TrainingError):
    """A generator that died, or that draws from other weights than it was given."""


class BroadcastError(EngineError):
    """A transfer of weights between processes that broke off: they can come another way."""


class EnvironmentFailedError(TrainingError):
    """An environment that broke, or that could judge too few of its samples."""


class WorkerError(TrainingError):
    """A worker of a group that raised, whose process died, or that is late.

    Where the worker raised something that can travel it is the `__cause__`, and a cause that is a
    `LaurelError` decides the exit code. A worker that died or is late may not do so again, so that
    the code tells a supervisor to try once more.
    """

    LOST_EXIT_CODE = 75
    """What sysexits.h calls a temporary failure."""

    def __init__(
        self,
        message: str,
        *,
        role: str = "",
        ranks: tuple[int, ...] = (),
        worker_traceback: str = "",
        exit_code: int = TrainingError.exit_code,
    ) -> None:
        super().__init__(message)
        self.role = role
        self.ranks = ranks
        """The ranks that are to blame, lowest first."""
        self.worker_traceback = worker_traceback
        """The traceback in the worker, as text; empty where there is none."""
        self.exit_code = exit_code

    @property
    def is_lost(self) -> bool:
        """Whether it died or is late, and did not say why."""
        return self.exit_code == self.LOST_EXIT_CODE


def is_lost_worker(error: BaseException | None) -> bool:
    """Whether a worker is lost for good: the fault of nothing that it was given."""
    return isinstance(error, WorkerError) and error.is_lost
