"""Answers of a policy to the same prompts, before and after its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from laurel.observe.console import format_number, print_table, shorten_middle, visible

_PROMPT_LENGTH = 240
_ANSWER_LENGTH = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredAnswer:
    """An answer, its score, and whether it is right."""

    text: str
    score: float | None = None
    """The score of a reward model; None if there is none."""
    is_right: bool | None = None
    """Whether the answer is right by the ground truth; None if unknown."""

    @property
    def verdict(self) -> str:
        """The word `right` or `wrong`, or an empty text if the truth is unknown."""
        return "" if self.is_right is None else "right" if self.is_right else "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A prompt with its answers before and after training."""

    prompt: str
    expected: str
    """The known answer; empty if there is none."""
    before: ScoredAnswer
    after: ScoredAnswer


def print_comparisons(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print answers before and after training, each with its score and verdict."""
    table = Table(title="the same prompts, before and after")
    table.add_column("prompt", overflow="fold")
    for when in ("before", "after"):
        table.add_column(when, overflow="fold")
        table.add_column("score", justify="right", no_wrap=True)
    for row in comparisons:
        cells = [Text(visible(shorten_middle(row.prompt, _PROMPT_LENGTH)))]
        for answer in (row.before, row.after):
            style = {"right": "green", "wrong": "red"}.get(answer.verdict, "")
            text = visible(shorten_middle(answer.text, _ANSWER_LENGTH))
            cells.append(Text(f"{text} {answer.verdict}".rstrip(), style=style))
            cells.append(Text("-" if answer.score is None else format_number(answer.score)))
        table.add_row(*cells)
    print_table(console, table)
