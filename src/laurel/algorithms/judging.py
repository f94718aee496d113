"""Completions on their way to environments: which of them go together, and how long it takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from laurel.algorithms.side_by_side import GivenUpError, PatientThreads, described
from laurel.algorithms.unfinished import Unfinished, take_verdict
from laurel.environments.interface import GROUP_ID, judged_by
from laurel.errors import EnvironmentFailedError, WorkerError
from laurel.protocols import Environment
from laurel.types import Conversation, Message

Seat = tuple[Conversation, Unfinished]
"""A prompt, and a conversation that began with it."""

PARTS = 4
"""Of a group that is judged in parts, at most."""
WORTH = 2
"""Tokens of a part that is judged by itself, as a multiple of those of its prompt."""


@dataclass(slots=True, kw_only=True)
class Clock:
    """Where the time of a batch of rollouts went, in seconds, and what it brought."""

    generation: float = 0.0
    """From the first request to the last completion."""
    environment: float = 0.0
    """In environments, all calls added up."""
    judging: float = 0.0
    """While at least one call of an environment was under way."""
    exposed: float = 0.0
    """Waiting for environments after the last completion: what streaming did not hide."""
    num_tokens: int = 0
    """Drawn in the time of `generation`, for groups that were left out too."""
    num_out_of_turns: int = 0
    """Conversations that their environment did not end, with no turn left."""
    num_cut_off: int = 0
    """Conversations that it did not end either, whose answer was cut off, or with no room left."""

    @property
    def hidden_share(self) -> float | None:
        """How much of the judging was done while completions were still being drawn, 0 to 1."""
        if not self.judging:
            return None
        return max(0.0, 1.0 - self.exposed / self.judging)

    def leave(self, game: Unfinished, *, is_out_of_turns: bool) -> None:
        """End a conversation that its environment would have gone on with, and count it."""
        game.truncated = game.is_over = True
        if is_out_of_turns:
            self.num_out_of_turns += 1
        else:
            self.num_cut_off += 1


class Calls:
    """The calls of environments for one batch, in one event loop."""

    def __init__(self, clock: Clock, limit: int) -> None:
        """Begin with none.

        Args:
            clock: Is told how long they take.
            limit: How many run side by side.
        """
        self.clock = clock
        self.slots = asyncio.Semaphore(limit)
        self._num_open = 0
        self._began = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """An environment is being called."""
        started = time.monotonic()
        if not self._num_open:
            self._began = started
        self._num_open += 1
        try:
            yield
        finally:
            now = time.monotonic()
            self.clock.environment += now - started
            self._num_open -= 1
            if not self._num_open:
                self.clock.judging += now - self._began


class Judges:
    """Calls environments in threads; what they say or fail to say is taken down."""

    def __init__(self, *, timeout: float, num_threads: int) -> None:
        """Hold no thread yet.

        Args:
            timeout: Seconds of one call; of one that judges several groups, for each of them.
            num_threads: Calls side by side.
        """
        self._timeout = timeout
        self._threads = PatientThreads(num_threads, name="environment")

    def begin(self, clock: Clock) -> Calls:
        """What the calls for one batch have in common."""
        return Calls(clock, self._threads.limit)

    def close(self) -> None:
        """Let go of the threads."""
        self._threads.close()

    async def judge(
        self,
        environment: Environment,
        seats: Sequence[Seat],
        calls: Calls,
        *,
        num_groups: int = 1,
    ) -> None:
        """One call for all of them.

        Raises:
            WorkerError: Who judges is lost.
        """
        games = [game for _, game in seats]
        logs = [[_plain(m) for m in (*prompt, *game.messages)] for prompt, game in seats]
        metadata = [{**(game.metadata or {}), GROUP_ID: game.group_id} for game in games]
        timeout = self._timeout * num_groups
        with calls.one():
            try:
                verdict = await self._threads.call(
                    calls.slots, environment.step, logs, metadata, timeout=timeout
                )
                take_verdict(environment.step, verdict, games)
            except GivenUpError:
                for game in games:
                    game.fail(f"timeout: no verdict within {timeout:g} s (env.timeout_seconds)")
            except EnvironmentFailedError as error:  # which says whose fault it is, and where
                for game in games:
                    game.fail(str(error))
            except Exception as error:  # an environment's own code: anything can come out of it
                if isinstance(error, WorkerError) and error.is_lost:
                    raise  # who judges is gone: not these samples' fault, nor the next ones'
                for game in games:
                    game.fail(described(error, environment.step))


def _plain(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def parts_of(environment: Environment, games: Sequence[Unfinished]) -> list[list[Unfinished]]:
    """Those of a group that come together, as soon as the last of them has ended.

    Who comes with whom depends on their indices alone, never on who ends first.
    """
    most = {"completion": len(games), "part": PARTS}.get(judged_by(environment), 1)
    size = -(-len(games) // most)
    return [list(games[first : first + size]) for first in range(0, len(games), size)]


def pays(part: Sequence[Unfinished], environment: Environment, prompt_length: int) -> bool:
    """Whether a part is worth a call of its own, which computes the prompt once more.

    So at most half as much again is computed for a group as in one call. It depends on what was
    said alone, so it is the same in every run.
    """
    if judged_by(environment) == "completion":
        return True
    return sum(len(ids) for game in part for ids in game.ids) >= WORTH * prompt_length


def agree(games: Iterable[Unfinished]) -> None:
    """Give what says the same, but was judged apart, the verdict of the first who said it."""
    first_of: dict[Conversation, Unfinished] = {}
    for game in games:
        if game.failure is None:
            first = first_of.setdefault(tuple(game.messages), game)
            game.reward, game.components = first.reward, dict(first.components)


class Assembly:
    """The groups of a batch that one environment judges together, in one call."""

    def __init__(self, num_groups: int) -> None:
        self._num_missing = num_groups
        self._seats: list[Seat] = []
        self._is_judged = asyncio.Event()

    async def judged(
        self, seats: Sequence[Seat], judge: Callable[[Sequence[Seat]], Awaitable[None]]
    ) -> None:
        """Come back when all are there and have been judged; the last one to come sees to it."""
        self._seats += seats
        self._num_missing -= 1
        if self._num_missing:
            await self._is_judged.wait()
            return
        await judge(self._seats)
        self._is_judged.set()
