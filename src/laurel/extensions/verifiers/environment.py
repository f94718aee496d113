"""Adapts verifiers 0.4: its tasksets and environments, played by its own runner.

The rewards of a task, times their weights, are the named components of the reward; its metrics are
figures. Several turns, tools and users that are simulated are the runner's affair: a `step` gives
it the policy's turn, and returns what it asks next (`runner`).
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch

from laurel.config.data import TaskSetConfig
from laurel.data.tasks import MadeRows
from laurel.environments.interface import (
    CONVERSATION_ID,
    ENVIRONMENT_ROLE,
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
    Memory,
    batch_metrics,
    mean_of,
)
from laurel.errors import ConfigError, MissingDependencyError
from laurel.extensions.verifiers.settings import VerifiersEnvironmentConfig
from laurel.models.tool_calls import CallForm, form_of, needed_form
from laurel.observe.user_code import error_with_line
from laurel.protocols import MessageLog

if TYPE_CHECKING:
    from laurel.extensions.verifiers.runner import EpisodeRunner, EpisodeTurn, LoadedTaskset

_KEY = "verifiers"
# The metadata key of conversations whose episode has begun.
_BEGUN = "verifiers_begun"
_REMEMBERED = 1 << 16  # conversations that were closed


def load_taskset(
    name: str, config: VerifiersEnvironmentConfig, *, max_turns: int | None = None
) -> LoadedTaskset:
    """Load a taskset by its id, with the environment that plays it.

    Raises:
        ConfigError: As `LoadedTaskset`.
        MissingDependencyError: The package is not installed.
    """
    try:
        runner = importlib.import_module("laurel.extensions.verifiers.runner")
    except ModuleNotFoundError as error:
        if error.name not in ("verifiers", "verifiers.v1", "httpx"):  # which comes with it
            raise
        raise MissingDependencyError.of(
            "verifiers", extra="verifiers", purpose=f"env.verifiers.{name}"
        ) from None
    loaded: LoadedTaskset = runner.LoadedTaskset(name, config, max_turns=max_turns)
    return loaded


def taskset_rows(
    set_config: TaskSetConfig, environments: Mapping[str, VerifiersEnvironmentConfig]
) -> MadeRows:
    """Return the tasks of the taskset that the set's environment names.

    Raises:
        ConfigError: No such environment is configured, or the taskset cannot be used.
    """
    name = set_config.env_name or "verifiers"
    if name not in environments:
        raise ConfigError(
            f"dataset_name=verifiers: data.env_name={name} is no environment of env.verifiers; "
            f"there are: {', '.join(environments) or 'none'}. Name the taskset there: "
            f"env.verifiers.{name}.id=PACKAGE"
        )
    loaded = load_taskset(name, environments[name])
    if not loaded.tasks.bounded and set_config.max_samples is None:
        raise ConfigError(
            f"env.verifiers.{name}: the tasks of {environments[name].id} have no end; say how many "
            "in data.max_samples"
        )
    tasks = list(islice(loaded.tasks, set_config.max_samples))
    rows = [
        {"prompt": prompt, "metadata": {_KEY: task.data.model_dump(mode="json")}}
        for task, prompt in zip(tasks, loaded.prompts_of(tasks), strict=True)
    ]
    return MadeRows(origin=f"verifiers: {environments[name].id}", rows=rows)


class VerifiersEnvironment(EnvironmentInterface):
    """Gives the sum of a task's weighted rewards, each under its own name, where its episode ends.

    An error of the taskset's code is a failure with its line. So is an episode that does not begin
    with the prompt of its row, or is no single conversation to which messages are added.
    """

    def __init__(
        self, name: str, config: VerifiersEnvironmentConfig, *, max_turns: int | None = None
    ) -> None:
        """Load the taskset; where there may be tools, begin its first task to read them.

        Args:
            max_turns: The policy's turns after which an episode ends and is scored as it is.

        Raises:
            ConfigError: The taskset cannot be used here.
            MissingDependencyError: The package is not installed.
        """
        self._loaded = loaded = load_taskset(name, config, max_turns=max_turns)
        self._name = name
        self._form: CallForm | None = None
        self._opened: EpisodeRunner | None = None
        # A step that was given up may begin after the close of its conversation.
        self._closed: Memory[bool] = Memory(_REMEMBERED)
        self._lock = threading.Lock()
        tools: list[dict[str, Any]] = []
        if loaded.has_tools or loaded.may_open:
            try:
                for first in loaded.beginnings(self._runner(), list(islice(loaded.tasks, 1))):
                    tools = first.tools
                if tools and max_turns == 1:
                    raise ConfigError(
                        f"env.verifiers.{name}: a call and the answer after it take two turns, and "
                        "there is grpo.max_rollout_turns=1; raise it"
                    )
            except BaseException:
                self.shutdown()
                raise
        self.spec = EnvironmentSpec(judges="completion", tools=tuple(tools))

    def _runner(self) -> EpisodeRunner:
        with self._lock:
            if self._opened is None:
                self._opened = self._loaded.runner()
            return self._opened

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Choose the form of calls that the chat template writes, where there are tools."""
        if self.spec.tools:
            self._form = form_of(tokenizer, where=f"env.verifiers.{self._name}")

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Give the policy's turns to their episodes; return what each asks next, or its end."""
        if self.spec.tools:
            needed_form(self._form, f"env.verifiers.{self._name}")
        names = [str((entry or {}).get(CONVERSATION_ID) or uuid4().hex) for entry in metadata]

        # Made here: in the runner's own thread the lock could be that of a `shutdown`.
        runner = self._runner() if self._loaded.needs_episodes else None

        async def turns() -> list[EpisodeTurn | str]:
            parts = zip(names, message_log_batch, metadata, strict=True)
            return await asyncio.gather(*(self._turn(runner, *part) for part in parts))

        results = asyncio.run(turns()) if runner is None else runner.call(turns())
        reached = [None if isinstance(result, str) else result for result in results]
        components = dict.fromkeys(key for turn in reached if turn for key in turn.rewards)
        return EnvironmentReturn(
            observations=[
                (turn and turn.messages) or {"role": ENVIRONMENT_ROLE, "content": ""}
                for turn in reached
            ],
            metadata=[
                {**(entry or {}), CONVERSATION_ID: name, _BEGUN: True}
                for entry, name in zip(metadata, names, strict=True)
            ],
            next_stop_strings=[None] * len(results),
            rewards={
                key: torch.tensor([turn.rewards.get(key, 0.0) if turn else 0.0 for turn in reached])
                for key in components
            }
            or torch.zeros(len(results)),
            terminateds=torch.tensor([not (turn and turn.messages) for turn in reached]),
            failures=[
                f"error: env.verifiers.{self._name}: {result}" if isinstance(result, str) else None
                for result in results
            ],
            notes=[dict(turn.metrics) if turn else {} for turn in reached],
        )

    async def _turn(
        self,
        runner: EpisodeRunner | None,
        name: str,
        log: MessageLog,
        entry: dict[str, Any] | None,
    ) -> EpisodeTurn | str:
        """Return what becomes of a turn, or the reason why nothing does."""
        data = (entry or {}).get(_KEY)
        if data is None:
            return f"the task is not of env.verifiers.{self._name}, which would score it"
        if runner is None or (conversation := runner.conversations.get(name)) is None:
            try:
                task = self._loaded.task_of(data)
            except Exception as error:  # the taskset's own classes
                return error_with_line(error)
            if runner is None:
                return await self._loaded.score(task, log)
            if (entry or {}).get(_BEGUN) or self._closed.get(name.encode()):
                return "the conversation was closed"
            conversation = runner.begin(name, task)
            problem = self._mismatch(await conversation.news.get(), log)
            if problem is not None:
                await runner.end([name])
                return problem
        text, form = log[-1]["content"], self._form
        calls = form.read(text) if form is not None else []
        reply = form.before_calls(text) if form is not None and calls else text
        conversation.answer(reply, calls)
        result = await conversation.news.get()
        if isinstance(result, str) or not result.messages:
            await runner.end([name])
        return result

    def _mismatch(self, first: EpisodeTurn | str, log: MessageLog) -> str | None:
        """Return how an episode begins otherwise than the prompt of its row."""
        if isinstance(first, str) or not first.messages:
            return first if isinstance(first, str) else "it ends before the policy is asked"
        if first.messages != [
            {"role": message["role"], "content": message["content"]} for message in log[:-1]
        ]:
            return (
                f"it begins otherwise than the row's prompt, with {first.messages!r:.300}; leave "
                "out data.prompt_file and data.system_prompt_file, and let no user open at random"
            )
        if first.tools != list(self.spec.tools):
            return "its tools are not those of the first task, which the prompts show"
        return None

    def close_conversations(self, metadata: Sequence[dict[str, Any] | None]) -> None:
        """End the episodes of these conversations, and wait until what they hold is closed."""
        names = [str((entry or {}).get(CONVERSATION_ID)) for entry in metadata]
        for name in names:
            self._closed.put(name.encode(), True)
        if self._opened is not None:
            self._opened.call(self._opened.end(names))

    def shutdown(self) -> None:
        """End all episodes and their servers."""
        with self._lock:
            opened = self._opened
        if opened is not None:  # its end takes a while, in which others may need the lock
            opened.close()

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Compute the common figures, and the mean of each metric of the taskset."""
        figures = batch_metrics(batch)
        measured: dict[str, list[float]] = {}
        for note in batch.get("notes") or []:
            # A rollout may end before it is scored: then it has no metrics.
            for name, value in (note or {}).items():
                measured.setdefault(name, []).append(float(value))
        for name, values in sorted(measured.items()):
            figures |= mean_of(f"metric/{name}", values)
        return batch, figures
