"""Jobs of a sandbox, their limits and their results.

Only the standard library is used here and below, so that the sandbox can be tried by any account
and with any Python of the machine.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from laurel.sandbox.comparison import Comparison

Mode = Literal["script", "stdio", "call", "tests"]
"""The way in which a program is graded.

`script`: it is only run. `stdio`: each test is a text on stdin and the expected output. `call`: a
function is called with plain data and its values are compared. `tests`: code of the data set calls
the program, from a second sandbox.
"""


class Status(enum.Enum):
    """The status of a program, or of one test of it."""

    OK = "ok"
    """It ended properly; with tests: all of them passed."""
    WRONG_ANSWER = "wrong_answer"
    SYNTAX_ERROR = "syntax_error"
    RUNTIME_ERROR = "runtime_error"
    """An uncaught exception, or an exit code that is not 0."""
    TIMEOUT_WALL = "timeout_wall"
    TIMEOUT_CPU = "timeout_cpu"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    DISK_LIMIT = "disk_limit"
    PROCESS_LIMIT = "process_limit"
    FORBIDDEN = "forbidden"
    """It made a system call that no program may make, and did not survive the refusal."""
    KILLED = "killed"
    """It died of a signal that was not ours: a segmentation fault, an abort."""
    BAD_RESULT = "bad_result"
    """Its answer is no plain data, or forged, doubled or out of order."""
    NO_RESULT = "no_result"
    """It ended before it answered."""
    NOT_RUN = "not_run"
    """Status of a test after a failed one, where only all tests together count."""
    SANDBOX_ERROR = "sandbox_error"
    """The sandbox failed, not the program: a failure to be masked, never a score."""

    @property
    def is_verdict(self) -> bool:
        """Whether the status says something about the program."""
        return self is not Status.SANDBOX_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one process of a job. CPU time is the limit that counts; wall time is generous,
    since it passes faster on a busy machine.
    """

    cpu_s: float = 5.0
    wall_s: float = 10.0
    mem_mb: int = 512
    """Address space."""
    disk_mb: int = 32
    """Size of all files together."""
    inodes: int = 2048
    threads: int = 60
    stdout_kb: int = 64
    stderr_kb: int = 16
    result_kb: int = 256
    """Size of all returned values together."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be more than 0")

    def message(self) -> dict[str, float | int]:
        """Return the limits as the sandbox reads them."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioTest:
    """A text on stdin, and the expected output. Trailing blanks of lines, and blank lines at the
    end, do not count.
    """

    stdin: str = ""
    stdout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A call with plain data, and the expected value."""

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    expected: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxJob:
    """A program and how to grade it.

    Args:
        id: Id for the caller; comes back in the result.
        code: The program, in Python.
        mode: How it is graded.
        stdin: Input of the program; for `script` only.
        tests: For `stdio` and `call`: the tests. For `tests`: texts of code, each run by itself
            instead of `test_code`.
        entry: For `call` and `tests`: name of the function; `Solution.name` is a method of a class
            that is made without arguments. For `call`, a program that has a `Solution` with a
            method of that name is called there.
        test_code: For `tests`: code that runs in a process of its own, and ends without an
            exception if the program is right. Undefined names in it are functions of the program.
        test_setup: For `tests`: code that runs before `test_code`: helpers that both need (the
            prompt).
        limits: Limits of each process.
        strict_types: For `call`: True is not 1, 1 is not 1.0, a list is not a tuple.
        float_tolerance: For `call` and `stdio`: largest relative or absolute difference.
        comparison: For `call` and `stdio`: whose rules compare; `strict_types` and
            `float_tolerance` belong to `laurel`.
        prelude: Code that runs before the program, among its names: the usual imports.
        stop_at_failure: For `stdio` and `tests`: only all tests together count, so none is run
            after a failed one; those are `NOT_RUN`.
        total_s: For `stdio` and `tests`: seconds of wall time for all tests together; the rest is
            then `TIMEOUT_WALL`. None: each test has its own limit alone.
    """

    code: str
    id: str = ""
    mode: Mode = "script"
    stdin: str = ""
    tests: Sequence[StdioTest] | Sequence[CallTest] | Sequence[str] = ()
    entry: str = ""
    test_code: str = ""
    test_setup: str = ""
    limits: Limits = Limits()
    strict_types: bool = True
    float_tolerance: float = 0.0
    comparison: Comparison = "laurel"
    prelude: str = ""
    stop_at_failure: bool = False
    total_s: float | None = None

    def __post_init__(self) -> None:
        wanted = {"stdio": StdioTest, "call": CallTest}.get(self.mode)
        if wanted is not None and not (
            self.tests and all(isinstance(test, wanted) for test in self.tests)
        ):
            raise ValueError(f"mode {self.mode} needs tests, each a {wanted.__name__}")
        if self.mode in ("call", "tests") and not self.entry:
            raise ValueError(f"mode {self.mode} needs the name of a function: entry")
        if self.mode == "tests" and not all(
            isinstance(one, str) and one.strip() for one in self.tests or (self.test_code,)
        ):
            raise ValueError("mode tests needs test_code, or tests that are code")


@dataclass(frozen=True, slots=True, kw_only=True)
class TestResult:
    """The result of one test."""

    __test__ = False  # not for pytest

    status: Status
    detail: str = ""
    """Message for people: what went wrong, without the expected value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The result of a job. Texts are cut at their limits; the program may have written anything."""

    id: str
    status: Status
    tests: tuple[TestResult, ...] = ()
    """Results of the tests, in the job's order."""
    stdout: str = ""
    """Output of the last process that ran the program."""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    exit_code: int | None = None
    signal: int | None = None
    cpu_s: float | None = None
    """CPU time of all processes; None where nothing ran."""
    wall_s: float = 0.0
    max_rss_kb: int = 0
    tier: str = ""
    """Letter of the tier that it ran in."""
    attempt: int = 1
    reason: str = ""
    """Reason of a SANDBOX_ERROR."""

    @property
    def passed_share(self) -> float:
        """Share of passed tests; without tests, 1.0 for OK and otherwise 0.0.

        Raises:
            ValueError: The sandbox failed: there is nothing to count.
        """
        if not self.status.is_verdict:
            raise ValueError(f"the sandbox failed, so there is no score: {self.reason}")
        if not self.tests:
            return float(self.status is Status.OK)
        return sum(test.status is Status.OK for test in self.tests) / len(self.tests)
