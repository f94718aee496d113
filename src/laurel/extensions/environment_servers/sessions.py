"""Sessions of a server as an environment: one for each rollout, from its first turn to its end.

What a server is and says is in `servers`; here is when its sessions begin, what becomes of
one that is lost, and that each is closed. Whatever goes wrong is one of three things:

- A refused action: the policy wrote something that is no action, or none that the server takes. It
  reads why, its rewards count, and the conversation goes on.
- A failure: the server says that its environment failed, or takes longer than the limit while it
  answers others; a new session repeats itself differently; two sessions in a row are lost at the
  same message; the server is full. The completion takes part in nothing.
- An outage: the server cannot be reached, or a session is lost at anything else. The server is
  waited for, as long as the limit from when it was first missed, and then the run ends.

The limit is a tenth of `env.timeout_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from uuid import uuid4

import torch

from laurel.data.sources import Row
from laurel.environments.interface import (
    CONVERSATION_ID,
    ENVIRONMENT_ROLE,
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
    Memory,
    batch_metrics,
    cut_middle,
    last_answer,
    mean_of,
)
from laurel.errors import ConfigError, EngineError, EnvironmentFailedError, WorkerError, counted
from laurel.observe.user_code import error_with_line
from laurel.protocols import MessageLog
from laurel.types import ToolSchemas
from laurel.workers.threads import BackgroundLoop

_log = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_CLOSING_SECONDS = 10.0  # limit of closing one session
_REACHING_SECONDS = 10.0  # limit of one attempt to see whether a server answers
_LIMIT = "(a tenth of env.timeout_seconds)"
_REMEMBERED = 1 << 16  # conversations that have ended
Result = TypeVar("Result")


class SessionLostError(Exception):
    """A session or its server is gone, whatever the policy did."""


class ServerFullError(SessionLostError):
    """A server has no room for another session; one that is closing may still take it."""


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """What a session answers to a message of the policy."""

    messages: tuple[Mapping[str, str], ...] = ()
    """The next messages, each with `role` and `content`."""
    reward: float | None = None
    """The sum of the rewards of this turn; None if there was none."""
    is_over: bool = False
    num_refused: int = 0
    """Actions or calls that the server did not take, of which the policy reads why."""


class ServerSession(Protocol):
    """One session of a server, used by one coroutine at a time."""

    async def turn(self, message: str) -> SessionTurn:
        """Act on a message of the policy.

        Raises:
            SessionLostError: The session is gone.
            EnvironmentFailedError: The server says that its environment failed.
        """

    async def close(self) -> None:
        """End the session, on the server as well if it answers."""


class SessionServer(Protocol):
    """A server that has been reached through the client of a package.

    Its methods are called in one event loop.
    """

    where: str
    """Its section of the configuration, for messages."""
    key: str
    """The metadata key of what `open` needs of a task, and the section of `env`."""
    tools: ToolSchemas
    """The functions that every prompt shows, once it has been reached."""

    async def reach(self) -> None:
        """Connect, and read what all sessions have in common.

        Raises:
            SessionLostError: It does not answer.
            ConfigError: It answers, and cannot be used.
        """

    async def open(self, task: Mapping[str, Any]) -> ServerSession:
        """Begin a session for a task.

        Raises:
            SessionLostError: The server does not answer, or is full (`ServerFullError`).
            EnvironmentFailedError: The server says that its environment failed.
        """

    async def make_rows(self, limit: int | None, split: str, made: list[Row]) -> None:
        """Make the rows of the server's tasks, the first `limit` of them.

        Args:
            limit: How many; None for all.
            split: Which, where the server has splits.
            made: Those that earlier calls made; the others are appended.

        Raises:
            SessionLostError: The server does not answer.
            TimeoutError: A session took longer than the limit to begin.
        """

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Take the policy's tokenizer, whose chat template says how it calls functions."""

    async def aclose(self) -> None:
        """Free what all sessions have in common."""


