"""What a sandbox is asked to run, within which limits, and what it says of it.

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
"""How a program is judged.

`script`: it is only run. `stdio`: each test is a text on stdin and the text that has to come out.
`call`: a function is called with plain data and its values are compared. `tests`: code of the data
set calls the program, from a second sandbox.
"""


class Status(enum.Enum):
    """What became of a program, or of one test of it."""

    OK = "ok"
    """It ended as it should; with tests: all of them passed."""
    WRONG_ANSWER = "wrong_answer"
    SYNTAX_ERROR = "syntax_error"
    RUNTIME_ERROR = "runtime_error"
    """An exception that nothing caught, or an exit code that is not 0."""
    TIMEOUT_WALL = "timeout_wall"
    TIMEOUT_CPU = "timeout_cpu"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    DISK_LIMIT = "disk_limit"
    PROCESS_LIMIT = "process_limit"
    FORBIDDEN = "forbidden"
    """It asked the system for something that no program is given here, and did not get over it."""
    KILLED = "killed"
    """It died of a signal that was not ours: a segmentation fault, an abort."""
    BAD_RESULT = "bad_result"
    """It answered with something that is no plain data, or is forged, doubled or out of order."""
    NO_RESULT = "no_result"
    """It went away before it answered."""
    NOT_RUN = "not_run"
    """Of one test: an earlier one had failed, and only all of them count."""
    SANDBOX_ERROR = "sandbox_error"
    """Ours, not the program's: a failure to be masked, never a score."""

    @property
    def is_verdict(self) -> bool:
        """Whether it says something about the program."""
        return self is not Status.SANDBOX_ERROR


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one process of a job may use. CPU time is the limit that is meant to be met; wall time
    is generous, since a busy machine makes it pass faster."""

    cpu_s: float = 5.0
    wall_s: float = 10.0
    mem_mb: int = 512
    """Address space."""
    disk_mb: int = 32
    """All files together."""
    inodes: int = 2048
    threads: int = 60
    stdout_kb: int = 64
    stderr_kb: int = 16
    result_kb: int = 256
    """All values that it returns together."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, and must be more than 0")

    def message(self) -> dict[str, float | int]:
        """As the sandbox reads it."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioTest:
    """A text on stdin, and what has to come out. Trailing blanks of lines, and blank lines at the
    end, do not count."""

    stdin: str = ""
    stdout: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """A call with plain data, and the value that it has to give."""

    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    expected: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxJob:
    """A program and how to judge it.

    Args:
        id: For whoever asks; comes back in the result.
        code: The program, in Python.
        mode: See `Mode`.
        stdin: Given to the program; of `script` only.
        tests: Of `stdio` and `call`: what it is judged by. Of `tests`: texts of code, each run for
            itself in the place of `test_code`.
        entry: Of `call` and `tests`: the name of the function; `Solution.name` is a method of a
            class that is made without arguments. Of `call`, a program that has a `Solution` with a
            method of that name is asked for that.
        test_code: Of `tests`: run in a process of its own. It ends without an exception where the
            program is right. Names in it that nobody defines are functions of the program.
        test_setup: Of `tests`: run before `test_code`: helpers that both need (the prompt).
        limits: Of each process.
        strict_types: Of `call`: True is not 1, 1 is not 1.0, a list is not a tuple.
        float_tolerance: Of `call` and `stdio`: largest relative or absolute difference.
        comparison: Of `call` and `stdio`: whose way to compare; `strict_types` and
            `float_tolerance` are of `laurel`.
        prelude: Code that is run before the program, among its names: the usual imports.
        stop_at_failure: Of `stdio` and `tests`: only all tests together count, so none is run after
            one that failed; those are `NOT_RUN`.
        total_s: Of `stdio` and `tests`: seconds by the clock for all tests together; those that
            are left then are `TIMEOUT_WALL`. None: each test has its own limit alone.
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
    """What became of one test."""

    __test__ = False  # not for pytest

    status: Status
    detail: str = ""
    """For people: what went wrong, without the expected value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """What became of a job. Texts are cut at their limits; the program may say anything in them."""

    id: str
    status: Status
    tests: tuple[TestResult, ...] = ()
    """In the order of the job's."""
    stdout: str = ""
    """Of the last process that ran the program."""
    stderr: str = ""
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    exit_code: int | None = None
    signal: int | None = None
    cpu_s: float | None = None
    """Of all processes; None where nothing ran."""
    wall_s: float = 0.0
    max_rss_kb: int = 0
    tier: str = ""
    """Letter of the isolation that it ran in; see `tiers.Tier`."""
    attempt: int = 1
    reason: str = ""
    """Of a SANDBOX_ERROR."""

    @property
    def passed_share(self) -> float:
        """Share of tests that passed; without tests, 1.0 for OK and else 0.0.

        Raises:
            ValueError: The sandbox failed: there is nothing to count.
        """
        if not self.status.is_verdict:
            raise ValueError(f"the sandbox failed, so there is no score: {self.reason}")
        if not self.tests:
            return float(self.status is Status.OK)
        return sum(test.status is Status.OK for test in self.tests) / len(self.tests)
