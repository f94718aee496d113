"""Options of the evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from laurel.cli.completion import offer_environments, offer_tasks
from laurel.cli.json_output import JsonOption
from laurel.cli.options import (
    BatchTokensOption,
    DeviceOption,
    MaxLengthOption,
    PrecisionOption,
    ThreadsOption,
)

EnvironmentOption = Annotated[
    str,
    typer.Option(
        "--environment", "-e", autocompletion=offer_environments,
        help="Who judges; default: as the data says.",
    ),
]  # fmt: skip
TasksOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", autocompletion=offer_tasks,
        help="Tasks, such as GSM8K, HumanEval or MBPP.",
    ),
]  # fmt: skip

RewardModelOption = Annotated[
    str,
    typer.Option(
        "--model", "-m", metavar="MODEL",
        help="A directory, a hub name, or the http:// address of a running laurel serve.",
    ),
]  # fmt: skip
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data", "-d", metavar="FILE",
        help="Rows: a file or a hub name; may be repeated. Default: the benchmark on the hub.",
    ),
]  # fmt: skip
NeededDataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data", "-d", metavar="FILE", help="Rows: a file or a hub name; may be repeated."
    ),
]
SplitOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Split of a directory or a hub data set.")
]
MaxSamplesOption = Annotated[int | None, typer.Option(min=1, help="Rows at most of each set.")]
OutputDirectoryOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="DIR", help="Write three JSON files into this."),
]
CompareOption = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        "--compare", metavar="A.json B.json",
        help="Score nothing: show two results of --output side by side, with significance.",
    ),
]  # fmt: skip
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="A key of the policy section."),
]
ApiKeyEnvOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Variable with the API key of a server; default: LAUREL_API_KEY where it is set.",
    ),
]
ZeroSpreadOption = Annotated[
    Literal["limit", "leave_out"],
    typer.Option(
        help="Ties: right answers that all score the same: 1, or as in rewardbench 0.1.4 nothing."
    ),
]
CompatibilityOption = Annotated[
    Literal["rewardbench"] | None,
    typer.Option(
        help="Make tokens as rewardbench 0.1.4 does, to reproduce its numbers; --max-length is "
        "its own then (default: 2048)."
    ),
]

DiagnosticsOption = Annotated[
    bool,
    typer.Option(
        "--diagnostics",
        help="Also by length, margin and subset (a --data each); calibration, scores, repeats.",
    ),
]
MarginKeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="KEY",
        help="Column of how much better the chosen answer is; a-b: column a less column b. "
        "Implies --diagnostics.",
    ),
]
TrainDataOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DATA",
        help="What the model was trained on: a bag-of-words baseline, and leaks. May be "
        "repeated; implies --diagnostics.",
    ),
]
SensitivityOption = Annotated[
    bool,
    typer.Option(
        "--sensitivity",
        help="Score the answers in other forms, too: white space, markdown, flattery, cut "
        "off. Implies --diagnostics.",
    ),
]
OtherLanguageOption = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="The same rows translated, in the same order: which verdicts change. Implies "
        "--diagnostics.",
    ),
]
MemberOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="MODEL",
        help="Another reward model, such as one of an ensemble: how often two agree. May be "
        "repeated; implies --diagnostics.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosticOptions:
    """What else the scores of pairs are to show."""

    diagnostics: DiagnosticsOption = False
    margin_key: MarginKeyOption = None
    train_data: TrainDataOption = None
    sensitivity: SensitivityOption = False
    other_language: OtherLanguageOption = None
    member: MemberOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """Which model, and which rows."""

    model: RewardModelOption = ""
    data: DataOption = None
    split: SplitOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededRowOptions(RowOptions):
    """The same of what has no place of its own on the hub."""

    data: NeededDataOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOptions:
    """How rows are scored, and what becomes of the result."""

    max_samples: MaxSamplesOption = None
    max_length: MaxLengthOption = None
    batch_tokens: BatchTokensOption = 8192
    precision: PrecisionOption = "float32"
    device: DeviceOption = "auto"
    cpu_threads: ThreadsOption = None
    settings: SettingsOption = None
    api_key_env: ApiKeyEnvOption = None
    output: OutputDirectoryOption = None
    as_json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBenchmarkOptions(ScoringOptions):
    """The same of a benchmark by itself, of which two results can be compared."""

    compare: CompareOption = None
