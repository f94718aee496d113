"""A Python function as a scorer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

from laurel.config.environments import FunctionConfig
from laurel.config.yaml_tree import nearest
from laurel.errors import ConfigError, EnvironmentFailedError, UserError
from laurel.models.spec import ModelSpec
from laurel.observe.hub import own_line_of
from laurel.rewards.remote.replica import failed
from laurel.types import Group, Score

MOST_AT_ONCE = 16
"""Calls of a function that is not async, in as many threads."""
MOST_WAITING = 256
"""Calls of one that is."""
MOST_HUNG = 32
"""Threads left behind by calls that took too long, above which no more are begun."""


class FunctionScorer:
    """Scores by calling a function, in threads here or in processes that can be killed.

    What it raises, returns instead of a finite number, or does not return in time is the failure of
    that completion. Example::

        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

        scorer = FunctionScorer(FunctionConfig(path="my_rewards.py:compute_score"))
    """

    reads_metadata = True
    noise = 0.0
    """What it says of equal completions is its own affair; nothing is rounded here."""

    def __init__(
        self,
        config: FunctionConfig,
        *,
        function: Function | None = None,
        num_workers: int = 0,
        where: str = "env.reward_model.function",
    ) -> None:
        """Find the function, and see whether it takes what it will be given.

        Args:
            config: See there.
            function: Instead of that which `config.path` names; in threads only.
            num_workers: Processes; 0: threads.
            where: The section, for messages.

        Raises:
            ConfigError: There is no such function, or it takes something else.
        """
        self.config = config
        self.judges_groups = config.group
        self._processes: FunctionProcesses | None = None
        self._hung = 0
        self._counting = threading.Lock()
        self._gate_of: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._rates = [
            _Rate(per_minute, each)
            for per_minute, each in (
                (config.max_rpm, 1.0),
                (config.max_tpm, config.estimated_tokens_per_request),
            )
            if per_minute is not None
        ]
        self._is_async = False
        if num_workers and function is None:
            # It is not even imported here: that may take a library that shall not be in this one.
            self._processes = FunctionProcesses(config, num_workers=num_workers, where=where)
            try:
                self._processes.start()
            except BaseException:
                self._processes.close()
                raise
            return
        self._function = function or find_function(config.path, where=f"{where}.path")
        self._served = served_arguments(self._function, config, where=where)
        check_call(
            self._function, config.kwargs | self._served, judges_groups=config.group, where=where
        )
        self._is_async = is_async(self._function)

    async def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """See `protocols.Scorer`."""
        return list(await asyncio.gather(*map(self._scored, groups)))

    async def _scored(self, group: Group) -> tuple[Score, ...]:
        calls = call_arguments(
            group,
            self.config.kwargs,
            judges_groups=self.judges_groups,
            data_source=self.config.data_source,
        )
        count = len(group.completions_G) if self.judges_groups else 1
        found = await asyncio.gather(*(self._called(call, count) for call in calls))
        return tuple(score for scores in found for score in scores)

    async def _called(self, arguments: Mapping[str, Any], count: int) -> tuple[Score, ...]:
        wait = max((rate.reserve(time.monotonic()) for rate in self._rates), default=0.0)
        if wait > 0:
            await _pause(wait)
        async with self._gate():
            if self._processes is not None:
                return await self._processes.call(arguments, count=count)
            arguments = {**arguments, **self._served}
            limit = self.config.timeout
            try:
                async with asyncio.timeout(limit) as clock:
                    if self._is_async:
                        result = await self._function(**arguments)
                    elif self._hung >= MOST_HUNG:
                        return (failed(self._why_hung()),) * count
                    else:
                        result = await self._in_thread(arguments)
            except _RaisedError as error:
                return (score_of_error(error.raised),) * count
            except Exception as error:  # a TimeoutError may be the function's own
                return (late(limit) if clock.expired() else score_of_error(error),) * count
            return verdicts_of(result, count=count, judges_groups=self.judges_groups)

    async def _in_thread(self, arguments: Mapping[str, Any]) -> Any:
        """The result of a call in a thread of its own, which is left behind if it is late."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def tell(result: Any, error: BaseException | None) -> None:
            if future.cancelled():
                with self._counting:
                    self._hung -= 1
            elif error is not None:
                future.set_exception(_RaisedError(error))
            else:
                future.set_result(result)

        def run() -> None:
            result, raised = None, None
            try:
                result = self._function(**arguments)
            except BaseException as error:
                raised = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(tell, result, raised)

        threading.Thread(target=run, name="laurel-function", daemon=True).start()
        try:
            return await future
        except asyncio.CancelledError:
            if future.cancelled():  # else the call has ended, and has told so
                with self._counting:
                    self._hung += 1
            raise

    def _why_hung(self) -> str:
        return (
            f"timeout: {self._hung} calls of the function hang in threads, which cannot be ended; "
            "set env.reward_model.num_workers, and its processes are killed"
        )

    def _gate(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if self._gate_of is None or self._gate_of[0] is not loop:
            # Processes have a queue of their own.
            is_open = self._is_async or self._processes is not None
            most = self.config.max_concurrent or (MOST_WAITING if is_open else MOST_AT_ONCE)
            self._gate_of = loop, asyncio.Semaphore(most)
        return self._gate_of[1]

    def close(self) -> None:
        """End the processes. Idempotent."""
        if self._processes is not None:
            self._processes.close()


_pause = asyncio.sleep
"""Until it is a call's turn."""


class _Rate:
    """So much a minute, evenly: what has not been used for a second is lost. For any thread."""

    def __init__(self, per_minute: float, each: float) -> None:
        """Let the first call begin at once.

        Args:
            per_minute: How much.
            each: Of it for a call.
        """
        self._interval = 60.0 * each / per_minute
        self._at_once = max(self._interval, 1.0)
        self._lock = threading.Lock()
        self._until = -math.inf
        """When all that was begun will have been paid for."""

    def reserve(self, now: float) -> float:
        """Seconds until the next call may begin, which it does."""
        with self._lock:
            self._until = max(self._until, now) + self._interval
            return max(0.0, self._until - self._at_once - now)


class _RaisedError(Exception):
    """What the function raised in its thread; a future does not take everything as it is."""

    def __init__(self, raised: BaseException) -> None:
        super().__init__(str(raised))
        self.raised = raised


# --------------------------------------------------------------------------------------------------
# Processes that run a function that scores; each can be killed in the middle of a call.

START_SECONDS = 120.0
"""Limit for a process to be ready: the function may import a large library."""
_AT_ONCE = 1 << 16


class FunctionProcesses:
    """Runs calls side by side. Processes start with the first call, or with `start`.

    A process that is killed takes with it whatever the function has started. They all end with
    `close`, and soon after this process, however that ends.
    """

    def __init__(self, config: FunctionConfig, *, num_workers: int, where: str) -> None:
        """Start nothing yet.

        Args:
            config: The function; its timeout is that of one call.
            num_workers: Processes.
            where: The section, for messages.
        """
        self._config = config
        self._where = where
        self._lock = threading.Lock()
        self._mine = threading.local()
        self._living: dict[int, _Process] = {}
        self._closed = False
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="laurel-function")

    async def call(self, arguments: Mapping[str, Any], *, count: int) -> tuple[Score, ...]:
        """The verdicts of one call on so many completions."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, arguments, count)

    def start(self) -> None:
        """Start a process, to see whether that can be done.

        Raises:
            ConfigError: The function cannot be found there.
        """
        self._threads.submit(self._process).result()

    def process_ids(self) -> list[int]:
        """The processes alive now."""
        with self._lock:
            return list(self._living)

    def close(self) -> None:
        """Kill the processes; calls under way fail. Idempotent."""
        with self._lock:
            self._closed = True
            living = list(self._living.values())
        for process in living:
            self._end(process)
        self._threads.shutdown(cancel_futures=True)

    def _call(self, arguments: Mapping[str, Any], count: int) -> tuple[Score, ...]:
        """In a thread of the pool, which has at most one process at a time."""
        limit = self._config.timeout
        try:
            message = json.dumps({"arguments": dict(arguments), "count": count})
        except (TypeError, ValueError) as error:
            reason = f"error: what the function is given cannot go to another process ({error})"
            return (failed(f"{reason}; set num_workers=0"),) * count
        process = self._process()
        try:
            reply = process.ask(message, time.monotonic() + limit)
        except TimeoutError:
            self._end(process)
            return (late(limit),) * count
        except OSError:
            self._end(process)
            if self._closed:
                raise EnvironmentFailedError("the scorer was closed meanwhile") from None
            return (failed("error: the process died while it ran the function"),) * count
        return tuple(Score(**{**one, "values_K": tuple(one["values_K"])}) for one in reply["found"])

    def _process(self) -> _Process:
        process: _Process | None = getattr(self._mine, "process", None)
        # By itself and not by its id, which another process may have by now.
        if process is not None and self._living.get(process.pid) is process:
            return process
        process = _Process()
        with self._lock:
            if self._closed:
                process.kill()
                raise EnvironmentFailedError("the scorer was closed")
            self._living[process.pid] = process
        self._mine.process = process
        config = {**self._config.model_dump(mode="json"), "where": self._where}
        try:
            said = process.ask(json.dumps(config), time.monotonic() + START_SECONDS)
        except OSError as error:
            self._end(process)
            raise EnvironmentFailedError(
                f"{self._where}: the process for the function does not start ({error})"
            ) from error
        if said["refused"] is not None:
            self._end(process)
            raise ConfigError(said["refused"])
        return process

    def _end(self, process: _Process) -> None:
        with self._lock:
            if self._living.get(process.pid) is not process:
                return
            del self._living[process.pid]
        process.kill()


class _Process:
    """One process, seen from here."""

    def __init__(self) -> None:
        self._link, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            "from laurel.rewards.function import main\n"
            f"main({there.fileno()}, {os.getpid()})"
        )
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # so that all it starts can be killed with it
            )
        self.pid = self._process.pid

    def ask(self, message: str, deadline: float) -> dict[str, Any]:
        """The reply; TimeoutError where it is late, OSError where the process is gone."""
        self._link.settimeout(max(deadline - time.monotonic(), 1e-3))
        self._link.sendall(message.encode() + b"\n")
        received = bytearray()
        while not received.endswith(b"\n"):
            self._link.settimeout(max(deadline - time.monotonic(), 1e-3))
            part = self._link.recv(_AT_ONCE)
            if not part:
                raise ConnectionResetError("the process is gone")
            received += part
        reply: dict[str, Any] = json.loads(received)
        return reply

    def kill(self) -> None:
        """End it and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._link.close()


