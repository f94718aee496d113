"""The protocol of program runners, and the outcome of a program's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from laurel.sandbox.jobs import Limits


class SandboxStartError(RuntimeError):
    """Raised where a zygote does not start."""


class SandboxLostError(RuntimeError):
    """Raised where the sandbox itself failed during a job, or before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutcome:
    """Holds how one process that ran a program ended, as seen from outside of it."""

    ended_by: str
    """One of `exit` (by itself), `wall`, `stdout`, `stderr`, `result` (that cap was met), `cancel`,
    `disk` (its files cannot be measured), `memory` (killed by the kernel, as its control group had
    none left).
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
            header: Kind of the job, `script` or `call`, and the fields of that kind.
            parts: Source of the program, and the parts of its kind.
            limits: Limits of the process.
            stdin: Standard input of the program.

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
        """Run tests that call a program, each in a process of its own.

        Args:
            code: The program.
            header: Header of the tests.
            parts: Source of the tests, and their other parts.
            limits: Limits of each process.
            is_waiting: Whether, given how the tests ended, to wait for the program's own end, which
                says why there was no answer. Otherwise it is killed.

        Returns:
            The outcomes of the tests and of the program.

        Raises:
            SandboxLostError: The sandbox failed.
        """
