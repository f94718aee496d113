"""Rows from a class or function of the user's own, named by its import path."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from laurel.config.data import DatasetConfig, TaskSetConfig
from laurel.config.sft import DemonstrationSetConfig
from laurel.errors import DataError, counted, setting_of
from laurel.observe.user_code import ForkGuard, import_object

SetConfig = TypeVar("SetConfig", DatasetConfig, TaskSetConfig, DemonstrationSetConfig)

_HELD_OUT = ":val_dataset"
"""Ends the name of a split for the rows that the user's class holds out of it."""
_ACTED_ON_HERE = frozenset(
    {
        "split",
        "prompt_file",
        "system_prompt_file",
        "system_prompt",
        "repeat",
        "seed",
        "split_validation_size",
        "processor",
        "env_name",
        "task_name",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnRows(Generic[SetConfig]):
    """The rows that a class or function of the user supplies for one split."""

    rows: Iterable[Any]
    config: SetConfig
    """The configuration without the column names that the user's object has already applied."""
    task_name: str | None = None
    prompt_file: str | None = None
    system_prompt_file: str | None = None
    notes: list[str] = field(default_factory=list)


def open_own(config: SetConfig) -> OwnRows[SetConfig]:
    """Call the class or function that the configuration names, and open the configured split.

    The split is `train` by default. A class is called with those values of the configuration that
    are set and that it accepts; it has `formatted_ds` (rows, or rows by split) or, as a class for
    NeMo RL since 2026, `dataset`, `val_dataset` and `task_name`; optionally `task_spec`, or
    `set_task_spec`, which makes it. A function returns the rows, or rows by split, itself.

    Raises:
        DataError: The object cannot be imported or called, or has no such split.
    """
    path = config.dataset_name or ""
    made, accepted, ignored = _make(path, config)
    task = getattr(made, "task_spec", None)
    return OwnRows(
        rows=_guarded(_split_of(made, path, config.split or "train"), path),
        # Columns that the object itself has read are at their defaults here.
        config=type(config)(
            **config.model_dump(exclude_unset=True, exclude=set(filter(_is_column, accepted)))
        ),
        task_name=getattr(task, "task_name", None) or getattr(made, "task_name", None),
        prompt_file=getattr(task, "prompt_file", None),
        system_prompt_file=getattr(task, "system_prompt_file", None),
        notes=[f"{path} takes no {key}, so data.{key} has no effect" for key in ignored],
    )


def own_validation_split(config: SetConfig) -> str | None:
    """Return the split with the validation rows of the user's class or function, if it has any."""
    made, _, _ = _make(config.dataset_name or "", config)
    rows = _rows_of(made)
    if isinstance(rows, Mapping) and rows.get("validation") is not None:
        return "validation"
    return (
        None if getattr(made, "val_dataset", None) is None else f"{config.split or ''}{_HELD_OUT}"
    )


def _is_column(key: str) -> bool:
    # Columns are looked up in the rows that the object gives, unless it asks for their names.
    return key.endswith("_key")


def _make(path: str, config: SetConfig) -> tuple[Any, set[str], list[str]]:
    """Call the class or function; return its result, the keys it accepts, and the ignored ones."""
    maker = import_object(path, where=setting_of("data.dataset_name", path), kind=DataError)
    if not callable(maker):
        raise DataError(
            f"{setting_of('data.dataset_name', path)} is a {type(maker).__name__}; "
            "it must be a class with dataset or formatted_ds, or a function that yields rows"
        )
    values = config.model_dump(
        exclude_defaults=True, exclude={"dataset_name", "max_samples", "kwargs"}
    )
    if str(values.get("split", "")).endswith(_HELD_OUT):
        values["split"] = values["split"].removesuffix(_HELD_OUT) or None
    values = {key: value for key, value in values.items() if value is not None}
    section = {"dataset_name": path, **values, **config.kwargs}
    try:
        parameters = dict(inspect.signature(maker).parameters)
    except (TypeError, ValueError):
        parameters = {}
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    accepted = {key: value for key, value in values.items() if takes_all or key in parameters}
    if "split_validation_size" in accepted:  # Laurel holds out, by prompts
        accepted["split_validation_size"] = 0.0
    accepted |= config.kwargs
    others = values.keys() - accepted.keys() - _ACTED_ON_HERE
    ignored = sorted(key for key in others if not _is_column(key))
    try:
        with ForkGuard():
            made = maker(**accepted)
            if hasattr(made, "set_task_spec"):
                made.set_task_spec(section)
    except Exception as problem:
        # The user's code may raise anything; all of it means that there are no rows.
        given = ", ".join(f"{key}={value!r}" for key, value in accepted.items())
        raise DataError(
            f"{setting_of('data.dataset_name', path)}: calling it with ({given}) raised "
            f"{type(problem).__name__}: {problem}"
        ) from problem
    return made, values.keys() & parameters.keys(), ignored


def _rows_of(made: Any) -> Any:
    """Return the rows, or the rows by split, of what a class or function of the user gave."""
    if hasattr(made, "formatted_ds"):
        return made.formatted_ds
    # What has items is the rows itself; the `dataset` of torch's Subset is what it is a part of.
    is_rows = hasattr(made, "__iter__") or hasattr(made, "__getitem__")
    return made if is_rows else getattr(made, "dataset", made)


def _split_of(made: Any, path: str, split: str) -> Iterable[Any]:
    rows = made.val_dataset if split.endswith(_HELD_OUT) else _rows_of(made)
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
            "where rows are expected: a class must carry dataset or formatted_ds, a function must "
            "yield rows"
        )
    return rows


def _guarded(rows: Iterable[Any], path: str) -> Iterator[Any]:
    count = 0
    iterator = iter(rows)
    while True:
        try:
            with ForkGuard():
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