# --------------------------------------------------------------------------------------------------
# What runs in a process for a function that scores: one call after the other.

_LOOK_FOR_PARENT_SECONDS = 1.0


def main(descriptor: int, parent: int) -> None:
    """Serve the process at the other end of a socket until it is gone.

    Args:
        descriptor: Of the socket.
        parent: Process id of the other end.
    """
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    link = socket.socket(fileno=descriptor)
    with link.makefile("rwb") as lines:
        config = json.loads(lines.readline())
        function: Function | None = None
        served: dict[str, Any] = {}
        refused: str | None = None
        try:
            function = find_function(config["path"], where=f"{config['where']}.path")
            where = config.pop("where")
            settings = FunctionConfig.model_validate(config)
            served = served_arguments(function, settings, where=where)
            check_call(
                function, settings.kwargs | served, judges_groups=settings.group, where=where
            )
        except UserError as error:
            refused = str(error)
        _say(lines, {"refused": refused})
        while function is not None and (line := lines.readline()):
            asked = json.loads(line)
            asked["arguments"] |= served
            found = _called(function, asked, judges_groups=config["group"])
            _say(lines, {"found": [dataclasses.asdict(one) for one in found]})


def _called(function: Function, asked: dict[str, Any], *, judges_groups: bool) -> tuple[Score, ...]:
    try:
        result = function(**asked["arguments"])
        if is_async(function):
            result = asyncio.run(_awaited(result))
        return verdicts_of(result, count=asked["count"], judges_groups=judges_groups)
    except BaseException as error:  # of the function's, SystemExit among them
        return (score_of_error(error),) * int(asked["count"])


