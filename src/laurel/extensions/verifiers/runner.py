"""Plays episodes of verifiers 0.4 with its own runner, whose model is the policy.

A thread with one event loop holds the package's servers and plays all episodes. Their runner does
all but sample: where it asks a model, the call waits here until the policy has answered. This is
the only module that imports the package.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
import sys
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message
from verifiers.v1.harnesses.utils.core import gate_tool_call
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import InterceptionServerConfig
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated
from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

from laurel.errors import ConfigError, WorkerError
from laurel.extensions.verifiers.settings import VerifiersEnvironmentConfig
from laurel.models.tool_calls import MalformedCall, ReadCall
from laurel.observe.user_code import error_with_line, guarded, line_of
from laurel.protocols import MessageLog

# Their loader reads it: it holds one harness.
__all__ = ["ChatHarness", "EpisodeRunner", "EpisodeTurn", "LoadedTaskset"]

_log = logging.getLogger(__name__)
T = TypeVar("T")
Json = dict[str, Any]

HARNESS_ID = "laurel_chat"
# Their loader finds a harness by the name of a module in this package of theirs.
sys.modules[f"verifiers.v1.harnesses.{HARNESS_ID}"] = sys.modules[__name__]

CLOSED = "the conversation was closed"
"""Why nothing can become of a turn after `EpisodeRunner.end`."""
MALFORMED = "malformed_call"
"""The name of a call that could not be read; its argument says why."""
CONTEXT = vf.ModelContext(
    model="policy",
    # Never called, since the policy takes its place; the variable keeps theirs from being read.
    client=vf.EvalClientConfig(base_url="http://127.0.0.1/v1", api_key_var="NO_KEY_IS_NEEDED"),
)
OPENINGS_AT_A_TIME = 8
"""Episodes that are begun at a time to read prompts; each may start tool servers."""
CLOSING_SECONDS = 30.0
"""Seconds that open episodes and servers may take to end."""


@dataclass(frozen=True, slots=True)
class EpisodeTurn:
    """What an episode asks of the policy next, or its end."""

    messages: list[Json] = field(default_factory=list)
    """Messages since the policy's last; none where the episode has ended."""
    tools: list[Json] = field(default_factory=list)
    """Schemas of the tools that the policy may call."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Rewards times their weights, by name, at the end."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics by name, at the end."""


