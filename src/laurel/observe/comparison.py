"""Answers of a policy to the same prompt, before and after its training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from laurel.observe.console import format_number, shorten_middle, visible

_PROMPT_LENGTH = 240
_ANSWER_LENGTH = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer, what a reward model thinks of it, and whether it is right."""

    text: str
    score: float | None = None
    """None where nobody scored it."""
    is_right: bool | None = None
    """None where nobody knows."""

    @property
    def verdict(self) -> str:
        """`right`, `wrong` or nothing."""
        return "" if self.is_right is None else "right" if self.is_right else "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A prompt, and what was answered before and after."""

    prompt: str
    expected: str
    """The known answer; empty where there is none."""
    before: Answer
    after: Answer


def print_comparisons(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Show answers before and after, each with its score and the verdict."""
    table = Table(title="the same prompts, before and after", title_justify="left", expand=True)
    table.add_column("prompt", ratio=3)
    for when in ("before", "after"):
        table.add_column(when, ratio=2)
        table.add_column("score", justify="right", no_wrap=True)
    for row in comparisons:
        cells = [Text(visible(shorten_middle(row.prompt, _PROMPT_LENGTH)))]
        for answer in (row.before, row.after):
            style = {"right": "green", "wrong": "red"}.get(answer.verdict, "")
            text = visible(shorten_middle(answer.text, _ANSWER_LENGTH))
            cells.append(Text(f"{text} {answer.verdict}".rstrip(), style=style))
            cells.append(Text("-" if answer.score is None else format_number(answer.score)))
        table.add_row(*cells)
    console.print(table)
