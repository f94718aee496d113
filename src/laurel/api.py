"""The commands as Python functions: settings and files in, values out; for notebooks and programs.

::

    from laurel import api

    outcome = api.train("rm", {"policy.model_name": "Qwen/Qwen3-0.6B",
                               "data.dataset_name": "BinaryPreferenceDataset",
                               "data.train_data_path": "pairs.jsonl"})
    run = api.read_run(outcome.run_dir)
    print(run.series("train/loss").values)
    scores = api.score(outcome.best, [{"prompt": "...", "completions": ["...", "..."]}])
    api.show(api.evaluate("pairs", outcome.best, ["held_out.jsonl"], diagnostics=True))

Each does what the command of its name does, and reports on the console unless `quiet`. Failures
are errors of `laurel.errors`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from laurel import plugins
from laurel.config.data import BenchmarkName
from laurel.config.load import column_overrides, overrides_of
from laurel.config.schemas import SCHEMAS, Kind
from laurel.config.yaml_tree import nearest
from laurel.errors import ConfigError, ModelError, speaking
from laurel.evaluation.results import Evaluation
from laurel.observe.console import make_console, say_on, silent_console
from laurel.observe.run_record import RunRecord, Series
from laurel.observe.run_record import read_run_record as _read_run
from laurel.rewards.spec import ScorerSpec
from laurel.run.train import trained
from laurel.types import Score

if TYPE_CHECKING:
    from laurel.rewards.scorer import LocalScorer
    from laurel.training.loop import RunOutcome

__all__ = [
    "Evaluation",
    "RunRecord",
    "Series",
    "evaluate",
    "export",
    "open_scorer",
    "read_run",
    "score",
    "show",
    "train",
]

# In errors the arguments of functions take the place of command-line options.
_ARGUMENTS = {
    f"--{name}": name for name in ("model", "data", "dataset", "output", "overwrite", "member")
} | {"policy.model_name": "model", "data.dataset_name": "dataset"}

# A library that is imported later asks for ipywidgets in every notebook; no bar of its is shown.
warnings.filterwarnings("ignore", message="IProgress not found")


def train(
    kind: Kind,
    settings: Mapping[str, Any] | None = None,
    *,
    config: str | Path | None = None,
    quiet: bool = False,
) -> RunOutcome:
    """Train a model as `laurel rm`, `laurel sft` or `laurel grpo` does.

    Example::

        api.train("grpo", {"env.custom.polite.name": "__main__.Polite"}, config="grpo.yaml")

    Args:
        kind: `rm` (a reward model), `sft` (fine-tuning) or `grpo`.
        settings: Keys as on the command line (`policy.optimizer.kwargs.lr`) with their values:
            texts, paths, numbers, booleans, None, and lists and mappings of those. They go before
            what the file says.
        config: A configuration file; without it the defaults are changed.
        quiet: Say nothing.

    Returns:
        How it ended, where the checkpoints are (`latest`, `best`) and where it logged (`run_dir`).

    Raises:
        UserError: Something that cannot be used; all of a configuration at once.
        TrainingError: The run went wrong.
    """
    _check_choice("kind", kind, SCHEMAS)
    path = None if config is None else Path(config)
    return trained(kind, path, overrides_of(settings or {}), _console(quiet))


def read_run(directory: str | Path | None) -> RunRecord:
    """Read the log directory of a run: metrics, data reports, samples, alarms.

    Args:
        directory: `run_dir` of the outcome.

    Raises:
        DataError: Nothing of a run is there, or a file is broken.
    """
    if directory is None:
        raise ConfigError("there is no directory to read a run from: name the one it logged to")
    return _read_run(Path(directory))


def open_scorer(model: str | Path, *, quiet: bool = False) -> LocalScorer:
    """Open a reward model for scoring, checked as at every load.

    Args:
        model: A directory of a model, a checkpoint or a run with checkpoints; a name on the hub.
        quiet: Do not say what was found.

    Raises:
        UserError: There is none, or it does not give the scores it was saved with.
    """
    from laurel.rewards.open import open_local

    with speaking(_ARGUMENTS):
        return open_local(_path(model), say=say_on(_console(quiet)))


def _path(model: str | Path | None) -> str:
    """Where a model is.

    Raises:
        ModelError: None was given, as `outcome.best` is where no metric ranks the checkpoints.
    """
    if model is None:
        raise ModelError(
            "model is None: outcome.best is None where checkpointing.metric_name is null, and "
            "outcome.latest where nothing was saved; give a directory or a name on the hub"
        )
    return str(model)


def score(
    model: LocalScorer | str | Path,
    rows: Iterable[Mapping[str, Any]],
    *,
    settings: Mapping[str, Any] | None = None,
) -> list[tuple[Score, ...]]:
    """Score conversations with a reward model, as `laurel score` does.

    Args:
        model: From `open_scorer`, or what that takes.
        rows: In the shapes that lines of a file may have, such as `{"prompt", "completions"}`,
            `{"prompt", "chosen", "rejected"}` or `{"messages"}`.
        settings: Columns of other names, in the keys of `train`: `{"data.prompt_key": "question"}`.
            With `{"data.on_bad_row": "skip"}` a row that cannot be read gets one failure.

    Returns:
        For each row one score a completion, in order. A score has a `value`, or a `failure`.

    Raises:
        UserError: A model or a row that cannot be used.
    """

    def opened() -> LocalScorer:
        if isinstance(model, str | Path) or model is None:  # as `outcome.best` may be
            return open_scorer(model, quiet=True)
        return model

    scores: list[tuple[Score, ...]] = _functions_of("score").score_rows(
        opened, rows, settings or {}
    )
    return scores


def evaluate(
    benchmark: BenchmarkName,
    model: str | Path = "",
    data: Sequence[str | Path] = (),
    *,
    judge: str | Path | None = None,
    diagnostics: bool = False,
    train_data: Sequence[str | Path] = (),
    sensitivity: bool = False,
    dataset: str | None = None,
    settings: Mapping[str, Any] | None = None,
    max_samples: int | None = None,
    output: str | Path | None = None,
    scorer_options: ScorerSpec | None = None,
    cpu_threads: int | None = None,
    quiet: bool = False,
) -> Evaluation:
    """Evaluate a reward model as `laurel eval` does; `show` prints the tables.

    Args:
        benchmark: Name of the command, e.g. `pairs`.
        model: A directory, a name on the hub, or the address of a running `laurel serve`.
        data: Rows: files, directories or names on the hub; empty is the benchmark's own place.
        judge: File of a judge that scores in place of a model; of `scorer_options` only the device
            counts with it.
        diagnostics: For `pairs`: calibration, accuracy by length and more, in
            `report()["diagnostics"]`. The next two imply it.
        train_data: For `pairs`: training data of the model, for a baseline and leaks.
        sensitivity: For `pairs`: score the answers once more in other forms.
        dataset: For `pairs`: class of the data set; None: derived from the columns.
        settings: For `pairs`: columns of other names, in the keys of `train`:
            `{"data.prompt_key": "question"}`.
        max_samples: Rows at most of each set.
        output: Write three JSON files into this directory.
        scorer_options: How a model that is loaded here scores.
        cpu_threads: On CPU; None is what OMP_NUM_THREADS says, or else one per core.
        quiet: Do not say what was found.

    Raises:
        UserError: A model, a row or a file that cannot be used.
    """
    _check_choice("benchmark", benchmark, plugins.names("benchmarks"))
    with speaking(_ARGUMENTS):
        found: Evaluation = _functions_of("eval").evaluate_model(
            benchmark,
            _path(model) if judge is None else str(model or ""),
            data,
            _console(quiet),
            judge=judge,
            dataset=dataset,
            diagnostics=diagnostics,
            train_data=tuple(map(str, train_data)),
            sensitivity=sensitivity,
            max_samples=max_samples,
            output=None if output is None else Path(output),
            column_keys=column_overrides(overrides_of(settings or {})),
            scorer_options=scorer_options,
            cpu_threads=cpu_threads,
        )
    return found


def show(evaluation: Evaluation) -> None:
    """Print the tables of an evaluation."""
    _functions_of("eval").show(evaluation)


def export(
    model: str | Path,
    output: str | Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    evaluations: Sequence[str | Path] = (),
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Export a model as `laurel export` does: a plain Hugging Face directory, tested first.

    Args:
        model: A directory of a model, a checkpoint or a run; a name on the hub.
        output: Directory to write.
        dtype: Dtype of the weights.
        evaluations: Directories that `evaluate(..., output=...)` wrote, for the model card.
        overwrite: Whether a directory that is there may give way.
        quiet: Do not say what was found.

    Returns:
        The directory.

    Raises:
        UserError: A model or a directory that cannot be used, or one that would give other scores.
    """
    with speaking(_ARGUMENTS):
        written: Path = _functions_of("export").export_model(
            Path(output),
            _console(quiet),
            model=_path(model),
            dtype=dtype,
            overwrite=overwrite,
            evaluations=list(map(Path, evaluations)),
        )
    return written


def _functions_of(command: str) -> ModuleType:
    return plugins.find(plugins.Command, command).for_programs()


def _console(quiet: bool) -> Console:
    return silent_console() if quiet else make_console()


def _check_choice(what: str, given: str, choices: Iterable[str]) -> None:
    known = list(choices)
    if given not in known:
        near = nearest(given, known)
        hint = f"; did you mean '{near}'?" if near else ""
        raise ConfigError(f"{what} '{given}' is none of {', '.join(known)}{hint}")
