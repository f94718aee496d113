"""The command `laurel score`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from laurel.plugins import Command
from laurel.run.options import (
    ColumnKeys,
    JsonOption,
    JudgeOption,
    LocalScorerOptions,
    ModelOption,
    sets_column,
)


class ScoreCommand(Command):
    """Score conversations with a reward model."""

    after = "plan"

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return score_command

    def for_programs(self) -> ModuleType:
        """Return `score_rows`."""
        from laurel.extensions.score import programs

        return programs


def score_command(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="A file of JSON lines with conversations; - reads stdin."
        ),
    ] = "-",
    overrides: ColumnKeys = None,
    model: ModelOption = "",
    judge: JudgeOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write JSON lines to this file.", metavar="FILE"),
    ] = None,
    as_json: JsonOption = False,
    *,
    options: LocalScorerOptions,
) -> None:
    """Score conversations with a reward model.

    Each line is {"messages": [...]}, {"prompt": ..., "completions": [...]}, or a row of a
    preference data set, whose columns are set as for laurel rm. A prompt is a string or a list of
    messages. The exit code is 1 if a completion gets no score. With data.on_bad_row=skip a row that
    cannot be read gets a failure in place of scores and is counted; the exit code stays 0.

    Example: laurel score rows.jsonl -m results/rm/best data.prompt_key=question
    """
    from laurel.config.load import column_overrides
    from laurel.extensions.score.score import RowsFile, run_score

    # Words that set a key may stand before the file, or without one.
    words = [file, *(overrides or [])]
    file = next((word for word in words if not sets_column(word)), "-")
    columns = column_overrides(
        [word for word in words if word != file],
        or_bad_rows=True,
        remedy="There is one file, and an option before it may lack its value",
    )
    is_skip = columns.pop("on_bad_row", "error") == "skip"
    exit_code = run_score(
        RowsFile(file=file, columns=columns, on_bad_row="skip" if is_skip else "error"),
        model=model,
        judge_file=judge,
        output=output,
        as_json=as_json,
        options=options.spec(),
        settings=options.settings or (),
        cpu_threads=options.cpu_threads,
    )
    if exit_code:
        raise typer.Exit(exit_code)
