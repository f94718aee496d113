"""Runs the rollouts of tasks: generate, score, append observations, generate again.

Generation and scoring overlap. The generator gets the requests of all tasks at once. The
environment gets finished completions while others are still being generated: one by one if the
environment can score single completions, otherwise group by group. An environment may also ask for
parts of a group, or for the whole batch; see `types.JudgingUnit`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from laurel.config.grpo import TreeConfig
from laurel.errors import ConfigError, DataError, EngineError, EnvironmentFailedError
from laurel.grpo.branching import CHOICE, branch_off
from laurel.grpo.grading import (
    BatchBarrier,
    Calls,
    Graders,
    PendingGrade,
    RolloutInProgress,
    RolloutStats,
    copy_reward_to_duplicates,
    described,
    keeps_conversations,
    level_rounding,
    parts_to_grade,
    together,
    worth_separate_call,
)
from laurel.grpo.shared_devices import SharedDevices, Use
from laurel.protocols import Environment, Generator
from laurel.types import (
    GenerationRequest,
    RolloutGroup,
    SamplingParams,
    Task,
)
from laurel.workers.threads import end_all

if TYPE_CHECKING:
    from laurel.models.chat import ChatFormat
    from laurel.types import TokenIds

TRAINING, VALIDATION = 0, 1
"""The first of the numbers from which the seeds of a batch are derived."""


@dataclass(slots=True, kw_only=True)
class _Batch:
    numbers: tuple[int, ...]
    num_generations: int
    with_greedy: bool
    sampling: SamplingParams
    calls: Calls
    # How completions branch; None: they do not.
    tree: TreeConfig | None
    # The groups of a batch branch at the same time, once nothing is being sampled: so what is
    # computed together, and its rounding, depends on no clock. Turns wait for environments anyway.
    rounds: Sequence[BatchBarrier]
    # The groups of an environment that scores a whole batch wait here for each other.
    barriers: dict[str, BatchBarrier]
    # Requests with completions outstanding.
    num_open: int = 0
    # Calls that tell environments of conversations that ended without them.
    closing: set[asyncio.Task[None]] = field(default_factory=set)
    # Time of the latest request or completion.
    last_news: float = field(default_factory=time.monotonic)
    last_completion: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RolloutContext:
    task: Task
    environment: Environment
    prompt_ids: TokenIds
    # Number of the batch, then of the task in it.
    numbers: tuple[int, ...]
    batch: _Batch

    @property
    def group_id(self) -> str:
        return "-".join(map(str, self.numbers))


CLOSING_SECONDS = 10.0
"""Seconds that a failed generator may take to release its requests, and environments to close
conversations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """What a run allows its rollouts."""

    max_turns: int
    """The maximum number of the policy's turns in a conversation."""
    max_length: int
    """The maximum number of tokens of a whole conversation."""
    environment_timeout: float = 600.0
    """The maximum seconds of a call of an environment."""
    generation_timeout: float = 1800.0
    """The maximum seconds without a new completion; then generation fails."""
    max_failed_share: float = 0.5
    """The share of failed completions that `check_failures` allows."""
    num_threads: int = 16
    """The maximum number of concurrent calls of environments."""


