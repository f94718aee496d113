"""Adapts verifiers 0.4: the tasks of its tasksets, scored by their own rewards and metrics.

A task is answered in one turn. Its rewards, times their weights, are the named components of the
reward; its metrics are figures. Tasksets that need more of the package's own runner (tool servers,
users that are simulated, containers) are refused before the run.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from laurel.config.data import TaskSetConfig
from laurel.config.environments import VerifiersEnvironmentConfig
from laurel.data.tasks import MadeRows
from laurel.environments.interface import (
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
    batch_figures,
    mean_of,
)
from laurel.errors import ConfigError, MissingDependencyError
from laurel.observe.hub import error_with_line
from laurel.protocols import MessageLog

_KEY = "verifiers"


def load_taskset(name: str, config: VerifiersEnvironmentConfig) -> Any:
    """Load a taskset by its id, and check that it can be scored here.

    Raises:
        ConfigError: There is no such taskset, it does not take the arguments, or it needs more than
            one turn and a conversation.
        MissingDependencyError: The package is not installed.
    """
    where = f"env.verifiers.{name}"
    try:
        package = importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        if error.name not in ("verifiers", "verifiers.v1"):
            raise
        raise MissingDependencyError.of("verifiers", extra="verifiers", purpose=where) from None
    try:
        settings = package.taskset_config_type(config.id)(**{**config.args, "id": config.id})
        taskset = package.load_taskset(settings)
    except Exception as error:  # a package of somebody's: its import may raise anything
        raise ConfigError(f"{where}: {config.id}: {error_with_line(error)}") from error
    kind = type(taskset).task_type()
    needs = _needs(package, taskset, kind)
    if needs:
        raise ConfigError(
            f"{where}: {config.id} needs {', '.join(needs)}, which only the package's own runner "
            "has. Here a taskset is answered in one turn, and scored by the conversation alone"
        )
    return taskset


def _needs(package: Any, taskset: Any, kind: Any) -> list[str]:
    """List what a taskset needs that a single conversation does not give."""
    needs = []
    if kind.toolsets(taskset.config.task) or taskset.toolsets(taskset.config):
        needs.append("tool servers")
    if package.environment_class(taskset.config.id) is not package.SingleAgentEnv:
        needs.append("an environment of its own")
    if kind.NEEDS_CONTAINER:
        needs.append("a container")
    task = next(iter(taskset), None)
    hooks = [] if task is None else [*task.hooks("reward"), *task.hooks("metric")]
    for hook in hooks:
        runtime = inspect.signature(hook).parameters.get("runtime")
        if runtime is not None and runtime.default is inspect.Parameter.empty:
            needs.append(f"a runtime for its '{hook.__name__}'")
    return needs


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
    taskset = load_taskset(name, environments[name])
    if not taskset.bounded and set_config.max_samples is None:
        raise ConfigError(
            f"env.verifiers.{name}: the tasks of {environments[name].id} have no end; say how many "
            "in data.max_samples"
        )
    rows = [_row(task) for task in islice(taskset, set_config.max_samples)]
    return MadeRows(origin=f"verifiers: {environments[name].id}", rows=rows)


def _row(task: Any) -> dict[str, Any]:
    data = task.data
    if isinstance(data.prompt, str):
        said = [{"role": "user", "content": data.prompt}]
    else:
        content = importlib.import_module("verifiers.v1.types").content_text
        said = [{"role": one.role, "content": content(one.content)} for one in data.prompt or []]
    if data.system_prompt is not None:
        said = [{"role": "system", "content": data.system_prompt}, *said]
    return {"prompt": said, "metadata": {_KEY: data.model_dump(mode="json")}}


class VerifiersEnvironment(EnvironmentInterface):
    """Gives the sum of a task's weighted rewards, each under its own name."""

    spec = EnvironmentSpec(judges="completion")

    def __init__(self, name: str, config: VerifiersEnvironmentConfig) -> None:
        """Load the taskset, whose tasks are made anew from a row's metadata to score an answer."""
        self._taskset = load_taskset(name, config)
        self._package = importlib.import_module("verifiers.v1")
        self._name = name
        state_cls = importlib.import_module("verifiers.v1.state").state_cls
        self._state = state_cls(type(self._taskset).task_type())

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Score one answer to each task; an error of a reward is a failure with its line."""
        results = asyncio.run(self._scored(message_log_batch, metadata))
        traces = [None if isinstance(one, str) else one for one in results]
        parts = [
            {} if one is None else {k: r.value for k, r in one.rewards.items() if r is not None}
            for one in traces
        ]
        names = list(dict.fromkeys(name for part in parts for name in part)) or [self._name]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""} for _ in results],
            metadata=list(metadata),
            next_stop_strings=[None] * len(results),
            rewards={
                name: torch.tensor([part.get(name, 0.0) for part in parts], dtype=torch.float32)
                for name in names
            },
            terminateds=torch.ones(len(results), dtype=torch.bool),
            failures=[one if isinstance(one, str) else None for one in results],
            notes=[
                {} if one is None else {k: v for k, v in one.metrics.items() if v is not None}
                for one in traces
            ],
        )

    async def _scored(
        self, logs: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> list[Any]:
        return await asyncio.gather(*map(self._trace_of, logs, metadata))

    async def _trace_of(self, log: MessageLog, metadata: dict[str, Any] | None) -> Any:
        """Return the scored trace of a conversation, or the reason why there is none."""
        given = (metadata or {}).get(_KEY)
        if given is None:
            return f"error: the task is not of env.verifiers.{self._name}, which would score it"
        package, kind = self._package, type(self._taskset).task_type()
        try:
            task = kind(kind.data_type().model_validate(given), self._taskset.config.task)
            messages = [_typed(package, message) for message in log]
            trace = package.Trace(
                task=package.TraceTask(
                    type=kind.__name__, data=task.data, key=task.key, hash=task.hash
                ),
                agent=package.AgentInfo(config=package.AgentConfig()),
                state=self._state(),
                nodes=[
                    package.MessageNode(
                        parent=i - 1 if i else None, message=message, sampled=i == len(log) - 1
                    )
                    for i, message in enumerate(messages)
                ],
            )
            await task.score(trace)
        except Exception as error:  # the taskset's own code: anything can come out of it
            # Theirs wraps the error of a reward, whose line is the one to look at.
            return f"error: env.verifiers.{self._name}: {error_with_line(_cause(error))}"
        if not any(reward is not None for reward in trace.rewards.values()):
            return f"error: env.verifiers.{self._name}: the task has no rewards"
        return trace

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Compute the common figures, and the mean of each metric of the taskset."""
        figures = batch_figures(batch)
        measured: dict[str, list[float]] = {}
        for note in batch.get("notes") or []:
            # Behind tools, a rollout may end before it is scored: then it has no note.
            for name, value in (note or {}).items():
                measured.setdefault(name, []).append(float(value))
        for name, values in sorted(measured.items()):
            figures |= mean_of(f"metric/{name}", values)
        return batch, figures


def _typed(package: Any, message: Mapping[str, str]) -> Any:
    kinds = {"system": package.SystemMessage, "assistant": package.AssistantMessage}
    return kinds.get(message["role"], package.UserMessage)(content=message["content"])


def _cause(error: Exception) -> Exception:
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return error
