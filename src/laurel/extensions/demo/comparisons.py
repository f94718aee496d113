"""Prints answers of a policy before and after its training, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from laurel.observe.comparisons import Comparison
from laurel.observe.console import format_number, print_table, shorten_middle, visible

_PROMPT_LENGTH = 240
_ANSWER_LENGTH = 320


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