class Rollouts:
    """Runs rollouts with one generator and the environments of a run."""

    def __init__(
        self,
        generator: Generator,
        environments: Mapping[str, Environment],
        chat: ChatFormat,
        limits: RolloutLimits,
        *,
        seed: int,
        per_step: bool = False,
        tree: TreeConfig | None = None,
        devices: SharedDevices | None = None,
    ) -> None:
        """Set the components and limits that stay the same during a run.

        Args:
            environments: The environments by the names that tasks give.
            seed: The seed of the run. The seed of each turn is derived from it and from the
                numbers of the batch, task, completion and turn.
            per_step: Whether rollouts get the rewards of their steps.
            tree: The section `grpo.tree`; validations do without.
            devices: Those that the generator shares with environments that rest; None: it has its
                own.

        Raises:
            ConfigError: An environment's conversations, or its answers, cannot branch.
        """
        if tree is not None:
            for name, environment in environments.items():
                _check_branches(name, environment, at_turns=limits.max_turns > 1)
        self.tree = tree
        self._devices = devices
        self.generator = generator
        self.environments = environments
        self.chat = chat
        self.limits = limits
        # 32 bits each, as `SeedSequence` divides numbers.
        self._seed_words = [
            seed >> bit & 0xFFFF_FFFF for bit in range(0, max(1, seed.bit_length()), 32)
        ]
        self._graders = Graders(
            timeout=limits.environment_timeout,
            num_threads=limits.num_threads,
            ends_of=chat.token_ends if per_step else None,
        )

    def close(self) -> None:
        """Stop the threads; the caller closes the generator and the environments."""
        self._graders.close()

    async def play(
        self,
        tasks: Sequence[Task],
        *,
        num_generations: int,
        sampling: SamplingParams,
        batch: tuple[int, ...],
        with_greedy: bool = False,
        stats: RolloutStats | None = None,
        on_group: Callable[[RolloutGroup], None] = lambda group: None,
    ) -> list[RolloutGroup]:
        """Run the rollouts of all tasks.

        Args:
            tasks: Tasks whose prompts fit into the context.
            sampling: The sampling parameters. Each turn's `max_new_tokens` is reduced to the tokens
                that `max_length` leaves.
            batch: Numbers that identify this batch within the run; the seeds depend on them.
            with_greedy: Whether each group gets a `greedy` completion besides, which is scored in
                the same calls.
            on_group: Called with each group as soon as it is finished, in any order.

        Returns:
            A group for each task, in order.

        Raises:
            EngineError: The generator died or is stuck.
            WorkerError: The worker process of an environment is lost.
        """
        stats = stats or RolloutStats()
        names = Counter(task.environment for task in tasks)
        tree = None if batch[:1] == (VALIDATION,) else self.tree
        num_rounds = tree.rounds if tree is not None and self.limits.max_turns == 1 else 0
        played = _Batch(
            numbers=batch,
            num_generations=num_generations + with_greedy,
            with_greedy=with_greedy,
            sampling=sampling,
            calls=self._graders.begin(stats),
            tree=tree,
            rounds=[BatchBarrier(len(tasks)) for _ in range(num_rounds)],
            barriers={
                name: BatchBarrier(number)
                for name, number in names.items()
                if self.environments[name].spec.judges == "batch"
            },
        )
        started = played.last_completion
        rollouts = asyncio.ensure_future(
            together(self._play(task, i, played, on_group) for i, task in enumerate(tasks))
        )
        watch = asyncio.ensure_future(self._watch(played))
        try:
            await asyncio.wait((rollouts, watch), return_when=asyncio.FIRST_COMPLETED)
            groups = rollouts.result() if rollouts.done() else watch.result()
        finally:
            await end_all((rollouts, watch), patience=CLOSING_SECONDS)
            if played.closing:
                await asyncio.wait(played.closing, timeout=CLOSING_SECONDS)
        stats.generation += played.last_completion - started
        stats.exposed += time.monotonic() - played.last_completion
        return groups

    async def _watch(self, batch: _Batch) -> list[RolloutGroup]:
        # A generator that is stuck gives no error by itself.
        limit = self.limits.generation_timeout
        while True:
            quiet = time.monotonic() - batch.last_news if batch.num_open else 0.0
            if quiet > limit:
                raise EngineError(
                    f"the generator has finished nothing for {quiet:.0f} s "
                    "(policy.generation.timeout_seconds)"
                )
            await asyncio.sleep(min(limit - quiet + 0.01, 5.0))

    async def _play(
        self, task: Task, index: int, batch: _Batch, on_group: Callable[[RolloutGroup], None]
    ) -> RolloutGroup:
        environment = self.environments[task.environment]
        context = _RolloutContext(
            task=task,
            environment=environment,
            prompt_ids=self.chat.prompt_ids(task.prompt, tools=environment.spec.tools),
            numbers=(*batch.numbers, index),
            batch=batch,
        )
        rollouts = [
            RolloutInProgress(
                index=i,
                metadata=dict(task.metadata),
                group_id=context.group_id,
                num_prompt_messages=len(task.prompt),
                is_validation=batch.numbers[:1] == (VALIDATION,),
                stop_strings=environment.spec.stop_strings,
                is_greedy=batch.with_greedy and i == batch.num_generations - 1,
            )
            for i in range(_num_first(batch))
        ]
        if batch.tree is not None:
            for rollout in rollouts:
                rollout.turn_starts = [rollout.copy()]
        by_segments = batch.tree is not None and self.limits.max_turns == 1
        try:
            if by_segments:  # all of them are one group, which is scored as a whole
                await self._sample_all(context, rollouts)
                await self._branch(context, rollouts)
            if (barrier := batch.barriers.get(task.environment)) is not None:
                if not by_segments:
                    await self._sample_all(context, rollouts)
                await barrier.wait(_pending(context, rollouts), partial(self._grade, context))
                await self._run_further_turns(context, rollouts)
            elif by_segments:
                parts = parts_to_grade(environment, rollouts)
                await together(self._finish_part(context, part) for part in parts)
            else:
                await self._grade_in_parts(context, parts_to_grade(environment, rollouts))
            if batch.tree is not None and not by_segments:
                await self._branch(context, rollouts)
        finally:
            self._end_conversations(context, rollouts)
        if environment.spec.judges in ("completion", "part"):
            copy_reward_to_duplicates(rollouts)
        level_rounding(rollouts)
        prompt_ids = context.prompt_ids
        num_shared = min(rollout.num_shared(prompt_ids) for rollout in rollouts)
        finished = tuple(rollout.finished(prompt_ids, num_shared) for rollout in rollouts)
        group = RolloutGroup(
            id=context.group_id,
            task=task,
            prompt_ids=prompt_ids[:num_shared],
            rollouts_G=finished[:-1] if batch.with_greedy else finished,
            greedy=finished[-1] if batch.with_greedy else None,
        )
        on_group(group)
        return group

    async def _sample_all(
        self, context: _RolloutContext, rollouts: Sequence[RolloutInProgress]
    ) -> None:
        async with aclosing(self._sample_turn(context, rollouts)) as sampled:
            async for _ in sampled:
                pass

    async def _branch(self, context: _RolloutContext, rollouts: list[RolloutInProgress]) -> None:
        # Adds the completions of all rounds, each when those before it are finished.
        tree = context.batch.tree
        assert tree is not None
        for number in range(tree.rounds):
            seed = np.random.SeedSequence((*self._seed_words, *context.numbers, CHOICE, number))
            at_turns = self.limits.max_turns > 1
            begun = branch_off(rollouts, tree, self.chat.token_ends, seed, at_turns=at_turns)
            rollouts += begun
            if at_turns:
                await together(self._take_turns(context, rollout) for rollout in begun)
            else:
                await context.batch.rounds[number].wait((), _nothing)
                await together(self._sample_all(context, [rollout]) for rollout in begun)

    async def _grade_in_parts(
        self, context: _RolloutContext, parts: Sequence[list[RolloutInProgress]]
    ) -> None:
        # Each part continues as soon as all of it has ended. Parts too short to repay computing the
        # prompt once more are scored in one call at the end.
        part_of = {rollout.index: part for part in parts for rollout in part}
        missing = {id(part): len(part) for part in parts}
        waiting: list[RolloutInProgress] = []
        ends: list[asyncio.Task[None]] = []
        try:
            async with aclosing(
                self._sample_turn(context, [g for p in parts for g in p])
            ) as sampled:
                async for rollout in sampled:
                    part = part_of[rollout.index]
                    missing[id(part)] -= 1
                    if missing[id(part)]:
                        continue
                    if worth_separate_call(part, context.environment, len(context.prompt_ids)):
                        ends.append(asyncio.ensure_future(self._finish_part(context, part)))
                    else:
                        waiting += part
            if waiting:
                waiting.sort(key=lambda rollout: rollout.index)
                ends.append(asyncio.ensure_future(self._finish_part(context, waiting)))
            await asyncio.gather(*ends)
        finally:
            await end_all(ends)

    async def _finish_part(
        self, context: _RolloutContext, rollouts: Sequence[RolloutInProgress]
    ) -> None:
        await self._grade(context, _pending(context, rollouts))
        await self._run_further_turns(context, rollouts)

    async def _run_further_turns(
        self, context: _RolloutContext, rollouts: Sequence[RolloutInProgress]
    ) -> None:
        for rollout in rollouts:
            self._continue(context, rollout)
        self._leave(context, [rollout for rollout in rollouts if rollout.is_over])
        # A task for each would cost more than the rest of a step for a short conversation.
        await together(self._take_turns(context, r) for r in rollouts if not r.is_over)

    async def _take_turns(self, context: _RolloutContext, rollout: RolloutInProgress) -> None:
        while not rollout.is_over:
            await self._sample_all(context, [rollout])
            await self._grade(context, _pending(context, [rollout]))
            self._continue(context, rollout)
        self._leave(context, [rollout])

    def _leave(self, context: _RolloutContext, rollouts: Sequence[RolloutInProgress]) -> None:
        # What others may continue is kept until the group is finished.
        if context.batch.tree is None:
            self._end_conversations(context, rollouts)

    def _conversations(
        self, context: _RolloutContext, rollouts: Sequence[RolloutInProgress]
    ) -> tuple[str, ...]:
        # A name for each where there may be several turns, or others that begin alike.
        if self.limits.max_turns == 1 and context.batch.tree is None:
            return ()
        return tuple(f"{context.group_id}-{rollout.index}" for rollout in rollouts)

    def _end_conversations(
        self, context: _RolloutContext, rollouts: Sequence[RolloutInProgress]
    ) -> None:
        if names := self._conversations(context, rollouts):
            self.generator.end_conversations(names)
        left = [rollout for rollout in rollouts if rollout.is_open]
        if left and keeps_conversations(context.environment):
            for rollout in left:
                rollout.is_open = False
            metadata = [rollout.full_metadata for rollout in left]
            calls, closing = context.batch.calls, context.batch.closing
            closing.add(
                asyncio.ensure_future(
                    self._graders.close_conversations(context.environment, metadata, calls)
                )
            )

    async def _sample_turn(
        self, context: _RolloutContext, rollouts: Sequence[RolloutInProgress]
    ) -> AsyncGenerator[RolloutInProgress, None]:
        # One turn of the policy in conversations that are equal so far, each as it ends. A greedy
        # one among others takes a request of its own, at the same time.
        parts = [[r for r in rollouts if r.is_greedy is wanted] for wanted in (False, True)]
        if not all(parts):
            async with aclosing(self._request_turn(context, rollouts)) as sampled:
                async for rollout in sampled:
                    yield rollout
            return
        ended = asyncio.Queue[RolloutInProgress | None]()

        async def sample(part: Sequence[RolloutInProgress]) -> None:
            try:
                async with aclosing(self._request_turn(context, part)) as sampled:
                    async for rollout in sampled:
                        ended.put_nowait(rollout)
            finally:
                ended.put_nowait(None)

        requests = [asyncio.ensure_future(sample(part)) for part in parts]
        try:
            num_open = len(requests)
            while num_open:
                if (one := await ended.get()) is not None:
                    yield one
                else:
                    num_open -= 1
            await asyncio.gather(*requests)
        finally:
            await end_all(requests)

    async def _request_turn(
        self, context: _RolloutContext, rollouts: Sequence[RolloutInProgress]
    ) -> AsyncGenerator[RolloutInProgress, None]:
        first, batch = rollouts[0], context.batch
        begun = () if first.begun is None else (first.begun[0],)
        so_far = np.concatenate((first.context(context.prompt_ids), *begun))
        is_later = first.num_tokens > 0
        is_alone = is_later or first.is_greedy or first.index >= _num_first(batch)
        turn = f"-{first.index}-{first.num_turns}" if is_alone else ""
        new_tokens = batch.sampling.max_new_tokens - sum(map(len, begun))
        sampling = replace(
            batch.sampling,
            max_new_tokens=min(new_tokens, self.limits.max_length - len(so_far)),
            stop_strings=tuple(dict.fromkeys((*batch.sampling.stop_strings, *first.stop_strings))),
            temperature=0.0 if first.is_greedy else batch.sampling.temperature,
        )
        request = GenerationRequest(
            id=context.group_id + turn,
            prompt_ids=so_far,
            seeds_G=tuple(
                int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)
                # As an array, which takes half as long as a tuple of the same numbers.
                for words in np.array(
                    [
                        (*self._seed_words, *context.numbers, rollout.index, rollout.num_turns)
                        for rollout in rollouts
                    ],
                    dtype=np.uint32,
                )
            ),
            sampling=sampling,
            conversations_G=self._conversations(context, rollouts),
            branch_of=f"{context.group_id}-{first.branch.of}" if first.branch is not None else "",
        )
        missing = set(range(len(rollouts)))
        async with (
            self._under_way(batch),
            aclosing(self.generator.generate(request)) as completions,
        ):
            async for generated in completions:
                batch.last_news = batch.last_completion = time.monotonic()
                if generated.index not in missing or not len(generated.ids_L):
                    raise EngineError(
                        f"the generator answered request {request.id} with "
                        f"{len(generated.ids_L)} tokens for completion {generated.index}, "
                        f"while it owed {sorted(missing)}"
                    )
                missing.remove(generated.index)
                batch.calls.stats.num_tokens += len(generated.ids_L)
                if is_later:
                    batch.calls.stats.num_repeated += len(so_far)
                    batch.calls.stats.num_cached += generated.num_cached
                rollouts[generated.index].add_turn(generated, self.chat.text_of)
                yield rollouts[generated.index]
        if missing:
            raise EngineError(
                f"the generator ended request {request.id} without completions {sorted(missing)}"
            )

    @asynccontextmanager
    async def _under_way(self, batch: _Batch) -> AsyncIterator[None]:
        # What waits for devices is not under way: `_watch` does not count its seconds.
        async with self._taken_for("generating"):
            batch.num_open += 1
            batch.last_news = time.monotonic()
            try:
                yield
            finally:
                batch.num_open -= 1

    def _continue(self, context: _RolloutContext, rollout: RolloutInProgress) -> None:
        if rollout.is_over:
            return
        stats = context.batch.calls.stats
        if rollout.truncated or rollout.num_turns >= self.limits.max_turns:
            stats.end_unfinished(
                rollout, is_out_of_turns=rollout.num_turns >= self.limits.max_turns
            )
            return
        history, turn = (*context.task.prompt, *rollout.messages[:-1]), rollout.messages[-1]
        observation, tools = rollout.observation, context.environment.spec.tools
        try:
            ids = self.chat.observation_ids(
                observation, history=history, turn_ids=rollout.ids[-1], tools=tools
            )
            rewritten = self.chat.rewritten_ids(
                observation, history=history, turn=turn, tools=tools
            )
            if rewritten is not None and rewritten[0] != context.prompt_ids[0]:
                raise DataError(
                    "the chat template begins the conversation with another token once it has "
                    "more turns, so its sequences have nothing in common"
                )
        except DataError as error:  # this observation's, and nobody else's
            rollout.fail(str(error))
            return
        length = len(rollout.context(context.prompt_ids)) + len(ids)
        if rewritten is not None:
            length = len(rewritten)
        if length >= self.limits.max_length:
            stats.end_unfinished(rollout, is_out_of_turns=False)
            return
        if rewritten is None:
            rollout.add_observation(observation, ids)
        else:
            rollout.begin_sequence(observation, rewritten)
        if rollout.turn_starts is not None:
            try:
                rollout.turn_starts.append(rollout.copy())
            except Exception as error:  # metadata may hold anything
                rollout.fail(f"grpo.tree copies metadata of turns: {described(error)}")

    async def _grade(self, context: _RolloutContext, pending: Sequence[PendingGrade]) -> None:
        # The conversations may be of several tasks.
        num_groups = -(-len(pending) // context.batch.num_generations)
        async with self._taken_for("scoring") if context.environment.spec.rests else nullcontext():
            await self._graders.grade(
                context.environment, pending, context.batch.calls, num_groups=num_groups
            )

    def _taken_for(self, use: Use) -> AbstractAsyncContextManager[None]:
        return nullcontext() if self._devices is None else self._devices.taken_for(use)

    def check_failures(self, groups: Sequence[RolloutGroup]) -> None:
        """Check that no environment failed on more than `max_failed_share` of its completions.

        Raises:
            EnvironmentFailedError: An environment failed on more.
        """
        for name in self.environments:
            samples = [r for g in groups if g.task.environment == name for r in g.all_rollouts]
            failed = [r.failure for r in samples if r.failure is not None]
            if failed and len(failed) > self.limits.max_failed_share * len(samples):
                raise EnvironmentFailedError(
                    f"the environment {name!r} could not judge {len(failed)} of {len(samples)} "
                    f"samples, more than env.max_failed_share={self.limits.max_failed_share:g} "
                    "allows. "
                    f"The first reason: {failed[0].removeprefix('error: ')}"
                )


async def _nothing(pending: Sequence[PendingGrade]) -> None:
    pass


def _num_first(batch: _Batch) -> int:
    # The completions that are sampled from the prompt on, in one request.
    tree, number = batch.tree, batch.num_generations
    return number if tree is None else tree.num_initial(number)


def _check_branches(name: str, environment: Environment, *, at_turns: bool) -> None:
    if at_turns and keeps_conversations(environment):
        raise ConfigError(
            f"grpo.tree continues a conversation twice, and the environment {name!r} keeps "
            "something of each that cannot be copied (close_conversations), such as a session; "
            "leave grpo.tree out"
        )
    if not at_turns and environment.spec.stop_strings:
        raise ConfigError(
            f"grpo.tree continues unfinished turns, and the environment {name!r} ends "
            f"them at {environment.spec.stop_strings[0]!r}, which may begin before the place where "
            "one is continued; leave grpo.tree out"
        )


def _pending(context: _RolloutContext, rollouts: Sequence[RolloutInProgress]) -> list[PendingGrade]:
    return [(context.task.prompt, rollout) for rollout in rollouts]
