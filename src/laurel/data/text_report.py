"""The reports of tasks and of demonstrations: what was read, and what the rest looks like."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from laurel.data.report import LengthSummary, RowReport, fingerprint, lengths_to_dict
from laurel.types import Conversation, Task

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(slots=True, kw_only=True)
class TextReport(RowReport):
    """What became of the rows of sets of prompts, or of whole conversations."""

    items: str = "conversations"
    """What is counted and measured."""
    num_items: int = 0
    sets: Counter[str] = field(default_factory=Counter)
    """How many came from each set."""
    lengths: list[int] = field(default_factory=list, repr=False)
    tokens_of_items: list[int] = field(default_factory=list, repr=False)
    prompts: set[bytes] = field(default_factory=set, repr=False)

    @property
    def num_prompts(self) -> int:
        """Different prompts."""
        return len(self.prompts)

    @property
    def characters(self) -> LengthSummary | None:
        """Lengths in characters of the contents."""
        return LengthSummary.of(self.lengths)

    @property
    def tokens(self) -> LengthSummary | None:
        """Lengths in tokens, once `set_lengths` was told them."""
        return LengthSummary.of(self.tokens_of_items)

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Tells the tokens of every item that is left."""
        self.tokens_of_items = list(lengths)

    def describe_items(self, items: Iterable[tuple[str, Conversation, Conversation]]) -> None:
        """Takes the figures of what is left, each as (set, prompt, everything that is measured)."""
        self.num_items, self.sets, self.lengths, self.prompts = 0, Counter(), [], set()
        for name, prompt, whole in items:
            self.num_items += 1
            self.sets[name] += 1
            self.lengths.append(sum(len(message.content) for message in whole))
            self.prompts.add(fingerprint(prompt))

    @classmethod
    def merge(cls, reports: Sequence[Self], *, name: str) -> Self:
        """The report of several sets that are concatenated."""
        merged = cls.of_rows(reports, name=name)
        for report in reports:
            merged.num_items += report.num_items
            merged.sets.update(report.sets)
            merged.lengths += report.lengths
            merged.tokens_of_items += report.tokens_of_items
            merged.prompts |= report.prompts
        return merged

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {
            **self.rows_to_dict(),
            f"num_{self.items}": self.num_items,
            "num_prompts": self.num_prompts,
            "sets": dict(self.sets),
            "lengths": lengths_to_dict(self.characters, self.tokens),
            "notes": list(self.notes),
        }

    def render(self) -> RenderableType:
        """The report as a table for the terminal, at most 80 columns wide."""
        from laurel.data.report_table import lay_out

        return lay_out(self, self._figures())

    def _figures(self) -> Iterator[tuple[str, str]]:
        from laurel.data.report_table import length_line

        if not self.num_items:
            return
        yield self.items, f"{self.num_items:,}"
        if len(self.sets) > 1:
            for name, count in self.sets.items():
                yield f"  {name}", f"{count:,}"
        yield "different prompts", f"{self.num_prompts:,}"
        if self.characters is not None:
            yield "length in characters", length_line(self.characters)
        if self.tokens is not None:
            yield "length in tokens", length_line(self.tokens)
        if self.num_truncated:
            yield "cut to fit", f"{self.num_truncated:,} of {self.num_items:,} {self.items}"


@dataclass(slots=True, kw_only=True)
class TaskReport(TextReport):
    """What became of the rows of sets of tasks. Lengths are those of the prompts."""

    items: str = "tasks"

    def describe(self, tasks: Iterable[Task]) -> None:
        """Takes the figures of the tasks; call it again after leaving out more of them."""
        self.describe_items(
            (f"{task.name} ({task.environment})", task.prompt, task.prompt) for task in tasks
        )

    def move_out(self, *, kept: Sequence[Task], held_out: Sequence[Task], name: str) -> TaskReport:
        """Counts tasks as held out from here, and returns the report of the set they went to."""
        sources = list(dict.fromkeys(task.source for task in held_out))  # tasks may be repeated
        other = self.split_off(sources, name=name)
        self.describe(kept)
        other.describe(held_out)
        return other