class LoadedTaskset:
    """A taskset with the environment that plays it, in which one agent is the policy."""

    def __init__(
        self, name: str, config: VerifiersEnvironmentConfig, *, max_turns: int | None = None
    ) -> None:
        """Load both, and let their agents run here.

        Raises:
            ConfigError: There is no such taskset, it does not take the settings, or it needs what
                there is not.
        """
        self._where, self._id = f"env.verifiers.{name}", config.id
        try:
            taskset = {**config.args, "id": config.id}
            settings = resolve_env_config({**config.env, "taskset": taskset})
            self.policy, agents = self._agents(settings, max_turns)
            self.env = load_environment(
                settings.model_copy(update={**agents, "interception": InterceptionServerConfig()})
            )
            self.tasks = self.env.taskset
            self._kind = type(self.tasks).task_type()
            first = next(iter(self.tasks), None)
            self.has_tools = bool(
                self._kind.toolsets(self.tasks.config.task)
                or self.tasks.toolsets(self.tasks.config)
            )
            is_plain = type(self.env) is vf.SingleAgentEnv
            self.may_open = not is_plain
            """Whether an episode may begin with another prompt than its task's."""
            self.needs_episodes = bool(
                self.has_tools or not is_plain or config.env or (first and _acts(first))
            )
            """Whether more than a conversation is needed to score it."""
        except ConfigError:
            raise
        except Exception as error:  # a package of somebody's: its import may raise anything
            raise ConfigError(f"{self._where}: {config.id}: {error_with_line(error)}") from error
        if self._kind.NEEDS_CONTAINER:
            raise ConfigError(f"{self._where}: {config.id} needs a container; here there is none")

    def _agents(self, settings: Any, max_turns: int | None) -> tuple[str, dict[str, Any]]:
        """Return the name of the policy's agent, and all agents with what they run in here."""
        agents, changed = agent_config_fields(settings), {}
        free = [name for name, agent in agents.items() if agent.client is None]
        if len(free) != 1:
            raise ConfigError(
                f"{self._where}: of the agents {', '.join(agents)} one must be the policy, and "
                f"{', '.join(free) or 'none'} has no client: name the model of each other one, "
                f"{self._where}.env.AGENT={{model: NAME, client: {{type: eval, base_url: URL}}}}"
            )
        self._refuse_retries(settings, "the environment")
        for name, agent in agents.items():
            where = f"{self._where}: the agent '{name}'"
            program = agent.harness.id if agent.harness else default_harness_id(self._id)
            # Their default, a shell for the policy on this machine, is left out.
            if program != "null" and (agent.harness or program != "bash"):
                raise ConfigError(f"{where} runs the program '{program}', which needs a container")
            if "runtime" in agent.model_fields_set and agent.runtime.type != "subprocess":
                raise ConfigError(f"{where} needs a container ({agent.runtime.type})")
            here: Json = {
                "harness": vf.HarnessConfig(id=HARNESS_ID),
                "runtime": vf.SubprocessConfig(),
            }
            if name == free[0]:
                of_engine = ("model", "sampling", *(f"max_{kind}_tokens" for kind in _COUNTED))
                own_keys = [key for key in of_engine if getattr(agent, key) is not None]
                if own_keys:
                    raise ConfigError(
                        f"{where} is the policy: {own_keys[0]} is policy.generation's"
                    )
                self._refuse_retries(agent, f"the agent '{name}', the policy,")
                here["max_turns"] = min(filter(None, (agent.max_turns, max_turns)), default=None)
            changed[name] = agent.model_copy(update=here)
        return free[0], changed

    def _refuse_retries(self, settings: Any, who: str) -> None:
        # A rollout is played once: a second try would be another conversation.
        if settings.retries != vf.RetryConfig():
            raise ConfigError(f"{self._where}: {who} has retries; set max_retries: 0, and no rules")

    def task_of(self, data: Json) -> Any:
        """Make a task anew from what its row holds."""
        return self._kind(self._kind.data_type().model_validate(data), self.tasks.config.task)

    def runner(self) -> EpisodeRunner:
        """Open the environment.

        Raises:
            ConfigError: It cannot be opened.
        """
        try:
            return EpisodeRunner(self.env, self.policy)
        except Exception as error:  # of the environment's own servers
            raise ConfigError(f"{self._where}: {error_with_line(error)}") from error

    def beginnings(self, runner: EpisodeRunner, tasks: Sequence[Any]) -> list[EpisodeTurn]:
        """Return what each task first asks of the policy.

        Raises:
            ConfigError: An episode ended before.
        """
        turns = runner.openings(tasks)
        for task, first in zip(tasks, turns, strict=True):
            if isinstance(first, str) or not first.messages:
                why = first if isinstance(first, str) else "it ends before the policy is asked"
                raise ConfigError(f"{self._where}: task {task.data.idx} cannot begin: {why}")
        return [first for first in turns if isinstance(first, EpisodeTurn)]

    def prompts_of(self, tasks: Sequence[Any]) -> list[list[Json]]:
        """Return the prompt of each task.

        A user may open the conversation, so that only an episode that has begun tells the prompt.
        Where that of the first task is its task's own, the others are taken to be so.
        """
        prompts = [[_plain(message) for message in _beginning(task.data)] for task in tasks]
        if self.may_open and tasks:
            with closing(self.runner()) as runner:
                first = self.beginnings(runner, tasks[:1])[0].messages
                if first != prompts[0]:
                    rest = self.beginnings(runner, tasks[1:])
                    prompts = [first, *(turn.messages for turn in rest)]
        for task, prompt in zip(tasks, prompts, strict=True):
            if not prompt or any(
                "calls" in message or message["content"] is None for message in prompt
            ):
                what = "calls or images in its prompt" if prompt else "no prompt"
                raise ConfigError(f"{self._where}: task {task.data.idx} has {what}")
        return prompts

    async def score(self, task: Any, log: MessageLog) -> EpisodeTurn | str:
        """Score a conversation without an episode; a string is the reason why there is no score."""
        kinds = {"system": vf.SystemMessage, "assistant": vf.AssistantMessage}
        trace = vf.Trace(
            task=vf.TraceTask(
                type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
            ),
            agent=vf.AgentInfo(config=vf.AgentConfig()),
            state=state_cls(type(task))(),
            nodes=[
                vf.MessageNode(
                    parent=i - 1 if i else None,
                    message=kinds.get(message["role"], vf.UserMessage)(content=message["content"]),
                    sampled=i == len(log) - 1,
                )
                for i, message in enumerate(log)
            ],
        )
        try:
            await task.score(trace)
        except Exception as error:  # the taskset's own code: anything can come out of it
            # Theirs wraps the error of a reward, whose line is the one to look at.
            while isinstance(error.__cause__, Exception):
                error = error.__cause__
            return error_with_line(error)
        return _scores_of(trace)


