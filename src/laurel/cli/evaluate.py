"""The commands of `laurel eval`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from laurel.cli.options import (
    BatchTokensOption,
    ColumnKeys,
    ConfigOption,
    DeviceOption,
    MaxLengthOption,
    ModelOption,
    Overrides,
    PrecisionOption,
    ThreadsOption,
    offer_environments,
    offer_preferences,
    offer_tasks,
    with_option_groups,
)
from laurel.observe.json_output import JsonOption

if TYPE_CHECKING:
    from laurel.config.data import BenchmarkName
    from laurel.run.evaluation.run import EvaluationRequest


# --------------------------------------------------------------------------------------------------
# Options of the evaluations.

EnvironmentOption = Annotated[
    str,
    typer.Option(
        "--environment",
        "-e",
        autocompletion=offer_environments,
        help="Who judges; default: as the data says.",
    ),
]
TasksOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        autocompletion=offer_tasks,
        help="Tasks, such as GSM8K, HumanEval or MBPP.",
    ),
]

RewardModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="A directory, a hub name, or the http:// address of a running laurel serve.",
    ),
]
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        "-d",
        metavar="FILE",
        help="Rows: a file or a hub name; may be repeated. Default: the benchmark on the hub.",
    ),
]
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
        "--compare",
        metavar="A.json B.json",
        help="Score nothing: show two results of --output side by side, with significance.",
    ),
]
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


eval_app = typer.Typer(
    help="Measure how good a model is.", no_args_is_help=True, rich_markup_mode=None
)


@eval_app.callback()
def eval_commands() -> None:
    """Measure how good a model is."""


@eval_app.command("policy")
def eval_policy(
    config: ConfigOption = None,
    overrides: Overrides = None,
    model: ModelOption = "",
    environment: EnvironmentOption = "",
    dataset: TasksOption = None,
    data_path: Annotated[
        str | None, typer.Option(metavar="FILE", help="Where they lie, if not on the hub.")
    ] = None,
    num_generations: Annotated[
        int, typer.Option("-n", "--num-generations", min=1, help="Completions of each task.")
    ] = 1,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="Default: 0 for one completion, else as the configuration says."),
    ] = None,
    max_samples: Annotated[int | None, typer.Option(min=1, help="Tasks at most.")] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Longest completion of one turn; default: what there is room for."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write JSON here.", metavar="FILE")
    ] = None,
    samples: Annotated[
        Path | None, typer.Option(help="Write the completions here, as parquet.", metavar="FILE")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """A policy on tasks: mean reward, pass@k, failures.

    The tasks are those of --dataset, or the validation tasks of a GRPO configuration. The exit code
    is 1 where a completion could not be judged.

    Example: laurel eval policy -m results/grpo/best -e code --dataset HumanEval -n 4
    """
    from laurel.run.evaluation.policy import EvalOptions, run_eval

    options = EvalOptions(
        model=model,
        environment=environment,
        dataset=dataset,
        data_path=data_path,
        num_generations=num_generations,
        temperature=temperature,
        max_samples=max_samples,
        max_new_tokens=max_new_tokens,
        output=output,
        samples=samples,
        as_json=as_json,
    )
    if exit_code := run_eval(config, overrides or [], options):
        raise typer.Exit(exit_code)


@eval_app.command("reward-bench")
@with_option_groups
def eval_reward_bench(
    rows: RowOptions,
    prior: Annotated[
        bool, typer.Option("--prior", help="Score the four prior sets, too, from the hub.")
    ] = False,
    compatibility: CompatibilityOption = None,
    *,
    how: OneBenchmarkOptions,
) -> None:
    """RewardBench: subsets, four sections, the final score.

    The exit code is 1 where a completion could not be scored.

    Example: laurel eval reward-bench -m Skywork/Skywork-Reward-V2-Qwen3-8B -o results
    """
    _run("reward-bench", rows, how, prior=prior, compatibility=compatibility)


@eval_app.command("reward-bench-2")
@with_option_groups
def eval_reward_bench_2(
    rows: RowOptions,
    zero_spread: ZeroSpreadOption = "limit",
    compatibility: CompatibilityOption = None,
    *,
    how: OneBenchmarkOptions,
) -> None:
    """RewardBench 2: best of four in five domains, and Ties.

    Example: laurel eval reward-bench-2 -m results/rm/best -d best_of_4.jsonl.gz
    """
    _run("reward-bench-2", rows, how, zero_spread=zero_spread, compatibility=compatibility)


@eval_app.command("rm-bench")
@with_option_groups
def eval_rm_bench(rows: RowOptions, how: OneBenchmarkOptions) -> None:
    """RM-Bench: three styles each against each.

    Accuracy where style helps (easy), is even (normal) or misleads (hard).
    """
    _run("rm-bench", rows, how)


@eval_app.command("judge-bench")
@with_option_groups
def eval_judge_bench(rows: RowOptions, how: OneBenchmarkOptions) -> None:
    """JudgeBench: pairs with one answer known to be right."""
    _run("judge-bench", rows, how)


@eval_app.command("pairs")
@with_option_groups
def eval_pairs(
    rows: NeededRowOptions,
    overrides: ColumnKeys = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=offer_preferences,
            help="The class that reads them; default: told.",
        ),
    ] = None,
    *,
    also: DiagnosticOptions,
    how: OneBenchmarkOptions,
) -> None:
    """Any preferences: how often the model agrees.

    Columns of other names are named as for laurel rm, and hold for all rows of the command.

    Example: laurel eval pairs -m results/rm/best -d rows.jsonl data.prompt_key=question
    """
    from laurel.config.overrides import column_overrides

    _run(
        "pairs",
        rows,
        how,
        dataset=dataset,
        column_keys=column_overrides(overrides or []),
        diagnostics=also.diagnostics,
        margin_key=also.margin_key,
        train_data=tuple(also.train_data or ()),
        sensitivity=also.sensitivity,
        other_language=also.other_language,
        members=tuple(also.member or ()),
    )


@eval_app.command("best-of-n")
@with_option_groups
def eval_best_of_n(rows: NeededRowOptions, how: OneBenchmarkOptions) -> None:
    """Lists with verdicts: how often the best-scored is right.

    Example: laurel eval best-of-n -m results/rm/best -d groups.jsonl.gz
    """
    _run("best-of-n", rows, how)


@eval_app.command("all")
@with_option_groups
def eval_all(
    rows: NeededRowOptions,
    hub: Annotated[
        bool,
        typer.Option("--hub", help="Read benchmarks without rows from their places on the hub."),
    ] = False,
    zero_spread: ZeroSpreadOption = "limit",
    *,
    how: ScoringOptions,
) -> None:
    """Every benchmark whose rows are at hand, and a summary.

    Which benchmark a file belongs to is told from its columns. The model is loaded once.

    Example: laurel eval all -m results/rm/best -d llmbar.jsonl.gz -d best_of_4.jsonl.gz
    """
    from laurel.run.evaluation.run import run_all

    if exit_code := run_all(_request(rows, how, zero_spread=zero_spread), hub=hub):
        raise typer.Exit(exit_code)


def _run(
    name: BenchmarkName,
    rows: RowOptions,
    how: OneBenchmarkOptions,
    *,
    compatibility: CompatibilityOption = None,
    **said: Any,
) -> None:
    if how.compare is not None:
        from laurel.run.evaluation.tables import run_compare

        exit_code = run_compare(name, *how.compare, as_json=how.as_json)
    else:
        from laurel.run.evaluation.run import run_benchmark

        reproduces = None if compatibility is None else name
        exit_code = run_benchmark(name, _request(rows, how, reproduces=reproduces, **said))
    if exit_code:
        raise typer.Exit(exit_code)


def _request(
    rows: RowOptions, how: ScoringOptions, *, reproduces: BenchmarkName | None = None, **said: Any
) -> EvaluationRequest:
    """What the options say; `reproduces` is the benchmark of a program whose tokens are wanted."""
    from laurel.evaluation.rewardbench_tokens import FORMATS, MAX_LENGTH
    from laurel.rewards.spec import ScorerSpec
    from laurel.run.evaluation.run import EvalScorer, EvaluationRequest

    form = None
    if reproduces is not None:
        form = replace(FORMATS[reproduces], max_length=how.max_length or MAX_LENGTH)
    scorer = EvalScorer(
        model=rows.model,
        options=ScorerSpec(
            max_length=how.max_length,
            batch_tokens=how.batch_tokens,
            precision=how.precision,
            device=how.device,
        ),
        settings=tuple(how.settings or ()),
        cpu_threads=how.cpu_threads,
        api_key_env=how.api_key_env,
        reproduces=form,
    )
    return EvaluationRequest(
        scorer=scorer,
        data=tuple(rows.data or ()),
        split=rows.split,
        max_samples=how.max_samples,
        output=how.output,
        as_json=how.as_json,
        **said,
    )
