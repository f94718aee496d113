"""Completions with their rewards: a table on screen, a parquet file a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from laurel.observe.console import format_number, print_line, shorten_middle, visible
from laurel.types import Conversation

_PROMPT_LENGTH = 240
_ANSWER_LENGTH = 320


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRow:
    """One rollout, as people look at it."""

    step: int
    task: str
    """The task's id."""
    group: str
    environment: str
    prompt: str
    completion: str
    """Of several turns, with marks between them; see `completion_text`."""
    reward: float | None
    advantage: float | None = None
    answer: str | None = None
    expected: str | None = None
    """The known answer, where there is one."""
    truncated: bool = False
    failure: str | None = None
    num_tokens: int = 0
    num_turns: int = 1
    weight_version: int = 0

    @classmethod
    def columns(cls) -> tuple[str, ...]:
        """Names of the cells."""
        return tuple(cls.__dataclass_fields__)

    @property
    def cells(self) -> tuple[object, ...]:
        """The values, in the order of `columns`."""
        return tuple(asdict(self).values())


def completion_text(messages: Conversation) -> str:
    """What followed a prompt as one text; turns that are not the policy's are marked.

    As in `x [environment] wrong [policy] y`; of a single turn its text alone.
    """
    text, speaker = "", "policy"
    for message in messages:
        by = "policy" if message.role == "assistant" else "environment"
        if by != speaker:
            text += f" [{by}] "
        text, speaker = text + message.content, by
    return text


def print_completions(
    console: Console, title: str, rows: Sequence[CompletionRow], *, is_brief: bool = False
) -> None:
    """Show completions with their rewards.

    Args:
        console: Where they are shown.
        title: Above them.
        rows: The completions.
        is_brief: A line each, without a title.
    """
    if is_brief:
        for row in rows:
            said = "failed" if row.reward is None else f"reward {format_number(row.reward)}"
            print_line(console, f"  {said}  {row.prompt} | {row.completion}")
        return
    table = Table(title=title, title_justify="left", show_lines=True, expand=True)
    table.add_column("prompt", ratio=2)
    table.add_column("completion", ratio=3)
    table.add_column("reward", justify="right", no_wrap=True)
    for row in rows:
        reward = Text("-" if row.reward is None else format_number(row.reward))
        if row.failure is not None:
            reward = Text(f"failed: {visible(row.failure)}", style="yellow")
        completion = Text(visible(shorten_middle(row.completion, _ANSWER_LENGTH)))
        if row.truncated:
            completion.append(" [cut off]", style="yellow")
        table.add_row(Text(visible(shorten_middle(row.prompt, _PROMPT_LENGTH))), completion, reward)
    console.print(table)


def write_completions(path: Path, rows: Sequence[CompletionRow]) -> None:
    """Write the rows as a parquet file that pandas, polars and duckdb read."""
    import pyarrow
    from pyarrow import parquet

    arrow: Any = pyarrow
    write: Any = parquet.write_table
    kinds = {"int": arrow.int64(), "float": arrow.float64(), "bool": arrow.bool_()}
    schema = arrow.schema(
        [
            (name, kinds.get(str(field.type).removesuffix(" | None"), arrow.string()))
            for name, field in CompletionRow.__dataclass_fields__.items()
        ]
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{name: _storable(value) for name, value in asdict(row).items()} for row in rows]
    write(arrow.Table.from_pylist(cells, schema=schema), path)


def _storable(value: object) -> object:
    """Half a character, as broken data may have, has no place in UTF-8."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    return value