_COUNTED = ("input", "output", "total")


def _acts(task: Any) -> bool:
    """Report whether a task does more than to score a conversation."""
    of_base = (vf.Task.setup, vf.Task.finalize)
    if (type(task).setup, type(task).finalize) != of_base:
        return True
    if task.hooks("stop") or discover_decorated(task, "intercept"):
        return True
    scoring = [*task.hooks("reward"), *task.hooks("metric")]
    scoring += [judge.score for judge in task.plugged_judges()]
    return any("runtime" in inspect.signature(function).parameters for function in scoring)


def _beginning(data: Any) -> list[Json]:
    """Return the messages that a conversation about a task begins with, as they are sent."""
    prompt = data.prompt
    messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
    if data.system_prompt:
        messages.insert(0, vf.SystemMessage(content=data.system_prompt))
    return [message_to_wire(message) for message in messages]


def _plain(message: Json) -> Json:
    """Return a message as rollouts know it; its content is None if it is not text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        are_text = all(part["type"] == "text" for part in content)
        content = "\n".join(part["text"] for part in content) if are_text else None
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    return {"role": message["role"], "content": content} | ({"calls": calls} if calls else {})


def _scores_of(trace: Any) -> EpisodeTurn | str:
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return EpisodeTurn(rewards=rewards, metrics=metrics) if rewards else "the task has no rewards"


class ChatHarness(vf.Harness):  # type: ignore[misc]
    """Runs a task's tools for a model in this process, and has none of its own.

    It does what their `null` does in a Python process for each segment of a conversation.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Ask the model until it answers without a call."""
        body: Json = {"model": ctx.model, "messages": _beginning(data)}
        messages = body["messages"]
        timeout = self.config.tool_timeout
        specs = {name: {"url": url, "timeout": timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            # The server is this process, so no certificates need to be read.
            http = httpx.AsyncClient(verify=False, timeout=None)
            await stack.enter_async_context(http)
            tools, dispatch, servers = await connect_mcp({"mcpServers": specs}, stack)
            body |= {"tools": tools} if tools else {}
            while True:
                headers = {"Authorization": f"Bearer {secret}"}
                reply = await http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if reply.is_error:
                    raise RuntimeError(f"the model was not asked: {reply.text:.500}")
                message = reply.json()["choices"][0]["message"]
                messages.append(message)
                for call in message.get("tool_calls") or ():
                    answer = None
                    if tool_interception_url:  # a hook of the task may answer in the tool's place
                        function = SimpleNamespace(**call["function"])
                        tool_call = SimpleNamespace(id=call["id"], function=function)
                        verdict = await gate_tool_call(
                            http, tool_interception_url, secret, tool_call
                        )
                        answer = verdict.get("message")
                    answer = answer or {
                        "role": "tool",
                        "tool_call_id": call["id"],
                        "name": call["function"]["name"],
                        "content": await _result_of(call["function"], dispatch, servers),
                    }
                    messages.append(bound_tool_message(answer))
                if not message.get("tool_calls"):
                    return vf.ProgramResult(exit_code=0, stdout="", stderr="")


async def _result_of(function: Json, dispatch: Json, servers: Json) -> Any:
    name, arguments = function["name"], json.loads(function["arguments"])
    if name in dispatch:
        return await call_mcp(servers, dispatch, name, arguments)
    if name == MALFORMED:
        return f"error: the call cannot be read: {arguments['problem']}"
    return f"error: unknown tool {name!r}; there are {', '.join(dispatch) or 'none'}"


class _PolicyClient(vf.Client):  # type: ignore[misc]
    """Hands what their runner asks the model to the conversation of the trace."""

    def __init__(self, conversations: Mapping[str, Conversation]) -> None:
        self._conversations = conversations

    async def get_response(
        self,
        dialect: Any,
        body: Json,
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        message = await self._conversations[session_id or ""].ask(body)
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
        }
        whole = {"object": "chat.completion", "created": 0, "model": body["model"]}
        raw = {**whole, "id": f"{session_id}", "choices": [choice]}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class Conversation:
    """An episode that is being played; all of it happens in the runner's loop."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[EpisodeTurn | str] = asyncio.Queue()
        """What has become of the policy's last turn; a string says why nothing can."""
        self.task: asyncio.Task[None] | None = None
        self.trace: Any = None
        self._messages: list[Json] = []
        self._reply: asyncio.Future[Json] = asyncio.Future()

    async def ask(self, body: Json) -> Json:
        """Wait for the policy's message in answer to a request of their runner."""
        messages, so_far = [_plain(message) for message in body["messages"]], len(self._messages)
        new = messages[so_far:]
        if messages[:so_far] != self._messages:
            self._fail("what it asks is not the conversation so far and new messages after it")
        elif not new:
            self._fail("it asks again without a new message")
        elif any(message["content"] is None for message in new):
            self._fail("it shows the policy something else than text")
        self._messages, self._reply = messages, asyncio.Future()
        self.news.put_nowait(EpisodeTurn(new, body.get("tools") or []))
        return await self._reply

    def answer(self, text: str, calls: Sequence[ReadCall] = ()) -> None:
        """Give the policy's turn to their runner: its text, and the calls after it."""
        message: Json = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{len(self._messages)}_{i}",
                    "type": "function",
                    "function": _wire_call(call),
                }
                for i, call in enumerate(calls)
            ]
        self._messages = [*self._messages, _plain(message)]
        if not self._reply.done():  # a limit of theirs may have ended the episode meanwhile
            self._reply.set_result(message)

    def _fail(self, reason: str) -> None:
        self.news.put_nowait(reason)
        if self.task is not None:
            self.task.cancel()


