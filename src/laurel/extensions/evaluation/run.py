"""Runs the evaluations of reward models: scores rows, computes metrics and compares baselines."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laurel import __version__
from laurel.config.data import BenchmarkName
from laurel.data.benchmarks import BenchmarkRow
from laurel.errors import ConfigError, DataError, counted, if_interrupted, key_of, setting_of
from laurel.evaluation.benchmarks import (
    BenchmarkOptions,
    benchmark_named,
    preference_rows,
    reduce_scores,
)
from laurel.evaluation.results import Evaluation
from laurel.evaluation.statistics import Measured
from laurel.extensions.evaluation import other_benchmarks
from laurel.extensions.evaluation.benchmarks import BENCHMARKS
from laurel.extensions.evaluation.diagnostics import diagnostics_report
from laurel.extensions.evaluation.results import check_output_directory, write_results
from laurel.extensions.evaluation.rows import (
    ON_HUB,
    TrainingPairs,
    benchmark_in,
    training_pairs,
)
from laurel.extensions.evaluation.served import server_spec
from laurel.extensions.evaluation.tables import (
    print_compatibility,
    print_diagnostics,
    print_evaluation,
    print_judge,
    print_matrix,
    share_text,
)
from laurel.observe.console import (
    make_console,
    message_console,
    new_table,
    print_table,
    say_on,
    visible,
)
from laurel.observe.files import replace_file
from laurel.observe.json_output import write_json
from laurel.observe.progress import RowProgress
from laurel.rewards.spec import ScorerSpec
from laurel.run.model import model_spec
from laurel.run.specs import (
    asked_scorer,
    check_judge,
    open_asked,
    open_asked_judge,
    policy_of_settings,
)
from laurel.types import Score

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.config.environments import JudgeConfig, JudgeFile
    from laurel.extensions.evaluation.rewardbench_tokens import ReferenceFormat, RewardBenchContract
    from laurel.rewards.scorer import LocalScorer, OnBatch
    from laurel.types import Group


# Rows that the noise of scores is measured on.
_NUM_PROBES = 8


def run_benchmark(name: BenchmarkName, request: EvaluationRequest) -> int:
    """Evaluate a model on a benchmark as `evaluated` does, and print and write the results.

    Returns:
        The exit code: 1 if a completion has no score, otherwise 0.
    """
    console = message_console()
    evaluation = evaluated(name, request, console)
    if request.as_json:
        write_json(evaluation.report())
    else:
        show_evaluation(evaluation)
    say_failures(evaluation, console)
    return 1 if evaluation.failures else 0


def evaluated(name: BenchmarkName, request: EvaluationRequest, console: Console) -> Evaluation:
    """Score the rows of a benchmark, write result files if asked for, and return the results.

    Everything that needs no model is checked first.
    """
    request = checked_request(request)
    (evaluation,) = _evaluated({name: request}, request, console)
    return evaluation


def _evaluated(
    requests: Mapping[BenchmarkName, EvaluationRequest],
    request: EvaluationRequest,
    console: Console,
) -> list[Evaluation]:
    """Read the rows of benchmarks, load the requested scorer once, and evaluate it on each."""
    if request.scorer.judge is not None:
        _check_can_judge(request.scorer.judge, requests, request)
    notes: list[str] = []
    with console.status("reading the rows"):
        rows = {
            name: benchmark_named(name).read(single, notes.append)
            for name, single in requests.items()
        }
        training = None
        if request.train_data:
            training = training_pairs(
                replace(request, data=request.train_data, margin_key=None, max_samples=None)
            )
    for note in (*notes, *(training.notes if training is not None else ())):
        console.print(f"note    {visible(note)}", soft_wrap=True)
    evaluations: list[Evaluation] = []

    def kept() -> str:
        if request.output is None:
            return "no result is kept"
        return f"{len(evaluations)} of {counted(len(requests), 'result')} kept in {request.output}"

    started = time.monotonic()
    with if_interrupted(kept), open_evaluation_scorer(request.scorer, console) as scorer:
        for name, single in requests.items():
            if single is not request:  # of several
                title = benchmark_named(name).title
                console.print(f"scoring {title}: {counted(len(rows[name]), 'row')}")
            evaluations.append(
                evaluate_rows(name, rows[name], single, scorer, started=started, training=training)
            )
            if request.output is not None:
                for path in write_results(request.output, evaluations[-1]):
                    console.print(f"written to {path}", soft_wrap=True)
            started = time.monotonic()
    return evaluations


def _check_can_judge(
    judge: JudgeFile, names: Collection[BenchmarkName], request: EvaluationRequest
) -> None:
    if "process-bench" in names:
        raise ConfigError("ProcessBench needs the values of steps, and --judge gives one score")
    if judge.judge.compares and request.sensitivity:
        raise ConfigError(
            "--sensitivity asks how the score of one answer changes, and a judge with "
            "compares=true has only scores relative to the other answers"
        )
    check_judge(judge)


def checked_request(request: EvaluationRequest) -> EvaluationRequest:
    """Return a request with its model resolved, before any row is read."""
    scorer = request.scorer.resolved()
    # Members are loaded after all rows are scored: a wrong name is reported now.
    for name in request.members:
        replace(request.scorer, model=name).resolved()
    models = [request.scorer.model, *request.members]
    for name in dict.fromkeys(models):
        if models.count(name) > 1:
            raise ConfigError(
                f"{setting_of('--member', name)}: it is named twice, and agrees with itself"
            )
    if request.output is not None:
        check_output_directory(request.output)
    return replace(request, scorer=scorer)


def evaluate_rows(
    name: BenchmarkName,
    rows: Sequence[BenchmarkRow],
    request: EvaluationRequest,
    scorer: OpenScorer,
    *,
    started: float,
    training: TrainingPairs | None = None,
) -> Evaluation:
    """Score rows, and compute all metrics that the request asks for.

    `started` is the time at which the work on them began, by `time.monotonic`.

    Raises:
        UserError: No metric can be computed from the rows.
    """
    benchmark = benchmark_named(name)
    scores = scorer.score([row.group for row in rows])
    seconds = time.monotonic() - started
    reduced = reduce_scores(benchmark, rows, scores, request)
    every = [score for scores_G in scores for score in scores_G]
    details = {
        **benchmark.details(reduced.rows),
        **_diagnosed(rows, reduced.rows, request, scorer, training),
    }
    if request.scorer.judge is not None:
        details["judge"] = judge_details(request.scorer.judge.judge, every)
    by_contract = None
    if scorer.reference is not None:
        by_contract, compatibility = _compared_with_contract(
            name, rows, scores, request, scorer, scorer.reference
        )
        details["compatibility"] = compatibility
    return Evaluation(
        benchmark=name,
        title=benchmark.title,
        model=request.scorer.model,
        data=request.data,
        measured=reduced.measured,
        baseline=reduced.baseline,
        by_contract=by_contract,
        rows=reduced.rows,
        num_completions=len(every),
        num_truncated=sum(score.truncated and score.failure is None for score in every),
        failures=tuple(
            f"{row.source or row.group.id}: {score.failure}"
            for row, scores_G in zip(rows, scores, strict=True)
            for score in scores_G
            if score.failure is not None
        ),
        seconds=seconds,
        details=details,
    )


def judge_details(judge: JudgeConfig, scores: Sequence[Score]) -> dict[str, Any]:
    """Return how a judge was read, and the means of the parts of its scores, such as flips."""
    parts: dict[str, list[float]] = {}
    for score in scores:
        for part, value in score.parts.items():
            parts.setdefault(part, []).append(value)
    means = {part: math.fsum(values) / len(values) for part, values in sorted(parts.items())}
    return {"read_out": judge.read_out, "compares": judge.compares, **means}


def _compared_with_contract(
    name: BenchmarkName,
    rows: Sequence[BenchmarkRow],
    scores: Sequence[tuple[Score, ...]],
    request: EvaluationRequest,
    scorer: OpenScorer,
    reference: RewardBenchContract,
) -> tuple[Measured, dict[str, Any]]:
    """Return the metrics under the model's own contract, and how the tokens differ.

    Rows whose tokens differ are scored once more; the other scores are the same.
    """
    from laurel.extensions.evaluation.rewardbench_tokens import differences, summary

    with scorer.console.status("comparing the tokens with those of the scoring contract"):
        compared = differences(reference, [row.group for row in rows])
    others = [
        index
        for index, row in enumerate(compared)
        if any(difference is not None and difference.is_read for difference in row)
    ]
    by_contract = list(scores)
    again = scorer.score_by_contract([rows[index].group for index in others])
    for index, scores_G in zip(others, again, strict=True):
        by_contract[index] = scores_G
    form = reference.form
    compatibility = {
        "program": form.program,
        "max_length": form.max_length,
        "truncation_side": form.truncation_side,
        **summary(compared),
    }
    return reduce_scores(benchmark_named(name), rows, by_contract, request).measured, compatibility


def _diagnosed(
    rows: Sequence[BenchmarkRow],
    scored: Sequence[Any],
    request: EvaluationRequest,
    scorer: OpenScorer,
    training: TrainingPairs | None,
) -> dict[str, dict[str, Any]]:
    """Compute the diagnostics of pairs; nothing unless the request asks for them."""
    if not request.is_diagnosed:
        return {}
    translated = None
    plain = replace(request, margin_key=None)
    if request.other_language is not None:
        others = preference_rows(replace(plain, data=(request.other_language,)), lambda note: None)
        translated = _pairs_scored(others, request, scorer)
    members = {request.scorer.model: _column(scored)} if request.members else {}
    for name in request.members:
        member_scorer = replace(request.scorer, model=name).resolved()
        with open_evaluation_scorer(member_scorer, scorer.console) as member:
            members[name] = _column(_pairs_scored(rows, request, member))
    from laurel.environments.reward_model_environment import measure_noise

    noise = None
    with suppress(ValueError):  # none of these rows can be scored
        noise = measure_noise(scorer.score_now_quietly, [row.group for row in rows[:_NUM_PROBES]])
    status = scorer.console.status("computing diagnostics")
    with status if not request.sensitivity else nullcontext():
        report = diagnostics_report(
            scored,
            training=None if training is None else training.pairs,
            notes=() if training is None else training.notes,
            score=scorer.score if request.sensitivity else None,
            members=members,
            in_other_language=translated,
            noise=noise,
            reads_logits=request.scorer.judge is None,
        )
    return {"diagnostics": report}


def _pairs_scored(
    rows: Sequence[BenchmarkRow], request: EvaluationRequest, scorer: OpenScorer
) -> Sequence[Any]:
    scores = scorer.score([row.group for row in rows])
    return reduce_scores(BENCHMARKS["pairs"], rows, scores, request).rows


def _column(pairs: Sequence[Any]) -> list[tuple[float | None, float | None]]:
    return [(pair.score_chosen, pair.score_rejected) for pair in pairs]


def show_evaluation(evaluation: Evaluation) -> None:
    """Print the tables of an evaluation to standard output."""
    console, details = make_console(), evaluation.details
    print_evaluation(console, evaluation)
    if "judge" in details:
        print_judge(console, details["judge"])
    if "compatibility" in details:
        print_compatibility(console, details["compatibility"], num_rows=len(evaluation.rows))
    if "matrix" in details:
        print_matrix(console, details["matrix"], other_benchmarks.STYLES)
    if "diagnostics" in details:
        print_diagnostics(console, details["diagnostics"])


def say_failures(evaluation: Evaluation, console: Console) -> None:
    """Print how many completions have no score, and the reason for the first of them."""
    if evaluation.failures:
        console.print(
            f"FAILED  {len(evaluation.failures):,} of {evaluation.num_completions:,} completions "
            f"have no score; the first: {visible(evaluation.failures[0])}",
            soft_wrap=True,
        )


CHUNK = 256
"""The number of groups that a loaded model scores at a time."""
# All groups of a request must come back within one time limit.
CHUNK_OF_SERVER = 32
"""The number of groups in one request to a server."""

ScoreNow = Callable[["Sequence[Group]", "OnBatch"], "list[tuple[Score, ...]]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalScorer:
    """The options of an evaluation that choose the model and how it is loaded."""

    model: str
    """The model: a directory, a hub name, or the address of a running `laurel serve`."""
    options: ScorerSpec = field(default_factory=ScorerSpec)
    settings: tuple[str, ...] = ()
    """The values of `--set`, which `policy_of_settings` reads."""
    cpu_threads: int | None = None
    api_key_env: str | None = None
    """The environment variable with the server's API key; None: `LAUREL_API_KEY`, if it is set."""
    reproduces: ReferenceFormat | None = None
    """The program whose tokenization is copied; None: the model's scoring contract is used."""
    judge: JudgeFile | None = None
    """The judge that scores instead of a reward model; `model` is its name."""

    @property
    def is_server(self) -> bool:
        """Report whether `model` is the address of a server."""
        return self.model.startswith(("http://", "https://"))

    def resolved(self) -> EvalScorer:
        """Return these options with the model resolved, before any row is read."""
        if self.judge is not None:
            return self
        if not self.is_server:
            return replace(self, options=asked_scorer(self.model, self.options, or_server=True))
        if self.reproduces is not None:
            raise ConfigError(
                "--compatibility decides what tokens the model reads, and a server decides that by "
                f"itself: {setting_of('--model', self.model)} is an address. Name the directory "
                "of the model, or its name on the hub"
            )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenScorer:
    """A loaded model, or a connected server, that is ready to score."""

    console: Console
    score_now: ScoreNow
    chunk: int
    """The number of groups that are scored at a time."""
    own: LocalScorer | None = None
    """The scorer under the model's own contract, if `score_now` copies another program."""
    reference: RewardBenchContract | None = None
    """The contract that copies another program's tokenization; None if none is copied."""

    def score(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups with a progress bar; return a score or failure per completion, in order."""
        return self._score(groups, self.score_now)

    def score_now_quietly(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score a few groups without showing a progress bar."""
        return self.score_now(groups, lambda *_: None)

    def score_by_contract(self, groups: Sequence[Group]) -> list[tuple[Score, ...]]:
        """Score groups under the model's own scoring contract."""
        return self._score(groups, self.score_now if self.own is None else self.own.score_now)

    def _score(self, groups: Sequence[Group], score_now: ScoreNow) -> list[tuple[Score, ...]]:
        scores: list[tuple[Score, ...]] = []
        with RowProgress(
            self.console, len(groups), chunk=self.chunk, shares_screen=False
        ) as progress:
            for first in range(0, len(groups), self.chunk):
                chunk = groups[first : first + self.chunk]
                progress.show()
                scores += score_now(chunk, progress.advance)
                progress.hide(done=len(chunk))
        return scores


@contextmanager
def open_evaluation_scorer(scorer: EvalScorer, console: Console) -> Iterator[OpenScorer]:
    """Load a model or connect to its server, and yield the scorer until the context ends."""
    if scorer.judge is not None:
        opened = open_asked_judge(
            scorer.judge, scorer.options, console, cpu_threads=scorer.cpu_threads
        )
        with opened as judge:
            yield OpenScorer(
                console=console,
                score_now=lambda groups, _: judge.score_now(groups),
                chunk=CHUNK_OF_SERVER,
            )
    elif scorer.is_server:
        if scorer.settings:
            raise ConfigError(
                f"--set is for a model that is loaded here, and {key_of('--model')} is an address"
            )
        if scorer.options.aggregate is not None:
            raise ConfigError(
                "--aggregate is for a model that is loaded here, and "
                f"{key_of('--model')} is an address: give it to laurel serve"
            )
        spec = server_spec(scorer.model, api_key_env=scorer.api_key_env)
        with console.status(f"asking {scorer.model}"):
            from laurel.rewards.open import open_scorer

            server = open_scorer(spec, say=say_on(console))
        with server:
            yield OpenScorer(
                console=console,
                score_now=lambda groups, _: server.score_now(groups),
                chunk=CHUNK_OF_SERVER,
            )
    else:
        yield _local(scorer, console)


def _local(scorer: EvalScorer, console: Console) -> OpenScorer:
    form, spec, place = scorer.reproduces, scorer.options, scorer.options.found
    assert place is not None
    if form is not None and (Path(place.name) / "scoring.json").is_file():
        # The given length is that of the other program; the contract has its own.
        spec = replace(spec, max_length=None)
    own = open_asked(spec, scorer.settings, cpu_threads=scorer.cpu_threads, console=console)
    if form is None:
        return OpenScorer(console=console, score_now=own.score_now, chunk=CHUNK)
    from laurel.extensions.evaluation.rewardbench_tokens import RewardBenchContract
    from laurel.rewards.scorer import LocalScorer

    # `open_asked` has checked the settings and shown its warnings.
    policy = policy_of_settings(scorer.settings, rules=None, say=lambda _: None)
    model = replace(model_spec(policy), name=place.name)
    reference = RewardBenchContract.beside(own.contract, model, form=form)
    console.print(
        f"format  of {form.program}: more than {reference.form.max_length:,} tokens are cut on the "
        f"{reference.form.truncation_side}",
        soft_wrap=True,
    )
    other = LocalScorer(own.model, reference, batch_tokens=own.batch_tokens)
    return OpenScorer(
        console=console, score_now=other.score_now, chunk=CHUNK, own=own, reference=reference
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest(BenchmarkOptions):
    """The options of a reward-model evaluation; some apply to one benchmark only."""

    scorer: EvalScorer
    diagnostics: bool = False
    """Whether diagnostics are computed (`pairs` only); the next four options imply it.

    A margin key implies it as well.
    """
    train_data: tuple[str, ...] = ()
    """The files that the model was trained on, for baselines and the detection of leaks."""
    sensitivity: bool = False
    """Whether other forms of the answers are scored, to see how much that changes the scores."""
    other_language: str | None = None
    """The file with the same pairs in another language, whose scores are compared."""
    members: tuple[str, ...] = ()
    """Other models that score the same pairs, to measure how much the models agree."""
    output: Path | None = None
    as_json: bool = False

    @property
    def is_diagnosed(self) -> bool:
        """Report whether any option asks for diagnostics."""
        return bool(
            self.diagnostics
            or self.margin_key
            or self.train_data
            or self.sensitivity
            or self.other_language
            or self.members
        )


FILE_NAME = "all-report.json"


def run_all(request: EvaluationRequest, *, hub: bool) -> int:
    """Evaluate a model on every benchmark whose rows are named, and optionally the hub's.

    All rows are read before the model is loaded, and the model is loaded once.

    Args:
        request: The options; its data may hold the rows of different benchmarks.

    Returns:
        The exit code: 1 if a completion has no score, otherwise 0.
    """
    console = message_console()
    request = checked_request(request)
    if not request.data and not hub:
        raise DataError(
            f"no rows are named; add {key_of('--data')} with files of any of the benchmarks "
            "(may be repeated), "
            "or --hub to read each benchmark from its own place on the hub"
        )
    requests = _requests(request, hub=hub)
    # ProcessBench is for process reward models alone, so others lack nothing without it.
    absent: list[BenchmarkName] = [
        name for name in BENCHMARKS if name not in requests and name != "process-bench"
    ]
    evaluations = _evaluated(requests, request, console)
    if request.as_json:
        write_json(_report(evaluations, request, absent))
    else:
        for evaluation in evaluations:
            show_evaluation(evaluation)
        _print_summary(evaluations, absent)
    if request.output is not None:
        path = request.output.expanduser() / FILE_NAME
        with replace_file(path) as file:
            json.dump(_report(evaluations, request, absent), file, indent=4, allow_nan=False)
            file.write("\n")
        console.print(f"written to {path}", soft_wrap=True)
    for evaluation in evaluations:
        say_failures(evaluation, console)
    return 1 if any(evaluation.failures for evaluation in evaluations) else 0


def _requests(request: EvaluationRequest, *, hub: bool) -> dict[BenchmarkName, EvaluationRequest]:
    """Split a request into one per benchmark that has rows, in the order of benchmarks."""
    paths: dict[BenchmarkName, list[str]] = {}
    for path in request.data:
        paths.setdefault(benchmark_in(path, split=request.split), []).append(path)
    requests = {}
    for name in BENCHMARKS:
        if name in paths:
            requests[name] = replace(request, data=tuple(paths[name]))
        elif hub and name in ON_HUB:
            requests[name] = replace(request, data=(), split=None)
    return requests


def _print_summary(evaluations: Sequence[Evaluation], absent: Sequence[BenchmarkName]) -> None:
    console = make_console()
    names = {evaluation.baseline_name for evaluation in evaluations}
    baseline = names.pop() if len(names) == 1 else "baseline"
    columns = ("", "score", baseline, "rows", "failed")
    table = new_table(f"all: {evaluations[0].model}", *columns)
    for evaluation in evaluations:
        final = evaluation.measured.final
        table.add_row(
            evaluation.title,
            share_text(final.value),
            share_text(evaluation.beside(final)),
            f"{final.num_rows:,}",
            f"{final.num_failures:,}" if final.num_failures else "",
        )
    print_table(console, table)
    if absent:
        titles = ", ".join(f"{BENCHMARKS[name].title} ({name})" for name in absent)
        console.print(f"absent  {visible(titles)}: no rows of these", soft_wrap=True)


def _report(
    evaluations: Sequence[Evaluation], request: EvaluationRequest, absent: Sequence[BenchmarkName]
) -> dict[str, Any]:
    return {
        "model": request.scorer.model,
        "laurel": __version__,
        "data": list(request.data),
        "summary": [
            {
                "benchmark": evaluation.benchmark,
                "title": evaluation.title,
                "score": evaluation.measured.final.value,
                "longer_wins": evaluation.beside(evaluation.measured.final),
                "num_rows": evaluation.measured.final.num_rows,
                "num_failures": evaluation.measured.final.num_failures,
            }
            for evaluation in evaluations
        ],
        "absent": list(absent),
        "benchmarks": {evaluation.benchmark: evaluation.report() for evaluation in evaluations},
    }
