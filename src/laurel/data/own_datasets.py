"""Rows from a class or function of the user's own, named by its import path."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from laurel.config.preference_data import DatasetConfig
from laurel.config.sft_training import DemonstrationSetConfig
from laurel.config.tasks import TaskSetConfig
from laurel.errors import DataError, setting_of
from laurel.observe.counts import counted

SetConfig = TypeVar("SetConfig", DatasetConfig, TaskSetConfig, DemonstrationSetConfig)

# Columns are looked up in the rows that the object gives, unless it asks for their names itself.
_COLUMNS = frozenset(
    {"prompt_key", "chosen_key", "rejected_key", "margin_key", "target_key", "input_key",
     "output_key", "chat_key", "system_key"}
)  # fmt: skip
_ACTED_ON_HERE = frozenset(
    {"split", "prompt_file", "system_prompt_file", "system_prompt", "repeat", "seed",
     "split_validation_size", "processor", "env_name", "task_name"}
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRows(Generic[SetConfig]):
    """What the user's object gave for one split."""

    rows: Iterable[Any]
    config: SetConfig
    """The configuration without the column names that the object itself has acted on."""
    task_name: str | None = None
    prompt_file: str | None = None
    system_prompt_file: str | None = None
    notes: list[str] = field(default_factory=list)


def is_import_path(name: str) -> bool:
    """Whether the name can only be an import path: it has a dot or a colon."""
    return "." in name or ":" in name


def open_own(config: SetConfig) -> OwnRows[SetConfig]:
    """The rows of the configured split (`train` where none is said). Raises DataError.

    A class is made with those of the configuration's values that were set and that it accepts, and
    carries `formatted_ds` (rows, or rows by split) and optionally `task_spec`. A function gives the
    rows, or rows by split, itself.
    """
    path = config.dataset_name or ""
    made, accepted, ignored = _make(path, config)
    task = getattr(made, "task_spec", None)
    return OwnRows(
        rows=_guarded(_split_of(made, path, config.split or "train"), path),
        config=_without(config, accepted & _COLUMNS),
        task_name=getattr(task, "task_name", None),
        prompt_file=getattr(task, "prompt_file", None),
        system_prompt_file=getattr(task, "system_prompt_file", None),
        notes=[f"{path} takes no {key}, so data.{key} has no effect" for key in ignored],
    )


def has_own_split(config: SetConfig, split: str) -> bool:
    """Whether the user's object has its rows by split, and that split among them."""
    made, _, _ = _make(config.dataset_name or "", config)
    rows = getattr(made, "formatted_ds", made)
    return isinstance(rows, Mapping) and rows.get(split) is not None


def _without(config: SetConfig, keys: AbstractSet[str]) -> SetConfig:
    """The configuration with those keys at their defaults."""
    return type(config)(**config.model_dump(exclude_unset=True, exclude=set(keys)))


def _make(path: str, config: SetConfig) -> tuple[Any, set[str], list[str]]:
    """What the class or function made, the keys that it names, and the set keys without effect."""
    maker = import_object(path, key="data.dataset_name")
    if not callable(maker):
        raise DataError(
            f"{setting_of('data.dataset_name', path)} is a {type(maker).__name__}; "
            "it must be a class with formatted_ds, or a function that yields rows"
        )
    values = config.model_dump(exclude_defaults=True, exclude={"dataset_name", "max_samples"})
    try:
        parameters = dict(inspect.signature(maker).parameters)
    except (TypeError, ValueError):
        parameters = {}
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    accepted = {key: value for key, value in values.items() if takes_all or key in parameters}
    ignored = sorted(values.keys() - accepted.keys() - _COLUMNS - _ACTED_ON_HERE)
    try:
        made = maker(**accepted)
    except Exception as problem:
        # The user's code may raise anything; all of it means that there are no rows.
        given = ", ".join(f"{key}={value!r}" for key, value in accepted.items())
        raise DataError(
            f"{setting_of('data.dataset_name', path)}: calling it with ({given}) raised "
            f"{type(problem).__name__}: {problem}"
        ) from problem
    return made, values.keys() & parameters.keys(), ignored


def import_object(path: str, *, key: str) -> Any:
    """The object at `package.module.Name` or `package.module:Name`, which `key` names.

    Raises DataError.
    """
    # As with `python -m`, a module in the working directory can be named.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    module_path, colon, tail = path.partition(":")
    names = module_path.split(".")
    longest = len(names) if colon else len(names) - 1
    names += tail.split(".") if tail else []
    for length in range(longest, 0, -1):
        module_name = ".".join(names[:length])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as problem:
            if problem.name and f"{module_name}.".startswith(f"{problem.name}."):
                continue
            raise DataError(
                f"{setting_of(key, path)}: importing {module_name} failed: {problem}. "
                "Install what it imports"
            ) from problem
        except Exception as problem:
            raise DataError(
                f"{setting_of(key, path)}: importing {module_name} raised "
                f"{type(problem).__name__}: {problem}"
            ) from problem
        for name in names[length:]:
            if not hasattr(found, name):
                raise DataError(
                    f"{setting_of(key, path)}: {module_name} has no '{name}'; "
                    f"it has: {', '.join(_public_names(found)) or 'nothing public'}"
                )
            found = getattr(found, name)
        return found
    raise DataError(
        f"{setting_of(key, path)}: there is no module '{names[0]}' in the working directory "
        f"({os.getcwd()}) or among the installed packages"
    )


def _public_names(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_")
        and getattr(value, "__module__", None) == getattr(module, "__name__", "")
    ][:10]  # fmt: skip


def _split_of(made: Any, path: str, split: str) -> Iterable[Any]:
    rows = made.formatted_ds if hasattr(made, "formatted_ds") else made
    if isinstance(rows, Mapping):
        present = [str(name) for name, value in rows.items() if value is not None]
        if split not in present:
            raise DataError(
                f"{setting_of('data.dataset_name', path)} has no split '{split}'; it has: "
                f"{', '.join(present) or 'none'}"
            )
        rows = rows[split]
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes):
        raise DataError(
            f"{setting_of('data.dataset_name', path)} gives a {type(rows).__name__} "
            "where rows are expected: a class must carry formatted_ds, a function must yield rows"
        )
    return rows


def _guarded(rows: Iterable[Any], path: str) -> Iterator[Any]:
    count = 0
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except Exception as problem:
            raise DataError(
                f"{setting_of('data.dataset_name', path)} raised {type(problem).__name__} after "
                f"{counted(count, 'row')}: {problem}"
            ) from problem
        count += 1
        yield row