def _wire_call(call: ReadCall) -> Json:
    name, arguments = (
        (MALFORMED, {"problem": call.problem})
        if isinstance(call, MalformedCall)
        else (call.name, dict(call.arguments))
    )
    return {"name": name, "arguments": json.dumps(arguments)}


class EpisodeRunner:
    """Holds an environment of theirs open in a thread, and plays its episodes."""

    def __init__(self, env: Any, policy: str) -> None:
        """Start the thread, and the servers that all episodes share.

        Raises:
            Exception: The environment's own, if it cannot be opened.
        """
        self._env, self._policy = env, policy
        self.conversations: dict[str, Conversation] = {}
        """The open ones, by the names that `begin` got."""
        self._by_trace: dict[str, Conversation] = {}
        self._stopping = asyncio.Event()
        self._ended_by: BaseException | None = None
        opened: Future[asyncio.AbstractEventLoop] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(opened,), name="verifiers", daemon=True
        )
        self._thread.start()
        self._loop = opened.result()

    def _run(self, opened: Future[asyncio.AbstractEventLoop]) -> None:
        try:
            asyncio.run(self._serve(opened))
        except (Exception, SystemExit) as error:  # of their servers, or of the taskset's code
            self._ended_by = error
            if opened.done():
                _log.warning("verifiers: the thread that plays episodes ended", exc_info=error)
            else:
                is_exit = isinstance(error, SystemExit)
                opened.set_exception(RuntimeError(repr(error)) if is_exit else error)

    async def _serve(self, opened: Future[asyncio.AbstractEventLoop]) -> None:
        async with self._env.serving():
            # The server makes a client for each endpoint; that of the policy is there already.
            clients = self._env._interception.clients
            clients[CONTEXT.client.model_dump_json()] = _PolicyClient(self._by_trace)
            opened.set_result(asyncio.get_running_loop())
            await self._stopping.wait()
            await self.end(list(self.conversations))

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the loop, and wait for its result.

        Raises:
            WorkerError: The thread has ended, so that no episode can be played (`is_lost`).
        """
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
        except (RuntimeError, CancelledError) as error:
            if isinstance(error, CancelledError) and not self._stopping.is_set():
                self._thread.join(CLOSING_SECONDS)  # an ending loop cancels what runs in it
            if self._stopping.is_set() or self._thread.is_alive():
                raise
            coroutine.close()
            raise WorkerError(
                f"the thread that plays episodes of verifiers has ended: {self._ended_by!r}",
                exit_code=WorkerError.LOST_EXIT_CODE,
            ) from self._ended_by

    def begin(self, name: str, task: Any) -> Conversation:
        """Start an episode of a task, in the loop, under a name of the caller's."""
        conversation = self.conversations[name] = Conversation()
        conversation.task = asyncio.create_task(self._play(conversation, task))
        return conversation

    async def _play(self, conversation: Conversation, task: Any) -> None:
        def watch(trace: Any) -> None:
            if trace.agent.name != self._policy:
                return
            if conversation.trace is not None:
                raise ValueError(
                    f"the agent '{self._policy}', the policy, has several conversations in one "
                    "episode, and a rollout is one"
                )
            conversation.trace = trace
            self._by_trace[trace.id] = conversation

        try:
            episode = await guarded(self._env.run_episode(task, CONTEXT, on_trace=watch))
            conversation.news.put_nowait(self._end_of(conversation.trace, episode))
        except Exception as error:  # of their runner, which promises to raise none
            conversation.news.put_nowait(error_with_line(error))
        finally:
            if conversation.trace is not None:
                self._by_trace.pop(conversation.trace.id, None)

    def _end_of(self, trace: Any, episode: Any) -> EpisodeTurn | str:
        if trace is not None and self._env.complete(episode):
            return _scores_of(trace)
        errors = [*episode.errors, *(error for other in episode.traces for error in other.errors)]
        return _first_line_of(errors[0]) if errors else "the episode did not come to its end"

    async def end(self, names: Sequence[str]) -> None:
        """End episodes, and wait until what they hold is closed; unknown names are ignored."""
        ending = [self.conversations.pop(name) for name in names if name in self.conversations]
        tasks = [conversation.task for conversation in ending if conversation.task is not None]
        for conversation in ending:  # not by the tasks, which may not have begun
            conversation.news.put_nowait(CLOSED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def openings(self, tasks: Sequence[Any]) -> list[EpisodeTurn | str]:
        """Play each task up to the policy's first turn."""

        async def opened(name: str, task: Any, slots: asyncio.Semaphore) -> EpisodeTurn | str:
            async with slots:
                first = await self.begin(name, task).news.get()
                await self.end([name])
            return first

        async def all_opened() -> list[EpisodeTurn | str]:
            slots = asyncio.Semaphore(OPENINGS_AT_A_TIME)
            return await asyncio.gather(
                *(opened(f"opening {i}", task, slots) for i, task in enumerate(tasks))
            )

        return self.call(all_opened())

    def close(self) -> None:
        """End all episodes and the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(CLOSING_SECONDS)
            if self._thread.is_alive():
                _log.warning(
                    "verifiers: episodes and servers have not ended within %g s", CLOSING_SECONDS
                )


def _first_line_of(error: Any) -> str:
    """Describe an error that their trace holds as text, with the line that raised it first."""
    cause = (error.traceback or "").partition("\n\nThe above exception was")[0]
    frames = re.findall(r'^  File "(.+)", line (\d+)', cause, re.MULTILINE)
    if not frames:
        return f"{error.type}: {error.message}"
    line = re.split(r"^(?=\S)", cause.strip(), flags=re.MULTILINE)[-1].strip()
    return f"{line} ({line_of(frames[-1][0], int(frames[-1][1]))})"
