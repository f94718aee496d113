"""What the `data` sections of all runs have in common: a set, and the two forms of naming sets.

Sets are named by flat keys (`dataset_name`, `train_data_path`, ...) or by the blocks `train` and
`validation`, whose missing keys `default` fills.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field, field_validator

from laurel.config.section import Section


class SetConfig(Section):
    """One data set: which class reads it, from where."""

    dataset_name: str | None = None
    """The class that reads it, or the import path of your own; null is told from the rows."""
    data_path: str | None = None
    """A local file (.json, .jsonl, .csv, .parquet, .arrow; also .gz), a directory written by
    `datasets.save_to_disk`, or a name on the Hugging Face hub."""
    subset: str | None = None
    """Configuration of a hub data set."""
    split: str | None = None
    """Split of a hub data set; `train` where none is said."""
    max_samples: int | None = Field(default=None, ge=1)
    """Read only the first rows, after filtering."""
    prompt_file: str | None = None
    """Text file with `{}` where the first user message goes."""
    system_prompt_file: str | None = None
    """Text file put before every conversation as a system message."""


class TextSetConfig(SetConfig):
    """A set of questions and answers, or of conversations."""

    input_key: str = "input"
    """Column of the question (ResponseDataset); where there is none of this name and no other is
    set, it is looked for."""
    output_key: str = "output"
    """Column of the answer (ResponseDataset); likewise."""
    split_validation_size: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share held out for validation where no validation set is named."""
    seed: int = 42
    """Draws the held-out share."""


class SetsConfig(Section):
    """Where the rows of a run come from."""

    fills_blocks: ClassVar[tuple[str, ...]] = ("dataset_name",)
    """Flat keys that fill blocks, too, behind `default`."""

    dataset_name: str | None = None
    """See the same key of a set; for training and, where no other is said, validation."""
    train_data_path: str | None = None
    """Training rows: a path or a hub name."""
    val_data_path: str | None = None
    """Validation rows."""
    train_split: str | None = None
    """Split of a hub data set to train on."""
    val_split: str | None = None
    """Split of a hub data set to validate on."""
    subset: str | None = None
    """Configuration of a hub data set."""
    prompt_file: str | None = None
    """See the same key of a set."""
    system_prompt_file: str | None = None
    """See the same key of a set."""
    shuffle: bool = True
    """Draw a new order of the training rows each epoch, from the seed of the run."""
    max_samples: int | None = Field(default=None, ge=1)
    """Use only the first training rows, after filtering."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A malformed row stops the run with its file and line, or is left out and counted."""


class TextDataConfig(SetsConfig):
    """Where questions, answers and conversations come from."""

    fills_blocks: ClassVar[tuple[str, ...]] = ("dataset_name", "prompt_file", "system_prompt_file")

    input_key: str = "input"
    """See the same key of a set."""
    output_key: str = "output"
    """See the same key of a set."""
    split_validation_size: float = Field(default=0.05, ge=0.0, lt=1.0)
    """Share of the training rows held out where no validation set is named. Rows with the same
    prompt stay on one side."""
    seed: int = 42
    """Draws the held-out share."""

    @field_validator("train", "validation", mode="before", check_fields=False)
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return None if value in ({}, []) else value


S = TypeVar("S", bound=SetConfig)


def train_sets(data: Any, kind: type[S]) -> list[S]:
    """The training sets, in either form, with the defaults filled in."""
    if data.train is None:
        return [flat_set(data, kind, data.train_data_path, data.train_split)]
    return [filled(data, block) for block in _listed(data.train)]


def validation_sets(data: Any, kind: type[S]) -> list[S]:
    """The validation sets, in the form of a path, a split or blocks; empty without any."""
    if data.validation is not None:
        return [filled(data, block) for block in _listed(data.validation)]
    if data.val_data_path is None and data.val_split is None:
        return []
    path = data.val_data_path or data.train_data_path
    return [flat_set(data, kind, path, data.val_split)]


def flat_set(data: SetsConfig, kind: type[S], path: str | None, split: str | None) -> S:
    """The set that the flat keys describe: all that it has in common with the section.

    But for what the section says of all rows together: how many, and how many are held out.
    """
    of_all = {"max_samples", "split_validation_size"}
    shared = (kind.model_fields.keys() & type(data).model_fields.keys()) - of_all
    values = {key: getattr(data, key) for key in shared}
    return kind(data_path=path, split=split, **values)


def filled(data: Any, block: S) -> S:
    """A block with what it leaves out: from `default`, then from the flat keys."""
    base = data.default.model_dump(exclude_unset=True) if data.default is not None else {}
    for key in type(data).fills_blocks:
        if getattr(data, key) is not None:
            base.setdefault(key, getattr(data, key))
    return type(block)(**{**base, **block.model_dump(exclude_unset=True)})


def _listed(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else [value]
