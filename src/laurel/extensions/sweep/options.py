"""The options of `laurel sweep`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from laurel.run.options import ConfigOption, JsonOption, complete_overrides


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """The options of `laurel sweep`."""

    config: ConfigOption = None
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUES",
            autocompletion=complete_overrides,
            help="A key with the values to try: key=[a,b,c], key=range(0.0,0.2), "
            "key=log(1e-5,1e-3) (whole numbers where both ends are). Other overrides hold for all "
            "trials.",
        ),
    ] = None
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="The directory of the sweep."),
    ] = Path("results/sweep")
    num_trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            min=1,
            help="The number of trials. Default: every combination of lists, or 20 where there are "
            "ranges.",
        ),
    ] = None
    num_folds: Annotated[
        int,
        typer.Option(
            "--folds",
            min=0,
            help="Divide the prompts of the training set into so many parts, and validate on each "
            "in turn. Default: the validation sets of the configuration.",
        ),
    ] = 0
    num_seeds: Annotated[
        int,
        typer.Option(
            "--seeds", min=1, help="The number of seeds with which each trial is repeated."
        ),
    ] = 1
    metric: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The validation metric that is compared. Default: checkpointing.metric_name.",
        ),
    ] = None
    search: Annotated[
        Literal["tpe", "random"], typer.Option(help="How values of ranges are chosen.")
    ] = "tpe"
    num_workers: Annotated[
        int,
        typer.Option(
            "--workers", min=1, help="The number of runs at a time; more than one runs on Ray."
        ),
    ] = 1
    prunes: Annotated[
        bool,
        typer.Option(
            "--prune/--no-prune", help="End trials that are worse than the median of others."
        ),
    ] = True
    as_json: JsonOption = False
