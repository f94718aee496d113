"""Defines an environment whose policy calls Python functions before it answers."""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, NotRequired, Required

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from typing_extensions import TypedDict

from laurel.environments.interface import (
    ENVIRONMENT_ROLE,
    EnvironmentInterface,
    EnvironmentReturn,
    EnvironmentSpec,
    batch_metrics,
    cut_middle,
    last_answer,
    mean_of,
    settings_of,
)
from laurel.environments.registry import imported
from laurel.errors import ConfigError, EnvironmentFailedError
from laurel.extensions.function_tools.settings import ToolsConfig
from laurel.models.tool_calls import (
    CallForm,
    MalformedCall,
    ReadCall,
    ToolCall,
    form_of,
    needed_form,
)
from laurel.observe.user_code import ForkGuard, guarded
from laurel.protocols import MessageLog
from laurel.types import Observation, ToolSchemas
from laurel.workers.process_pool import ProcessDiedError, ProcessPool, ProcessPoolSpec

TOOL_ROLE = "tool"
COUNTS = "tool_counts"
"""The metadata key of what has become of the calls of a conversation so far."""
OUTCOMES = (
    "answered",
    "malformed",
    "unknown_name",
    "wrong_arguments",
    "raised",
    "timeout",
    "over_limit",
)
"""What may become of a call: all but the first are answered by a text about what was wrong."""
INVALID = ("malformed", "unknown_name", "wrong_arguments")
"""What was wrong with the call itself."""


class Reply(NamedTuple):
    """The text that answers a call, and what became of the call, one of `OUTCOMES`."""

    outcome: str
    text: str


class ToolEnvironment(EnvironmentInterface):
    """Runs the calls in the policy's messages; a message without a call is its final answer.

    The calls of a message run concurrently, and each is answered by a `tool` message. The reward is
    always 0: in a composite that this environment conducts, others score the final answer. A
    function that raises, takes too long, or does not take its arguments is answered by a text, and
    counted. If its process dies, the completion is a failure.
    """

    def __init__(
        self, env_config: ToolsConfig | Mapping[str, Any], *, max_observation_chars: int = 4096
    ) -> None:
        """Import the functions and describe them; processes start with the first call.

        Args:
            max_observation_chars: Longest result that the policy sees; a longer one loses its
                middle.

        Raises:
            ConfigError: Settings are invalid, or a function cannot be described.
        """
        self.config = config = settings_of(ToolsConfig, env_config, where="env.tools")
        if not config.functions:
            raise ConfigError("env.tools.functions is empty: name at least one, module.function")
        schemas = schemas_of(config)
        self.spec = EnvironmentSpec(judges="completion", tools=schemas, components=())
        self._names = [schema["function"]["name"] for schema in schemas]
        self._form: CallForm | None = None
        self._most_chars = max_observation_chars
        parameters = [schema["function"]["parameters"] for schema in schemas]
        self._pool = ProcessPool(
            ProcessPoolSpec(
                name="the pool of tools",
                prepare="laurel.extensions.function_tools.environment:prepare_calls",
                num_workers=config.num_workers,
                timeout_seconds=config.timeout_seconds,
                settings=list(zip(config.functions, parameters, strict=True)),
            )
        )

    def use_tokenizer(self, tokenizer: Any) -> None:
        """Choose the form of calls that the chat template writes."""
        self._form = form_of(tokenizer)

    def step(
        self, message_log_batch: Sequence[MessageLog], metadata: Sequence[dict[str, Any] | None]
    ) -> EnvironmentReturn:
        """Run the calls in the last messages of conversations, and answer them.

        The returned metadata counts the outcomes of the conversation's calls (`tool_counts`).
        """
        import torch

        # Before any call begins: a call may have effects.
        if len(message_log_batch) != len(metadata):
            raise EnvironmentFailedError(
                f"{len(message_log_batch)} conversations came with metadata for {len(metadata)}"
            )
        counts = [Counter[str]((entry or {}).get(COUNTS) or {}) for entry in metadata]
        form = needed_form(self._form, "env.tools")
        # All calls begin before the first of them is waited for.
        waiting = [
            [
                self._begin(call, number)
                for number, call in enumerate(form.read(last_answer(log)), before.total() + 1)
            ]
            for log, before in zip(message_log_batch, counts, strict=True)
        ]
        observations: list[Observation] = []
        failures: list[str | None] = []
        invalid: list[bool] = []
        for replies, counter in zip(waiting, counts, strict=True):
            failure, shown = None, []
            invalid.append(False)
            for reply in replies:
                try:
                    outcome, text = reply()
                except (ProcessDiedError, EnvironmentFailedError) as error:
                    failure = f"a tool failed: {error}"
                    continue
                counter[outcome] += 1
                invalid[-1] |= outcome in INVALID
                content = cut_middle(text, self._most_chars)
                shown.append({"role": TOOL_ROLE, "content": content})
            failures.append(failure)
            observations.append(shown or {"role": ENVIRONMENT_ROLE, "content": ""})
        return EnvironmentReturn(
            observations=observations,
            metadata=[
                {**(entry or {}), COUNTS: dict(counter)}
                for entry, counter in zip(metadata, counts, strict=True)
            ],
            next_stop_strings=[None for _ in metadata],
            rewards=torch.zeros(len(metadata)),
            # Without a call it is the final answer.
            terminateds=torch.tensor([not replies for replies in waiting], dtype=torch.bool),
            failures=failures,
            invalid_calls=invalid,
            notes=[dict(counter) for counter in counts],
        )

    def _begin(self, call: ReadCall, number: int) -> Callable[[], Reply]:
        """Start a call, the `number`-th of its conversation; the result waits for the reply."""
        if number > self.config.max_calls:
            used_up = f"the {self.config.max_calls} calls are used up: give your answer now"
            return lambda: Reply("over_limit", f"Error: {used_up}")
        if isinstance(call, MalformedCall):
            assert self._form is not None
            form = self._form.write([ToolCall(self._names[0], {"...": "..."})])
            unread = f"the call cannot be read: {call.problem}. The form is {form}"
            return lambda: Reply("malformed", f"Error: {unread}")
        if call.name not in self._names:
            unknown = f"there is no function {call.name!r:.100}, only {', '.join(self._names)}"
            return lambda: Reply("unknown_name", f"Error: {unknown}")
        future = self._pool.submit({"name": call.name, "arguments": dict(call.arguments)})

        def wait() -> Reply:
            try:
                return Reply(*future.result())
            except TimeoutError:
                limit = f"{call.name} took more than {self.config.timeout_seconds:g} s"
                return Reply("timeout", f"Error: {limit}")
            except ProcessDiedError as error:
                raise ProcessDiedError(f"{call.name}: {error}") from error

        return wait

    def global_post_process_and_metrics(
        self, batch: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], dict[str, float]]:
        """Compute how many calls the completions of a batch made, and what became of them.

        `calls` is the mean number of calls, `calling_share` the share of completions with any.
        `calls/<outcome>` are shares of all calls: `answered`, `malformed`, `unknown_name`,
        `wrong_arguments`, `raised`, `timeout` and `over_limit`.
        """
        metrics = batch_metrics(batch)
        counts = [Counter(note) for note in batch.get("notes") or ()]
        metrics |= mean_of("calls", [float(count.total()) for count in counts])
        metrics |= mean_of("calling_share", [float(count.total() > 0) for count in counts])
        if num_calls := sum(count.total() for count in counts):
            for outcome in OUTCOMES:
                metrics[f"calls/{outcome}"] = sum(count[outcome] for count in counts) / num_calls
        return batch, metrics

    def shutdown(self) -> None:
        """End the processes; calls in progress fail."""
        self._pool.close()


