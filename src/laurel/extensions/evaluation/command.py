"""Defines the commands of `laurel eval`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from laurel.cli.main import App
from laurel.errors import speaking
from laurel.extensions.evaluation.options import EvalPolicyOptions
from laurel.plugins import Command
from laurel.run.options import (
    ColumnKeys,
    ConfigOption,
    JsonOption,
    JudgeOption,
    LocalScorerOptions,
    Overrides,
    PreferenceSetOption,
)

if TYPE_CHECKING:
    from laurel.config.data import BenchmarkName
    from laurel.extensions.evaluation.run import EvaluationRequest


class Eval(Command):
    """Measure how good a model is."""

    after = "config"

    def make(self, section: None, name: str) -> typer.Typer:
        """Return the group of commands."""
        return eval_app

    def for_programs(self) -> ModuleType:
        """Return the module with `evaluate_model` and `show`."""
        from laurel.extensions.evaluation import programs

        return programs


ZeroSpreadOption = Annotated[
    Literal["limit", "leave_out"],
    typer.Option(
        help="Ties in which all right answers score the same: limit counts 1 for them, leave_out "
        "nothing, as rewardbench 0.1.4 does."
    ),
]
CompatibilityOption = Annotated[
    Literal["rewardbench"] | None,
    typer.Option(
        help="Tokenize as rewardbench 0.1.4 does, to reproduce its numbers; --max-length is then "
        "2048 by default."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnosticOptions:
    """Options of `laurel eval pairs` that ask for diagnostics beyond the accuracy."""

    diagnostics: Annotated[
        bool,
        typer.Option(
            "--diagnostics",
            help="Also report accuracy by length, margin and subset (a --data each), the "
            "calibration, the scores and repeated rows.",
        ),
    ] = False
    margin_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="The column with the margin of the chosen answer; a-b is column a minus column b. "
            "Implies --diagnostics.",
        ),
    ] = None
    train_data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DATA",
            help="The model's training data, for a bag-of-words baseline and a check for leaks; "
            "repeatable. Implies --diagnostics.",
        ),
    ] = None
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Also score changed answers: with other white space, with markdown, with "
            "flattery, and cut off. Implies --diagnostics.",
        ),
    ] = False
    other_language: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The same rows translated, in the same order, to count the verdicts that change. "
            "Implies --diagnostics.",
        ),
    ] = None
    member: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODEL",
            help="Another reward model, such as one of an ensemble, to measure how often two "
            "agree; repeatable. Implies --diagnostics.",
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """Options of `laurel eval` that select the model and the rows."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            metavar="MODEL",
            help="The model: a directory, a hub name, or the http:// address of a laurel serve.",
        ),
    ] = ""
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            "-d",
            metavar="FILE",
            help="The rows: a file or a hub name; repeatable. Default: the benchmark on the hub.",
        ),
    ] = None
    split: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The split of a directory or a hub data set."),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededRowOptions(RowOptions):
    """Options that select the model and the rows, for commands without a default data set."""

    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", "-d", metavar="FILE", help="The rows: a file or a hub name; repeatable."
        ),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringOptions(LocalScorerOptions):
    """Options for what scores, and where the result is written."""

    judge: JudgeOption = None
    max_samples: Annotated[
        int | None,
        typer.Option(min=1, help="The most rows of each data set, a share of each subset."),
    ] = None
    api_key_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The environment variable with the API key of a server. Default: LAUREL_API_KEY.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="DIR", help="Write three JSON files to this directory."
        ),
    ] = None
    as_json: JsonOption = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OneBenchmarkOptions(ScoringOptions):
    """Options of a command for a single benchmark, which can also compare two stored results."""

    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            "--compare",
            metavar="A.json B.json",
            help="Score nothing, but show two results of --output side by side, with the "
            "significance of their difference.",
        ),
    ] = None


_DATASET = {"data.dataset_name": "--dataset"}
eval_app = App(help="Measure how good a model is.", no_args_is_help=True)


@eval_app.callback()
def eval_commands() -> None:
    """Measure how good a model is."""


@eval_app.command("policy")
def eval_policy(
    config: ConfigOption = None, overrides: Overrides = None, *, options: EvalPolicyOptions
) -> None:
    """Evaluate a policy on tasks: mean reward, pass@k, failures.

    The tasks are those of --dataset, or the validation tasks of a GRPO configuration. The exit code
    is 1 if a completion could not be graded.

    Example: laurel eval policy -m results/grpo/best -e code --dataset HumanEval -n 4
    """
    from laurel.extensions.evaluation.policy import run_eval

    with speaking(*([_DATASET] if options.dataset else [])):
        exit_code = run_eval(config, overrides or [], options)
    if exit_code:
        raise typer.Exit(exit_code)