async def _awaited(result: Any) -> Any:
    return await result


def _say(lines: Any, value: object) -> None:
    lines.write(json.dumps(value).encode() + b"\n")
    lines.flush()


def _end_with(parent: int) -> None:
    """A call that never ends would otherwise outlive whoever asked."""
    while os.getppid() == parent:
        time.sleep(_LOOK_FOR_PARENT_SECONDS)
    os.killpg(0, signal.SIGKILL)


# --------------------------------------------------------------------------------------------------
# A Python function that scores: how it is found, what it is given, and what its results mean.

Function = Callable[..., Any]
ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""What a function is called with, by name; with an `s` at their ends one for whole groups."""
_LONGEST_REASON = 500


def find_function(path: str, *, where: str) -> Function:
    """The function that a path names.

    Args:
        path: `module:function`, or `path/to/file.py:function`.
        where: The key, for messages.

    Raises:
        ConfigError: There is none, or it is nothing that can be called.
    """
    place, _, name = path.rpartition(":")
    module = _from_file(place, where) if place.endswith(".py") else _imported(place, where)
    found = getattr(module, name, None)
    if found is None:
        near = nearest(name, [known for known in vars(module) if not known.startswith("_")])
        hint = f"; did you mean '{near}'?" if near else ""
        raise ConfigError(f"{where}={path}: there is no '{name}' in {place}{hint}")
    if not callable(found):
        raise ConfigError(f"{where}={path}: '{name}' is {type(found).__name__}, not a function")
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
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{where}: {file} cannot be run: {_told(error)}") from error
    return module


def _imported(place: str, where: str) -> Any:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{place}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{where}: there is no module '{error.name}'; install it, or name a file "
                "(path/to/file.py:function)"
            ) from error
        raise ConfigError(f"{where}: {place} cannot be imported: {_told(error)}") from error
    except Exception as error:
        raise ConfigError(f"{where}: {place} cannot be imported: {_told(error)}") from error


def served_arguments(function: Function, config: FunctionConfig, *, where: str) -> dict[str, Any]:
    """What a function is given besides where it asks for it, as verl gives it: the address of a
    model's servers and the model's tokenizer.

    Raises:
        ConfigError: It asks for what the settings do not say, or does not take what they do.
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
                raise ConfigError(
                    f"{where}.{key} is for a function that takes {name}, and this one does not; "
                    "leave it out"
                )
            served[name] = given[name]
        elif parameter is not None and parameter.default is parameter.empty:
            what = (
                "HOST:PORT of the server that it is to ask (`laurel serve`, vLLM or SGLang)"
                if key == "router"
                else "the model whose tokenizer it is to use"
            )
            raise ConfigError(f"{where}: the function asks for {name}; set {where}.{key}: {what}")
    if "reward_model_tokenizer" in served:
        from laurel.models.loading.pretrained import find_tokenizer

        name = served["reward_model_tokenizer"]
        served["reward_model_tokenizer"] = find_tokenizer(ModelSpec(name=name))
    return served


