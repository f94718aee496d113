"""The servers whose sessions `sessions` plays, each through the client of its own package.

OpenEnv (`openenv-core` 0.3): an action from each message, an observation in return. The Open Reward
Standard (`openreward` 0.1): tools that the policy calls.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from laurel.config.data import TaskSetConfig
from laurel.config.environments import EnvironmentsConfig
from laurel.data.sources import Row
from laurel.data.tasks import MadeRows
from laurel.errors import ConfigError, EnvironmentFailedError, MissingDependencyError
from laurel.extensions.environment_servers.sessions import (
    ServerFullError,
    ServerSession,
    SessionEnvironment,
    SessionLostError,
    SessionServer,
    SessionTurn,
)
from laurel.extensions.environment_servers.settings import (
    OpenEnvConfig,
    OpenRewardConfig,
    SessionsConfig,
)
from laurel.models.tool_calls import CallForm, MalformedCall, fault_of, form_of, needed_form
from laurel.types import ToolSchemas

_FULL = "CAPACITY_REACHED"  # what a server of OpenEnv calls it
_FULL_STATUS = 429  # what one of the Open Reward Standard answers, as beyond a limit of requests
_OPENINGS_AT_A_TIME = 8  # sessions that are begun at a time to read prompts, at most
_CODE = re.compile(r"\(code: (\w+)\)\s*$")
_GONE_STATUS = frozenset({404, 410, 502, 503, 504})
"""HTTP statuses that speak of a session or a server that is gone, not of an environment's error."""


