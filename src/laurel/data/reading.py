"""Reads one data set in one pass: opens it, converts its rows, and counts every row left out."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import string
from collections import Counter
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

from laurel.config.data import TextSetConfig, is_import_path
from laurel.data.own_rows import SetConfig, open_own
from laurel.data.report import Reason, RowReport, conversation_fingerprint, origin_of
from laurel.data.sources import (
    LEAVE_OUT,
    Row,
    UnusableRow,
    as_row,
    complaint,
    read_rows,
)
from laurel.errors import DataError, counted, counted_that, no_file_at, setting_of
from laurel.types import USUAL_ROLES, Conversation, Message

# The files that are put around a prompt: a text for the first question, a system message.


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFrame:
    """The texts that a configuration adds to every prompt."""

    question: str | None = None
    """A template for the first user message: `{}` is its text, `{{` and `}}` are plain braces."""
    system: str | None = None
    """The system message that is put before the prompt; None adds none."""

    def around(self, prompt: Conversation) -> Conversation:
        """Return the prompt with the texts of this frame added.

        Raises:
            UnusableRow: The prompt has no user message that the question's template could apply to.
        """
        framed = prompt
        if self.question is not None:
            asked = next((i for i, turn in enumerate(prompt) if turn.role == "user"), None)
            if asked is None:
                raise UnusableRow(
                    "no user message for the prompt file",
                    "the prompt has no user message to put into data.prompt_file",
                )
            turn = Message("user", self.question.format(prompt[asked].content))
            framed = (*prompt[:asked], turn, *prompt[asked + 1 :])
        if self.system is not None:
            framed = (Message("system", self.system), *framed)
        return framed


def read_prompt_frame(prompt_file: str | None, system_prompt_file: str | None) -> PromptFrame:
    """Read the question template and the system prompt from their files, and check them.

    Raises:
        DataError: A file cannot be read, or the question's template is invalid.
    """
    question = None if prompt_file is None else _read(prompt_file, key="data.prompt_file")
    if question is not None:
        path = prompt_file or ""
        advice = "write {} once, where the question goes, and {{ }} for plain braces"
        try:
            fields = [
                name for _, name, _, _ in string.Formatter().parse(question) if name is not None
            ]
        except ValueError as problem:
            raise DataError(f"data.prompt_file: {path}: {problem}; {advice}") from problem
        if not fields or set(fields) not in ({""}, {"0"}) or (fields[0] == "" and len(fields) > 1):
            shown = ", ".join(f"{{{name}}}" for name in fields) or "none"
            raise DataError(
                f"data.prompt_file: {path} must have one place for the question, and has: {shown}; "
                f"{advice}"
            )
        try:
            question.format("")
        except (ValueError, LookupError) as problem:
            raise DataError(f"data.prompt_file: {path}: {problem}; {advice}") from problem
    system = (
        None
        if system_prompt_file is None
        else _read(system_prompt_file, key="data.system_prompt_file")
    )
    return PromptFrame(question=question, system=system)


def _read(path: str, *, key: str) -> str:
    if (problem := no_file_at(path)) is not None:
        raise DataError(f"{key}: {problem}")
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DataError(f"{key}: {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{key}: {path} cannot be read as UTF-8 text: {problem}") from problem


Read = TypeVar("Read")
Remedy = Callable[[UnusableRow], str]
"""A function that returns the advice for a malformed row."""

Report = TypeVar("Report", bound=RowReport)

HubParts = tuple[tuple[str | None, str | None], ...]
"""The (subset, split) of each part of a hub data set that is read."""


class LeftOutRow(Exception):
    """Raised for a well-formed row that is left out; only `laurel.data` raises and catches it."""

    def __init__(self, reason: Reason, kind: str = "") -> None:
        super().__init__(reason, kind)
        self.reason: Reason = reason
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSet:
    """The name, subset and split under which a data set is found on the Hugging Face hub."""

    name: str | None
    parts: HubParts = ((None, None),)


NO_HUB = HubSet(name=None)
"""The place of data sets that have none on the hub, so that a path has to be given."""


@dataclass(slots=True, kw_only=True)
class OpenedSet(Generic[SetConfig]):
    """A data set whose configuration and files are resolved, but whose rows are not yet read."""

    config: SetConfig
    """The columns and settings that the rows are read with."""
    is_own: bool
    """True if a class or function of the user supplies the rows."""
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
        remedy: Remedy | None = None,
    ) -> list[Read]:
        """Convert rows with `convert(source, row)` until as many as may be are kept.

        That is `limit`, or the `max_samples` of the configuration where it is less.

        With `remedy`, an error about a row ends with its advice instead of the usual one.

        Raises:
            DataError: A file cannot be read, or a malformed row is an error.
        """

        def complain(source: str, problem: UnusableRow) -> None:
            if on_bad_row == "error":
                said = "" if remedy is None else remedy(problem)
                raise DataError(complaint(problem, self.path, source, said=said)) from problem
            report.drop_malformed(source, problem)

        def complain_unread(source: str, problem: UnusableRow) -> None:
            report.num_read += 1
            complain(source, problem)

        limits = [most for most in (self.config.max_samples, limit) if most is not None]
        most = min(limits, default=None)
        kept: list[Read] = []
        with contextlib.closing(self._rows(complain_unread)) as rows:
            for source, row in rows:
                report.num_read += 1
                try:
                    kept.append(convert(source, as_row(row)))
                except UnusableRow as problem:
                    complain(source, problem)
                except LeftOutRow as left_out:
                    report.drop(left_out.reason, source, kind=left_out.kind)
                if most is not None and len(kept) == most:
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


def open_set(
    config: SetConfig, *, known: Mapping[str, HubSet], report: RowReport
) -> OpenedSet[SetConfig]:
    """Open the configured data set, and write its name and origin into the report.

    Raises:
        DataError: The set's name is unknown, a path is missing, or the user's own class or a prompt
            file cannot be used.
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
    if config.kwargs:
        raise DataError(
            f"data set '{report.name}': kwargs ({', '.join(config.kwargs)}) are for a class of "
            "your own, whose import path is data.dataset_name; leave them out"
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


def read_sets(
    sets: Sequence[SetConfig],
    read: Callable[[SetConfig, str, int | None], tuple[list[Read], Report]],
    *,
    name: str,
    limit: int | None,
) -> tuple[list[Read], Report]:
    """Read several data sets in sequence, and report what was left out of all.

    Args:
        read: Reads one, given its name in the report and the largest number of rows to keep.
        name: The name of the whole, in the report and at the start of every name.

    Raises:
        DataError: There is no set, or `read` raises one.
    """
    items: list[Read] = []
    reports: list[Report] = []
    for index, config in enumerate(sets):
        num_rows = sum(report.num_kept for report in reports)
        if limit is not None and num_rows >= limit:
            break
        label = name if len(sets) == 1 else f"{name}-{index + 1}"
        found, report = read(config, label, None if limit is None else limit - num_rows)
        items += found
        reports.append(report)
    if not reports:
        raise DataError(f"data set '{name}': there is none; name one in data.train")
    return items, reports[0] if len(reports) == 1 else type(reports[0]).merge(reports, name=name)


def _parts(hub: HubSet, config: SetConfig) -> HubParts:
    if config.subset is not None:
        splits = dict(hub.parts)
        return ((config.subset, config.split or splits.get(config.subset)),)
    return tuple((subset, config.split or split) for subset, split in hub.parts)


def unknown_class(name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown name of a data set."""
    by_lower = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f"Did you mean {by_lower[near[0]]}? " if near else ""
    return (
        f"{setting_of('data.dataset_name', name)} is unknown. {hint}Known are: "
        f"{', '.join(by_lower.values())}; or give the dotted import path of your own class"
    )


# Rows that are read but have no tokens: what a chat template refuses shows only with the model.

_ENCODED_AT_ONCE = 512


class HasSource(Protocol):
    """An item that was read from a row."""

    @property
    def source(self) -> str:
        """The row's place."""
        ...


Item = TypeVar("Item")
SourcedItem = TypeVar("SourcedItem", bound=HasSource)
Encoded = TypeVar("Encoded")


def encoded(
    items: Sequence[SourcedItem],
    encode: Callable[[Sequence[SourcedItem]], Sequence[Encoded]],
    *,
    report: RowReport,
    on_bad_row: Literal["error", "skip"],
) -> Iterator[tuple[SourcedItem, Encoded]]:
    """Yield each item with its tokens, as `encode` makes them of several items at once.

    Items that `encode` refuses with a `DataError` are treated as malformed rows. A row of several
    items is counted once.

    Raises:
        DataError: An item is refused, and `on_bad_row` is `error`.
    """
    refused: set[str] = set()
    for first in range(0, len(items), _ENCODED_AT_ONCE):
        some = items[first : first + _ENCODED_AT_ONCE]
        try:
            yield from zip(some, encode(some), strict=True)
            continue
        except DataError:
            pass  # one of them is refused: which one shows only alone
        for item in some:
            try:
                (found,) = encode([item])
            except DataError as problem:
                said = str(problem).removeprefix(f"{item.source}: ")
                if on_bad_row == "error":
                    raise DataError(f"{item.source}: {said} Or {LEAVE_OUT}.") from problem
                if item.source not in refused:
                    report.drop("malformed", item.source, kind=_cause(problem, item.source))
                refused.add(item.source)
            else:
                yield item, found


def _cause(problem: BaseException, source: str) -> str:
    """Name why a row is refused in words that rows with the same fault share."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    said = str(problem).removeprefix(f"{source}: ").strip() or type(problem).__name__
    # The template raises what its author wrote; our own messages quote the row in brackets.
    why = said.splitlines()[0].partition(" (")[0]
    return why if isinstance(problem, DataError) else f"the chat template refuses it: {why:.120}"


# The roles in the rows of a data set: those that are probably misspelt are noted.
#
# Templates such as ChatML render any role, so that nothing else would report `usr`.

_MOST_NAMED = 3


@dataclass(slots=True)
class UnusualRoles:
    """Counts the rows with a role outside `USUAL_ROLES`; such rows are kept."""

    num_rows: int = 0
    first: dict[str, str] = field(default_factory=dict)
    """The source of the first row with each unusual role, by the role."""

    def look(self, source: str, messages: Iterable[Message]) -> None:
        """Count a row if a message has an unusual role; keep the first source of each such role."""
        unusual = dict.fromkeys(m.role for m in messages if m.role not in USUAL_ROLES)
        self.num_rows += bool(unusual)
        for role in unusual:
            self.first.setdefault(role, source)

    def notes(self) -> list[str]:
        """Return a list with one note that names all unusual roles; empty if there were none."""
        if not self.num_rows:
            return []
        named = [_named(role, source) for role, source in self.first.items()][:_MOST_NAMED]
        more = len(self.first) - len(named)
        return [
            f"{counted_that(self.num_rows, 'row', 'have')} a role that is none of "
            f"{', '.join(USUAL_ROLES)}: {', '.join(named)}{f' and {more} more' if more else ''}"
        ]


def _named(role: str, source: str) -> str:
    near = difflib.get_close_matches(role.lower(), USUAL_ROLES, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    return f"{role[:40]!r} (first in {source}{meant})"


# The held-out prompts: a share of the rows, whole prompts, the same ones on any machine.


def split(
    items: Sequence[Item], prompts: Sequence[bytes], held_out: Collection[bytes]
) -> tuple[list[Item], list[Item]]:
    """Split items into (kept, held out), by whether the item's prompt is among those held out.

    Prompts are given as fingerprints, one per item.
    """
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item, prompt in zip(items, prompts, strict=True):
        sides[prompt in held_out].append(item)
    return sides


def held_out_prompts(prompts: Sequence[bytes], *, share: float, seed: int) -> set[bytes]:
    """Choose the prompts to hold out so that about `share` of the rows have one of them.

    The input has one fingerprint per row. The choice depends on the seed and the prompts, and not
    on the order of the rows. At least one prompt is held out, and at least one is not.

    Raises:
        DataError: There are fewer than two different prompts.
    """
    counts = Counter(prompts)
    if len(counts) < 2:
        raise DataError(
            f"data.split_validation_size={share:g}: {counted(len(prompts), 'row')} with "
            f"{counted(len(counts), 'different prompt')} cannot be split, as rows with the same "
            "prompt stay on one side. Name a validation set instead (data.val_data_path), or set "
            "data.split_validation_size=0"
        )
    shuffled = _shuffled(counts, seed)
    wanted = share * len(prompts)
    held_out: set[bytes] = set()
    num_held_out = 0
    for prompt in shuffled[:-1]:
        after = num_held_out + counts[prompt]
        if abs(after - wanted) < abs(num_held_out - wanted):
            held_out.add(prompt)
            num_held_out = after
    if not held_out:
        held_out.add(min(shuffled, key=lambda prompt: counts[prompt]))
    return held_out


class _Prompted(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def prompt(self) -> Conversation: ...


P = TypeVar("P", bound=_Prompted)


def hold_out_of_sets(items: Sequence[P], sets: Sequence[TextSetConfig]) -> tuple[list[P], list[P]]:
    """Split the items of training sets into (train, validation).

    The share and the seed are those of each set. Items with equal prompts stay on one side.

    Raises:
        DataError: A set has fewer than two different prompts.
    """
    splits = [(one.split_validation_size, one.seed) for one in sets]
    if not any(share for share, _ in splits):
        return list(items), []
    prompts = [conversation_fingerprint(item.prompt) for item in items]
    held_out = held_out_of_sets(prompts, [item.id for item in items], splits)
    return split(items, prompts, held_out)


class _HasShare(Protocol):
    @property
    def split_validation_size(self) -> float: ...


def holds_out(sets: Sequence[_HasShare]) -> bool:
    """Report whether a part of any of the training sets is held out."""
    return any(one.split_validation_size for one in sets)


def asks_share(sets: Sequence[SetConfig]) -> bool:
    """Report whether a share to hold out is written for any of the training sets."""
    key = "split_validation_size"
    return any(key in one.model_fields_set and one.get(key) for one in sets)


def held_out_of_sets(
    prompts: Sequence[bytes], ids: Sequence[str], splits: Sequence[tuple[float, int]]
) -> set[bytes]:
    """Choose the prompts to hold out of several sets, given the share and the seed of each.

    Ids of rows begin with `train-N:` where there are several sets.

    Raises:
        DataError: A set has fewer than two different prompts.
    """
    held_out: set[bytes] = set()
    for share, seed in dict.fromkeys(splits):
        if not share:
            continue
        # With the colon: train-1 is also how train-10 begins.
        starts = tuple(f"train-{n + 1}:" for n, one in enumerate(splits) if one == (share, seed))
        of_these_sets = [
            prompt
            for row, prompt in zip(ids, prompts, strict=True)
            if len(splits) == 1 or row.startswith(starts)
        ]
        if of_these_sets:
            held_out |= held_out_prompts(of_these_sets, share=share, seed=seed)
    return held_out


def prompts_of_folds(prompts: Sequence[bytes], num_folds: int, seed: int) -> list[set[bytes]]:
    """Divide prompts into folds with about as many rows each, for cross-validation.

    The input has one fingerprint per row. The division depends on the seed and the prompts, and not
    on the order of the rows.

    Raises:
        DataError: There are fewer different prompts than folds.
    """
    counts = Counter(prompts)
    if len(counts) < num_folds:
        raise DataError(
            f"{counted(len(prompts), 'row')} with {counted(len(counts), 'different prompt')} "
            f"cannot be divided into {num_folds} folds, as rows with the same prompt stay together"
        )
    folds: list[set[bytes]] = [set() for _ in range(num_folds)]
    sizes = [0] * num_folds
    # The largest first: what comes last can even out what they left.
    for prompt in sorted(_shuffled(counts, seed), key=lambda one: -counts[one]):
        smallest = sizes.index(min(sizes))
        folds[smallest].add(prompt)
        sizes[smallest] += counts[prompt]
    return folds


def _shuffled(prompts: Iterable[bytes], seed: int) -> list[bytes]:
    key = seed.to_bytes(16, "little", signed=True)
    return sorted(prompts, key=lambda prompt: hashlib.blake2b(prompt, key=key).digest())