@dataclass(slots=True)
class _Episode:
    """An open session, and what has happened in it."""

    session: ServerSession
    task: Mapping[str, Any]
    turns: list[tuple[str, SessionTurn]] = field(default_factory=list)

    @property
    def has_reward(self) -> bool:
        return any(turn.reward is not None for _, turn in self.turns)

    @property
    def note(self) -> dict[str, float]:
        refused = sum(turn.num_refused for _, turn in self.turns)
        return {"turns": float(len(self.turns)), "refused": float(refused)}


class SessionEnvironment(EnvironmentInterface):
    """Plays each conversation in a session of its own; the reward is the sum of its rewards.

    A session that is lost is begun anew, and the policy's messages are sent again: if every answer
    is as it was, the conversation goes on, otherwise the completion is a failure. An outage longer
    than the limit ends the run as a lost worker does.
    """

    def __init__(
        self, server: SessionServer, *, url: str, limit: float, max_observation_chars: int = 4096
    ) -> None:
        """Reach the server, and wait for it; it is closed with this environment.

        Args:
            url: Its address, for messages.
            limit: Seconds of one step, of the beginning of a session, and of an outage.
            max_observation_chars: Longest message that the policy sees; a longer one loses its
                middle.

        Raises:
            ConfigError: The server does not answer, or cannot be used.
        """
        self.where = server.where
        self._server, self._url, self._limit = server, url, limit
        self._most_chars = max_observation_chars
        self._episodes: dict[str, _Episode] = {}
        self._running: dict[str, asyncio.Task[Any]] = {}
        self._ended: Memory[bool] = Memory(_REMEMBERED)
        self._background = BackgroundLoop("laurel-sessions")
        try:
            self._wait_for(self._patiently(self._reach))
        except WorkerError as error:
            self.shutdown()
            raise ConfigError(
                f"{error}. Is the address right, and the server started?"
            ) from error.__cause__
        except BaseException:
            self.shutdown()
            raise
        self.spec = EnvironmentSpec(judges="completion", tools=server.tools, components=())

    @property
    def num_open(self) -> int:
        """The number of sessions that are open."""
        return len(self._episodes)

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Choose the form of calls that the chat template writes, where the server has tools."""
        if self.spec.tools:
            self._server.use_tokenizer(tokenizer)

    def rows(self, limit: int | None, split: str = "train") -> list[Row]:
        """Make the rows of the server's tasks, the first `limit` of a split."""
        made: list[Row] = []

        async def make() -> None:
            # Of as many sessions as there are rows, each with its own limit.
            await self._within(None, "a reset", self._server.make_rows(limit, split, made))

        self._wait_for(self._patiently(make, made))
        return made

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Give the policy's message to the session of its conversation, which the first one opens.

        Raises:
            WorkerError: The server does not answer (`is_lost`).
        """
        names = [(entry or {}).get(CONVERSATION_ID) or uuid4().hex for entry in metadata]
        results = self._wait_for(self._turns(names, message_log_batch, metadata))
        turns = [SessionTurn() if isinstance(result, str) else result[0] for result in results]
        return EnvironmentReturn(
            observations=[
                [self._shown(message) for message in turn.messages]
                or {"role": ENVIRONMENT_ROLE, "content": ""}
                for turn in turns
            ],
            metadata=[
                {**(entry or {}), CONVERSATION_ID: name}
                for entry, name in zip(metadata, names, strict=True)
            ],
            next_stop_strings=[None] * len(turns),
            rewards=torch.tensor([turn.reward or 0.0 for turn in turns], dtype=torch.float32),
            # The session of a failure has been closed.
            terminateds=torch.tensor(
                [
                    isinstance(result, str) or turn.is_over
                    for result, turn in zip(results, turns, strict=True)
                ],
                dtype=torch.bool,
            ),
            failures=[result if isinstance(result, str) else None for result in results],
            notes=[None if isinstance(result, str) else result[1] for result in results],
        )

    def _shown(self, message: Mapping[str, str]) -> dict[str, str]:
        return {**message, "content": cut_middle(message["content"], self._most_chars)}

    async def _turns(
        self,
        names: Sequence[str],
        logs: Sequence[MessageLog],
        metadata: Sequence[dict[str, Any] | None],
    ) -> list[tuple[SessionTurn, dict[str, float]] | str]:
        return await asyncio.gather(*map(self._turn_or_failure, names, logs, metadata))

    async def _turn_or_failure(
        self, name: str, log: MessageLog, entry: dict[str, Any] | None
    ) -> tuple[SessionTurn, dict[str, float]] | str:
        if self._ended.get(name.encode()):
            return f"error: {self.where}: the conversation has ended"
        task = asyncio.current_task()
        assert task is not None
        self._running[name] = task
        is_over = True
        try:
            turn, episode = await self._next_turn(name, log, entry)
            is_over = turn.is_over
            if is_over and not episode.has_reward:
                return f"error: {self.where}: the session ended without any reward"
            return turn, {**episode.note, "ended": float(is_over)}
        except asyncio.CancelledError:
            if self._ended.get(name.encode()):  # `close_conversations` has cancelled it
                return f"error: {self.where}: the conversation was closed"
            raise
        except WorkerError:
            raise
        except EnvironmentFailedError as error:
            return f"error: {self.where}: {error}"
        except Exception as error:  # of a package or of a server: anything can come out of it
            return f"error: {self.where}: {error_with_line(error)}"
        finally:
            self._running.pop(name, None)
            if is_over:
                await self._close(name)

    async def _next_turn(
        self, name: str, log: MessageLog, entry: dict[str, Any] | None
    ) -> tuple[SessionTurn, _Episode]:
        message = last_answer(log)
        if (episode := self._episodes.get(name)) is None:
            task = (entry or {}).get(self._server.key)
            if task is None:
                raise EnvironmentFailedError("the task is not of this server, which would play it")
            if sum(m["role"] == "assistant" for m in log) > 1:
                raise EnvironmentFailedError("the conversation has no session to go on in")
            episode = _Episode(await self._patiently(lambda: self._open(task)), task)
            self._episodes[name] = episode
        try:
            turn = await self._answer(episode.session, message)
        except SessionLostError as error:
            await self._replace(episode, error)
            try:
                turn = await self._answer(episode.session, message)
            except SessionLostError as again:
                # The message may be what ends sessions, or servers: it is not sent a third time.
                raise EnvironmentFailedError(
                    f"two sessions in a row were lost at the same message ({error}; {again})"
                ) from again
        episode.turns.append((message, turn))
        return turn, episode

    async def _open(self, task: Mapping[str, Any]) -> ServerSession:
        return await self._within(
            self._limit, "the beginning of a session", self._server.open(task)
        )

    async def _answer(self, session: ServerSession, message: str) -> SessionTurn:
        return await self._within(self._limit, "a step", session.turn(message))

    async def _within(
        self, limit: float | None, what: str, work: Coroutine[Any, Any, Result]
    ) -> Result:
        """Wait for an answer, and tell an environment that is slow from a server that hangs.

        Raises:
            EnvironmentFailedError: It takes too long, and the server answers others.
            SessionLostError: The server does not answer others either.
        """
        try:
            async with asyncio.timeout(limit):
                return await work
        except TimeoutError:
            await self._reach()
            raise EnvironmentFailedError(
                f"timeout: no answer to {what} within {self._limit:g} s {_LIMIT}"
            ) from None

    async def _reach(self) -> None:
        try:
            async with asyncio.timeout(_REACHING_SECONDS):
                await self._server.reach()
        except TimeoutError:
            raise SessionLostError(f"no answer within {_REACHING_SECONDS:g} s") from None

    async def _replace(self, episode: _Episode, lost: SessionLostError) -> None:
        """Open another session in place of a lost one, and bring it to where that was."""
        _log.warning("%s: a session is lost (%s), and is begun anew", self.where, lost)
        await _end(episode.session)
        episode.session = await self._patiently(lambda: self._repeated(episode, lost))

    async def _repeated(self, episode: _Episode, lost: SessionLostError) -> ServerSession:
        """Open a session, and send it what the lost one answered.

        Raises:
            EnvironmentFailedError: It answers something else.
            SessionLostError: It is lost, too.
        """
        session = await self._open(episode.task)
        try:
            for message, turn in episode.turns:
                if await self._answer(session, message) != turn:
                    raise EnvironmentFailedError(
                        f"the session is lost ({lost}), and a new one answers the same messages "
                        "differently"
                    )
        except BaseException:
            await _end(session)
            raise
        return session

    async def _patiently(
        self, ask: Callable[[], Coroutine[Any, Any, Result]], made: Sequence[Row] = ()
    ) -> Result:
        """Ask a server until it answers; what grows in `made` meanwhile is an answer as well.

        Raises:
            WorkerError: It has not answered until the limit.
            EnvironmentFailedError: It is full, and nothing ends.
        """
        patience, clock = self._limit, asyncio.get_running_loop().time
        missed: float | None = None
        num_made, pause = 0, _FIRST_PAUSE
        while True:
            try:
                return await ask()
            except SessionLostError as error:
                if missed is None or len(made) > num_made:
                    missed, num_made, pause = clock(), len(made), _FIRST_PAUSE
                if isinstance(error, ServerFullError):
                    # Sessions that are closing need a moment; the others may wait for this one.
                    end = missed + min(patience, _CLOSING_SECONDS)
                    if clock() >= end:
                        raise EnvironmentFailedError(str(error)) from error
                elif clock() >= (end := missed + patience):
                    raise WorkerError(
                        f"{self.where}: {self._url} has not answered for {patience:g} s "
                        f"{_LIMIT}: {error}",
                        exit_code=WorkerError.LOST_EXIT_CODE,
                    ) from error
                if pause == _FIRST_PAUSE:
                    _log.warning(
                        "%s: waiting for %s, %g s at most %s: %s",
                        *(self.where, self._url, patience, _LIMIT, error),
                    )
            await asyncio.sleep(min(pause, max(0.0, end - clock())))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def close_conversations(self, metadata: Sequence[dict[str, Any] | None]) -> None:
        """Close the sessions of conversations that something else has ended."""
        names = [(entry or {}).get(CONVERSATION_ID) for entry in metadata]
        self._wait_for(self._close_all([name for name in names if name is not None]))

    async def _close_all(self, names: Sequence[str]) -> None:
        await asyncio.gather(*map(self._close, names))

    async def _close(self, name: str) -> None:
        # A step that was given up may still run, or begin only now.
        self._ended.put(name.encode(), True)
        if (running := self._running.get(name)) is not None:
            running.cancel()
            await asyncio.wait({running})
        if (episode := self._episodes.pop(name, None)) is not None:
            await _end(episode.session)

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Compute the common figures, and how sessions went.

        `turns` and `refused` are means over sessions, `ended` is the share that the server ended.
        """
        figures = batch_metrics(batch)
        notes = [note for note in batch.get("notes") or () if note]
        for name in ("turns", "refused", "ended"):
            figures |= mean_of(name, [float(note[name]) for note in notes])
        return batch, figures

    def shutdown(self) -> None:
        """Close all sessions; idempotent."""
        self._background.close(self._end_all(), patience=_CLOSING_SECONDS)

    async def _end_all(self) -> None:
        if names := {*self._episodes, *self._running}:
            _log.warning("%s: closing %s", self.where, counted(len(names), "session"))
        await self._close_all(list(names))
        await self._server.aclose()

    def _wait_for(self, work: Coroutine[Any, Any, Result]) -> Result:
        try:
            return self._background.wait_for(work)
        except (EngineError, CancelledError) as error:
            raise EnvironmentFailedError(f"{self.where} was shut down") from error


async def _end(session: ServerSession) -> None:
    """Close a session; one that cannot be closed ends with its connection."""
    try:
        async with asyncio.timeout(_CLOSING_SECONDS):
            await session.close()
    except Exception as error:
        _log.warning("a session was not closed: %s", error_with_line(error))