def _package(module: str, *, package: str, extra: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise MissingDependencyError.of(package, extra=extra, purpose=where) from None


class OpenEnvServer:
    """A server of OpenEnv; its tasks are seeds, and a session is a connection of its own."""

    key = "openenv"
    tools: ToolSchemas = ()

    def __init__(self, name: str, config: OpenEnvConfig, *, limit: float) -> None:
        """Import the client; nothing is asked for.

        Args:
            limit: Seconds of one answer.

        Raises:
            MissingDependencyError: The package is not installed.
        """
        self.where, self.config, self._limit = f"env.openenv.{name}", config, limit
        client = _package(
            "openenv.core.generic_client", package="openenv-core", extra="openenv", where=self.where
        )
        self._client_class: Any = client.GenericEnvClient
        self._closed: Any = importlib.import_module("websockets.exceptions").ConnectionClosed

    async def reach(self) -> None:
        """Connect once."""
        await self._connected(lambda client: client.close())

    async def _connected(self, use: Any) -> Any:
        client = self._client_class(base_url=self.config.url, message_timeout_s=self._limit)
        try:
            await client.connect()
            return await use(client)
        except BaseException as error:
            await client.close()
            if isinstance(error, ConnectionError | self._closed):
                raise SessionLostError(str(error)) from error
            raise

    async def reset(self, client: Any, arguments: Mapping[str, Any]) -> str:
        """Reset the environment of a connection, and return what the policy sees.

        Raises:
            SessionLostError: The server does not answer, or is full.
            EnvironmentFailedError: It says that it cannot.
        """
        full = ServerFullError(
            f"{self.config.url} has no more sessions: start it with as many (max_concurrent_envs) "
            "as there are rollouts at a time"
        )
        try:
            result = await client.reset(**{**self.config.reset, **arguments})
        except (ConnectionError, self._closed) as error:
            # A full server says so and closes, perhaps before the reset is sent; then what it said
            # is still to be read, for which the client has no other method.
            message: Any = None
            with suppress(ConnectionError, self._closed):
                message = await client._receive()
            if message is not None and message.get("data", {}).get("code") == _FULL:
                raise full from error
            raise SessionLostError(f"{type(error).__name__}: {error}") from error
        except RuntimeError as error:  # which is how the client passes on the server's errors
            if _code(error) == _FULL:
                raise full from error
            raise EnvironmentFailedError(f"reset({dict(arguments)}): {error}") from error
        return self.text_of(result.observation)

    async def open(self, task: Mapping[str, Any]) -> ServerSession:
        """Connect, and reset to the task's seed."""

        async def begin(client: Any) -> ServerSession:
            arguments = task.get("reset", {})
            start = await self.reset(client, arguments)
            if task.get("start", start) != start:
                raise EnvironmentFailedError(
                    f"reset({dict(arguments)}) shows something else than when the rows were made: "
                    "name a field of the observation that does not change (observation_key)"
                )
            return _OpenEnvSession(client, self)

        opened: ServerSession = await self._connected(begin)
        return opened

    async def make_rows(self, limit: int | None, split: str, made: list[Row]) -> None:
        """Make a row of each seed, whose prompt is what `reset` shows."""
        assert limit is not None  # `session_rows` has asked for it

        async def make(client: Any) -> None:
            for seed in range(len(made), limit):
                arguments = {"seed": seed}
                start = await self.reset(client, arguments)
                prompt = [{"role": "user", "content": start}]
                task = {"reset": arguments, "start": start}
                made.append({"prompt": prompt, "metadata": {self.key: task}})
            await client.close()

        await self._connected(make)

    def text_of(self, observation: Mapping[str, Any]) -> str:
        """Return what the policy sees of an observation.

        Raises:
            EnvironmentFailedError: It has not the configured field.
        """
        key = self.config.observation_key
        if key is not None and key not in observation:
            raise EnvironmentFailedError(
                f"an observation has no '{key}' (observation_key), only {', '.join(observation)}"
            )
        shown = observation if key is None else observation[key]
        return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)

    def action_of(self, message: str) -> dict[str, Any]:
        """Return the action in a message of the policy.

        Raises:
            ValueError: There is none; the message tells the policy why.
        """
        text, tag = message.rpartition("</think>")[2], self.config.action_tag
        if tag is not None:
            actions = re.findall(f"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)
            if not actions:
                raise ValueError(f"write your action as <{tag}>...</{tag}>")
            text = actions[-1]
        text = text.strip()
        action: Any = {self.config.action_key: text}
        if self.config.action_key is None:
            try:
                action = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"the action is no JSON: {error}") from None
            if not isinstance(action, dict):
                raise ValueError('the action has to be a JSON object, {"...": ...}')
        if fault := fault_of(action):
            raise ValueError(f"the action cannot be sent: {fault}")
        return {**action, **self.config.action_fields}

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Do nothing: actions are text."""

    async def aclose(self) -> None:
        """Do nothing: each session has a connection of its own."""


class _OpenEnvSession:
    def __init__(self, client: Any, server: OpenEnvServer) -> None:
        self._client, self._server = client, server

    async def turn(self, message: str) -> SessionTurn:
        try:
            action = self._server.action_of(message)
        except ValueError as error:
            return self._refused(str(error))
        try:
            result = await self._client.step(action)
        except RuntimeError as error:
            if _code(error) == "VALIDATION_ERROR":
                return self._refused("the environment does not take this action")
            if _code(error) == "SESSION_ERROR":
                # What the action's validator raised was no text that the server could send, and it
                # has ended the session. A failure would be a way out of the reward.
                return SessionTurn(reward=0.0, is_over=True, num_refused=1)
            raise EnvironmentFailedError(str(error)) from error
        except (ConnectionError, self._server._closed) as error:
            raise SessionLostError(f"{type(error).__name__}: {error}") from error
        text = "" if result.done else self._server.text_of(result.observation)
        return SessionTurn(
            messages=({"role": self._server.config.role, "content": text},),
            reward=None if result.reward is None else float(result.reward),
            is_over=bool(result.done),
        )

    def _refused(self, why: str) -> SessionTurn:
        shown = {"role": self._server.config.role, "content": f"Error: {why}"}
        return SessionTurn(messages=(shown,), num_refused=1)

    async def close(self) -> None:
        await self._client.close()


def _code(error: RuntimeError) -> str | None:
    match = _CODE.search(str(error))
    return None if match is None else match.group(1)


class OpenRewardServer:
    """A server of the Open Reward Standard: tasks by split, and tools that the policy calls."""

    key = "openreward"

    def __init__(self, name: str, config: OpenRewardConfig, *, limit: float) -> None:
        """Import the client; nothing is asked for.

        Args:
            limit: Seconds of the beginning of a session.

        Raises:
            ConfigError: The environment variable with the key is not set.
            MissingDependencyError: The package is not installed.
        """
        self.where, self.config, self._limit = f"env.openreward.{name}", config, limit
        self.tools: ToolSchemas = ()
        self.form: CallForm | None = None
        self.types = _package(
            "openreward.api.environments.client",
            package="openreward",
            extra="openreward",
            where=self.where,
        )
        self._errors: Any = importlib.import_module("openreward.api.errors")
        self._http: Any = importlib.import_module("aiohttp")
        self._key = "" if config.api_key_env is None else os.environ.get(config.api_key_env, "")
        if config.api_key_env is not None and not self._key:
            raise ConfigError(f"{self.where}: the variable {config.api_key_env} is not set")
        self._api: Any = None
        self._environment: Any = None

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Turn the errors of the client into those of sessions."""
        gone = (
            self._errors.SessionTerminatedError,
            self._errors.TransportError,
            self._http.ClientError,
            ConnectionError,
        )
        try:
            yield
        except self._http.ClientResponseError as error:
            kind = SessionLostError if error.status in _GONE_STATUS else EnvironmentFailedError
            raise kind(f"HTTP {error.status}: {error.message}") from error
        except self._errors.ToolFailed as error:
            raise EnvironmentFailedError(f"a tool failed: {error}") from error
        except gone as error:
            raise SessionLostError(f"{type(error).__name__}: {error}") from error

    @contextmanager
    def _opening(self) -> Iterator[None]:
        try:
            with self.asking():
                yield
        except EnvironmentFailedError as error:
            if getattr(error.__cause__, "status", None) != _FULL_STATUS:
                raise
            raise ServerFullError(
                f"{self.config.url} has no more sessions, or limits requests ({error}): let it "
                "have as many as there are rollouts at a time"
            ) from error

    async def reach(self) -> None:
        """Read the tools that all tasks have in common."""
        if self._api is None:  # its connections belong to the running loop
            self._api = self.types.AsyncEnvironmentsAPI(self.config.url, self._key)
            self._environment = self._api.get(
                "environment", variant=self.config.environment, base_url=self.config.url
            )
        try:
            with self.asking():
                tools = self._schemas(await self._environment.list_tools())
        except SessionLostError as error:
            if getattr(error.__cause__, "status", None) != 404:
                raise
            environment = self.config.environment
            raise ConfigError(
                f"{self.where}: {self.config.url} has no environment"
                + (f" '{environment}'" if environment else "")
                + f" of the Open Reward Standard ({error})"
            ) from error
        if self.tools not in ((), tools):
            # The prompts show those of the beginning.
            raise EnvironmentFailedError(f"{self.where}: the server has other tools than before")
        self.tools = tools

    def _schemas(self, tools: Sequence[Any]) -> ToolSchemas:
        return tuple(
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    # Without the titles, which repeat names.
                    "parameters": self.types.sanitize_tool_schema(tool.input_schema, "anthropic")
                    or {"type": "object", "properties": {}},
                },
            }
            for tool in tools
        )

    async def open(self, task: Mapping[str, Any]) -> ServerSession:
        """Begin a session for a task of the server."""
        return _OpenRewardSession(await self._begun(task), self)

    async def _begun(self, task: Mapping[str, Any]) -> Any:
        session = self._environment.session(task=self.types.Task(**task))
        try:
            with self._opening():
                await session.__aenter__()
                tools = self._schemas(await session.list_tools())
            if tools != self.tools:
                raise EnvironmentFailedError(
                    "the task has tools of its own, and here all tasks of a server show the same "
                    "ones"
                )
        except BaseException:
            await session.__aexit__(None, None, None)
            raise
        return session

    async def make_rows(self, limit: int | None, split: str, made: list[Row]) -> None:
        """Read the tasks of the split, and the prompt of each from a session that is closed."""
        with self.asking():
            tasks = await self._environment.get_task_range(split, 0, limit)
        at_a_time = _OPENINGS_AT_A_TIME
        while some := tasks[len(made) : len(made) + at_a_time]:
            # Each is waited for, whatever becomes of the others: none is left open.
            for row in await asyncio.gather(*map(self._row_of, some), return_exceptions=True):
                if isinstance(row, ServerFullError) and at_a_time > 1:
                    at_a_time //= 2
                    break
                if isinstance(row, BaseException):
                    raise row
                made.append(row)

    async def _row_of(self, server_task: Any) -> Row:
        task = {**vars(server_task), "task_spec": dict(server_task.task_spec)}
        # Some servers begin one session after the other.
        async with asyncio.timeout(self._limit * _OPENINGS_AT_A_TIME):
            session = await self._begun(task)
            try:
                with self._opening():
                    messages = await session.get_messages()
            finally:
                await session.__aexit__(None, None, None)
        opening = [{"role": m.role, "content": text_of_blocks(m.blocks)} for m in messages]
        return {"prompt": list(map(dict, opening)), "metadata": {self.key: task}}

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Choose the form of calls that the chat template writes."""
        self.form = form_of(tokenizer, where=self.where)

    async def aclose(self) -> None:
        """Close the connections."""
        if self._api is not None:
            await self._api.aclose()


class _OpenRewardSession:
    def __init__(self, session: Any, server: OpenRewardServer) -> None:
        self._session, self._server = session, server

    async def turn(self, message: str) -> SessionTurn:
        server, messages, rewards, num_refused = self._server, [], [], 0
        calls = needed_form(server.form, server.where).read(message) if server.tools else []
        if not calls:
            with server.asking():
                if await self._session.terminal_tool() is None:
                    # Nothing else would ever end it, and the policy chose not to call.
                    return SessionTurn(reward=0.0, is_over=True)
                try:
                    final = await self._session.call_terminal_tool(message)
                except server._errors.ToolCallError as error:
                    shown = {"role": "user", "content": f"Error: {error.detail}"}
                    return SessionTurn(messages=(shown,), num_refused=1)
            return SessionTurn(reward=final.reward, is_over=True)
        is_over = False
        for call in calls:
            if isinstance(call, MalformedCall):
                num_refused, text = (
                    num_refused + 1,
                    f"Error: the call cannot be read: {call.problem}",
                )
            else:
                try:
                    with server.asking():
                        output = await self._session.call_tool(call.name, dict(call.arguments))
                except server._errors.ToolCallError as error:
                    num_refused, text = num_refused + 1, f"Error: {error.detail}"
                else:
                    text = text_of_blocks(output.blocks)
                    is_over = output.finished
                    rewards += [] if output.reward is None else [float(output.reward)]
            messages.append({"role": "tool", "content": text})
            if is_over:
                break
        return SessionTurn(
            messages=tuple(messages),
            reward=sum(rewards) if rewards else None,
            is_over=is_over,
            num_refused=num_refused,
        )

    async def close(self) -> None:
        await self._session.__aexit__(None, None, None)


def text_of_blocks(blocks: Sequence[Any]) -> str:
    """Return the text of content blocks.

    Raises:
        EnvironmentFailedError: There is something else among them, such as an image.
    """
    others = sorted({block.type for block in blocks} - {"text"})
    if others:
        raise EnvironmentFailedError(f"a message has a block of the type {others[0]}, not text")
    return "\n".join(block.text for block in blocks)


def open_sessions(
    name: str,
    config: SessionsConfig,
    *,
    timeout_seconds: float,
    max_observation_chars: int = 4096,
) -> SessionEnvironment:
    """Make the environment of a server, `env.openenv.<name>` or `env.openreward.<name>`.

    Args:
        timeout_seconds: `env.timeout_seconds`, of which a tenth is the limit of one answer.

    Raises:
        ConfigError: The server does not answer, or cannot be used.
        MissingDependencyError: The package is not installed.
    """
    # A step, an outage and the step again are over before the environment's own limit.
    limit = timeout_seconds / 10
    server: SessionServer
    if isinstance(config, OpenEnvConfig):
        server = OpenEnvServer(name, config, limit=limit)
    else:
        assert isinstance(config, OpenRewardConfig)
        server = OpenRewardServer(name, config, limit=limit)
    return SessionEnvironment(
        server, url=config.url, limit=limit, max_observation_chars=max_observation_chars
    )


def session_rows(set_config: TaskSetConfig, settings: EnvironmentsConfig, *, kind: str) -> MadeRows:
    """Return the rows of the server that the set's environment names.

    Raises:
        ConfigError: No such environment is configured, or its server cannot be used.
    """
    name = set_config.env_name or kind
    environments: Mapping[str, SessionsConfig] = settings.get(kind, {})
    if name not in environments:
        raise ConfigError(
            f"dataset_name={kind}: data.env_name={name} is no environment of env.{kind}; there "
            f"are: {', '.join(environments) or 'none'}. Name the server there: "
            f"env.{kind}.{name}.url=http://HOST:PORT"
        )
    if isinstance(environments[name], OpenEnvConfig) and set_config.max_samples is None:
        raise ConfigError(
            f"env.openenv.{name}: a server of OpenEnv has no list of tasks: say how many seeds "
            "make one (data.max_samples)"
        )
    limit = settings.timeout_seconds
    with open_sessions(name, environments[name], timeout_seconds=limit) as environment:
        rows = environment.rows(set_config.max_samples, set_config.split or "train")
    if set_config.prompt_file is None and any(not row["prompt"][0]["content"] for row in rows):
        raise ConfigError(
            f"env.{kind}.{name}: a session begins without a text, so that there is no prompt: give "
            "one by data.prompt_file, or (OpenEnv) name another observation_key"
        )
    return MadeRows(origin=f"{kind}: {environments[name].url}", rows=rows)
