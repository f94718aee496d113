"""Scores completions in environments: decides which ones share a call, and measures the time."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import numpy as np

from laurel.environments.composite import CompositeEnvironment
from laurel.environments.interface import (
    CONVERSATION_ID,
    GROUP_ID,
    EnvironmentInterface,
    checked_return,
    close_quietly,
    invalid_return,
    method_name,
    source_of,
)
from laurel.errors import DataError, EnvironmentFailedError, WorkerError
from laurel.models.tokenizer import shared_prefix
from laurel.observe.user_code import is_installed, is_ours, line_of
from laurel.protocols import Environment
from laurel.types import (
    IS_VALIDATION,
    PROMPT_MESSAGES,
    Branch,
    Conversation,
    Generated,
    Message,
    Observation,
    Rollout,
    StepReward,
    Turn,
    messages_of,
)
from laurel.workers.threads import DaemonThread, end_all

if TYPE_CHECKING:
    from laurel.types import LogProbs, Mask, TokenIds


# A completion while it is being played: what was said, its tokens, its reward so far.


@dataclass(slots=True, kw_only=True)
class RolloutInProgress:
    """A completion that is being generated and scored, turn by turn."""

    index: int
    metadata: dict[str, Any] | None
    group_id: str = ""
    """The id of the group that the completion belongs to."""
    num_prompt_messages: int = 0
    is_validation: bool = False
    is_greedy: bool = False
    """Whether the likeliest token is taken each time: a baseline, which is not learned from."""
    id: str = field(default_factory=lambda: uuid4().hex)
    """An id that the rollouts of a discarded batch, played anew, do not have."""
    messages: list[Message] = field(default_factory=list)
    ids: list[TokenIds] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    logprobs: list[LogProbs] = field(default_factory=list)
    contexts: list[int] = field(default_factory=list)
    """Which pieces of `ids` are whole contexts, from the prompt's first token on: with each of them
    a further sequence begins."""
    reward: float = 0.0
    components: dict[str, float] = field(default_factory=dict)
    rounding: float = 0.0
    """A bound of the rounding error of `reward`, the sum over components and turns, and so of each
    component of it."""
    failure: str | None = None
    truncated: bool = False
    is_over: bool = False
    num_turns: int = 0
    weight_version: int | None = None
    answer: str | None = None
    note: Any = None
    turns: list[Turn] = field(default_factory=list)
    invalid_turns: list[int] = field(default_factory=list)
    new_steps: Sequence[StepReward] | None = None
    """Rewards of steps of the last turn, as the environment gave them."""
    steps: list[StepReward] | None = None
    stop_strings: tuple[str, ...] = ()
    observation: Observation = ()
    """The environment's last observation."""
    is_open: bool = False
    """Whether the environment has seen the conversation, and has not ended it."""
    begun: tuple[TokenIds, LogProbs] | None = None
    """The first tokens of a turn that is to be continued, as they were sampled."""
    branch: Branch | None = None
    turn_starts: list[RolloutInProgress] | None = None
    """Copies made before each of its turns, from which others may go on; None: none does."""

    @property
    def full_metadata(self) -> dict[str, Any]:
        """The metadata as the environment gets it: the task's, and that of the rollout."""
        return {
            **(self.metadata or {}),
            GROUP_ID: self.group_id,
            CONVERSATION_ID: self.id,
            PROMPT_MESSAGES: self.num_prompt_messages,
            IS_VALIDATION: self.is_validation,
        }

    def copy(self) -> RolloutInProgress:
        """Return a copy that goes on by itself, a conversation that no environment has seen."""
        names = ("messages", "ids", "masks", "logprobs", "contexts", "turns", "invalid_turns")
        lists: dict[str, Any] = {name: list(getattr(self, name)) for name in names}
        return replace(
            self,
            id=uuid4().hex,
            metadata=deepcopy(self.metadata),
            components=dict(self.components),
            is_open=False,
            turn_starts=None if self.turn_starts is None else [],
            **lists,
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens after the prompt so far."""
        return sum(map(len, self.ids)) + (0 if self.begun is None else len(self.begun[0]))

    def add_turn(self, generated: Generated, text_of: Callable[[TokenIds], str]) -> None:
        """Append an assistant turn that the generator has sampled, or the rest of one."""
        ids, logprobs, text = generated.ids_L, generated.logprobs_L, generated.text
        if self.begun is not None:
            ids = np.concatenate((self.begun[0], ids))
            logprobs = np.concatenate((self.begun[1], logprobs))
            text, self.begun = text_of(ids), None
        begin = sum(map(len, self.ids))
        self.turns.append(Turn(len(self.messages), begin, begin + len(ids)))
        self._append(ids, True, logprobs)
        self.messages.append(Message("assistant", text))
        self.num_turns += 1
        self.truncated = generated.finish_reason != "stop"
        versions = (self.weight_version, generated.weight_version)
        self.weight_version = min(v for v in versions if v is not None)

    def add_observation(self, observation: Observation, ids: TokenIds) -> None:
        """Append the environment's messages, with their tokens, which are not trained on."""
        self._append(ids, False, np.zeros(len(ids), dtype=np.float32))
        self.messages += [Message(m["role"], m["content"]) for m in messages_of(observation)]

    def begin_sequence(self, observation: Observation, context_ids: TokenIds) -> None:
        """Append the environment's messages where the template rewrites the turns before them.

        `context_ids` are all tokens up to the policy's next turn, from the prompt's first on.
        """
        self.contexts.append(len(self.ids))
        self.add_observation(observation, context_ids)

    def context(self, prompt_ids: TokenIds) -> TokenIds:
        """Return all tokens before the policy's next turn: those of the latest sequence."""
        if self.contexts:
            return _joined(self.ids[self.contexts[-1] :])
        return np.concatenate((prompt_ids, *self.ids))

    def num_shared(self, prompt_ids: TokenIds) -> int:
        """Count the first tokens of the prompt with which all sequences begin."""
        contexts = [self.ids[piece] for piece in self.contexts]
        return shared_prefix([np.append(prompt_ids, -1), *contexts])

    def _append(self, ids: TokenIds, is_policy: bool, logprobs: LogProbs) -> None:
        self.ids.append(np.asarray(ids, dtype=np.int32))
        self.masks.append(np.full(len(ids), is_policy))
        self.logprobs.append(np.asarray(logprobs, dtype=np.float32))

    def place_steps(self, ends_of: TokenEnds, step: Callable[..., Any]) -> None:
        """Check the rewards of the last turn's steps, and find the tokens at which the steps end.

        The conversation fails if they are invalid, or if the environment has ended it without any.
        One that is cut off before may have no steps.

        Args:
            ends_of: Finds the tokens, as `ChatFormat.token_ends` does.
            step: The method that returned them, for error messages.
        """
        given, self.new_steps = self.new_steps, None
        if self.failure is not None or (given is None and not self.is_over):
            return
        if given is None:
            if self.steps is None:
                expected = "a list, because its spec says gives_steps"
                self.fail(str(invalid_return(step, "None as steps", expected)))
            return
        text, before = self.messages[-1].content, sum(map(len, self.ids[:-1]))
        try:
            new = _checked_steps(step, given, text)
            ends = ends_of(self.ids[-1], text, [one.end for one in new]) if new else ()
        except (DataError, EnvironmentFailedError) as error:
            self.fail(str(error))
            return
        placed = [StepReward(before + end, one.value) for end, one in zip(ends, new, strict=True)]
        self.steps = (self.steps or []) + placed

    def fail(self, reason: str) -> None:
        """End the conversation without a reward; `reason` becomes the rollout's `failure`."""
        self.failure, self.is_over = reason, True

    def finished(self, prompt_ids: TokenIds, num_shared: int) -> Rollout:
        """Return this conversation as a `Rollout`; its reward is None if it failed.

        Its sequences begin after the first `num_shared` tokens of the prompt.
        """
        rest_L = prompt_ids[num_shared:]
        skipped = [num_shared if i in self.contexts else 0 for i in range(len(self.ids))]

        def flat(pieces: Sequence[np.ndarray], first: np.ndarray) -> np.ndarray:
            kept = [piece[skip:] for piece, skip in zip(pieces, skipped, strict=True)]
            return _joined([first, *kept] if len(first) else kept)

        # Where pieces end, as it was sampled, and how far what follows moves.
        played = [0, *accumulate(map(len, self.ids))]
        moves = [len(rest_L) - before for before in accumulate(skipped, initial=0)]

        def moved(end: int) -> int:
            return end + moves[bisect_left(played, end)]

        return Rollout(
            messages=tuple(self.messages),
            ids_L=flat(self.ids, rest_L),
            mask_L=flat(self.masks, np.zeros(len(rest_L), dtype=bool)),
            logprobs_L=flat(self.logprobs, np.zeros(len(rest_L), dtype=np.float32)),
            reward=None if self.failure is not None else self.reward,
            components=self.components,
            failure=self.failure,
            truncated=self.truncated,
            num_turns=self.num_turns,
            turns=tuple(Turn(one.message, moved(one.begin), moved(one.end)) for one in self.turns),
            weight_version=self.weight_version or 0,
            answer=self.answer,
            note=self.note,
            steps=None
            if self.steps is None
            else tuple(StepReward(moved(one.end), one.value) for one in self.steps),
            invalid_turns=tuple(self.invalid_turns),
            branch=None
            if self.branch is None
            else Branch(self.branch.of, moved(self.branch.length)),
            begins=tuple(moved(played[piece]) for piece in self.contexts),
        )


TokenEnds = Callable[["TokenIds", str, Sequence[int]], Sequence[int]]


def _place_steps(
    rollouts: Sequence[RolloutInProgress], ends_of: TokenEnds, step: Callable[..., Any]
) -> None:
    for rollout in rollouts:
        rollout.place_steps(ends_of, step)


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays; a single one, as most conversations have, is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def take_verdict(
    step: Callable[..., Any], returned: Any, rollouts: Sequence[RolloutInProgress]
) -> None:
    """Write what an environment's `step` returned into the conversations that it scored.

    A conversation fails if its reward is not finite, or if an observation that should continue it
    is not a message.

    Args:
        step: The method that was called, for error messages.
        rollouts: The conversations, in the order in which they were passed to `step`.

    Raises:
        EnvironmentFailedError: The value does not have one entry for each conversation.
    """
    verdict, columns, over = checked_return(step, returned, len(rollouts))
    for i, rollout in enumerate(rollouts):
        rollout.is_open = not over[i]
        failure = verdict.failures[i] if verdict.failures is not None else None
        observation = verdict.observations[i]
        values = {name: float(column[i]) for name, column in columns.items()}
        components = {name: value for name, value in values.items() if name}
        if verdict.components is not None and failure is None:
            components |= {name: float(v) for name, v in verdict.components[i].items()}
        for name, value in (values | components).items():
            if failure is None and not np.isfinite(value):
                what = f"the reward {value}" + (f" as {name!r}" if name else "")
                failure = str(
                    invalid_return(step, what, "a finite number, or a reason in `failures`")
                )
        if failure is None and not over[i] and not _are_messages(observation):
            failure = f"{observation!r} is no observation: a role and a content are expected"
        if failure is not None:
            rollout.fail(failure)
            continue
        rollout.reward += sum(values.values())
        rollout.rounding += ROUNDING * sum(map(abs, values.values()))
        for name, value in components.items():
            rollout.components[name] = rollout.components.get(name, 0.0) + value
        rollout.is_over = bool(over[i])
        rollout.metadata = verdict.metadata[i]
        stops = verdict.next_stop_strings[i]
        rollout.stop_strings = rollout.stop_strings if stops is None else tuple(stops)
        rollout.answer = verdict.answers[i] if verdict.answers is not None else None
        rollout.note = verdict.notes[i] if verdict.notes is not None else None
        if verdict.invalid_calls is not None and verdict.invalid_calls[i]:
            rollout.invalid_turns.append(rollout.num_turns - 1)
        rollout.new_steps = verdict.steps[i] if verdict.steps is not None else None
        rollout.observation = observation


def _checked_steps(step: Callable[..., Any], given: Any, text: str) -> list[StepReward]:
    expected = "a StepReward for each step: the number of characters up to its end, and its reward"
    try:  # of numpy and torch too, which neither JSON nor a checkpoint could hold
        steps = [StepReward(index(end), float(value)) for end, value in given]
    except (TypeError, ValueError, RuntimeError) as error:
        raise invalid_return(step, f"{given!r:.200} as steps", expected) from error
    ends = [one.end for one in steps]
    limits = (0 if text else -1, *ends, len(text) + 1)
    if any(one >= other for one, other in pairwise(limits)):
        returned = f"steps that end at {ends} in a message of {len(text)} characters"
        raise invalid_return(step, returned, "ascending ends, the last at most there")
    if not all(np.isfinite(one.value) for one in steps):
        raise invalid_return(step, "a reward of a step that is not finite", expected)
    return steps


def _are_messages(observation: Any) -> bool:
    said = observation if isinstance(observation, list | tuple) else [observation]
    return bool(said) and all(
        isinstance(one, Mapping)
        and all(isinstance(one.get(key), str) for key in ("role", "content"))
        for one in said
    )


PendingGrade = tuple[Conversation, RolloutInProgress]
"""The prompt and the rest of a conversation that is to be scored."""

MAX_PARTS = 4
"""Maximum number of parts of a group that is scored in parts."""
MIN_TOKEN_RATIO = 2
"""Minimum ratio of a part's tokens to those of its prompt for a separate scoring call."""


@dataclass(slots=True, kw_only=True)
class RolloutStats:
    """The durations, in seconds, and the counts of a batch of rollouts."""

    generation: float = 0.0
    """Time from the first request for completions to the last completion."""
    environment: float = 0.0
    """Time in calls of environments, summed over all calls."""
    judging: float = 0.0  # as files of checkpoints name it
    """Time with at least one call of an environment in progress."""
    exposed: float = 0.0
    """Time of waiting for environments after generation has ended."""
    num_tokens: int = 0
    """Tokens sampled during `generation`, including groups that were left out."""
    num_repeated: int = 0
    """Tokens of earlier turns, which are in the prompts of later turns again."""
    num_cached: int = 0
    """Tokens of `num_repeated` that the generator did not compute again."""
    num_out_of_turns: int = 0
    """Conversations that ran out of turns before their environment ended them."""
    num_cut_off: int = 0
    """Conversations that reached a limit of tokens before their environment ended them."""

    @property
    def hidden_share(self) -> float | None:
        """Share of the scoring time that overlapped with generation, 0 to 1.

        None if no environment was called.
        """
        if not self.judging:
            return None
        return max(0.0, 1.0 - self.exposed / self.judging)

    def end_unfinished(self, rollout: RolloutInProgress, *, is_out_of_turns: bool) -> None:
        """Mark a conversation as truncated and over before its environment ended it, and count it.

        Args:
            is_out_of_turns: Whether the limit of turns ended it; otherwise its tokens ran out.
        """
        rollout.truncated = rollout.is_over = True
        if is_out_of_turns:
            self.num_out_of_turns += 1
        else:
            self.num_cut_off += 1


class Calls:
    """Limits and times the calls of environments that one batch of rollouts makes."""

    def __init__(self, stats: RolloutStats, limit: int) -> None:
        """Set up the limit of concurrent environment calls and the timer of their duration.

        Args:
            stats: Accumulates the seconds that calls take, in `environment` and `judging`.
            limit: The maximum number of concurrent calls of environments.
        """
        self.stats = stats
        self.slots = asyncio.Semaphore(limit)
        self._num_open = 0
        self._began = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Time one call of an environment, which runs while the context is open."""
        started = time.monotonic()
        if not self._num_open:
            self._began = started
        self._num_open += 1
        try:
            yield
        finally:
            now = time.monotonic()
            self.stats.environment += now - started
            self._num_open -= 1
            if not self._num_open:
                self.stats.judging += now - self._began


class Graders:
    """Calls environments in threads, and writes rewards and failures into the conversations."""

    def __init__(
        self, *, timeout: float, num_threads: int, ends_of: TokenEnds | None = None
    ) -> None:
        """Set the limits of calls; threads start with the first calls.

        Args:
            timeout: The maximum seconds of a call. A call for n groups may take n times as long.
            ends_of: Finds the tokens at which steps end, as `ChatFormat.token_ends` does; None if
                nothing reads rewards of steps.
        """
        self._timeout = timeout
        self._ends_of = ends_of
        self._threads = PatientThreads(num_threads, name="environment")

    def begin(self, stats: RolloutStats) -> Calls:
        """Create the limit and the timer that the calls of one batch share."""
        return Calls(stats, self._threads.limit)

    def close(self) -> None:
        """Stop the idle threads; calls in progress are abandoned, not waited for."""
        self._threads.close()

    async def grade(
        self,
        environment: Environment,
        pending: Sequence[PendingGrade],
        calls: Calls,
        *,
        num_groups: int = 1,
    ) -> None:
        """Score conversations in one call of their environment.

        Each conversation gets its reward. If the call raises an error or takes too long, all
        conversations fail with that reason.

        Args:
            calls: Limits how many environment calls of the batch run at the same time, and times
                them.
            num_groups: The number of groups that the conversations come from; the time limit of a
                call (the argument `timeout` of `Graders`) is multiplied by it.

        Raises:
            WorkerError: The environment's worker process is lost.
        """
        rollouts = [rollout for _, rollout in pending]
        logs = [
            [{"role": m.role, "content": m.content} for m in (*prompt, *rollout.messages)]
            for prompt, rollout in pending
        ]
        metadata = [rollout.full_metadata for rollout in rollouts]
        for rollout in rollouts:
            rollout.is_open = True
        timeout = self._timeout * num_groups
        with calls.one():
            try:
                verdict = await self._threads.call(
                    calls.slots, environment.step, logs, metadata, timeout=timeout
                )
                take_verdict(environment.step, verdict, rollouts)
            except GivenUpError:
                for rollout in rollouts:
                    rollout.fail(f"timeout: no verdict within {timeout:g} s (env.timeout_seconds)")
            except (
                EnvironmentFailedError
            ) as error:  # its message names the environment and the line
                for rollout in rollouts:
                    rollout.fail(str(error))
            except Exception as error:  # an environment's own code: anything can come out of it
                if isinstance(error, WorkerError) and error.is_lost:
                    raise  # the worker is gone: not these samples' fault, nor the next ones'
                for rollout in rollouts:
                    rollout.fail(described(error, environment.step))
        # From here on the environment is not at fault, and its time is over.
        if self._ends_of is not None and environment.spec.gives_steps:
            place = partial(_place_steps, rollouts, self._ends_of, environment.step)
            try:
                await self._threads.call(calls.slots, place, timeout=timeout)
            except Exception as error:  # of a tokenizer
                reason = f"the tokens that end its steps were not found: {described(error)}"
                for rollout in rollouts:
                    if rollout.failure is None:
                        rollout.fail(reason)

    async def close_conversations(
        self, environment: Environment, metadata: Sequence[dict[str, Any]], calls: Calls
    ) -> None:
        """Tell an environment in a thread that conversations have ended.

        An error or a call that takes too long is a warning in the log.
        """
        close = partial(close_quietly, environment, metadata)
        try:
            await self._threads.call(calls.slots, close, timeout=self._timeout)
        except GivenUpError as error:
            logging.getLogger(__name__).warning(
                "%s: %s (env.timeout_seconds)", method_name(environment.close_conversations), error
            )


def keeps_conversations(environment: Environment) -> bool:
    """Report whether `close_conversations` does anything: of a composite, that of any part."""
    if isinstance(environment, CompositeEnvironment):
        return any(map(keeps_conversations, environment.parts.values()))
    # An environment of the user's own need not have it.
    method = getattr(environment, "close_conversations", None)
    no_op = EnvironmentInterface.close_conversations
    return method is not None and getattr(method, "__func__", method) is not no_op


def alone(environments: Iterable[Environment]) -> list[Environment]:
    """Return environments and, in place of composites, all that they contain, each once."""
    found: dict[int, Environment] = {}
    for one in environments:
        parts = alone(one.parts.values()) if isinstance(one, CompositeEnvironment) else [one]
        found |= {id(part): part for part in parts}
    return list(found.values())


def parts_to_grade(
    environment: Environment, rollouts: Sequence[RolloutInProgress]
) -> list[list[RolloutInProgress]]:
    """Divide a group into parts, each scored as soon as all of its completions have ended.

    The division depends on indices alone, never on the order of completion.
    """
    most = {"completion": len(rollouts), "part": MAX_PARTS}.get(environment.spec.judges, 1)
    size = -(-len(rollouts) // most)
    return [list(rollouts[first : first + size]) for first in range(0, len(rollouts), size)]


def worth_separate_call(
    part: Sequence[RolloutInProgress], environment: Environment, prompt_length: int
) -> bool:
    """Report whether a part of a group is long enough to be scored in a call of its own.

    Each call computes the prompt again. The rule bounds the extra computation for a group at 50 %.
    The answer depends on the tokens alone, so it is the same in every run. Environments that score
    single completions always get separate calls.
    """
    if environment.spec.judges == "completion":
        return True
    return (
        sum(len(ids) for rollout in part for ids in rollout.ids) >= MIN_TOKEN_RATIO * prompt_length
    )


def copy_reward_to_duplicates(rollouts: Iterable[RolloutInProgress]) -> None:
    """Give conversations with equal messages equal rewards: those of the first of them.

    Equal conversations that are scored in different calls may otherwise differ by rounding.
    """
    first_of: dict[Conversation, RolloutInProgress] = {}
    for rollout in rollouts:
        if rollout.failure is None:
            first = first_of.setdefault(tuple(rollout.messages), rollout)
            rollout.reward, rollout.components = first.reward, dict(first.components)
            rollout.note, rollout.rounding = first.note, first.rounding
            if rollout.steps and first.steps and len(rollout.steps) == len(first.steps):
                # Equal texts may have different tokens.
                rollout.steps = [
                    StepReward(own.end, one.value)
                    for own, one in zip(rollout.steps, first.steps, strict=True)
                ]


ROUNDING = 8 * float(np.finfo(np.float64).eps)
"""The bound of the rounding error of a sum of weighted rewards, relative to their absolute sum."""


def level_rounding(rollouts: Iterable[RolloutInProgress]) -> None:
    """Make rewards of a group equal that differ by no more than the rounding of their sums.

    0.1 + 0.2 and 0.3 are such rewards. Normalisation would turn the difference into an advantage.
    So are components, which are sums over turns.
    """
    scored = [one for one in rollouts if one.failure is None]
    for lower, higher in pairwise(sorted(scored, key=lambda one: one.reward)):
        if higher.reward - lower.reward <= lower.rounding + higher.rounding:
            higher.reward = lower.reward
    for name in {name for one in scored for name in one.components}:
        values = [
            (one.components[name], i) for i, one in enumerate(scored) if name in one.components
        ]
        for lower, higher in pairwise(scored[i] for _, i in sorted(values)):
            difference = higher.components[name] - lower.components[name]
            if difference <= lower.rounding + higher.rounding:
                higher.components[name] = lower.components[name]


class BatchBarrier:
    """Collects the groups of a batch for an environment that scores all of them in one call."""

    def __init__(self, num_groups: int) -> None:
        self._num_missing = num_groups
        self._pending: list[PendingGrade] = []
        self._is_done = asyncio.Event()

    async def wait(
        self,
        pending: Sequence[PendingGrade],
        grade: Callable[[Sequence[PendingGrade]], Awaitable[None]],
    ) -> None:
        """Add a group, and wait until all groups of the batch have been scored.

        The last group to arrive calls `grade` with the conversations of all groups.
        """
        self._pending += pending
        self._num_missing -= 1
        if self._num_missing:
            await self._is_done.wait()
            return
        await grade(self._pending)
        self._is_done.set()


# Doing things side by side: calls that block in threads, and coroutines that fail together.

T = TypeVar("T")


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently, and return their results in order.

    The first exception cancels the other coroutines, and is raised when they have ended.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


class PatientThreads:
    """Runs blocking calls in threads, and abandons those that take too long.

    An abandoned call keeps its thread, and another thread replaces it in the pool. No thread keeps
    the process from exiting.
    """

    def __init__(self, limit: int, *, name: str) -> None:
        """Create a pool of at most `limit` threads with this name.

        Each thread is started when a call first needs it.
        """
        self.limit = limit
        self._name = name
        self._idle: list[DaemonThread] = []

    async def call(
        self,
        slots: asyncio.Semaphore,
        function: Callable[..., T],
        *arguments: Any,
        timeout: float,
    ) -> T:
        """Call a function in a thread; return its result or raise its exception.

        Args:
            slots: A semaphore of the running event loop that admits `limit` calls.
            timeout: The maximum seconds of the call; waiting for a slot does not count.

        Raises:
            GivenUpError: The call took longer than `timeout`.
        """
        async with slots:
            thread = self._idle.pop() if self._idle else DaemonThread(self._name)
            future = thread.begin(function, *arguments)
            waiting = asyncio.wrap_future(future)
            try:
                await asyncio.wait((waiting,), timeout=timeout)
                if not waiting.done():
                    raise GivenUpError(f"nothing within {timeout:g} s")
                call = waiting.result()
            finally:
                if future.done() and not future.cancelled():
                    self._idle.append(thread)
                else:
                    waiting.cancel()
                    thread.end()
        try:
            return call()
        except BaseException as error:
            # sys.exit() must not end the loop, and a coroutine may not raise StopIteration.
            if not isinstance(error, Exception) or isinstance(error, StopIteration):
                raise RuntimeError(described(error)) from None
            raise

    def close(self) -> None:
        """End the idle threads and wait for them; threads with a call in progress are left."""
        idle, self._idle = self._idle, []
        for thread in idle:
            thread.end()
        for thread in idle:
            thread.join()


class GivenUpError(Exception):
    """Raised when a call in a thread took longer than its time limit."""


def described(error: BaseException, called: Callable[..., Any] | None = None) -> str:
    """Describe an exception in one line, with the line of code that raised it.

    Args:
        called: The function whose author reads the message. The line shown is then the innermost
            one in the function's file, or in a file that is part of no installed package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    source = None if called is None else source_of(called)
    if called is not None and source is not None:
        own = [f for f in frames if f.filename == source[0] or not is_installed(f.filename)]
        if own:
            where = f" ({line_of(own[-1].filename, own[-1].lineno)})"
        elif all(is_ours(frame.filename) for frame in frames):
            where = f" (calling {method_name(called)})"  # it did not take how it was called
    return f"{type(error).__name__}: {error}{where}"
