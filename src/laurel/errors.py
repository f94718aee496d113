"""Every error Laurel raises on purpose, as one tree.

::

    LaurelError
    |-- UserError                     an input that cannot be used; exit code 2
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
        |-- EngineError               a generator died, or samples from other weights than it should
        |   `-- BroadcastError        weights did not all come from the learner's process
        |-- EnvironmentFailedError    an environment broke, or failed on too many samples
        `-- WorkerError               a worker of a group failed; or died or is late: exit code 75

Each is also the standard class a caller would expect, is picklable (it may cross a process), and
its message says what was wrong, where, and what to do.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

Result = TypeVar("Result")


class LaurelError(Exception):
    """Root of all errors of Laurel."""

    exit_code = 1


class UserError(LaurelError):
    """The user's input cannot be used; the message says how to fix it."""

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
        """Outcome of the run otherwise, a `training.loop.RunOutcome`."""


class MissingDependencyError(UserError, ImportError):
    """An optional package that is required and not installed."""

    @classmethod
    def of(cls, package: str, *, extra: str, purpose: str) -> MissingDependencyError:
        """Make the error with the command that installs the package."""
        return cls(
            f"{purpose} needs the package '{package}', which is not installed. "
            f"Install it with: {install_command(extra)}"
        )


class ProtocolError(LaurelError, ValueError):
    """A request or a reply that does not keep to its protocol."""

    def __init__(
        self, message: str, *, kind: Literal["reply", "nan", "count", "version"] = "reply"
    ) -> None:
        super().__init__(message)
        self.kind = kind
        """Kind of the fault: a number that is not finite, another count or version than requested,
        or other.
        """


