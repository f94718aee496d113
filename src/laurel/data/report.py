"""Reports which rows were read, which were left out and why, and how long the kept ones are."""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from rich.table import Table
from rich.text import Text

from laurel.errors import counted
from laurel.observe.console import UNBROKEN, is_unbroken
from laurel.observe.metrics import answer_length, longer_credit
from laurel.types import Conversation, Preference, Task

if TYPE_CHECKING:
    import numpy.typing as npt
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

    from laurel.data.sources import UnusableRow


Reason = Literal[
    "malformed",
    "empty",
    "no rating",
    "identical sides",
    "same tokens",
    "tie",
    "duplicate",
    "over-long",
    "held out",
    "no answer",
    "nothing to learn",
    "answer refused",
]
"""The reasons for which a row is left out."""

MAX_EXAMPLES = 3
MAX_SOURCES = 1000
"""The largest number of rows that a report lists for one kind of one reason."""
MIN_HELD_OUT = 10
"""The number of rows below which a report says that they measure little."""


def conversation_fingerprint(conversation: Conversation) -> bytes:
    """Hash a conversation to 16 bytes that are the same on any machine."""
    digest = hashlib.blake2b(digest_size=16)
    for message in conversation:
        # Lengths keep (role, content) apart, so no two conversations run into one text.
        head = f"{len(message.role)},{len(message.content)}:"
        digest.update(f"{head}{message.role}{message.content}".encode())
    return digest.digest()


