"""The seams between rooms. Read this file second.

Each has at least two implementations or a fake in the tests, and one suite in `tests/contracts`
that every implementation passes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from laurel.types import (
    EnvironmentReturn,
    EnvironmentSpec,
    Generated,
    GenerationRequest,
    Group,
    RejectedTask,
    Score,
    Task,
    Weights,
)

MessageLog = Sequence[Mapping[str, str]]
"""A conversation as environments read it: raw `{"role", "content"}`, never templated text."""


class Generator(Protocol):
    """Draws completions from the policy."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is drawn with."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        """The completions of one prompt, each as soon as it has ended, in any order.

        Requests run side by side; closing the iterator early aborts what is left of its own. An
        engine that dies raises `EngineError` from every iterator that is open.
        """

    async def update_weights(self, weights: Weights) -> None:
        """Draw from these weights from now on.

        Waits for the requests that are under way, so no completion mixes versions.

        Raises:
            EngineError: The engine does not compute what the weights say.
        """

    async def sleep(self) -> None:
        """Give memory back while others need it. Requests wait until `wake`."""

    async def wake(self) -> None:
        """Be ready for requests again."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class Scorer(Protocol):
    """Gives completions their rewards.

    Optional attributes: `reads_metadata` (False): scores depend on `Group.metadata`, too.
    `judges_groups` (False): and on the other completions of the group, equal ones among them.
    `noise` (measured): standard deviation of what its scores are off by.
    """

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """One score per completion of each group, in order.

        A completion that cannot be scored gets a `Score` with a failure; the others are not
        affected. Scores do not depend on what else is in the call.
        """


class Environment(Protocol):
    """Judges what the policy says, and answers it where the conversation goes on.

    `environments.interface.EnvironmentInterface` has all of it but `step` and
    `global_post_process_and_metrics`.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        """What it is. The same for as long as it lives."""

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """The verdict on each conversation, in order. Any number of them, from 1 up.

        A conversation that cannot be judged is a failure in the return value; an exception says
        that the environment itself is broken. May be called from several threads at once, for
        conversations that are never learned from: it leaves the state as it is.

        Args:
            message_log_batch: Whole conversations, the policy's latest message last.
            metadata: Of each: the task's metadata at first, then what the step before returned;
                and the id of its group under `environments.interface.GROUP_ID`, by which
                `group_ids` of the finished batch tells which task it was.
        """

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """The batch as it is, and figures of it, computed from it alone. Changes nothing.

        Args:
            batch: One entry per finished conversation of this environment that has a reward, in
                order: `message_log`, `prompt` and `completion` (text), `group_ids`, `rewards`
                (float32 [B]), `components` (name -> float32 [B]), `is_end` (bool [B]: not cut
                off), `prompt_lengths` and `generation_lengths` (int64 [B], tokens), `answers`,
                and `notes`, see `EnvironmentReturn`. And `num_failures`: how many more had none.

        Returns:
            The figures' names have no prefix; they are logged as `env/<name>/<figure>`.
        """

    def end_batch(self, batch: Mapping[str, Any]) -> None:
        """Let the state go on from a batch that was learned from; the only call that changes it.

        Args:
            batch: See `global_post_process_and_metrics`. Batches come in the order of their steps;
                those of validations do not come.
        """

    def state_dict(self) -> dict[str, Any]:
        """A copy of the state, in values that JSON knows, tensors and arrays."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""

    def noise_floor(self) -> float:
        """Standard deviation of the rewards' own noise: differences below it mean nothing."""

    def validate(self, tasks: Sequence[Task]) -> list[RejectedTask]:
        """The tasks that it could not judge fairly: whose own reference would not be rewarded."""

    def resting(self) -> AbstractContextManager[None]:
        """Give the memory of devices back meanwhile; nothing is judged."""

    def shutdown(self) -> None:
        """Free processes and memory. Idempotent."""


class Pending(Protocol):
    """Work that a worker group has been given and that may still be under way."""

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""

    def wait(self, *, timeout: float | None = None) -> list[Any]:
        """The results in the order of the ranks. May be called again, with the same outcome.

        Args:
            timeout: Seconds from now; None: the group's own limit.

        Raises:
            WorkerError: A worker raised, its process died, or it did not answer in time.
        """


class WorkerGroup(Protocol):
    """N equal workers, one per rank, each a plain object that knows nothing of its group.

    A worker's methods run one at a time, in the order in which they were asked for. Arguments
    and results belong to whoever made them: the other side may not write into them. What goes to
    several groups travels once as `distributed.worker_calls.Shared`.

    When a worker raises, the others get a moment to end; who does not (it may wait for the one
    that raised, in a collective) is ended, and so is the group. When a process dies or is late,
    the group is ended at once. A group that has ended raises its error from every call after.
    Every error names the role and the ranks. It is a context manager that shuts down.
    """

    @property
    def role(self) -> str:
        """What its workers are, e.g. `policy`: for messages."""

    @property
    def size(self) -> int:
        """Number of workers."""

    def start(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Ask every worker for the same, and do not wait."""

    def start_each(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> Pending:
        """Ask each worker with arguments of its own, in the order of the ranks."""

    def start_one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Ask one worker; the list that comes back has one entry."""

    def call(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """`start` and `wait`."""

    def call_each(
        self,
        method: str,
        per_rank_args: Sequence[tuple[Any, ...]],
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """`start_each` and `wait`."""

    def call_one(
        self, rank: int, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """`start_one` and `wait`, and the one result."""

    def alive(self) -> list[bool]:
        """Whether the process of each rank lives. Answers at once, also while they work."""

    def shutdown(self) -> None:
        """End every worker: its `shutdown()` if it has one, then its process. Idempotent."""
