"""The commands of `laurel eval`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from laurel.cli.app import App
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
)
from laurel.observe.json_output import JsonOption

if TYPE_CHECKING:
    from laurel.config.data import BenchmarkName
    from laurel.run.evaluation.run import EvaluationRequest


# --------------------------------------------------------------------------------------------------
# Options of the evaluations.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosticOptions:
    """What else the scores of pairs are to show."""

    diagnostics: Annotated[
        bool,
        typer.Option(
            "--diagnostics",
            help="Also by length, margin and subset (a --data each); calibration, scores, repeats.",
        ),
    ] = False
    margin_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Column of how much better the chosen answer is; a-b: column a less column b. "
            "Implies --diagnostics.",
        ),
    ] = None
    train_data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA",
            help="What the model was trained on: a bag-of-words baseline, and leaks. May be "
            "repeated; implies --diagnostics.",
        ),
    ] = None
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Score the answers in other forms, too: white space, markdown, flattery, cut "
            "off. Implies --diagnostics.",
        ),
    ] = False
    other_language: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The same rows translated, in the same order: which verdicts change. Implies "
            "--diagnostics.",
        ),
    ] = None
    member: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL",
            help="Another reward model, such as one of an ensemble: how often two agree. May be "
            "repeated; implies --diagnostics.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """Which model, and which rows."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="A directory, a hub name, or the http:// address of a running laurel serve.",
        ),
    ] = ""
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FILE",
            help="Rows: a file or a hub name; may be repeated. Default: the benchmark on the hub.",
        ),
    ] = None
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Split of a directory or a hub data set.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededRowOptions(RowOptions):
    """The same of what has no place of its own on the hub."""

    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", "-d", metavar="FILE", help="Rows: a file or a hub name; may be repeated."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOptions:
    """How rows are scored, and what becomes of the result."""

    max_samples: Annotated[int | None, typer.Option(min=1, help="Rows at most of each set.")] = None
    max_length: MaxLengthOption = None
    batch_tokens: BatchTokensOption = 8192
    precision: PrecisionOption = "float32"
    device: DeviceOption = "auto"
    cpu_threads: ThreadsOption = None
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the policy section."),
    ] = None
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Variable with the API key of a server; default: LAUREL_API_KEY where it is set.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Write three JSON files into this."),
    ] = None
    as_json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBenchmarkOptions(ScoringOptions):
    """The same of a benchmark by itself, of which two results can be compared."""

    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare",
            metavar="A.json B.json",
            help="Score nothing: show two results of --output side by side, with significance.",
        ),
    ] = None


eval_app = App(help="Measure how good a model is.", no_args_is_help=True)


@eval_app.callback()
def eval_commands() -> None:
    """Measure how good a model is."""


@eval_app.command("policy")
def eval_policy(
    config: ConfigOption = None,
    overrides: Overrides = None,
    model: ModelOption = "",
    environment: Annotated[
        str,
        typer.Option(
            "--environment",
            "-e",
            autocompletion=offer_environments,
            help="Who judges; default: as the data says.",
        ),
    ] = "",
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            autocompletion=offer_tasks,
            help="Tasks, such as GSM8K, HumanEval or MBPP.",
        ),
    ] = None,
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
def eval_rm_bench(rows: RowOptions, how: OneBenchmarkOptions) -> None:
    """RM-Bench: three styles each against each.

    Accuracy where style helps (easy), is even (normal) or misleads (hard).
    """
    _run("rm-bench", rows, how)


@eval_app.command("judge-bench")
def eval_judge_bench(rows: RowOptions, how: OneBenchmarkOptions) -> None:
    """JudgeBench: pairs with one answer known to be right."""
    _run("judge-bench", rows, how)


@eval_app.command("pairs")
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
def eval_best_of_n(rows: NeededRowOptions, how: OneBenchmarkOptions) -> None:
    """Lists with verdicts: how often the best-scored is right.

    Example: laurel eval best-of-n -m results/rm/best -d groups.jsonl.gz
    """
    _run("best-of-n", rows, how)


@eval_app.command("all")
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
