"""A Python function that scores: how it is found, what it is given, and what its results mean."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from laurel.config.schema import PolicyConfig
from laurel.config.scorers import FunctionConfig
from laurel.config.tree import nearest
from laurel.errors import ConfigError
from laurel.observe.source_lines import own_line_of
from laurel.rewards.remote.replica import failed
from laurel.types import Group, Score

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
        from laurel.models.pretrained import find_tokenizer

        name = served["reward_model_tokenizer"]
        served["reward_model_tokenizer"] = find_tokenizer(
            PolicyConfig(model_name=name), name, (), is_resumed=False
        )
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


def arguments_of(
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
        return (verdict_of(result),)
    results = result.tolist() if hasattr(result, "tolist") else result
    if isinstance(results, str | bytes | Mapping) or not isinstance(results, Sequence):
        reason = f"error: the function returned {type(result).__name__}, not a list of results"
        return (failed(reason),) * count
    if len(results) != count:
        reason = f"count: the function returned {len(results)} results for {count} completions"
        return (failed(reason),) * count
    return tuple(verdict_of(one) for one in results)


def verdict_of(result: Any) -> Score:
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


def failure_of(error: BaseException) -> Score:
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
