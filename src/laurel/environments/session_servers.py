"""The servers whose sessions `sessions` plays, each through the client of its own package.

OpenEnv (`openenv-core` 0.3): an action from each message, an observation in return.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from laurel.config.environments import OpenEnvConfig
from laurel.data.sources import Row
from laurel.environments.sessions import (
    ServerSession,
    SessionEnvironment,
    SessionLostError,
    SessionTurn,
)
from laurel.errors import ConfigError, EnvironmentFailedError, MissingDependencyError
from laurel.types import ToolSchemas

_CODE = re.compile(r"\(code: (\w+)\)\s*$")


def _package(module: str, *, package: str, extra: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        raise MissingDependencyError.of(package, extra=extra, purpose=where) from None


def _prompt(system: str | None, said: Iterable[Mapping[str, str]]) -> list[dict[str, str]]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, *map(dict, said)]


# --------------------------------------------------------------------------------------------------
# OpenEnv.


class OpenEnvServer:
    """A server of OpenEnv; its tasks are seeds, and a session is a connection of its own."""

    key = "openenv"
    tools: ToolSchemas = ()

    def __init__(self, name: str, config: OpenEnvConfig) -> None:
        """Import the client; nothing is asked for.

        Raises:
            MissingDependencyError: The package is not installed.
        """
        self.where, self.config = f"env.openenv.{name}", config
        found = _package(
            "openenv.core.generic_client", package="openenv-core", extra="openenv", where=self.where
        )
        self._client_class: Any = found.GenericEnvClient
        self._closed: Any = importlib.import_module("websockets.exceptions").ConnectionClosed

    async def reach(self) -> None:
        """Connect once."""
        await self._connected(lambda client: client.close())

    async def _connected(self, use: Any) -> Any:
        client = self._client_class(
            base_url=self.config.url, message_timeout_s=self.config.step_timeout
        )
        try:
            await client.connect()
            return await use(client)
        except BaseException as error:
            await client.close()
            if isinstance(error, ConnectionError | self._closed):
                raise SessionLostError(str(error)) from error
            raise

    async def reset(self, client: Any, given: Mapping[str, Any]) -> str:
        """Reset the environment of a connection, and return what the policy sees.

        Raises:
            SessionLostError: The server does not answer.
            EnvironmentFailedError: It says that it cannot.
        """
        try:
            result = await client.reset(**{**self.config.reset, **given})
        except (ConnectionError, self._closed, TimeoutError) as error:
            raise SessionLostError(f"{type(error).__name__}: {error}") from error
        except RuntimeError as error:  # which is how the client passes on the server's errors
            if _code(error) == "CAPACITY_REACHED":
                raise EnvironmentFailedError(
                    f"{self.config.url} has no more sessions ({error}): start it with as many "
                    "(max_concurrent_envs) as there are rollouts at a time"
                ) from error
            raise EnvironmentFailedError(f"reset({dict(given)}): {error}") from error
        return self.text_of(result.observation)

    async def open(self, task: Mapping[str, Any]) -> ServerSession:
        """Connect, and reset to the task's seed."""

        async def begin(client: Any) -> ServerSession:
            given = task.get("reset", {})
            start = await self.reset(client, given)
            if task.get("start", start) != start:
                raise EnvironmentFailedError(
                    f"reset({dict(given)}) shows something else than when the rows were made: name "
                    "a field of the observation that does not change (observation_key)"
                )
            return _OpenEnvSession(client, self)

        opened: ServerSession = await self._connected(begin)
        return opened

    async def rows(self, limit: int | None) -> list[Row]:
        """Make a row of each seed, whose prompt is what `reset` shows."""
        if limit is None:
            raise ConfigError(
                f"{self.where}: a server of OpenEnv has no list of tasks: say how many seeds make "
                "one (data.max_samples)"
            )

        async def make(client: Any) -> list[Row]:
            made: list[Row] = []
            for seed in range(self.config.first_seed, self.config.first_seed + limit):
                given = {"seed": seed}
                start = await self.reset(client, given)
                said = "\n\n".join(text for text in (self.config.instruction, start) if text)
                if not said:
                    raise ConfigError(
                        f"{self.where}: reset shows nothing, so that there is no prompt: set "
                        "instruction, or another observation_key"
                    )
                prompt = _prompt(self.config.system_prompt, [{"role": "user", "content": said}])
                task = {"reset": given, "start": start}
                made.append({"prompt": prompt, "metadata": {self.key: task}})
            await client.close()
            return made

        found: list[Row] = await self._connected(make)
        return found

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
            found = re.findall(f"<{tag}>((?:(?!<{tag}>).)*?)</{tag}>", text, re.DOTALL)
            if not found:
                raise ValueError(f"write your action as <{tag}>...</{tag}>")
            text = found[-1]
        text = text.strip()
        if self.config.action_key is not None:
            return {**self.config.action_fields, self.config.action_key: text}
        try:
            action = json.loads(text)
        except ValueError as error:
            raise ValueError(f"the action is no JSON: {error}") from None
        if not isinstance(action, dict):
            raise ValueError('the action has to be a JSON object, {"...": ...}')
        return {**self.config.action_fields, **action}

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
    found = _CODE.search(str(error))
    return None if found is None else found.group(1)


def open_openenv(name: str, config: OpenEnvConfig) -> SessionEnvironment:
    """Make the environment `env.openenv.<name>`.

    Raises:
        ConfigError: The server does not answer, or cannot be used.
        MissingDependencyError: The package is not installed.
    """
    server = OpenEnvServer(name, config)
    return SessionEnvironment(server.where, server, config)