def check_call(
    function: Function, kwargs: Mapping[str, Any], *, judges_groups: bool, where: str
) -> None:
    """Refuse a function that does not take what it will be given.

    Args:
        function: It.
        kwargs: What it is given besides what a completion is described by.
        judges_groups: Whether it is called for whole groups.
        where: The section, for messages.

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
    try:
        signature.bind(**dict.fromkeys(names), **kwargs)
    except TypeError as error:
        said = ", ".join([*names, *kwargs])
        raise ConfigError(
            f"{where}: {getattr(function, '__name__', function)}{signature} cannot be called with "
            f"{said}: {error}"
        ) from error


def is_async(function: Function) -> bool:
    """Whether calling it gives something to wait for."""
    call = getattr(function, "__call__", None)  # noqa: B004  of an object that is a function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _names(judges_groups: bool) -> tuple[str, ...]:
    return tuple(f"{name}s" for name in ARGUMENTS) if judges_groups else ARGUMENTS


# ----------------------------------------------------------------------------------- what it gets


def call_arguments(
    group: Group, kwargs: Mapping[str, Any], *, judges_groups: bool, data_source: str
) -> list[dict[str, Any]]:
    """The arguments of each call that a group takes: one for each completion, or one for all.

    `solution_str` is the last message. `extra_info` is that of the task, with whatever else its
    metadata has, and as `prompt` the messages before.
    """
    metadata = group.metadata
    extra = {k: v for k, v in metadata.items() if k not in ("data_source", "ground_truth")}
    nested = extra.pop("extra_info", None)
    extra |= nested if isinstance(nested, Mapping) else {}
    rows = []
    for completion in group.completions_G:
        *before, answer = (*group.prompt, *completion.messages)
        prompt = [{"role": message.role, "content": message.content} for message in before]
        rows.append(
            (
                metadata.get("data_source", data_source),
                answer.content,
                metadata.get("ground_truth"),
                {"prompt": prompt} | extra,
            )
        )
    if not judges_groups:
        return [dict(zip(ARGUMENTS, row, strict=True)) | dict(kwargs) for row in rows]
    columns = [list(column) for column in zip(*rows, strict=True)]
    return [dict(zip(_names(True), columns, strict=True)) | dict(kwargs)] if rows else []


# ------------------------------------------------------------------------------ what it gives back


def verdicts_of(result: Any, *, count: int, judges_groups: bool) -> tuple[Score, ...]:
    """What a call has returned, as one verdict on each of the completions that it was about."""
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
    """A number, or a dictionary with a `score` and perhaps other numbers, as a verdict."""
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
        return failed(f"error: the function returned {_kind(value)}, not a number")
    if not math.isfinite(number):
        return failed(f"nan: the function returned {number}")
    return Score(value=number, values_K=(number,), parts=parts)


def _number(value: Any) -> float | None:
    """Of whatever libraries call a number; None for anything else."""
    if not isinstance(value, numbers.Real) and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def score_of_error(error: BaseException) -> Score:
    """The verdict where a call has raised."""
    place = own_line_of(error)
    where = "" if place is None else f" ({place})"
    return failed(f"error: the function raised {_told(error)}{where}")


def late(seconds: float) -> Score:
    """The verdict where a call took too long."""
    return failed(f"timeout: the function took more than {seconds:.3g} s")


def _told(error: BaseException) -> str:
    said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return said[:_LONGEST_REASON]
