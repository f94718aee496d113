"""The data report: what was read, what was left out and why, and what the rest looks like."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from laurel.observe.counts import counted
from laurel.observe.lengths import answer_length, longer_credit
from laurel.types import Conversation, Preference

if TYPE_CHECKING:
    import numpy.typing as npt
    from rich.console import RenderableType

Reason = Literal[
    "malformed",
    "empty",
    "no rating",
    "identical sides",
    "tie",
    "duplicate",
    "over-long",
    "held out",
    "no answer",
    "nothing to learn",
    "answer refused",
]
"""Why a row is left out."""

MAX_EXAMPLES = 3


def fingerprint(conversation: Conversation) -> bytes:
    """Sixteen bytes that conversations share only if they say the same, alike on any machine."""
    digest = hashlib.blake2b(digest_size=16)
    for message in conversation:
        # Lengths keep (role, content) apart, so no two conversations run into one text.
        head = f"{len(message.role)},{len(message.content)}:"
        digest.update(f"{head}{message.role}{message.content}".encode())
    return digest.digest()


@dataclass(slots=True)
class LeftOut:
    """How many rows were left out for one reason, with the first sources and the kinds of it."""

    count: int = 0
    examples: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)

    def add(self, other: LeftOut) -> None:
        """Counts the other's rows too."""
        self.count += other.count
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]
        self.kinds.update(other.kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSummary:
    """Lengths of whole conversations (a prompt with one of its completions)."""

    minimum: int
    median: float
    mean: float
    p95: float
    maximum: int

    @classmethod
    def of(cls, lengths: Sequence[int] | npt.NDArray[np.int64]) -> LengthSummary | None:
        """The summary, or None where there is nothing to sum up."""
        if len(lengths) == 0:
            return None
        values = np.asarray(lengths, dtype=np.int64)
        return cls(
            minimum=int(values.min()),
            median=float(np.median(values)),
            mean=float(values.mean()),
            p95=float(np.percentile(values, 95)),
            maximum=int(values.max()),
        )


def lengths_to_dict(
    characters: LengthSummary | None, tokens: LengthSummary | None
) -> dict[str, dict[str, float]]:
    """The summaries that there are as plain values, for JSON."""
    return {
        unit: {
            "min": summary.minimum,
            "median": summary.median,
            "mean": summary.mean,
            "p95": summary.p95,
            "max": summary.maximum,
        }
        for unit, summary in {"characters": characters, "tokens": tokens}.items()
        if summary is not None
    }


@dataclass(slots=True)
class _Figures:
    """What the kept preferences look like; two sets' figures can be added."""

    num_completions: Counter[int] = field(default_factory=Counter)
    num_pairs: int = 0
    num_tied_pairs: int = 0
    longer_wins: float = 0.0
    prompts: set[bytes] = field(default_factory=set)
    characters: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class RowReport:
    """What became of the rows of one data set, whatever they say."""

    name: str
    dataset_class: str = ""
    origin: str = ""
    """The file (without its directory), the hub name, or the import path."""
    num_read: int = 0
    dropped: dict[str, LeftOut] = field(default_factory=dict)
    num_truncated: int = 0
    """Conversations that were cut to the longest length."""
    notes: list[str] = field(default_factory=list)

    @property
    def num_kept(self) -> int:
        """Rows that are left."""
        return self.num_read - self.num_dropped

    @property
    def num_dropped(self) -> int:
        """Rows that were left out, for any reason."""
        return sum(left_out.count for left_out in self.dropped.values())

    def drop(self, reason: Reason, source: str, *, kind: str = "") -> None:
        """Counts a row that was read and is left out; `kind` says more about the reason."""
        kinds = Counter([kind]) if kind else Counter[str]()
        self.dropped.setdefault(reason, LeftOut()).add(LeftOut(1, [source], kinds))

    def warning_of_cuts(self, total: int, max_length: int) -> str | None:
        """What to say where more than half of `total` conversations were cut; None otherwise."""
        if 2 * self.num_truncated <= total:
            return None
        return (
            f"{self.name}: {self.num_truncated:,} of {counted(total, 'conversation')} cut to "
            f"{max_length:,} tokens, so most of what they say is not seen as it is. Raise "
            "data.max_input_seq_length or policy.max_total_sequence_length"
        )

    def add_rows(self, other: RowReport) -> None:
        """Counts the rows of another set too."""
        self.num_read += other.num_read
        self.num_truncated += other.num_truncated
        self.notes += [f"{other.origin or other.name}: {note}" for note in other.notes]
        for reason, left_out in other.dropped.items():
            self.dropped.setdefault(reason, LeftOut()).add(left_out)

    @classmethod
    def of_rows(cls, reports: Sequence[Self], *, name: str) -> Self:
        """A report of the rows of several sets that are concatenated, without their figures."""
        merged = cls(
            name=name,
            dataset_class=", ".join(dict.fromkeys(report.dataset_class for report in reports)),
            origin=", ".join(dict.fromkeys(report.origin for report in reports)),
        )
        for report in reports:
            merged.add_rows(report)
        return merged

    def split_off(self, sources: Sequence[str], *, name: str) -> Self:
        """Counts rows as held out from here, and returns a report of them without figures."""
        for source in sources:
            self.drop("held out", source)
        return type(self)(
            name=name,
            dataset_class=self.dataset_class,
            origin=self.origin,
            num_read=len(sources),
            notes=[f"held out from {self.name}"],
        )

    def rows_to_dict(self) -> dict[str, Any]:
        """The rows read, kept and left out as plain values, for JSON."""
        return {
            "name": self.name,
            "dataset_class": self.dataset_class,
            "origin": self.origin,
            "rows_read": self.num_read,
            "rows_kept": self.num_kept,
            "rows_left_out": {
                reason: {
                    "count": left_out.count,
                    "examples": list(left_out.examples),
                    "kinds": dict(left_out.kinds.most_common()),
                }
                for reason, left_out in self.dropped.items()
            },
            "num_truncated": self.num_truncated,
        }


def origin_of(path_or_name: str) -> str:
    """What a report calls a path or hub name: a file without its directory, or the name."""
    is_local = os.path.exists(os.path.expanduser(path_or_name))
    return os.path.basename(os.path.normpath(path_or_name)) if is_local else path_or_name


def nothing_left(report: RowReport) -> str:
    """What to say where no row of a set is left."""
    reasons = ", ".join(
        f"{left_out.count} {reason} (e.g. {left_out.examples[0]}"
        + (f": {left_out.kinds.most_common(1)[0][0]}" if left_out.kinds else "")
        + ")"
        for reason, left_out in report.dropped.items()
    )
    notes = "".join(f". {note}" for note in report.notes)
    return (
        f"data set '{report.name}' ({report.origin or report.dataset_class}): nothing is left of "
        f"{counted(report.num_read, 'row')}. Left out: {reasons or 'none'}{notes}"
    )


@dataclass(slots=True, kw_only=True)
class DataReport(RowReport):
    """What became of the rows of a set of preferences. Later stages add to it."""

    figures: _Figures = field(default_factory=_Figures, repr=False)

    @property
    def num_prompts(self) -> int:
        """Different prompts among the kept rows."""
        return len(self.figures.prompts)

    @property
    def longer_wins_share(self) -> float | None:
        """Share of the pairs of different rank whose better answer is longer, in characters.

        Answers of one length count half. None where there are no such pairs.
        """
        num_decided = self.figures.num_pairs - self.figures.num_tied_pairs
        return self.figures.longer_wins / num_decided if num_decided else None

    @property
    def tied_pairs_share(self) -> float | None:
        """Share of the pairs of completions that have one rank; None where there are no pairs."""
        return (
            self.figures.num_tied_pairs / self.figures.num_pairs if self.figures.num_pairs else None
        )

    @property
    def characters(self) -> LengthSummary | None:
        """Lengths of the kept conversations in characters of their contents."""
        return LengthSummary.of(self.figures.characters)

    @property
    def tokens(self) -> LengthSummary | None:
        """Lengths of the kept conversations in tokens, once `set_lengths` was told them."""
        return LengthSummary.of(self.figures.tokens)

    def describe(self, preferences: Iterable[Preference]) -> None:
        """Takes the figures of the kept rows; call it again after leaving out more of them."""
        self.figures = _Figures(tokens=self.figures.tokens)
        for preference in preferences:
            _add(self.figures, preference)

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Tells the tokens of every kept conversation (each prompt with each completion)."""
        self.figures.tokens = list(lengths)

    def move_out(
        self, *, kept: Sequence[Preference], held_out: Sequence[Preference], name: str
    ) -> DataReport:
        """Counts rows as held out from here, and returns the report of the set they went to."""
        other = self.split_off([preference.source for preference in held_out], name=name)
        self.describe(kept)
        other.describe(held_out)
        return other

    @classmethod
    def merge(cls, reports: Sequence[DataReport], *, name: str) -> DataReport:
        """The report of several sets that are concatenated."""
        merged = cls.of_rows(reports, name=name)
        total = merged.figures
        for report in reports:
            total.num_completions.update(report.figures.num_completions)
            total.num_pairs += report.figures.num_pairs
            total.num_tied_pairs += report.figures.num_tied_pairs
            total.longer_wins += report.figures.longer_wins
            total.prompts |= report.figures.prompts
            total.characters += report.figures.characters
            total.tokens += report.figures.tokens
        return merged

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {
            **self.rows_to_dict(),
            "num_prompts": self.num_prompts,
            "completions_per_prompt": {
                str(size): count for size, count in sorted(self.figures.num_completions.items())
            },
            "num_pairs": self.figures.num_pairs,
            "tied_pairs_share": self.tied_pairs_share,
            "longer_wins_share": self.longer_wins_share,
            "lengths": lengths_to_dict(self.characters, self.tokens),
            "notes": list(self.notes),
        }

    def render(self) -> RenderableType:
        """The report as a table for the terminal, at most 80 columns wide."""
        from laurel.data.report_table import table_of

        return table_of(self)


def _add(figures: _Figures, preference: Preference) -> None:
    group = preference.group
    figures.num_completions[len(group.completions_G)] += 1
    figures.prompts.add(fingerprint(group.prompt))
    num_prompt = answer_length(group.prompt)
    lengths_G = [answer_length(completion.messages) for completion in group.completions_G]
    figures.characters += [num_prompt + length for length in lengths_G]
    for (rank, length), (other_rank, other_length) in combinations(
        zip(preference.ranks_G, lengths_G, strict=True), 2
    ):
        figures.num_pairs += 1
        if rank == other_rank:
            figures.num_tied_pairs += 1
        elif rank < other_rank:
            figures.longer_wins += longer_credit(length, other_length)
        else:
            figures.longer_wins += longer_credit(other_length, length)
