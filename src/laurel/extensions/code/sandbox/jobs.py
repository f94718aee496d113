"""Defines the jobs of a sandbox, their limits and their results.

This module and the modules below it import only the standard library, so that any account can try
the sandbox with any Python of the machine.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from laurel.extensions.code.sandbox.comparison import Comparison

Mode = Literal["script", "stdio", "call", "tests"]
"""The way in which a program is graded.

`script` only runs the program. With `stdio` each test is a text on stdin and the expected output.
`call` calls a function with plain data, and compares its values. With `tests`, code of the data set
calls the program from a second sandbox.
"""


class Status(enum.Enum):
    """The status of a program, or of one test of it."""

    OK = "ok"
    """The program ended without an error; all tests passed, if there are any."""
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
    """The program made a system call that no program may make, and ended because of the refusal."""
    KILLED = "killed"
    """The program died of a signal that the sandbox did not send, such as a segmentation fault."""
    BAD_RESULT = "bad_result"
    """The answer is not plain data, or is forged, doubled or out of order."""
    NO_RESULT = "no_result"
    """The program ended before it answered."""
    NOT_RUN = "not_run"
    """The test follows a failed one, and only all tests together count."""
    SANDBOX_ERROR = "sandbox_error"
    """The sandbox failed, not the program; this must be masked, and is never a score."""

    @property
    def is_verdict(self) -> bool:
        """Whether the status says something about the program."""
        return self is not Status.SANDBOX_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one process of a job.

    CPU time is the limit that counts. The limit of wall time is generous, because wall time depends
    on how busy the machine is.
    """

    cpu_s: float = 5.0
    wall_s: float = 10.0
    mem_mb: int = 512
    """The address space."""
    disk_mb: int = 32
    """The total size of all files."""
    inodes: int = 2048
    threads: int = 60
    stdout_kb: int = 64
    stderr_kb: int = 16
    result_kb: int = 256
    """The total size of all returned values."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be more than 0")

    def message(self) -> dict[str, float | int]:
        """Return the limits in the form that the sandbox reads."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioTest:
    """A text on stdin, and the expected output.

    Blanks at ends of lines, and blank lines at the end, do not count.
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
    """A program, and how to grade it.

    Args:
        id: An id for the caller, which the result repeats.
        code: The program, in Python.
        mode: The way in which the program is graded.
        stdin: The input of the program, for `script` only.
        tests: The tests, for `stdio` and `call`. For `tests`, texts of code that each run by
            themselves instead of `test_code`.
        entry: The name of the function, for `call` and `tests`. `Solution.name` is a method of a
            class that is created without arguments. With `call`, a method of that name of a class
            `Solution` is called if the program has one.
        test_code: For `tests`, code that runs in its own process, and ends without an exception if
            the program is right. Its undefined names are functions of the program.
        test_setup: For `tests`, code that runs before `test_code`, with helpers that both need (the
            prompt).
        limits: The limits of each process.
        strict_types: For `call`, whether types must be equal: True is not 1, 1 is not 1.0, and a
            list is not a tuple.
        float_tolerance: The largest relative or absolute difference, for `call` and `stdio`.
        comparison: The grader whose rules compare, for `call` and `stdio`; only `laurel` uses
            `strict_types` and `float_tolerance`.
        prelude: Code that runs before the program, in its namespace, such as the usual imports.
        stop_at_failure: For `stdio` and `tests`, whether only all tests together count, so that
            tests after a failed one are `NOT_RUN`.
        total_s: For `stdio` and `tests`, the seconds of wall time for all tests together, after
            which tests are `TIMEOUT_WALL`; None limits only each test.
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
    """A message for people about what went wrong, without the expected value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """The result of a job; texts from the program are truncated, and may contain anything."""

    id: str
    status: Status
    tests: tuple[TestResult, ...] = ()
    """The results of the tests, in the job's order."""
    stdout: str = ""
    """The output of the last process that ran the program."""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    exit_code: int | None = None
    signal: int | None = None
    cpu_s: float | None = None
    """The CPU time of all processes; None if nothing ran."""
    wall_s: float = 0.0
    max_rss_kb: int = 0
    tier: str = ""
    """The letter of the tier in which the job ran."""
    attempt: int = 1
    reason: str = ""
    """The reason of a SANDBOX_ERROR."""
