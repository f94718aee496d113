"""Defines the protocol of program runners, and the outcome of a program's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from laurel.sandbox.jobs import Limits


class SandboxStartError(RuntimeError):
    """Raised if a zygote does not start."""


class SandboxLostError(RuntimeError):
    """Raised if the sandbox itself failed during a job, or before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutcome:
    """How a process that ran a program ended, as its monitor saw it."""

    ended_by: str
    """The cause of the end: `exit` (by itself); `wall`, `stdout`, `stderr` or `result` (it reached
    that limit); `cancel`; `disk` (its files cannot be measured); or `memory` (the kernel killed it,
    because its control group had none left).
    """
    exit_code: int | None = None
    signal: int | None = None
    cpu_s: float | None = None
    wall_s: float = 0.0
    max_rss_kb: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    result: bytes = b""
    truncated: frozenset[str] = field(default_factory=frozenset)


class Runner(Protocol):
    """Runs the programs of one job at a time."""

    def one(
        self, header: Mapping[str, Any], *parts: bytes, limits: Limits, stdin: bytes = b""
    ) -> ProcessOutcome:
        """Run a program to its end.

        Args:
            header: The kind of the job, `script` or `call`, and the fields of that kind.
            parts: The source of the program, and the other parts of its kind.
            limits: The limits of the process.
            stdin: The standard input of the program.

        Raises:
            SandboxLostError: The sandbox failed, and not the program.
            SandboxStartError: The sandbox does not start.
        """

    def pair(
        self,
        code: bytes,
        header: Mapping[str, Any],
        *parts: bytes,
        limits: Limits,
        is_waiting: Callable[[ProcessOutcome], bool],
    ) -> tuple[ProcessOutcome, ProcessOutcome]:
        """Run tests that call a program, with a process for the tests and one for the program.

        Args:
            code: The program.
            header: The header of the tests.
            parts: The source of the tests, and their other parts.
            limits: The limits of each process.
            is_waiting: Returns, for the outcome of the tests, whether to wait for the program's own
                end, which explains a missing answer. Otherwise the program is killed.

        Returns:
            The outcomes of the tests and of the program.

        Raises:
            SandboxLostError: The sandbox failed.
        """