@dataclass(slots=True)
class LeftOut:
    """The rows left out for one reason: their number, their kinds, and where the first ones are."""

    count: int = 0
    examples: list[str] = field(default_factory=list)
    """The sources of the first `MAX_EXAMPLES` rows."""
    kinds: Counter[str] = field(default_factory=Counter)
    sources: dict[str, list[str]] = field(default_factory=dict)
    """The sources of the first `MAX_SOURCES` rows of each kind; rows of no kind are under `""`."""

    def add_row(self, source: str, kind: str = "") -> None:
        """Count one more left-out row; `kind` states the reason more precisely."""
        self.count += 1
        if kind:
            self.kinds[kind] += 1
        for sources, most in (
            (self.examples, MAX_EXAMPLES),
            (self.sources.setdefault(kind, []), MAX_SOURCES),
        ):
            if len(sources) < most:
                sources.append(source)

    def add(self, other: LeftOut) -> None:
        """Add the counts, kinds and sources of another `LeftOut` to this one."""
        self.count += other.count
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]
        self.kinds.update(other.kinds)
        for kind, sources in other.sources.items():
            self.sources[kind] = (self.sources.get(kind, []) + sources)[:MAX_SOURCES]

    def to_dict(self) -> dict[str, Any]:
        """Return the counts and sources as JSON-compatible values."""
        named = [
            {"source": source, "kind": kind or None}
            for kind, sources in self.sources.items()
            for source in sources
        ]
        return {
            "count": self.count,
            "examples": list(self.examples),
            "kinds": dict(self.kinds.most_common()),
            "sources": named,
            "sources_left_off": self.count - len(named),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Summarizes the lengths of conversations, each a prompt with one of its completions."""

    min: int
    median: float
    mean: float
    p95: float
    max: int

    @classmethod
    def of(cls, lengths: Sequence[int] | npt.NDArray[np.int64]) -> LengthSummary | None:
        """Return the summary of some lengths; None if there are no lengths."""
        if len(lengths) == 0:
            return None
        values = np.asarray(lengths, dtype=np.int64)
        return cls(
            min=int(values.min()),
            median=float(np.median(values)),
            mean=float(values.mean()),
            p95=float(np.percentile(values, 95)),
            max=int(values.max()),
        )


@dataclass(slots=True, kw_only=True)
class RowReport(ABC):
    """Reports the rows of one data set: how many were read, kept, left out and truncated."""

    name: str
    dataset_class: str = ""
    origin: str = ""
    """The place of the rows: a file name without its directory, a hub name, or an import path."""
    num_read: int = 0
    dropped: dict[str, LeftOut] = field(default_factory=dict)
    num_truncated: int = 0
    """The number of conversations that were truncated to the maximum length."""
    notes: list[str] = field(default_factory=list)
    first_lack: str = ""
    """What the first row without the expected columns lacks, with its place and the remedy."""
    prompts: set[bytes] = field(default_factory=set, repr=False)
    """The fingerprints of the kept rows' prompts."""
    lengths: list[int] = field(default_factory=list, repr=False)
    """The lengths of what is kept, in characters of the message contents."""
    token_lengths: list[int] = field(default_factory=list, repr=False)
    """The same lengths in tokens; empty before `set_lengths`."""

    @property
    def num_kept(self) -> int:
        """Return the number of rows that were read and not left out."""
        return self.num_read - self.num_dropped

    @property
    def num_dropped(self) -> int:
        """Return the number of rows that were left out for any reason."""
        return sum(left_out.count for left_out in self.dropped.values())

    @property
    def num_prompts(self) -> int:
        """Return the number of different prompts among the kept rows."""
        return len(self.prompts)

    @property
    def tokens(self) -> LengthSummary | None:
        """Return the lengths in tokens; None before `set_lengths`."""
        return LengthSummary.of(self.token_lengths)

    @abstractmethod
    def describe(self, items: Sequence[Any]) -> None:
        """Compute the statistics of what is kept; call it again after leaving out more."""

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the length in tokens of everything that is kept."""
        self.token_lengths = list(lengths)

    def note_control_tokens(
        self,
        rows: Iterable[tuple[str, Iterable[Conversation]]],
        find: Callable[[str], str | None],
    ) -> None:
        """Note how many rows spell a control token, which is plain text in a message.

        Args:
            find: Returns the first control token that a text spells; None if it spells none.
        """
        count, first = 0, ""
        for source, conversations in rows:
            texts = (message.content for talk in conversations for message in talk)
            token = next(filter(None, map(find, texts)), None)
            count += token is not None
            if token is not None and not first:
                first = f"{token} in {source}"
        if count:
            self.notes.append(
                f"{counted(count, 'row')} spell control tokens of the chat template (first: "
                f"{first}); in messages they are plain text. Rows that were rendered by a template "
                "have to be messages again"
            )

    def drop(self, reason: Reason, source: str, *, kind: str = "") -> None:
        """Count a row that was read and is left out; `kind` states the reason more precisely."""
        self.dropped.setdefault(reason, LeftOut()).add_row(source, kind)

    def drop_malformed(self, source: str, problem: UnusableRow) -> None:
        """Count a row that was read and cannot be used."""
        self.drop("malformed", source, kind=problem.kind)
        if problem.lacks_columns and not self.first_lack:
            self.first_lack = f"{source}: {problem.message}. {problem.remedy}"

    def warning_of_cuts(self, total: int, max_length: int) -> str | None:
        """Return a warning if more than half of `total` conversations were truncated, else None."""
        if 2 * self.num_truncated <= total:
            return None
        return (
            f"{self.name}: {self.num_truncated:,} of {counted(total, 'conversation')} cut to "
            f"{max_length:,} tokens, so most of them are not seen whole. Raise "
            "data.max_input_seq_length or policy.max_total_sequence_length"
        )

    def add(self, other: Self) -> None:
        """Add the rows of another data set's report to this one."""
        self.num_read += other.num_read
        self.num_truncated += other.num_truncated
        self.notes += [f"{other.origin or other.name}: {note}" for note in other.notes]
        for reason, left_out in other.dropped.items():
            self.dropped.setdefault(reason, LeftOut()).add(left_out)
        self.prompts |= other.prompts
        self.lengths += other.lengths
        self.token_lengths += other.token_lengths

    @classmethod
    def merge(cls, reports: Sequence[Self], *, name: str) -> Self:
        """Combine the reports of several data sets that are concatenated into one, named `name`."""
        merged = cls(
            name=name,
            dataset_class=", ".join(dict.fromkeys(report.dataset_class for report in reports)),
            origin=", ".join(dict.fromkeys(report.origin for report in reports)),
        )
        for report in reports:
            merged.add(report)
        return merged

    def move_out(self, *, kept: Sequence[Any], held_out: Sequence[Any], name: str) -> Self:
        """Count what is held out of this set, and return the report of the set that it goes to."""
        other = self.split_off([item.source for item in held_out], name=name)
        self.describe(kept)
        other.describe(held_out)
        return other

    def split_off(self, sources: Sequence[str], *, name: str) -> Self:
        """Count the rows of `sources` as held out, and return a new report with their counts."""
        for source in sources:
            self.drop("held out", source)
        note = f"held out from {self.name}"
        if len(sources) < MIN_HELD_OUT:
            note += (
                ": so few rows measure little. Set data.split_validation_size=0 for no validation, "
                "or name a file in data.val_data_path"
            )
        return type(self)(
            name=name,
            dataset_class=self.dataset_class,
            origin=self.origin,
            num_read=len(sources),
            notes=[note],
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-compatible values."""
        lengths = {"characters": LengthSummary.of(self.lengths), "tokens": self.tokens}
        return {
            "name": self.name,
            "dataset_class": self.dataset_class,
            "origin": self.origin,
            "rows_read": self.num_read,
            "rows_kept": self.num_kept,
            "rows_left_out": {
                reason: left_out.to_dict() for reason, left_out in self.dropped.items()
            },
            "num_truncated": self.num_truncated,
            **self.figures(),
            "lengths": {unit: asdict(found) for unit, found in lengths.items() if found},
            "notes": list(self.notes),
        }

    @abstractmethod
    def figures(self) -> dict[str, Any]:
        """Return the statistics of one kind of rows as JSON-compatible values."""

    @abstractmethod
    def figure_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the statistics for the terminal, each with its label; none without rows."""

    def render(self) -> RenderableType:
        """Return the report as a table for the terminal, at most 80 columns wide."""
        return _Lines(self)


def origin_of(path_or_name: str) -> str:
    """Return the name of a data source in reports: its file name, or its name on the hub."""
    is_local = os.path.exists(os.path.expanduser(path_or_name))
    return os.path.basename(os.path.normpath(path_or_name)) if is_local else path_or_name


def no_rows_left(report: RowReport) -> str:
    """Return the error message for a data set of which no row is left."""
    reasons = ", ".join(
        f"{left_out.count} {reason} ({_kinds(left_out)})"
        for reason, left_out in report.dropped.items()
    )
    notes = "".join(f". {note}" for note in report.notes)
    # A column that no row has is one mistake, and the message about a row says how to fix it.
    bad = report.dropped.get("malformed")
    is_of_all = bad is not None and bad.count == report.num_read
    first = f"{report.first_lack}. " if is_of_all and report.first_lack else ""
    return (
        f"data set '{report.name}' ({report.origin or report.dataset_class}): nothing is left of "
        f"{counted(report.num_read, 'row')}. {first}Left out: {reasons or 'none'}{notes}"
    )


def _kinds(left_out: LeftOut) -> str:
    """Name the kinds of rows with an example each, those of most rows first."""
    kinds = left_out.kinds.most_common()
    if not kinds:
        return f"e.g. {left_out.examples[0]}"
    first = {kind: left_out.sources[kind][0] for kind, _ in kinds[:MAX_EXAMPLES]}
    if len(kinds) == 1:
        return "".join(f"e.g. {source}: {kind}" for kind, source in first.items())
    said = [f"{left_out.kinds[kind]:,} x {kind}, e.g. {source}" for kind, source in first.items()]
    return "; ".join([*said, "..."] if len(kinds) > len(said) else said)


# The reports of preferences, of demonstrations and of tasks.


@dataclass(slots=True, kw_only=True)
class DataReport(RowReport):
    """Reports the rows of a preference data set; tokenization adds the lengths in tokens later.

    Its lengths are those of a prompt with one of its completions.
    """

    num_completions: Counter[int] = field(default_factory=Counter, repr=False)
    """The number of rows by their number of completions."""
    num_pairs: int = 0
    num_tied_pairs: int = 0
    longer_wins: float = 0.0
    """The sum of `longer_credit` over the pairs that are not tied."""

    @property
    def longer_wins_share(self) -> float | None:
        """Return the share of pairs of different rank whose better answer has more characters.

        Answers of equal length count half. None if there are no such pairs.
        """
        num_decided = self.num_pairs - self.num_tied_pairs
        return self.longer_wins / num_decided if num_decided else None

    @property
    def tied_pairs_share(self) -> float | None:
        """Return the share of pairs of completions with equal ranks; None if there are no pairs."""
        return self.num_tied_pairs / self.num_pairs if self.num_pairs else None

    def describe(self, items: Iterable[Preference]) -> None:
        """Compute the statistics of the kept preferences."""
        self.num_completions, self.prompts, self.lengths = Counter(), set(), []
        self.num_pairs, self.num_tied_pairs, self.longer_wins = 0, 0, 0.0
        for preference in items:
            group = preference.group
            self.num_completions[len(group.completions_G)] += 1
            self.prompts.add(conversation_fingerprint(group.prompt))
            num_prompt = answer_length(group.prompt)
            lengths_G = [answer_length(completion.messages) for completion in group.completions_G]
            self.lengths += [num_prompt + length for length in lengths_G]
            ranked = sorted(zip(preference.ranks_G, lengths_G, strict=True))
            for (rank, length), (other_rank, other_length) in combinations(ranked, 2):
                self.num_pairs += 1
                if rank == other_rank:
                    self.num_tied_pairs += 1
                else:
                    self.longer_wins += longer_credit(length, other_length)

    def add(self, other: Self) -> None:
        """Add the rows and pairs of another data set's report to this one."""
        RowReport.add(self, other)  # `super` does not know the class that `slots` makes
        self.num_completions.update(other.num_completions)
        self.num_pairs += other.num_pairs
        self.num_tied_pairs += other.num_tied_pairs
        self.longer_wins += other.longer_wins

    def figures(self) -> dict[str, Any]:
        """Return the statistics of the pairs."""
        return {
            "num_prompts": self.num_prompts,
            "completions_per_prompt": {
                str(size): count for size, count in sorted(self.num_completions.items())
            },
            "num_pairs": self.num_pairs,
            "tied_pairs_share": self.tied_pairs_share,
            "longer_wins_share": self.longer_wins_share,
        }

    def figure_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the statistics of the pairs, each with its label."""
        if not self.num_completions:
            return
        yield "different prompts", f"{self.num_prompts:,}"
        sizes = sorted(self.num_completions.items())
        shown = [f"{size} ({counted(count, 'row')})" for size, count in sizes[:6]]
        said = ", ".join(shown) + (", ..." if len(sizes) > 6 else "")
        yield "answers per row", said if len(sizes) > 1 else f"{sizes[0][0]}"
        if self.longer_wins_share is not None:
            decided = counted(self.num_pairs - self.num_tied_pairs, "pair")
            yield "longer answer wins", f"{self.longer_wins_share:.1%} of {decided}"
        if self.tied_pairs_share is not None:
            pairs = counted(self.num_pairs, "pair")
            yield "tied pairs", f"{self.tied_pairs_share:.1%} of {pairs}"
        yield from _length_lines(self)
        if self.num_truncated or self.token_lengths:
            total = counted(len(self.lengths), "conversation")
            yield "cut to fit", f"{self.num_truncated:,} of {total}"


@dataclass(slots=True, kw_only=True)
class TextReport(RowReport):
    """Reports the rows of data sets of prompts, or of whole conversations."""

    items: str = "conversations"
    """The word for what is counted, such as `conversations` or `tasks`."""
    num_items: int = 0
    sets: Counter[str] = field(default_factory=Counter)
    """The number of kept items of each data set, by the set's name."""

    def describe_items(self, items: Iterable[tuple[str, Conversation, Conversation]]) -> None:
        """Count and measure the kept items, each given as (set, prompt, whole conversation)."""
        self.num_items, self.sets, self.lengths, self.prompts = 0, Counter(), [], set()
        for name, prompt, whole in items:
            self.num_items += 1
            self.sets[name] += 1
            self.lengths.append(answer_length(whole))
            self.prompts.add(conversation_fingerprint(prompt))

    def add(self, other: Self) -> None:
        """Add the rows and items of another data set's report to this one."""
        RowReport.add(self, other)
        self.num_items += other.num_items
        self.sets.update(other.sets)

    def figures(self) -> dict[str, Any]:
        """Return the numbers of items and prompts."""
        return {
            f"num_{self.items}": self.num_items,
            "num_prompts": self.num_prompts,
            "sets": dict(self.sets),
        }

    def figure_lines(self) -> Iterator[tuple[str, str]]:
        """Yield the numbers of items and prompts, and the lengths, each with its label."""
        if not self.num_items:
            return
        yield self.items, f"{self.num_items:,}"
        if len(self.sets) > 1:
            for name, count in self.sets.items():
                yield f"  {name}", f"{count:,}"
        yield "different prompts", f"{self.num_prompts:,}"
        yield from _length_lines(self)
        if self.num_truncated:
            yield "cut to fit", f"{self.num_truncated:,} of {self.num_items:,} {self.items}"


@dataclass(slots=True, kw_only=True)
class TaskReport(TextReport):
    """Reports the rows of data sets of tasks; its lengths are those of the prompts."""

    items: str = "tasks"

    def describe(self, items: Iterable[Task]) -> None:
        """Count and measure the kept tasks."""
        self.describe_items(
            (f"{task.name} ({task.environment})", task.prompt, task.prompt) for task in items
        )

    def move_out(self, *, kept: Sequence[Task], held_out: Sequence[Task], name: str) -> Self:
        """Count the rows that are held out, and return the report of the set that they go to."""
        sources = list(dict.fromkeys(task.source for task in held_out))  # tasks may be repeated
        other = self.split_off(sources, name=name)
        self.describe(kept)
        other.describe(held_out)
        return other


def _length_lines(report: RowReport) -> Iterator[tuple[str, str]]:
    for unit, lengths in (("characters", report.lengths), ("tokens", report.token_lengths)):
        if (found := LengthSummary.of(lengths)) is not None:
            yield (
                f"length in {unit}",
                f"median {found.median:,.0f}, mean {found.mean:,.0f}, 95% under {found.p95:,.0f}, "
                f"from {found.min:,} to {found.max:,}",
            )


# How a data report looks in the terminal.

_WIDTH = 80
_LABEL = 24
# Below it, half of the width is for labels, and notes have lines of their own.
_NARROW = 60
_NOTE = "note"


class _Lines:
    """Renders a report at the terminal's width without truncating any line."""

    def __init__(self, report: RowReport) -> None:
        self._report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report, is_one_line = self._report, is_unbroken(console)
        width = UNBROKEN if is_one_line else min(_WIDTH, options.max_width)
        yield Text(f"Data '{report.name}'", style="bold")
        about = ", ".join(part for part in (report.dataset_class, report.origin) if part)
        if about:
            yield Text(about, style="dim", overflow="fold", no_wrap=is_one_line)
        is_narrow = width < _NARROW
        table = _table(width, width // 2 - 2 if is_narrow else _LABEL)
        for label, value in (*_rows(report), *report.figure_lines()):
            # Text, not str: a source such as name[17] must not be taken for markup.
            table.add_row(Text(label), Text(value))
        # Sentences have little room beside long labels.
        notes = _table(width, len(_NOTE)) if is_narrow else table
        for note in report.notes:
            notes.add_row(Text(_NOTE, style="yellow"), Text(note))
        yield table
        if is_narrow and report.notes:
            yield notes


def _table(width: int, label_width: int) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), width=width)
    table.add_column(ratio=None, width=label_width, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    return table


def _rows(report: RowReport) -> Iterator[tuple[str, str]]:
    yield "rows read", f"{report.num_read:,}"
    yield "rows kept", f"{report.num_kept:,}"
    yield "rows left out", f"{report.num_dropped:,}"
    for reason, left_out in report.dropped.items():
        said = f"{left_out.count:,}"
        # Where all rows are of a kind, their places stand at the kinds.
        if left_out.kinds.total() < left_out.count:
            said += f"  ({_places(left_out.examples, left_out.count, report.origin)})"
        yield f"  {reason}", said
        for kind, count in left_out.kinds.most_common():
            places = _places(left_out.sources[kind], count, report.origin)
            yield "", f"  {count:,} x {kind}  ({places})"


def _places(sources: Sequence[str], count: int, origin: str) -> str:
    """Return the first of `count` sources as text.

    If all come from the report's own file, only their line numbers are given.
    """
    more = ", ..." if count > MAX_EXAMPLES else ""
    sources = sources[:MAX_EXAMPLES]
    places = [source.removeprefix(f"{origin}:") for source in sources]
    if all(place.isdecimal() for place in places):
        return f"line{'s' if count > 1 else ''} {', '.join(places)}{more}"
    return ", ".join(sources) + more
