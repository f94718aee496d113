"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from laurel.cli.completion import offer_overrides

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML file; without it, the defaults.", metavar="FILE"),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        autocompletion=offer_overrides,
        help="Changes to the configuration: a.b=c sets, +a.b=c adds, ++a.b=c either, ~a.b deletes.",
    ),
]

ColumnKeys = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=COLUMN",
        help="Columns of other names, as laurel rm is told them: data.prompt_key=, "
        "data.chosen_key=, data.rejected_key=.",
    ),
]

ModelOption = Annotated[
    str, typer.Option("--model", "-m", metavar="MODEL", help="A directory or a hub name.")
]
MaxLengthOption = Annotated[
    int | None, typer.Option(min=2, help="Longest conversation, for a model without scoring.json.")
]
BatchTokensOption = Annotated[int, typer.Option(min=1, help="Tokens of one forward pass.")]
PrecisionOption = Annotated[
    Literal["float32", "bfloat16"], typer.Option(help="Of the weights and the arithmetic.")
]
DeviceOption = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option(help="auto: a GPU where there is one.")
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="Threads on a CPU; default: one per core.")
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A key of the policy section, e.g. tokenizer.pad_token=auto.",
    ),
]
ApiKeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Variable with the API key; default: LAUREL_API_KEY, or else a file that is made.",
    ),
]
AdminKeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Variable with the key for /admin; default: LAUREL_ADMIN_KEY, or else the API key.",
    ),
]