def schemas_of(config: ToolsConfig) -> ToolSchemas:
    """Describe the functions of a configuration as JSON schemas, from type hints and docstrings.

    Raises:
        ConfigError: A function cannot be imported or described.
    """
    from transformers.utils import chat_template_utils as describing

    schemas = []
    for path in config.functions:
        where = f"env.tools.functions: {path}"
        function = imported(path, "env.tools.functions")
        if not inspect.isroutine(function):
            raise ConfigError(f"{where} is no function, but a {type(function).__name__}")
        try:
            schema = describing.get_json_schema(function)
            _arguments_of(function, schema["function"]["parameters"])
        except describing.DocstringParsingException as error:
            how = 'a docstring with a summary, and "Args:" with a line for each argument'
            raise ConfigError(f"{where} needs {how}: {error}") from error
        except (describing.TypeHintParsingException, PydanticUserError, NameError) as error:
            raise ConfigError(
                f"{where} needs a type hint of plain values on each argument (int, str, "
                f"list[float], Literal, ...): {error}"
            ) from error
        schemas.append(schema)
    return tuple(schemas)


def _arguments_of(function: Callable[..., Any], parameters: Mapping[str, Any]) -> TypeAdapter[Any]:
    """Return the check of a function's arguments as a policy may write them in JSON."""
    hints, fields = typing.get_type_hints(function), {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise PydanticUserError(f"{parameter} cannot be given by name", code=None)
        # A docstring may list the choices of an argument.
        choices = parameters["properties"][name].get("enum")
        kind = Literal[tuple(choices)] if choices else hints[name]
        is_optional = parameter.default is not parameter.empty
        fields[name] = (NotRequired if is_optional else Required)[kind]
    make: Any = TypedDict
    arguments = make("Arguments", fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    return TypeAdapter(arguments)


def prepare_calls(
    functions: Sequence[tuple[str, Mapping[str, Any]]],
) -> Callable[[], Callable[[Any], Reply]]:
    """Import the functions in the process that starts the pool's others, which call them.

    `functions` are import paths, each with the parameters in its schema.
    """
    tools = {}
    for path, parameters in functions:
        function = imported(path, "env.tools.functions")
        tools[path.rpartition(".")[2]] = function, _arguments_of(function, parameters)

    def call(item: Mapping[str, Any]) -> Reply:
        function, check = tools[item["name"]]
        try:
            arguments = check.validate_json(json.dumps(item["arguments"]))
        except ValidationError as error:
            problems = [
                f"{'.'.join(map(str, fault['loc'])) or 'the arguments'}: {fault['msg']}"
                for fault in error.errors()
            ]
            wrong = f"Error: {item['name']} does not take these arguments: {'; '.join(problems)}"
            return Reply("wrong_arguments", wrong)
        try:
            with ForkGuard():
                result = function(**arguments)
                if inspect.iscoroutine(result):
                    result = asyncio.run(guarded(result))
            if not isinstance(result, str):
                result = json.dumps(result, ensure_ascii=False, default=str)
        except (Exception, SystemExit) as error:  # of a user's function
            return Reply("raised", f"Error: {type(error).__name__}: {error}")
        return Reply("answered", result)

    return lambda: call