@eval_app.command("reward-bench")
def eval_reward_bench(
    rows: RowOptions,
    prior: Annotated[
        bool, typer.Option("--prior", help="Also score the four prior sets, from the hub.")
    ] = False,
    compatibility: CompatibilityOption = None,
    *,
    how: OneBenchmarkOptions,
) -> None:
    """Run RewardBench: subsets, four sections, the final score.

    The exit code is 1 if a completion could not be scored.

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
    """Run RewardBench 2: best of four in five domains, and Ties.

    Example: laurel eval reward-bench-2 -m results/rm/best -d best_of_4.jsonl.gz
    """
    _run("reward-bench-2", rows, how, zero_spread=zero_spread, compatibility=compatibility)


@eval_app.command("rm-bench")
def eval_rm_bench(rows: RowOptions, how: OneBenchmarkOptions) -> None:
    """Run RM-Bench: each of three styles against each.

    It reports the accuracy where style helps (easy), is equal (normal) or misleads (hard).
    """
    _run("rm-bench", rows, how)


@eval_app.command("judge-bench")
def eval_judge_bench(rows: RowOptions, how: OneBenchmarkOptions) -> None:
    """Run JudgeBench: pairs of a right and a wrong answer."""
    _run("judge-bench", rows, how)


@eval_app.command("pairs")
def eval_pairs(
    rows: NeededRowOptions,
    overrides: ColumnKeys = None,
    dataset: PreferenceSetOption = None,
    *,
    also: DiagnosticOptions,
    how: OneBenchmarkOptions,
) -> None:
    """Measure how often a model agrees with any preferences.

    The names of columns are set as for laurel rm, and apply to every --data.

    Example: laurel eval pairs -m results/rm/best -d rows.jsonl data.prompt_key=question
    """
    from laurel.config.load import column_overrides

    _run(
        "pairs",
        rows,
        how,
        dataset=dataset,
        column_keys=column_overrides(
            overrides or [],
            remedy="Rows are named as --data {word}, and an option before it may lack its value",
        ),
        diagnostics=also.diagnostics,
        margin_key=also.margin_key,
        train_data=tuple(also.train_data or ()),
        sensitivity=also.sensitivity,
        other_language=also.other_language,
        members=tuple(also.member or ()),
    )


@eval_app.command("best-of-n")
def eval_best_of_n(rows: NeededRowOptions, how: OneBenchmarkOptions) -> None:
    """Measure how often the best-scored of several answers is right.

    Example: laurel eval best-of-n -m results/rm/best -d groups.jsonl.gz
    """
    _run("best-of-n", rows, how)


@eval_app.command("process-bench")
def eval_process_bench(
    rows: RowOptions,
    threshold: Annotated[
        float,
        typer.Option(min=0, max=1, help="A step with a lower value is called wrong."),
    ] = 0.5,
    fit_threshold: Annotated[
        str | None,
        typer.Option(
            metavar="SUBSET",
            help="Choose the threshold with the highest F1 on this subset (the paper: gsm8k).",
        ),
    ] = None,
    *,
    how: OneBenchmarkOptions,
) -> None:
    """Run ProcessBench: whether a process reward model finds the first wrong step.

    Example: laurel eval process-bench -m results/prm/best -d solutions.jsonl
    """
    _run("process-bench", rows, how, threshold=threshold, fit_threshold=fit_threshold)


@eval_app.command("all")
def eval_all(
    rows: NeededRowOptions,
    hub: Annotated[
        bool,
        typer.Option("--hub", help="Read the benchmarks that no --data gives from the hub."),
    ] = False,
    zero_spread: ZeroSpreadOption = "limit",
    *,
    how: ScoringOptions,
) -> None:
    """Run every benchmark whose rows are given, with a summary.

    The columns of a file decide which benchmark it belongs to. The model is loaded once.

    Example: laurel eval all -m results/rm/best -d llmbar.jsonl.gz -d best_of_4.jsonl.gz
    """
    from laurel.extensions.evaluation.run import run_all

    if exit_code := run_all(_request(rows, how, zero_spread=zero_spread), hub=hub):
        raise typer.Exit(exit_code)


def _run(
    name: BenchmarkName,
    rows: RowOptions,
    how: OneBenchmarkOptions,
    *,
    compatibility: CompatibilityOption = None,
    **fields: Any,
) -> None:
    if how.compare is not None:
        from laurel.extensions.evaluation.tables import run_compare

        exit_code = run_compare(name, *how.compare, as_json=how.as_json)
    else:
        from laurel.extensions.evaluation.run import run_benchmark

        reproduces = None if compatibility is None else name
        with speaking(_DATASET):
            exit_code = run_benchmark(name, _request(rows, how, reproduces=reproduces, **fields))
    if exit_code:
        raise typer.Exit(exit_code)


def _request(
    rows: RowOptions, how: ScoringOptions, *, reproduces: BenchmarkName | None = None, **fields: Any
) -> EvaluationRequest:
    """Build the evaluation request; `reproduces` names the program whose tokens are copied."""
    from laurel.extensions.evaluation.rewardbench_tokens import FORMATS, MAX_LENGTH
    from laurel.extensions.evaluation.run import EvalScorer, EvaluationRequest

    judge = None
    if how.judge is not None:
        from laurel.observe.console import message_console, say_on
        from laurel.run.specs import read_judge

        judge = read_judge(how.judge, say=say_on(message_console()))
    form = None
    if reproduces is not None:
        form = replace(FORMATS[reproduces], max_length=how.max_length or MAX_LENGTH)
    scorer = EvalScorer(
        model=rows.model if judge is None else judge.called,
        judge=judge,
        options=how.spec(),
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
        **fields,
    )
