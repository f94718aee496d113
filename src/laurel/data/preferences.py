"""Preferences from any data set: rows are read, judged usable or not, and every loss is counted."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Literal

from laurel.config.preference_data import DatasetConfig
from laurel.data.cells import UnusableRow, kind_of
from laurel.data.held_out import held_out_prompts, split
from laurel.data.own_datasets import has_own_split, is_import_path, open_own
from laurel.data.prompt_files import PromptFrame, read_prompt_frame
from laurel.data.report import DataReport, Reason, fingerprint, nothing_left, origin_of
from laurel.data.roles import UnusualRoles
from laurel.data.row_formats import DATASET_CLASSES, class_of, judge
from laurel.data.set_reading import unknown_class
from laurel.data.sources import complaint, locate, read_rows
from laurel.errors import DataError
from laurel.observe.counts import counted_that
from laurel.types import Group, Message, Preference

Remedy = Callable[[UnusableRow], str]
"""What to do about a malformed row."""


def load_preferences(
    config: DatasetConfig,
    *,
    name: str,
    ties: Literal["keep", "drop", "error"],
    duplicates: Literal["drop", "keep"],
    on_bad_row: Literal["error", "skip"],
    attributes: Sequence[str] = (),
    max_samples: int | None = None,
    remedy: Remedy | None = None,
) -> tuple[list[Preference], DataReport]:
    """The usable preferences of one data set, and the report of the others.

    `name` is the set's name in the report and the start of its groups' ids, which are unique where
    names are. `attributes` are the ratings that are wanted; completions get one number each, NaN
    where nobody rated. Reading stops once `max_samples` rows (or the configuration's, if that is
    less) are kept. `remedy` says what to do about a malformed row where there is no configuration
    whose keys could be set. Raises DataError, also where nothing is left.
    """
    source = _open(config, name=name)
    loading = _Loading(
        source=source,
        frame=read_prompt_frame(source.prompt_file, source.system_prompt_file),
        ties=ties,
        duplicates=duplicates,
        on_bad_row=on_bad_row,
        attributes=tuple(attributes),
        remedy=remedy,
    )
    limits = [limit for limit in (config.max_samples, max_samples) if limit is not None]
    preferences = loading.run(limit=min(limits, default=None))
    report = source.report
    report.describe(preferences)
    report.notes += loading.notes()
    if not preferences:
        raise DataError(nothing_left(report))
    return preferences, report


def own_validation(config: DatasetConfig) -> DatasetConfig | None:
    """The validation set that comes with the data set itself; None where there is none.

    HelpSteer3 on the hub has one, and so has a class of the user's own whose `formatted_ds` holds a
    `validation` split.
    """
    name = config.dataset_name
    if name is None:
        return None
    if name in DATASET_CLASSES:
        has_one = DATASET_CLASSES[name].has_validation and config.data_path is None
    else:
        has_one = is_import_path(name) and has_own_split(config, "validation")
    return config.model_copy(update={"split": "validation"}) if has_one else None


def hold_out(
    preferences: Sequence[Preference], *, share: float, seed: int
) -> tuple[list[Preference], list[Preference]]:
    """The preferences as (train, validation), about `share` of the rows held out.

    Prompts are held out whole, in an order drawn from the seed and the prompt alone, so rows with
    the same prompt stay on one side and the order of the rows does not matter. There is at least
    one row on each side. Raises DataError where there are fewer than two prompts.
    """
    prompts = [fingerprint(preference.group.prompt) for preference in preferences]
    return split(preferences, prompts, held_out_prompts(prompts, share=share, seed=seed))


# --------------------------------------------------------------------------------------- opening


@dataclass(slots=True, kw_only=True)
class _Source:
    """Where the rows of a data set come from, before the first is read."""

    config: DatasetConfig
    """What the rows are read by."""
    class_name: str | None
    """None where the first row tells it."""
    path: str | None
    """What is read; None where the user's own object gives the rows."""
    subset: str | None
    rows: Iterable[Any] | None
    prompt_file: str | None
    system_prompt_file: str | None
    report: DataReport


