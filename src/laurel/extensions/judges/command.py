"""The command `laurel data verdicts`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from laurel.errors import speaking
from laurel.plugins import Command
from laurel.run.options import JsonOption, PreferenceSetOption, sets_column


class Verdicts(Command):
    """Write verdicts that teach a judge, for laurel sft, from preferences."""

    after = "check"

    def make(self, section: None, name: str) -> Callable[..., Any]:
        """Return the function."""
        return data_verdicts


def data_verdicts(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE...", help="Preferences: files or hub names; and names of columns."
        ),
    ] = None,
    *,
    judge: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="The judge that is to learn: a YAML file with the keys of env.reward_model.",
        ),
    ],
    split: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The split of a directory or a hub data set."),
    ] = None,
    dataset: PreferenceSetOption = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The JSON lines to write.")
    ] = Path("verdicts.jsonl"),
    as_json: JsonOption = False,
) -> None:
    """Write verdicts that teach a judge, for laurel sft, from preferences.

    The questions are those that the judge of --judge will be asked, and its words are read as the
    tokens that are taught. Of a pair both positions are written (with compares), or both responses.
    Words KEY=COLUMN beside the files name columns, as for laurel rm: data.prompt_key=question.

    Example: laurel data verdicts pairs.jsonl --judge judge.yaml -o verdicts.jsonl
    """
    from laurel.config.load import column_overrides
    from laurel.evaluation.benchmarks import BenchmarkOptions
    from laurel.extensions.judges.verdicts import write_verdicts

    words = files or []
    columns = [word for word in words if sets_column(word)]
    rows = BenchmarkOptions(
        data=tuple(word for word in words if word not in columns),
        split=split,
        dataset=dataset,
        column_keys=column_overrides(columns),
    )
    with speaking({"--data": "FILE"}):
        write_verdicts(rows, judge_file=judge, output=output, as_json=as_json)