class BusyError(LaurelError, RuntimeError):
    """A queue or a server that accepts nothing at the moment; a later request may succeed."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        """Seconds after which a new request is worthwhile."""

    def __reduce__(self) -> tuple[object, ...]:
        return _busy, (str(self), self.retry_after)


def _busy(message: str, retry_after: float) -> BusyError:
    return BusyError(message, retry_after=retry_after)


class TrainingError(LaurelError, RuntimeError):
    """A run that cannot go on."""


class NonFiniteError(TrainingError):
    """The loss or the gradient was NaN or infinite for too many steps."""


class EngineError(TrainingError):
    """A generator that died, or that samples from other weights than it was given."""


class BroadcastError(EngineError):
    """A transfer of weights between processes that failed: another route may work."""


class EnvironmentFailedError(TrainingError):
    """An environment that broke, or that failed on too many samples."""


class WorkerError(TrainingError):
    """A worker of a group that raised, whose process died, or that is late.

    Where the worker's exception can be pickled it is the `__cause__`, and a cause that is a
    `LaurelError` decides the exit code. A worker that died or is late may work the next time, so
    the exit code asks a supervisor to retry.
    """

    LOST_EXIT_CODE = 75
    """Exit code of sysexits.h for a temporary failure."""

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
        """Failed ranks, lowest first."""
        self.worker_traceback = worker_traceback
        """Traceback in the worker, as text; empty where there is none."""
        self.exit_code = exit_code

    @property
    def is_lost(self) -> bool:
        """Whether the worker died or is late, without an exception of its own."""
        return self.exit_code == self.LOST_EXIT_CODE


def is_lost_worker(error: BaseException | None) -> bool:
    """Report whether an error means that a worker is permanently lost, whatever its input was."""
    return isinstance(error, WorkerError) and error.is_lost


@contextmanager
def if_interrupted(kept: Callable[[], str]) -> Iterator[None]:
    """Let the command line say what is kept of the work within, where Ctrl-C ends it."""
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(kept())
        raise


Names = Mapping[str, str]
"""The names of configuration keys in another vocabulary, such as the options of a command: of keys,
and of sections with all keys that have no entry of their own. A name that ends with a blank stands
before what follows: `{"policy": "--set "}` makes `--set tokenizer.pad_token` of a key of `policy`;
an empty one leaves the section out.
"""

_SPOKEN: ContextVar[tuple[Names, ...]] = ContextVar("laurel_names", default=())


def key_of(key: str) -> str:
    """Name a key for a message, as its reader wrote it (see `speaking`)."""
    for names in reversed(_SPOKEN.get()):
        section, rest = key, ""
        while section and section not in names:
            section, _, last = section.rpartition(".")
            rest = f".{last}{rest}"
        if section:
            name = names[section]
            key = name + (rest[1:] if not name or name.endswith(" ") else rest)
    return key


def setting_of(key: str, value: object) -> str:
    """Format a key and its value as the user wrote them, `key=value` or `--option value`."""
    name = key_of(key)
    if not name:
        return str(value)
    return f"{name} {value}" if _is_option(name) else f"{name}={value}"


def _is_option(name: str) -> bool:
    return name.startswith("--") and " " not in name


def no_file_at(path: str | Path) -> str | None:
    """Say what a path is where no file can be read from it; None if one may be.

    Reading waits for ever at a named pipe that nobody writes to. A pipe of the shell
    (`<(command)`) has no name, and can be read.
    """
    written = os.path.expanduser(path)
    try:
        mode = os.stat(written).st_mode
    except OSError:
        if not os.path.islink(written):
            return None
        return f"{path} is a link to {os.readlink(written)}, which leads to no file"
    kinds = {stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket", stat.S_IFBLK: "a device"}
    kind = kinds.get(stat.S_IFMT(mode))
    if kind is None or not os.path.exists(os.path.realpath(written)):
        return None
    return f"{path} is {kind}, not a file"


def about(key: str) -> str:
    """Begin a message about a key or a section; one without a name begins with nothing."""
    name = key_of(key)
    if not name:
        return ""
    return f"{name} " if _is_option(name) else f"{name}: "


@contextmanager
def speaking(*names: Names) -> Iterator[None]:
    """Give keys these names, the last of them first, in messages made within.

    Quoted paths and texts of libraries are never changed. The names hold for this thread and for
    tasks that it begins.
    """
    token = _SPOKEN.set((*_SPOKEN.get(), *names))
    try:
        yield
    finally:
        _SPOKEN.reset(token)


def names_in_use() -> tuple[Names, ...]:
    """Return the names of keys in messages made here, for `speaking` in another place."""
    return _SPOKEN.get()


# Words of messages: the command that installs Laurel, numbers of things.

DISTRIBUTION = "laurel-rl"


def install_command(extra: str = "") -> str:
    """Return the command that installs Laurel with an extra, from where this one was installed.

    That is the source tree or the wheel that pip has noted, if it is still there, and the registry
    of packages otherwise.
    """
    from importlib import metadata  # slow, and only a message needs it

    extras = f"[{extra}]" if extra else ""
    try:
        noted = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        noted = None
    source = json.loads(noted or "{}")
    address = urlsplit(source.get("url", ""))
    path = unquote(address.path)
    if address.scheme == "file" and os.path.exists(path):
        editable = "-e " if source.get("dir_info", {}).get("editable") else ""
        return f"pip install {editable}{shlex.quote(path + extras)}"
    if address.scheme in ("http", "https", "ssh"):
        version_control = source.get("vcs_info", {}).get("vcs")
        url = f"{version_control}+{source['url']}" if version_control else source["url"]
        return f"pip install {shlex.quote(f'{DISTRIBUTION}{extras} @ {url}')}"
    return f"pip install {shlex.quote(DISTRIBUTION + extras)}"


def counted(number: int, what: str) -> str:
    """Format a count with its noun, e.g. `1 row`, `2,000 rows`.

    Args:
        what: One of them; more take an s.
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def counted_that(number: int, what: str, verb: str) -> str:
    """Format a count with noun and verb, e.g. `1 row has`, `2 rows have`.

    Args:
        what: The noun in the singular.
        verb: The verb in the plural.
    """
    does = {"have": "has", "were": "was", "are": "is"}.get(verb, f"{verb}s")
    return f"{counted(number, what)} {does if number == 1 else verb}"