def _open(config: DatasetConfig, *, name: str) -> _Source:
    class_name = config.dataset_name
    report = DataReport(name=name, dataset_class=class_name or "")
    path, subset = config.data_path, config.subset
    source = _Source(
        config=config,
        class_name=class_name,
        path=path,
        subset=subset,
        rows=None,
        prompt_file=config.prompt_file,
        system_prompt_file=config.system_prompt_file,
        report=report,
    )
    if class_name is not None and class_name not in DATASET_CLASSES:
        if not is_import_path(class_name):
            raise DataError(unknown_class(class_name, DATASET_CLASSES))
        own = open_own(config)
        source.config, source.class_name, source.path = own.config, None, None
        source.rows = own.rows
        source.prompt_file = config.prompt_file or own.prompt_file
        source.system_prompt_file = config.system_prompt_file or own.system_prompt_file
        report.origin = own.task_name or ""
        report.notes += own.notes
        return source
    if path is None and class_name is not None:
        known = DATASET_CLASSES[class_name]
        source.path, source.subset = known.hub_name, subset or known.subset
    if source.path is None:
        raise DataError(
            f"data set '{name}': no path is given for {class_name or 'the rows'}. Set "
            "data.train_data_path (or data.val_data_path) to a file or a hub name"
        )
    report.origin = origin_of(source.path)
    return source


# --------------------------------------------------------------------------------------- loading


@dataclass(slots=True, kw_only=True)
class _Loading:
    """One pass over the rows of a data set."""

    source: _Source
    frame: PromptFrame
    ties: Literal["keep", "drop", "error"]
    duplicates: Literal["drop", "keep"]
    on_bad_row: Literal["error", "skip"]
    attributes: tuple[str, ...]
    remedy: Remedy | None
    seen: set[bytes] = field(default_factory=set)
    verdicts: set[bytes] = field(default_factory=set)
    num_contradictions: int = 0
    num_negative_margins: int = 0
    num_double_systems: int = 0
    num_duplicates: int = 0
    """Of those that were kept."""
    rated: set[str] = field(default_factory=set)
    roles: UnusualRoles = field(default_factory=UnusualRoles)

    def run(self, *, limit: int | None) -> list[Preference]:
        """Reads until the rows, or the limit, end."""
        kept: list[Preference] = []
        with contextlib.closing(self._rows()) as rows:
            for source, row in rows:
                self.source.report.num_read += 1
                try:
                    preference = self._preference(source, row)
                except UnusableRow as problem:
                    self._complain(source, problem)
                    continue
                reason = self._reason_against(preference)
                if reason is not None:
                    self.source.report.drop(reason, source)
                    continue
                self._note(preference)
                kept.append(preference)
                if limit is not None and len(kept) == limit:
                    break
        return kept

    def notes(self) -> list[str]:
        """What the reader of the report should know about rows that were kept."""
        said = {
            ("prefer", "what an earlier row with the same prompt and answers did not"): (
                self.num_contradictions
            ),
            ("have", "a margin below 0"): self.num_negative_margins,
            (
                "begin",
                "with a system message of its own, which now follows that of "
                "data.system_prompt_file",
            ): self.num_double_systems,
            (
                "say",
                "exactly what an earlier row said; laurel rm leaves such rows out unless "
                "data.duplicates=keep",
            ): self.num_duplicates,
        }
        notes = [
            f"{counted_that(count, 'row', verb)} {what}"
            for (verb, what), count in said.items()
            if count
        ]
        missing = [name for name in self.attributes if name not in self.rated]
        if missing:
            notes.append(f"no row rates {', '.join(missing)}")
        return notes + self.roles.notes()

    def _rows(self) -> Generator[tuple[str, Any], None, None]:
        source = self.source
        if source.path is None:
            for index, row in enumerate(source.rows or ()):
                yield f"{source.config.dataset_name}[{index}]", row
            return
        yield from read_rows(
            source.path,
            subset=source.subset,
            split=source.config.split,
            on_bad_row=self._complain_unread,
        )

    def _complain_unread(self, source: str, problem: UnusableRow) -> None:
        self.source.report.num_read += 1
        self._complain(source, problem)

    def _complain(self, source: str, problem: UnusableRow) -> None:
        if self.on_bad_row == "error":
            said = self.remedy(problem) if self.remedy is not None else ""
            raise DataError(complaint(problem, self.source.path, source, said=said)) from problem
        self.source.report.drop("malformed", source, kind=problem.kind)

    def _where(self, source: str) -> str:
        return source if self.source.path is None else locate(self.source.path, source)

    def _preference(self, source: str, row: Any) -> Preference:
        if not isinstance(row, Mapping):
            raise UnusableRow(
                "not an object", f"the row is {kind_of(row)} where {{key: value}} is expected"
            )
        judged = judge(row, self._class_of(row), self.source.config, self.attributes)
        prompt = self.frame.around(judged.prompt)
        if self.frame.system is not None and len(prompt) > 1 and prompt[1].role == "system":
            self.num_double_systems += 1
        return Preference(
            group=Group(
                id=f"{self.source.report.name}:{source}",
                prompt=prompt,
                completions_G=judged.completions_G,
            ),
            ranks_G=judged.ranks_G,
            margin=judged.margin,
            target=judged.target,
            attributes_GK=judged.attributes_GK,
            source=source,
        )

    def _class_of(self, row: Any) -> str:
        known = self.source.class_name
        if known is not None:
            return known
        known, clue = class_of(row, self.source.config)
        self.source.class_name = known
        report = self.source.report
        if report.dataset_class:
            report.dataset_class += f" (rows of {known})"
        else:
            report.dataset_class = known
            report.notes.append(f"read as {known}, told by: {clue}")
        return known

    def _reason_against(self, preference: Preference) -> Reason | None:
        """Why a well-formed row is left out, if it is."""
        ratings = preference.attributes_GK
        if self.attributes and (ratings is None or all(map(math.isnan, sum(ratings, ())))):
            return "no rating"
        if _has_blank(preference):
            return "empty"
        completions_G = preference.group.completions_G
        if len(completions_G) > 1 and len(set(completions_G)) == 1:
            return "identical sides"
        is_tie = len(completions_G) > 1 and len(set(preference.ranks_G)) == 1
        if is_tie and self.ties != "keep":
            if self.ties == "error":
                raise DataError(_tie(preference, self._where(preference.source)))
            return "tie"
        said = _what_it_says(preference)
        if said in self.seen:
            if self.duplicates == "drop":
                return "duplicate"
            self.num_duplicates += 1
        self.seen.add(said)
        return None

    def _note(self, preference: Preference) -> None:
        self.num_negative_margins += preference.margin < 0
        self.roles.look(preference.source, _messages_of(preference))
        for ratings in preference.attributes_GK or ():
            self.rated.update(
                name
                for name, rating in zip(self.attributes, ratings, strict=True)
                if not math.isnan(rating)
            )
        prompt = fingerprint(preference.group.prompt)
        answers = [fingerprint(c.messages) for c in preference.group.completions_G]
        ordered = combinations(sorted(zip(preference.ranks_G, answers, strict=True)), 2)
        decided = [(better, worse) for (a, better), (b, worse) in ordered if a < b]
        self.num_contradictions += any(
            prompt + worse + better in self.verdicts for better, worse in decided
        )
        self.verdicts.update(prompt + better + worse for better, worse in decided)


