"""One pass over the rows of a set: opened, read, converted, and every loss counted.

Tasks and demonstrations share it; preferences, which have more reasons to be left out, do not.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from laurel.config.sft_training import DemonstrationSetConfig
from laurel.config.tasks import TaskSetConfig
from laurel.data.cells import Row, UnusableRow, kind_of
from laurel.data.own_datasets import is_import_path, open_own
from laurel.data.prompt_files import PromptFrame, read_prompt_frame
from laurel.data.report import Reason, RowReport, origin_of
from laurel.data.sources import complaint, read_rows
from laurel.errors import DataError

C = TypeVar("C", TaskSetConfig, DemonstrationSetConfig)
Read = TypeVar("Read")

HubParts = tuple[tuple[str | None, str | None], ...]
"""(subset, split) of each part of a hub data set that is read."""


class LeftOutRow(Exception):
    """A row that is well formed and left out all the same. It never leaves the room of data."""

    def __init__(self, reason: Reason, kind: str = "") -> None:
        super().__init__(reason, kind)
        self.reason: Reason = reason
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSet:
    """Where a named data set is found if no path is given."""

    name: str | None
    parts: HubParts = ((None, None),)


NO_HUB = HubSet(name=None)
"""Of sets that always need a path."""


@dataclass(slots=True, kw_only=True)
class OpenedSet(Generic[C]):
    """A data set before its first row is read."""

    config: C
    """What the rows are read by."""
    is_own: bool
    """Whether the user's own object gives the rows."""
    task_name: str | None
    frame: PromptFrame
    path: str | None
    parts: HubParts
    rows: Iterable[Any]

    def read(
        self,
        convert: Callable[[str, Row], Read],
        *,
        report: RowReport,
        on_bad_row: Literal["error", "skip"],
        limit: int | None,
    ) -> list[Read]:
        """What `convert` makes of the rows, up to `limit` of them. It is given source and row.

        Raises:
            DataError: A file that cannot be read, or a malformed row where that is an error.
        """

        def complain(source: str, problem: UnusableRow) -> None:
            if on_bad_row == "error":
                raise DataError(complaint(problem, self.path, source)) from problem
            report.drop("malformed", source, kind=problem.kind)

        def complain_unread(source: str, problem: UnusableRow) -> None:
            report.num_read += 1
            complain(source, problem)

        kept: list[Read] = []
        with contextlib.closing(self._rows(complain_unread)) as rows:
            for source, row in rows:
                report.num_read += 1
                try:
                    kept.append(convert(source, _object(row)))
                except UnusableRow as problem:
                    complain(source, problem)
                except LeftOutRow as left_out:
                    report.drop(left_out.reason, source, kind=left_out.kind)
                if limit is not None and len(kept) == limit:
                    break
        return kept

    def _rows(
        self, complain: Callable[[str, UnusableRow], None]
    ) -> Generator[tuple[str, Any], None, None]:
        if self.path is None:
            for index, row in enumerate(self.rows):
                yield f"{self.config.dataset_name}[{index}]", row
            return
        for subset, split in self.parts:
            for source, row in read_rows(
                self.path, subset=subset, split=split, on_bad_row=complain
            ):
                # Parts of one hub name would count their rows from 0 each.
                in_part = len(self.parts) > 1 and subset is not None
                yield (f"{subset}/{source}" if in_part else source), row


def open_set(config: C, *, known: Mapping[str, HubSet], report: RowReport) -> OpenedSet[C]:
    """The configured set; what it is and where it comes from is written into the report.

    Raises:
        DataError: An unknown name, no path, an own class or a prompt file that cannot be used.
    """
    name = config.dataset_name or ""
    report.dataset_class = name
    if name and name not in known:
        if not is_import_path(name):
            raise DataError(unknown_class(name, known))
        own = open_own(config)
        report.origin = own.task_name or ""
        report.notes += own.notes
        return OpenedSet(
            config=own.config,
            is_own=True,
            task_name=own.task_name,
            frame=read_prompt_frame(
                config.prompt_file or own.prompt_file,
                config.system_prompt_file or own.system_prompt_file,
            ),
            path=None,
            parts=(),
            rows=own.rows,
        )
    path = config.data_path
    parts: HubParts = ((config.subset, config.split),)
    if path is None:
        hub = known[name] if name else NO_HUB
        path = hub.name
        if path is None:
            raise DataError(
                f"data set '{report.name}': no path is given for {name or 'the rows'}. Set "
                "data.train_data_path (or data.val_data_path, or data_path of its block) to a file "
                "or a hub name"
            )
        parts = _parts(hub, config)
    report.origin = origin_of(path)
    return OpenedSet(
        config=config,
        is_own=False,
        task_name=None,
        frame=read_prompt_frame(config.prompt_file, config.system_prompt_file),
        path=path,
        parts=parts,
        rows=(),
    )


def _parts(hub: HubSet, config: TaskSetConfig | DemonstrationSetConfig) -> HubParts:
    if config.subset is not None:
        splits = dict(hub.parts)
        return ((config.subset, config.split or splits.get(config.subset)),)
    return tuple((subset, config.split or split) for subset, split in hub.parts)


def unknown_class(name: str, known: Iterable[str]) -> str:
    """What to say where a data set's name is not known."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"Did you mean {by_lower[near[0]]}? " if near else ""
    return (
        f"data.dataset_name={name} is unknown. {hint}Known are: {', '.join(by_lower.values())}; or "
        "give the dotted import path of your own class"
    )


def _object(row: Any) -> Row:
    if not isinstance(row, Mapping):
        raise UnusableRow(
            "not an object", f"the row is {kind_of(row)} where {{key: value}} is expected"
        )
    return row
