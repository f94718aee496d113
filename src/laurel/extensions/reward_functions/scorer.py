"""A Python function as a scorer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laurel.config.environments import FunctionConfig
from laurel.errors import ConfigError
from laurel.models.spec import ModelSpec
from laurel.observe.user_code import ForkGuard, guarded, import_object, member_of, own_line_of
from laurel.plugins import ManagedFunction, RewardManager
from laurel.rewards.remote.replica import failed
from laurel.types import IS_VALIDATION, PROMPT_MESSAGES, Group, Score
from laurel.workers.process_pool import ProcessDiedError, ProcessPool, ProcessPoolSpec
from laurel.workers.threads import begin_in_thread

if TYPE_CHECKING:
    from laurel.plugins import ModelEndpoint

MAX_THREADS = 16
"""Concurrent calls of a function that is not async, each in a thread."""
MAX_COROUTINES = 256
"""Concurrent calls of an async function."""
MAX_HUNG = 32
"""Threads left behind by calls that timed out, above which no more calls are made."""


class FunctionScorer:
    """Scores by calling a function, in threads here or in processes that can be killed.

    A completion fails where the function raises, times out or returns no finite number. Of a
    dictionary, `score` is the reward, and the other numbers are its components. Example::

        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

    scorer = FunctionScorer(FunctionConfig(path="my_rewards.py:compute_score"))
    """

    reads_metadata = True
    names_components = True
    # The function's own noise is its affair; nothing is rounded here.
    noise = 0.0

    def __init__(
        self,
        config: FunctionConfig,
        *,
        function: Function | None = None,
        num_workers: int = 0,
        max_concurrent: int | None = None,
        where: str = "env.reward_model.function",
        servers: ModelEndpoint | None = None,
    ) -> None:
        """Find the function, and check that it accepts the arguments it will be given.

        Args:
            function: Called instead of the one that `config.path` names; in threads only.
            num_workers: Processes; 0: threads.
            max_concurrent: Calls at a time; None: as many as fit threads or processes.
            servers: Of the model that the function asks; they are closed with the scorer.

        Raises:
            ConfigError: There is no such function, or it takes other arguments.
        """
        if servers is not None:
            update: dict[str, str] = {"router": servers.address}
            if config.tokenizer is None:
                update["tokenizer"] = servers.section.model_name
            config = config.model_copy(update=update)
        self.config = config
        self._most_calls = max_concurrent
        self._servers = servers
        self.rests = servers is not None and servers.rests
        self.judges_groups = config.group
        self._processes: ProcessPool | None = None
        self._hung = 0
        self._counting = threading.Lock()
        self._gate_of: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._is_async = False
        if num_workers and function is None:
            # The function is not imported here: it may need a library that must not be loaded here.
            self._processes = ProcessPool(
                ProcessPoolSpec(
                    name=f"{where}: the process for the function",
                    prepare="laurel.extensions.reward_functions.scorer:prepare",
                    num_workers=num_workers,
                    timeout_seconds=config.timeout,
                    settings=config.model_dump(mode="json")
                    | {"where": where, "is_served": servers is not None},
                )
            )
            try:
                self._processes.start()
                self._managed = self._manager(where, None, config.kwargs)
            except BaseException:
                self._processes.close()
                raise
            return
        self._function = function or find_function(config.path, where=f"{where}.path")
        self._served = served_arguments(
            self._function, config, where=where, is_served=servers is not None
        )
        check_call(
            self._function, config.kwargs | self._served, judges_groups=config.group, where=where
        )
        self._unasked = unasked_arguments(self._function, config)
        self._is_async = is_async(self._function)
        self._managed = self._manager(where, self._function, config.kwargs | self._served)

    def _manager(
        self, where: str, function: Function | None, kwargs: Mapping[str, Any]
    ) -> Callable[[Any, Any], Any] | None:
        """Return what makes the calls in place of `_scored`; None: nothing does."""
        if self.config.manager == "naive":
            return None
        manager, section = self.config.settings_of(RewardManager, self.config.manager)
        managed = ManagedFunction(
            where=where,
            function=function,
            kwargs=kwargs,
            timeout=self.config.timeout,
        )
        return manager.make(section, managed)

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups (`protocols.Scorer`), all of them concurrently."""
        return list(await asyncio.gather(*map(self._scored, groups)))

    async def _scored(self, group: Group) -> tuple[Score, ...]:
        calls = call_arguments(
            group,
            self.config.kwargs,
            judges_groups=self.judges_groups,
        )
        count = len(group.completions_G) if self.judges_groups else 1
        found = await asyncio.gather(*(self._answered(call, count) for call in calls))
        return tuple(score for scores in found for score in scores)

    async def _answered(self, arguments: Mapping[str, Any], count: int) -> tuple[Score, ...]:
        async with self._gate():
            if self._managed is None:
                return await self._called(arguments, count)
            return await self._called_by_manager(self._managed, arguments, count)

    async def _called_by_manager(
        self, managed: Callable[[Any, Any], Any], arguments: Mapping[str, Any], count: int
    ) -> tuple[Score, ...]:
        def call(arguments: Mapping[str, Any]) -> Awaitable[tuple[Score, ...]]:
            return self._called(arguments, count)

        try:
            found = tuple(await managed(arguments, call))
        except Exception as error:  # a manager of another package may raise anything
            return (score_of_error(error),) * count
        if len(found) != count or not all(isinstance(one, Score) for one in found):
            reason = f"error: the manager '{self.config.manager}' did not return {count} scores"
            return (failed(reason),) * count
        return found

    async def _called(self, arguments: Mapping[str, Any], count: int) -> tuple[Score, ...]:
        if self._processes is not None:
            return await self._in_process(self._processes, arguments, count)
        arguments = {k: v for k, v in arguments.items() if k not in self._unasked}
        arguments |= self._served
        limit = self.config.timeout
        try:
            async with asyncio.timeout(limit) as clock:
                if self._is_async:
                    return await guarded(self._awaited(arguments, count))
                if self._hung >= MAX_HUNG:
                    reason = (
                        f"timeout: {self._hung} calls of the function hang in threads, which "
                        "cannot be ended; set env.reward_model.num_workers, and its processes "
                        "are killed"
                    )
                    return (failed(reason),) * count
                return await self._in_thread(arguments, count)
        except asyncio.CancelledError as error:
            # The function may raise one of its own, when nobody has cancelled this.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return (score_of_error(error),) * count
        # A TimeoutError may be the function's own; its sys.exit() must not end the loop.
        except (Exception, SystemExit) as error:
            return (late(limit) if clock.expired() else score_of_error(error),) * count

    async def _awaited(self, arguments: Mapping[str, Any], count: int) -> tuple[Score, ...]:
        result = await self._function(**arguments)
        return verdicts_of(result, count=count, judges_groups=self.judges_groups)

    async def _in_process(
        self, processes: ProcessPool, arguments: Mapping[str, Any], count: int
    ) -> tuple[Score, ...]:
        try:
            asked = processes.submit({"arguments": dict(arguments), "count": count})
        except (TypeError, ValueError) as error:
            reason = f"error: what the function is given cannot go to another process ({error})"
            return (failed(f"{reason}; set num_workers=0"),) * count
        try:
            found = await asyncio.wrap_future(asked)
        except TimeoutError:
            return (late(self.config.timeout),) * count
        except ProcessDiedError:
            return (failed("error: the process died while it ran the function"),) * count
        return tuple(Score(**{**one, "values_K": tuple(one["values_K"])}) for one in found)

    async def _in_thread(self, arguments: Mapping[str, Any], count: int) -> tuple[Score, ...]:
        """Call the function in a thread of its own, which is left behind if it times out."""
        scores = functools.partial(
            scores_of_call, self._function, arguments, count=count, judges_groups=self.judges_groups
        )
        call = begin_in_thread(scores, name="laurel-function")
        try:
            result = await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            self._count_hung(1)
            call.add_done_callback(lambda _: self._count_hung(-1))
            raise
        return result()

    def _count_hung(self, change: int) -> None:
        with self._counting:
            self._hung += change

    def _gate(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._gate_of is None or self._gate_of[0] is not loop:
            # Processes have their own queue.
            is_open = self._is_async or self._processes is not None
            most = self._most_calls or (MAX_COROUTINES if is_open else MAX_THREADS)
            if self._processes is not None and self._managed is not None:
                # A call that waited in their queue would begin at another time than its manager's.
                most = min(most, self._processes.num_workers)
            self._gate_of = loop, asyncio.Semaphore(most)
        return self._gate_of[1]

    def resting(self) -> AbstractContextManager[None]:
        """Free the device memory of the model's servers while the context is open."""
        return contextlib.nullcontext() if self._servers is None else self._servers.resting()

    def close(self) -> None:
        """End the processes and servers. Idempotent."""
        if self._processes is not None:
            self._processes.close()
        if self._servers is not None:
            self._servers.close()


# The function in a worker process.


def prepare(settings: dict[str, Any]) -> Callable[[], Callable[[dict[str, Any]], Any]]:
    """Find the function anew in a worker process, as `ProcessPoolSpec.prepare` asks."""
    # Threads and other things that its module starts on import do not outlive a fork.
    where, is_served = settings.pop("where"), settings.pop("is_served")
    return functools.partial(_opened, where, is_served, FunctionConfig(**settings))


# Called after the fork; `prepare` runs before it.
def _opened(where: str, is_served: bool, config: FunctionConfig) -> Callable[[dict[str, Any]], Any]:
    function = find_function(config.path, where=f"{where}.path")
    served = served_arguments(function, config, where=where, is_served=is_served)
    check_call(function, config.kwargs | served, judges_groups=config.group, where=where)

    unasked = unasked_arguments(function, config)

    def score(asked: dict[str, Any]) -> list[dict[str, Any]]:
        given = asked["arguments"].items()
        arguments = {name: value for name, value in given if name not in unasked} | served
        found = scores_of_call(
            function, arguments, count=asked["count"], judges_groups=config.group
        )
        return [dataclasses.asdict(one) for one in found]

    return score


# Finding the function, its arguments and its results.

Function = Callable[..., Any]
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Keyword arguments of the function; with an `s` appended for a function of whole groups."""
ROLLOUT_ARGUMENTS = ("response_str", "num_turns", "validate")
"""Keyword arguments that a function gets where it names them. A function of whole groups gets the
lists `response_strs` and `num_turns`, and one `validate`."""
_LONGEST_REASON = 500


def find_function(path: str, *, where: str) -> Function:
    """Import the function that a path names.

    Args:
        path: `module:function`, or `path/to/file.py:function`.

    Raises:
        ConfigError: There is no such function, or the name is not callable.
    """
    place, _, name = path.rpartition(":")
    said = f"{where}={path}"
    if place.endswith(".py"):
        found = member_of(_from_file(place, where), name, where=said, called=place)
    else:
        instead = "; install it, or name a file (path/to/file.py:function)"
        found = import_object(path, where=said, instead=instead)
    if not callable(found):
        raise ConfigError(f"{said}: '{name}' is {type(found).__name__}, not a function")
    function: Function = found
    return function


def _from_file(place: str, where: str) -> Any:
    file = Path(place).expanduser()
    if not file.is_file():
        raise ConfigError(f"{where}: there is no file {file} (seen from {Path.cwd()})")
    # The same file is one module, however often it is named.
    name = f"laurel_function_{blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with ForkGuard():
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{where}: {file} cannot be run: {_text_of(error)}") from error
    return module


def served_arguments(
    function: Function, config: FunctionConfig, *, where: str, is_served: bool = False
) -> dict[str, Any]:
    """Return the arguments that a function gets only where it asks for them, as in verl: the
    address of a model's servers and the model's tokenizer.

    With `is_served` the run started the servers, and a function need not ask for the tokenizer.

    Raises:
        ConfigError: It asks for what the settings do not give, or does not take what they give.
    """
    given = {"reward_router_address": config.router, "reward_model_tokenizer": config.tokenizer}
    parameters: Mapping[str, inspect.Parameter] = {}
    with contextlib.suppress(TypeError, ValueError):  # some functions written in C do not say
        parameters = inspect.signature(function).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    served: dict[str, Any] = {}
    for name, key in (("reward_router_address", "router"), ("reward_model_tokenizer", "tokenizer")):
        if name in config.kwargs:
            continue
        parameter = parameters.get(name)
        if given[name] is not None:
            if parameter is None and not takes_any:
                if is_served and key == "tokenizer":
                    continue
                raise ConfigError(
                    f"{where}.{key} is for a function that takes {name}, and this one does not; "
                    "leave it out"
                )
            served[name] = given[name]
        elif parameter is not None and parameter.default is parameter.empty:
            what = (
                "HOST:PORT of the server that it is to ask; or env.reward_model.server, which "
                "has the run start it"
                if key == "router"
                else "the model whose tokenizer it is to use"
            )
            raise ConfigError(f"{where}: the function asks for {name}; set {where}.{key}: {what}")
    if "reward_model_tokenizer" in served:
        from laurel.models.loading.pretrained import find_tokenizer

        name = served["reward_model_tokenizer"]
        served["reward_model_tokenizer"] = find_tokenizer(ModelSpec(name=name), pad_may_end=True)
    return served


def unasked_arguments(function: Function, config: FunctionConfig) -> frozenset[str]:
    """Return those of `ROLLOUT_ARGUMENTS` that neither the function nor `kwargs` names."""
    names = _rollout_names(config.group)
    asked: set[str] = set()
    with contextlib.suppress(TypeError, ValueError):  # some functions written in C do not say
        asked = set(inspect.signature(function).parameters)
    return frozenset(names) - asked - config.kwargs.keys()


def check_call(
    function: Function, kwargs: Mapping[str, Any], *, judges_groups: bool, where: str
) -> None:
    """Raise an error if a function does not accept the arguments it will be given.

    Args:
        kwargs: Arguments besides those that describe a completion.
        judges_groups: Whether the function is called for whole groups.

    Raises:
        ConfigError: It cannot be called so.
    """
    names = _names(judges_groups)
    taken = sorted(kwargs.keys() & set(names))
    if taken:
        raise ConfigError(f"{where}.kwargs: '{taken[0]}' is given by Laurel; leave it out")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C do not say
        return
    asked = [name for name in _rollout_names(judges_groups) if name in signature.parameters]
    try:
        signature.bind(**dict.fromkeys((*names, *asked, *kwargs)))
    except TypeError as error:
        given = ", ".join([*names, *kwargs])
        raise ConfigError(
            f"{where}: {getattr(function, '__name__', function)}{signature} cannot be called with "
            f"{given}: {error}"
        ) from error


def is_async(function: Function) -> bool:
    """Whether calling the function returns an awaitable."""
    call = getattr(function, "__call__", None)  # noqa: B004  of an object that is a function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _names(judges_groups: bool) -> tuple[str, ...]:
    return tuple(f"{name}s" for name in ARGUMENTS) if judges_groups else ARGUMENTS


def _rollout_names(judges_groups: bool) -> tuple[str, ...]:
    return ("response_strs", *ROLLOUT_ARGUMENTS[1:]) if judges_groups else ROLLOUT_ARGUMENTS


def call_arguments(
    group: Group, kwargs: Mapping[str, Any], *, judges_groups: bool
) -> list[dict[str, Any]]:
    """Build the arguments of each call for a group: one for each completion, or one for all.

    `solution_str` is the last message. `extra_info` is that of the task, with all other metadata,
    and the messages before as `prompt`. `response_str` has all messages since the prompt of the
    task, and `num_turns` counts them and the prompt, as verl does. `validate` tells whether the
    rollout only measures the policy.
    """
    metadata = group.metadata
    own = ("data_source", "ground_truth", PROMPT_MESSAGES, IS_VALIDATION)
    extra = {k: v for k, v in metadata.items() if k not in own}
    begins = metadata.get(PROMPT_MESSAGES, len(group.prompt))
    nested = extra.pop("extra_info", None)
    extra |= nested if isinstance(nested, Mapping) else {}
    rows = []
    for completion in group.completions_G:
        conversation = (*group.prompt, *completion.messages)
        *before, answer = conversation
        said = [message.content for message in conversation[begins:]]
        prompt = [{"role": message.role, "content": message.content} for message in before]
        rows.append(
            (
                metadata.get("data_source", ""),
                answer.content,
                metadata.get("ground_truth"),
                {"prompt": prompt, "num_turns": 1 + len(said)} | extra,
                "\n".join(said),
                1 + len(said),
            )
        )
    names = (*_names(judges_groups), *_rollout_names(judges_groups)[:-1])
    last = {"validate": bool(metadata.get(IS_VALIDATION))} | dict(kwargs)
    if not judges_groups:
        return [dict(zip(names, row, strict=True)) | last for row in rows]
    columns = [list(column) for column in zip(*rows, strict=True)]
    return [dict(zip(names, columns, strict=True)) | last] if rows else []


def scores_of_call(
    function: Function, arguments: Mapping[str, Any], *, count: int, judges_groups: bool
) -> tuple[Score, ...]:
    """Call a function, and convert what it returns or raises into scores."""
    try:
        with ForkGuard():  # for the conversion too, which may run methods of the result
            result = function(**arguments)
            if is_async(function):
                result = asyncio.run(guarded(result))
            return verdicts_of(result, count=count, judges_groups=judges_groups)
    except BaseException as error:  # raised by the function, SystemExit too
        return (score_of_error(error),) * count


def verdicts_of(result: Any, *, count: int, judges_groups: bool) -> tuple[Score, ...]:
    """Convert the result of a call into a score for each of its completions."""
    if not judges_groups:
        return (score_of_result(result),)
    results = result.tolist() if hasattr(result, "tolist") else result
    if isinstance(results, str | bytes | Mapping) or not isinstance(results, Sequence):
        reason = f"error: the function returned {type(result).__name__}, not a list of results"
        return (failed(reason),) * count
    if len(results) != count:
        reason = f"count: the function returned {len(results)} results for {count} completions"
        return (failed(reason),) * count
    return tuple(score_of_result(one) for one in results)


def score_of_result(result: Any) -> Score:
    """Convert a number, or a dictionary with a `score` and perhaps other numbers, into a score."""
    parts: dict[str, float] = {}
    value = result
    if isinstance(result, Mapping):
        if "score" not in result:
            return failed("error: the function returned a dictionary without a 'score'")
        value = result["score"]
        for name, part in result.items():
            number = _number(part)
            if name != "score" and number is not None and math.isfinite(number):
                parts[str(name)] = number
    number = _number(value)
    if number is None:
        kind = "None" if value is None else type(value).__name__
        return failed(f"error: the function returned {kind}, not a number")
    if not math.isfinite(number):
        return failed(f"nan: the function returned {number}")
    return Score(value=number, values_K=(number,), parts=parts)


def _number(value: Any) -> float | None:
    """Convert any library's number type; None for anything else."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def score_of_error(error: BaseException) -> Score:
    """Return the failed score of a call that raised."""
    place = own_line_of(error)
    where = "" if place is None else f" ({place})"
    return failed(f"error: the function raised {_text_of(error)}{where}")


def late(seconds: float) -> Score:
    """Return the failed score of a call that took too long."""
    return failed(f"timeout: the function took more than {seconds:.3g} s")


def _text_of(error: BaseException) -> str:
    try:
        said = str(error)
    except Exception:  # its class may be the user's own
        said = ""
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return text[:_LONGEST_REASON]
