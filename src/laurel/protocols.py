"""The protocols between rooms. Read this file second.

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
"""A conversation for environments: raw `{"role", "content"}`, never templated text."""


class Generator(Protocol):
    """A source of completions sampled from the policy."""

    @property
    def weight_version(self) -> int:
        """Version of the weights that the next token is sampled with."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Generated, None]:
        """Yield the completions of one prompt, each as soon as it has ended, in any order.

        Requests run concurrently; closing the iterator early aborts its remaining completions. An
        engine that dies raises `EngineError` from every iterator that is open.
        """

    def end_conversations(self, names: Sequence[str]) -> None:
        """Free what the engine keeps of conversations that have ended. Returns at once.

        Args:
            names: As in `GenerationRequest.conversations_G`; unknown ones are ignored.
        """

    async def update_weights(self, weights: Weights) -> None:
        """Sample from these weights from now on.

        Waits for requests in progress, so no completion mixes versions.

        Raises:
            EngineError: The engine does not compute what the weights say.
        """

    async def sleep(self) -> None:
        """Release memory while others need it. Requests wait until `wake`."""

    async def wake(self) -> None:
        """Resume serving requests."""

    def close(self) -> None:
        """Free everything. Idempotent."""


class Scorer(Protocol):
    """A scorer of completions: a reward model or anything else that gives rewards.

    Optional attributes: `names_components` (False): `Score.parts` are components of the reward.
    `reads_metadata` (False): scores depend on `Group.metadata` as well.
    `judges_groups` (False): scores depend on the other completions of the group as well, equal ones
    among them. `noise` (measured): standard deviation of the error of its scores.
    """

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score each completion of each group, in order.

        A completion that cannot be scored gets a `Score` with a failure; the others are not
        affected. Scores do not depend on what else is in the call.
        """


class Environment(Protocol):
    """An environment scores the policy's turns, and answers where the conversation goes on.

    `environments.interface.EnvironmentInterface` has all of it but `step` and
    `global_post_process_and_metrics`.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        """Properties of the environment, constant over its life."""

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Score one or more conversations, in order.

        A conversation that cannot be scored is a failure in the return value; an exception says
        that the environment itself is broken. May be called from several threads at once, for
        conversations that are not trained on: it must not change the state.

        Args:
            message_log_batch: Whole conversations, the policy's latest message last.
            metadata: Metadata of each: the task's at first, then what the step before returned;
                and the id of its group under `environments.interface.GROUP_ID`, by which
                `group_ids` of the finished batch tells which task it was; and under
                `CONVERSATION_ID` an id of its own, the same in all of its turns; `PROMPT_MESSAGES`
                and `IS_VALIDATION` tell where its answer begins and what it is for.
        """

    def close_conversations(self, metadata: Sequence[dict[str, Any] | None]) -> None:
        """Free what is kept for conversations that ended before the environment ended them.

        Called once for each conversation that `step` has seen and not terminated: it was cut off,
        ran out of turns, failed, or its batch was discarded. Called in a thread, perhaps while a
        `step` of the conversation that was given up still runs. An error becomes a warning.

        Args:
            metadata: Metadata of each, as its next `step` would get it. Some may be of
                conversations that it has not seen, which it ignores.
        """

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Return the batch unchanged, and metrics computed from it alone. Changes nothing.

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
        """Advance the state past a batch that was trained on; the only call that changes the state.

        Args:
            batch: Batch as for `global_post_process_and_metrics`. Batches come in the order of
                their steps; those of validations do not come.
        """

    def state_dict(self) -> dict[str, Any]:
        """Copy the state, in JSON values, tensors and arrays."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state."""

    def noise_floor(self) -> float:
        """Measure the standard deviation of the rewards' own noise.

        Differences below it mean nothing.
        """

    def step_noise_floor(self) -> float:
        """Measure the same of the rewards of steps."""

    def validate(self, tasks: Sequence[Task]) -> list[RejectedTask]:
        """List the tasks that it cannot score fairly: their own reference gets no reward."""

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Take the policy's tokenizer, whose chat template says how it calls functions.

        Called once, before the first rollout.

        Raises:
            ModelError: The template does not show or write what the environment needs.
        """

    def resting(self) -> AbstractContextManager[None]:
        """Release device memory for the duration; nothing is scored meanwhile."""

    def shutdown(self) -> None:
        """Release processes and memory. Idempotent."""


class Pending(Protocol):
    """A call of a worker group that may still be running."""

    def done(self) -> bool:
        """Report whether `wait` would return or raise at once."""

    def wait(self, *, timeout: float | None = None) -> list[Any]:
        """Return the results in the order of the ranks. May be called again, with the same outcome.

        Args:
            timeout: Seconds from now; None: the group's own limit.

        Raises:
            WorkerError: A worker raised, its process died, or it did not answer in time.
        """


class WorkerGroup(Protocol):
    """N equal workers, one per rank, each a plain object that knows nothing of its group.

    A worker's methods run one at a time, in the order in which they were asked for. Arguments
    and results belong to the side that made them: the other side may not write into them. What goes
    to several groups travels once as `workers.calls.Shared`.

    When a worker raises, the others get a moment to end; a worker that does not (it may wait for
    the failed one in a collective) is ended, and so is the group. When a process dies or is late,
    the group is ended at once. A group that has ended raises its error from every call after. Every
    error names the role and the ranks. It is a context manager that shuts down.
    """

    @property
    def role(self) -> str:
        """Role of its workers, e.g. `policy`: for messages."""

    @property
    def size(self) -> int:
        """Number of workers."""

    def start(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method on every worker without waiting."""

    def start_each(self, method: str, per_rank_args: Sequence[tuple[Any, ...]]) -> Pending:
        """Call a method on each worker with its own arguments, in the order of the ranks."""

    def start_one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method on one worker; the list of results has one entry."""

    def call(
        self, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call a method on every worker, and wait."""

    def call_each(
        self,
        method: str,
        per_rank_args: Sequence[tuple[Any, ...]],
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Call a method on each worker with its own arguments, and wait."""

    def call_one(
        self, rank: int, method: str, *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Any:
        """Call a method on one worker, and wait for its result."""

    def alive(self) -> list[bool]:
        """Report whether each rank's process is alive; returns at once, even during calls."""

    def shutdown(self) -> None:
        """Shut every worker down: its `shutdown()` if it has one, then its process. Idempotent."""


class MetricLogger(Protocol):
    """A destination of a run's metrics, tables and configuration."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log metrics by their full names, e.g. `train/loss` or `validation-default/accuracy`."""

    def log_table(
        self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, step: int
    ) -> None:
        """Log a table, e.g. a few pairs with their scores."""

    def log_config(self, config: Mapping[str, object]) -> None:
        """Log the resolved configuration."""

    def close(self) -> None:
        """Write pending data; nothing may be logged afterwards."""
