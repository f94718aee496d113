"""Runs programs on another node: a `Runner` whose zygote is held by a process there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from laurel.environments.sandbox.jobs import Limits
from laurel.environments.sandbox.node_worker import of_plain
from laurel.environments.sandbox.runner import Outcome, SandboxLostError, SandboxStartError
from laurel.environments.sandbox.tiers import Tier
from laurel.environments.sandbox.zygote_process import GRACE_SECONDS, START_SECONDS
from laurel.protocols import WorkerGroup

CLOSED = "the sandbox has been shut down"
MARGIN_SECONDS = 20.0
"""What a call to a node may take beyond what is waited for there."""


class Node(Protocol):
    """What a runner knows of its node."""

    tier: Tier
    last_failure: str | None

    def group(self) -> WorkerGroup:
        """Its process, which is started again where it was lost."""

    def ask(self, group: WorkerGroup, method: str, *args: Any, limit: float) -> Any:
        """Have its process do something."""

    def discard(self, index: int) -> None:
        """End one of its zygotes, where its process lives."""


class NodeRunner:
    """One zygote of a node.

    The limits of a program are kept there. Here is only waited longer than that can take: a node
    that does not answer is lost, and so is a program that it had.
    """

    pid: int | None = None

    def __init__(self, node: Node, index: int) -> None:
        """Ask for nothing yet.

        Args:
            node: Where it is.
            index: Which of the node's zygotes it is.
        """
        self.layers: frozenset[str] = frozenset()
        self.starts = 0
        self._node = node
        self._index = index
        self._group: WorkerGroup | None = None
        """The process that the zygote was started in."""
        self._closed = False
        self._asking = threading.RLock()
        """Held while a call is under way."""

    @property
    def tier(self) -> Tier | None:
        """See `Runner`: nodes may have different ones."""
        return self._node.tier

    def start(self) -> None:
        """See `Runner`. A zygote that dies is started again where it is, with the next program."""
        with self._asking:
            if self._closed:
                raise SandboxStartError(CLOSED)
            group = self._node.group()
            if group is not self._group:
                limit = START_SECONDS + MARGIN_SECONDS
                self.layers = frozenset(self._ask(group, "start", limit=limit))
                self._group = group
                self.starts += 1

    def one(
        self, header: Mapping[str, Any], *parts: bytes, limits: Limits, stdin: bytes = b""
    ) -> Outcome:
        """See `Runner`."""
        return self._run("one", dict(header), parts, limits.message(), stdin, limits=limits)[0]

    def pair(
        self,
        code: bytes,
        header: Mapping[str, Any],
        *parts: bytes,
        limits: Limits,
        is_waiting: Callable[[Outcome], bool],
    ) -> tuple[Outcome, Outcome]:
        """See `Runner`. Whether the program is waited for is decided where it runs: functions do
        not travel, and what they hold might be an answer."""
        verdict, outcome = self._run(
            "pair", code, dict(header), parts, limits.message(), limits=limits
        )
        return verdict, outcome

    def discard(self) -> None:
        """See `Runner`."""
        with self._asking:
            if not self._closed:
                self._group = None
                self._node.discard(self._index)

    def close(self) -> None:
        """See `Runner`. Waits for the call that is under way, so that none is when the cluster is
        left."""
        if not self._closed:
            self._closed = True
            self._node.discard(self._index)
        with self._asking:
            pass

    def _run(self, method: str, *args: Any, limits: Limits) -> list[Outcome]:
        with self._asking:
            self.start()
            assert self._group is not None
            # The zygote there may have to be started first.
            limit = limits.wall_s + GRACE_SECONDS + START_SECONDS + MARGIN_SECONDS
            said = self._ask(self._group, method, *args, limit=limit)
            self._node.last_failure = None
            return [of_plain(one) for one in said]

    def _ask(self, group: WorkerGroup, method: str, *args: Any, limit: float) -> Any:
        kind, said = self._node.ask(group, method, self._index, *args, limit=limit)
        if kind == "lost":
            raise SandboxLostError(said)
        if kind == "not started":
            raise SandboxStartError(said)
        return said
