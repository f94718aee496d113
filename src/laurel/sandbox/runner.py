"""What runs programs, and how one ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from laurel.sandbox.jobs import Limits


class SandboxStartError(RuntimeError):
    """A zygote does not start."""


class SandboxLostError(RuntimeError):
    """The sandbox itself failed in the middle of a job, or before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOutcome:
    """How one process that ran a program ended, as seen from outside of it."""

    ended_by: str
    """`exit` (by itself), `wall`, `stdout`, `stderr`, `result` (that cap was met), `cancel`,
    `disk` (what it has written cannot be measured), `memory` (the kernel, for its control group had
    none left)."""
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
            header: Its kind, `script` or `call`, and what goes with that.
            parts: Its source, and what goes with its kind.
            limits: See `Limits`.
            stdin: What it reads.

        Raises:
            SandboxLostError: The sandbox failed; the program is not to blame.
            SandboxStartError: It does not start.
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
            header: Of the tests.
            parts: Their source, and what goes with it.
            limits: Of each.
            is_waiting: Of how the tests ended: whether the program is to end by itself, for that
                says why there was no answer. Else it is ended.

        Returns:
            How the tests ended, and how the program did.

        Raises:
            SandboxLostError: As `one`.
        """