def _messages_of(preference: Preference) -> Iterator[Message]:
    yield from preference.group.prompt
    for completion in preference.group.completions_G:
        yield from completion.messages


def _has_blank(preference: Preference) -> bool:
    """Whether the prompt or an answer says nothing, or somebody takes a turn and says nothing."""
    group = preference.group
    answers = [message for completion in group.completions_G for message in completion.messages]
    asked = [message for message in group.prompt if message.role != "system"]
    if any(not message.content.strip() for message in (*asked, *answers)):
        return True
    return not asked


def _tie(preference: Preference, where: str) -> str:
    return (
        f"{where}: all {len(preference.ranks_G)} completions share rank {preference.ranks_G[0]} (a "
        "tie), which the loss cannot learn from. Set data.ties=drop to leave ties out, or "
        "rm.loss.type to davidson or rao_kupper to learn from them"
    )


def _what_it_says(preference: Preference) -> bytes:
    """A key that two rows share only if they say exactly the same, in whatever order."""
    group = preference.group
    ratings = preference.attributes_GK or ((),) * len(group.completions_G)
    judged = sorted(
        (rank, fingerprint(completion.messages), repr(rating))
        for rank, completion, rating in zip(
            preference.ranks_G, group.completions_G, ratings, strict=True
        )
    )
    said = repr((fingerprint(group.prompt), judged, preference.margin, preference.target))
    return hashlib.blake2b(said.encode(), digest_size=16).digest()
