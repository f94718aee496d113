"""Searches for the settings of reward-model training that do best in validation: `laurel sweep`.

    words of the command --> dimensions --Optuna--> trial --fold x seed--> runs of `rm` --> mean

A trial is one choice of settings, and its value the mean over its runs: one for each fold and seed.
All that a sweep knows lies in its directory: the study, and a file for each finished run. A sweep
that was killed goes on in the middle of a trial, and a run in it from its newest checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from laurel.config.load import Override, load_config, parse_override, to_yaml, translated
from laurel.config.resuming import Change, changes
from laurel.config.reward_model import RewardTrainingRun
from laurel.config.yaml_tree import PROCESSES, YamlNode, graft, plain_values
from laurel.data.preferences import Fold
from laurel.errors import (
    ConfigError,
    DataError,
    LaurelError,
    MissingDependencyError,
    ModelError,
    TrainingError,
    WorkerError,
    counted,
)
from laurel.extensions.sweep.options import SweepOptions
from laurel.models.checkpoint.store import DirectoryLock
from laurel.observe.console import silent_console
from laurel.observe.files import is_disk_error, replace_file
from laurel.run.request import plan_allocation
from laurel.run.reward_model import (
    check_reward_run,
    is_rate_auto,
    load_data,
    metric_selector,
    rate_kept,
    train_reward_model,
    with_rate,
)
from laurel.training.stopping import Selection, StopRequest
from laurel.workers.process import bound_count, check_counts

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.samplers import BaseSampler

    from laurel.protocols import Pending, WorkerGroup
    from laurel.run.reward_model import PreferenceData

STUDY, IDENTITY, BEST = "study.db", "sweep.json", "best.yaml"
CURVE, RESULT, STOP = "curve.jsonl", "result.json", "stop"
"""The files of a run: its validations so far, its end, and the request to end it."""
SET_BY_THE_SWEEP = ("rm.seed", "checkpointing.checkpoint_dir", "logger.log_dir")
WITHOUT_PRUNING = 5
"""The number of trials that finish before one can be pruned."""
STEPS_OF_A_RUN = 10_000_000
"""More than any run has: what tells the validations of a trial's runs apart, in order."""
NO_RESULT = (
    f"the worker wrote no {RESULT} here; --output must be on a file system that all machines share"
)
SECONDS_BETWEEN_LOOKS = 0.3
LONGEST_RUN = 30 * 24 * 3600.0
"""Seconds after which a run on another process counts as hung."""
_RANGE = re.compile(r"(?P<kind>log|range)\((?P<ends>[^()]*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """A key with the values that are tried: a list of them, or a range."""

    override: Override
    choices: Mapping[str, YamlNode] = field(default_factory=dict)
    """The values by their text; empty for a range."""
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    """Whether a range has whole numbers only, as both of its ends are."""

    @property
    def key(self) -> str:
        """The dotted name of the key."""
        return ".".join(self.override.keys)

    def suggest(self, trial: Trial) -> str | float:
        """Let a trial choose a value."""
        if self.choices:
            return str(trial.suggest_categorical(self.key, list(self.choices)))
        if self.is_whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.is_log)
        return trial.suggest_float(self.key, self.low, self.high, log=self.is_log)

    def ends(self) -> list[str | float]:
        """Return the values with which a configuration is tried before the sweep begins."""
        ends: list[float] = [self.low, self.high]
        return [*self.choices] or [int(end) if self.is_whole else end for end in ends]

    def set_to(self, value: str | float) -> Override:
        """Return the override that sets the key to a value."""
        place = f"sweep '{self.override.text}'"
        node = self.choices[str(value)] if self.choices else YamlNode(value, place)
        return replace(self.override, value=node, place=place)


def parse_words(words: Sequence[str]) -> tuple[list[Dimension], list[Override]]:
    """Divide the words of the command into what is searched and what is the same in all trials.

    `key=[a, b]` tries each value; `key=range(a, b)` and `key=log(a, b)` a range, the second evenly
    on a logarithmic scale, in whole numbers where both ends are. A list with one item, as in
    `key=[[0.9, 0.95]]`, is that item.

    Raises:
        ConfigError: A word is no override, or has no values; or nothing is searched.
    """
    dimensions: list[Dimension] = []
    fixed: list[Override] = []
    for word in words:
        override = parse_override(word)
        value = None if override.value is None else override.value.value
        dimension: Dimension | None = None
        if isinstance(value, list):
            if not value:
                raise ConfigError(f"{override.place}: the list is empty; name the values to try")
            texts = [json.dumps(plain_values(node), ensure_ascii=False) for node in value]
            choices = {text.strip('"'): node for text, node in zip(texts, value, strict=True)}
            if len(choices) < len(value):
                raise ConfigError(f"{override.place}: a value is named twice")
            if len(value) == 1:
                override = replace(override, value=value[0])
            else:
                dimension = Dimension(override=override, choices=choices)
        elif isinstance(value, str) and re.match(r"\w+\(", value):
            dimension = _parse_range(override, value)
        if dimension is None:
            fixed.append(override)
            continue
        if dimension.key in SET_BY_THE_SWEEP:
            raise ConfigError(
                f"{override.place}: a sweep sets {dimension.key} of every run itself"
                + ("; --seeds N repeats each trial with N seeds" if "seed" in dimension.key else "")
            )
        if any(dimension.key == other.key for other in dimensions):
            raise ConfigError(f"{override.place}: {dimension.key} is searched twice")
        dimensions.append(dimension)
    for override in fixed:
        key = ".".join(override.keys)
        if any(key == dimension.key for dimension in dimensions):
            raise ConfigError(f"{override.place}: {key} is searched too; leave one of the two out")
    if not dimensions:
        raise ConfigError(
            "nothing is searched: give at least one key several values, as in "
            "'policy.optimizer.kwargs.lr=[1e-5,1e-4]', 'policy.optimizer.kwargs.lr=log(1e-5,1e-3)' "
            "or 'rm.loss.label_smoothing=range(0.0,0.2)'"
        )
    return dimensions, fixed


def _parse_range(override: Override, text: str) -> Dimension:
    form = _RANGE.fullmatch(text)
    try:
        if form is None:
            raise ValueError("it is no range")
        ends = [end.strip() for end in form["ends"].split(",")]
        if len(ends) != 2:
            raise ValueError("a range has two ends")
        low, high = (float(end) for end in ends)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError("the first end must be below the second")
        if form["kind"] == "log" and low <= 0:
            raise ValueError("a logarithmic scale begins above 0")
    except ValueError as error:
        raise ConfigError(
            f"{override.place}: {error}. Write a range as range(0.0,0.2), or on a logarithmic "
            "scale as log(1e-5,1e-3); text with a bracket that is no range goes into a list, "
            "['text(...)']"
        ) from None
    whole = all(re.fullmatch(r"[+-]?\d+", end) for end in ends)
    return Dimension(
        override=override, low=low, high=high, is_log=form["kind"] == "log", is_whole=whole
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOfTrial:
    """One run of a trial: its configuration, its fold, and its directory."""

    config: RewardTrainingRun
    fold: Fold | None
    directory: Path
    metric: str

    @classmethod
    def of(
        cls,
        config: RewardTrainingRun,
        selection: Selection,
        *,
        directory: Path,
        fold: Fold | None,
        seed: int,
        has_slot: bool = False,
    ) -> RunOfTrial:
        """Give a run the directory, the seed and the fold that the sweep chose for it.

        A run in a worker of the sweep has its slot (`has_slot`), and reserves none of its own.
        """
        # Checkpoints serve resuming alone: the value is that of the last step, none is picked.
        saving = {
            "checkpoint_dir": str(directory / "saves"),
            "metric_name": None,
            "keep_top_k": 1,
            "resume": "auto",
        }
        changed = {
            "rm": config.rm.model_copy(update={"seed": seed, "val_at_end": True}),
            "checkpointing": config.checkpointing.model_copy(update=saving),
            "logger": config.logger.model_copy(update={"log_dir": str(directory / "logs")}),
        }
        if has_slot:
            # Without an address and a backend of its own, or Ray would start within Ray.
            alone = {"address": None, "backend": "local"}
            changed["cluster"] = config.cluster.model_copy(update=alone)
        assert selection.key is not None
        config = config.model_copy(update=changed)
        return cls(config=config, fold=fold, directory=directory, metric=selection.key)

    def train(self, is_enough: Callable[[int, float], bool]) -> None:
        """Train, and write how it ended to a file; its checkpoints go then.

        Args:
            is_enough: Called with the step and the value of each validation; returns whether the
                run is to end.

        Raises:
            InterruptedSweep: A signal or the time budget ended the run, which can go on from its
                checkpoint.
            CheckpointError: A checkpoint cannot be read or written.
        """
        started = time.monotonic()
        values: dict[int, float | None] = {}
        is_pruned = False

        def look(step: int, metrics: Mapping[str, float]) -> str | None:
            nonlocal is_pruned
            value = metrics.get(self.metric)
            values[step] = value
            # Before the first step there is nothing to judge a trial by.
            if value is None or not step:
                return None
            with (self.directory / CURVE).open("a", encoding="utf-8") as file:
                file.write(json.dumps([step, value]) + "\n")
            is_pruned = is_enough(step, value)
            return "the sweep has pruned this trial" if is_pruned else None

        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / CURVE).unlink(missing_ok=True)
        result: dict[str, Any] = {}
        stopped_by: str | None = None
        try:
            outcome = train_reward_model(
                self.config, console=silent_console(), fold=self.fold, on_validation=look
            )
        except LaurelError as error:
            if not _is_verdict(error):
                raise
            # Counted and named: the other trials go on.
            lines = str(error).strip().splitlines() or [""]
            result["failure"] = f"{type(error).__name__}: {lines[0]}"
        else:
            if outcome.ended != "finished":
                raise InterruptedSweep(outcome.signal or "checkpointing.checkpoint_must_save_by")
            stopped_by = outcome.signal  # which came too late to end this run
            value = values.get(outcome.step)
            if value is None or not math.isfinite(value):
                result["failure"] = f"no {self.metric} was measured after its last step"
            else:
                # Trained to its end a run has a value, however it compares.
                is_pruned = is_pruned and outcome.is_early
                result = {"value": value, "step": outcome.step, "is_pruned": is_pruned}
        result["seconds"] = time.monotonic() - started
        with replace_file(self.directory / RESULT) as file:
            json.dump(result, file)
        shutil.rmtree(self.directory / "saves", ignore_errors=True)
        if stopped_by is not None:
            raise InterruptedSweep(stopped_by)

    def result(self) -> Mapping[str, Any] | None:
        """Read how the run ended; None if it has not."""
        try:
            result = json.loads((self.directory / RESULT).read_bytes())
        except (OSError, ValueError):
            return None
        return result if isinstance(result, dict) and {"failure", "value"} & {*result} else None

    def curve(self) -> list[tuple[int, float]]:
        """Read the run's validations so far."""
        points: list[tuple[int, float]] = []
        with suppress(OSError, ValueError):  # the last line may still be being written
            for line in (self.directory / CURVE).read_text(encoding="utf-8").splitlines():
                step, value = json.loads(line)
                points.append((step, value))
        return points


def _is_verdict(error: BaseException | None) -> bool:
    # What is wrong with the machine says nothing about the settings: another start may get further.
    if isinstance(error, WorkerError):
        return not error.is_lost and _is_verdict(error.__cause__)
    if isinstance(error, DataError) and error.__cause__ is not None:
        return not is_disk_error(error.__cause__)
    return isinstance(error, ConfigError | DataError | ModelError | TrainingError)


class InterruptedSweep(Exception):
    """Raised when a signal or the time budget, named by the argument, ended a run of the sweep."""


class SweepWorker:
    """A worker that trains the runs of trials, in a process of its own."""

    def __init__(self, place: object) -> None:
        """Take the worker's place, which it does not need."""

    def train(self, run: RunOfTrial) -> None:
        """Train a run until it ends, or until the file that asks for its end is there."""
        run.train(lambda step, value: (run.directory / STOP).exists())


TrialState = Literal["complete", "pruned", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOutcome:
    """What became of a trial."""

    number: int
    params: Mapping[str, str | float]
    state: TrialState
    values: tuple[float, ...] = ()
    """The metric after the last step of each run; of a pruned trial, of its finished runs."""
    failure: str | None = None
    seconds: float = 0.0

    @property
    def mean(self) -> float | None:
        """The mean over the runs of a complete trial."""
        return statistics.fmean(self.values) if self.state == "complete" else None

    @property
    def half_width(self) -> float | None:
        """Half the width of the 95 % interval of the mean, by Student's t; None of one run."""
        number = len(self.values)
        if self.state != "complete" or number < 2:
            return None
        quantile = _T_975[number - 2] if number - 2 < len(_T_975) else 1.96 + 2.5 / (number - 1)
        return quantile * statistics.stdev(self.values) / math.sqrt(number)


_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantiles of Student's t with 1 to 10 degrees of freedom."""


class Sweep:
    """A search over the settings of a run, in a directory that holds all it knows."""

    def __init__(self, options: SweepOptions) -> None:
        """Check everything that needs no training.

        Raises:
            ConfigError: A setting, a value to try or the metric cannot be used.
        """
        # Absolute, because workers have other working directories.
        self.options = options = replace(options, output=options.output.absolute())
        self.dimensions, self._fixed = parse_words(options.overrides or [])
        self.warnings: tuple[str, ...] = ()
        self.rate_kept: float | None = None
        """The learning rate with which a sweep of an older version began, if it is `auto` now."""
        self._on_run: Callable[[str], None] = lambda text: None
        first = {dimension.key: dimension.ends()[0] for dimension in self.dimensions}
        self.base = self.config_of(first)
        # Each value by itself: a combination that cannot be used is a trial that fails.
        others = [
            self.config_of(first | {dimension.key: value})
            for dimension in self.dimensions
            for value in dimension.ends()[1:]
        ]
        if options.num_folds == 1:
            raise ConfigError("--folds 1: one fold leaves nothing to train on; give 2 or more")
        saving = self.base.checkpointing
        self.selection = metric_selector(self.base)(
            options.metric or saving.metric_name or "auto",
            None if options.metric else saving.higher_is_better,
            setting="--metric" if options.metric else "checkpointing.metric_name",
        )
        if not (self.selection.key or "").startswith("validation"):
            raise ConfigError(
                "a sweep compares trials by a metric of a validation set, and "
                + (f"{self.selection.key} is none" if self.selection.key else "there is no set")
                + "; name a set under data, or divide the training set with --folds 5"
            )
        for config in (self.base, *others):
            self._check(config)
        is_grid = (
            all(dimension.choices for dimension in self.dimensions) and options.num_trials is None
        )
        self.grid = (
            [
                dict(zip((dimension.key for dimension in self.dimensions), values, strict=True))
                for values in product(*(dimension.choices for dimension in self.dimensions))
            ]
            if is_grid
            else []
        )
        self.total = len(self.grid) or options.num_trials or 20
        self.study: Study | None = None
        self._started: dict[int, float] = {}

    def _check(self, config: RewardTrainingRun) -> None:
        # As the runs see it: with folds there is no other validation set.
        run = RunOfTrial.of(
            config, self.selection, directory=self.options.output, fold=None, seed=config.rm.seed
        )
        check_reward_run(run.config)
        number = self.options.num_workers
        if number == 1:
            return
        one_process = config.cluster.model_copy(update={"address": None, "backend": "auto"})
        if plan_allocation(config.model_copy(update={"cluster": one_process})).are_remote:
            raise ConfigError(
                f"--workers {number}: each run has one slot, and the configuration plans several; "
                "set cluster.gpus_per_node=1 and cluster.num_nodes=1, or take --workers out"
            )

    def config_of(self, params: Mapping[str, str | float]) -> RewardTrainingRun:
        """Return the configuration of a trial; its seed and its directories are the user's.

        Raises:
            ConfigError: The values cannot be used together.
        """
        config = self._load(params)
        if not self.options.num_folds:
            return config
        # The folds of the training sets take the place of every validation set.
        share = {"split_validation_size": 1 / self.options.num_folds}
        train = [one.model_copy(update=share) for one in config.data.train_sets()]
        cut: dict[str, Any] = {"validation": None, "train": train}
        return config.model_copy(update={"data": config.data.model_copy(update=cut)})

    def _load(self, params: Mapping[str, str | float]) -> RewardTrainingRun:
        overrides = [dimension.set_to(params[dimension.key]) for dimension in self.dimensions]
        loaded = load_config(RewardTrainingRun, self.options.config, [*self._fixed, *overrides])
        self.warnings = loaded.warnings
        return loaded.config if self.rate_kept is None else with_rate(loaded.config, self.rate_kept)

    def winner_yaml(self, best: TrialOutcome) -> str:
        """Return the configuration of the best trial as a file for `laurel rm --config`."""
        half = "" if best.half_width is None else f" +- {best.half_width:.4f} (95 %)"
        return (
            f"# The best of a sweep, trial {best.number}: {self.selection.key} {best.mean:.4f}"
            f"{half}, over {counted(len(best.values), 'run')}.\n"
            + "".join(f"# {key}={value}\n" for key, value in best.params.items())
            + to_yaml(self._load(best.params))
        )

    def open(self, stack: ExitStack) -> None:
        """Open the study of the directory, or begin it.

        Raises:
            ConfigError: The directory holds another sweep, or something else.
            MissingDependencyError: Optuna is not installed.
            CheckpointError: Another process uses the directory.
        """
        try:
            import optuna
        except ImportError as error:
            raise MissingDependencyError.of(
                "optuna", extra="sweep", purpose="laurel sweep"
            ) from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        number = self.options.num_folds
        if self.base.cluster.address is None:
            check_counts(self.base)
            bound_count("--workers", self.options.num_workers, PROCESSES)
        # Read once before the first trial: what is wrong with the data is wrong in every trial.
        data = load_data(self.base, fold=Fold(index=0, number=number, seed=0) if number else None)
        directory, path = self.options.output, self.options.output / IDENTITY
        if directory.is_dir() and any(directory.iterdir()) and not path.is_file():
            raise ConfigError(
                f"--output {directory} holds other files and no sweep; name another directory"
            )
        directory.mkdir(parents=True, exist_ok=True)
        lock = DirectoryLock(directory)
        lock.acquire()
        stack.callback(lock.release)
        rows = {"rows": rows_fingerprint(data)}
        if path.is_file():
            self._go_on(path, rows)
        else:
            identity = {**self._identity(), **rows}
            with replace_file(path) as file:
                json.dump(identity, file, indent=1)
        self.study = study = optuna.create_study(
            study_name="sweep",
            storage=f"sqlite:///{directory / STUDY}",
            direction="maximize" if self.selection.higher_is_better else "minimize",
            pruner=optuna.pruners.MedianPruner(n_startup_trials=WITHOUT_PRUNING),
            load_if_exists=True,
        )
        for params in self.grid:  # those of before are not doubled
            study.enqueue_trial(params, skip_if_exists=True)

    def _identity(self) -> dict[str, Any]:
        identity = {
            "searched": sorted(dimension.override.text for dimension in self.dimensions),
            "folds": self.options.num_folds,
            "seeds": self.options.num_seeds,
            "metric": self.selection.key,
            "higher_is_better": self.selection.higher_is_better,
            "search": "grid" if self.grid else self.options.search,
            "pruning": self.options.prunes,
            "configuration": self.base.model_dump(mode="json"),
        }
        return dict(json.loads(json.dumps(identity)))

    def _go_on(self, path: Path, rows: Mapping[str, str]) -> None:
        """Check that the directory holds this sweep; keep what was the default when it began.

        Raises:
            ConfigError: The directory holds another sweep, or its file cannot be read.
        """
        try:
            saved = json.loads(path.read_bytes())
            read = graft(saved["configuration"], str(path))
            settings = plain_values(translated(type(self.base), read))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
        if is_rate_auto(self.base) and (rate := rate_kept(settings)) is not None:
            self.rate_kept, self.base = rate, with_rate(self.base, rate)
        identity = {**self._identity(), **rows}
        changed = [
            Change(key=key, before=saved.get(key), now=value)
            for key, value in identity.items()
            if key != "configuration" and saved.get(key) != value
        ]
        # The length of a run counts as well, because trials are compared.
        changed += changes(type(self.base), settings, identity["configuration"], in_sweep=True)
        if changed:
            shown = "; ".join(
                f"{change.key}: {change.before} then, {change.now} now" for change in changed[:3]
            )
            raise ConfigError(
                f"--output {path.parent} holds another sweep ({shown}). Name another directory, or "
                "restore what changed"
            )

    def runs_of(self, trial: Trial, params: Mapping[str, str | float]) -> list[RunOfTrial]:
        """Return the runs of a trial: one for each fold and seed.

        Raises:
            ConfigError: The values of the trial cannot be used together.
        """
        config, number = self.config_of(params), self.options.num_folds
        first = self.base.rm.seed
        folds: list[Fold | None] = [Fold(index=i, number=number, seed=first) for i in range(number)]
        runs = []
        for seed in range(first, first + self.options.num_seeds):
            for fold in folds or [None]:
                name = f"seed_{seed}" + ("" if fold is None else f"_fold_{fold.index + 1}")
                directory = self.options.output / f"trial_{trial.number:03d}" / name
                runs.append(
                    RunOfTrial.of(
                        config,
                        self.selection,
                        directory=directory,
                        fold=fold,
                        seed=seed,
                        has_slot=self.options.num_workers > 1,
                    )
                )
        return runs

    def trials(self) -> Iterator[Trial]:
        """Yield the trials to run: first those that were interrupted, then new ones."""
        import optuna

        study = self.study
        assert study is not None
        unfinished = (optuna.trial.TrialState.RUNNING,)
        for trial in study.get_trials(deepcopy=False, states=unfinished):
            study.sampler = self._sampler(trial.number)  # it may have been killed before it sampled
            yield optuna.trial.Trial(study, trial._trial_id)
        while True:
            trials = study.get_trials(deepcopy=False)
            begun = [trial for trial in trials if trial.state.name != "WAITING"]
            if len(begun) >= self.total:
                return
            study.sampler = self._sampler(len(begun))
            yield study.ask()

    def _sampler(self, number: int) -> BaseSampler:
        # Seeded with the number of the trial: a sweep that was killed samples the same. Trials
        # under way count as bad, so that others look elsewhere.
        import optuna

        seed, is_parallel = self.base.rm.seed + number, self.options.num_workers > 1
        if self.options.search == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Optuna calls the option experimental
            return optuna.samplers.TPESampler(seed=seed, constant_liar=is_parallel)

    def run(
        self,
        on_trial: Callable[[TrialOutcome], None],
        on_run: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Run all trials that are left, here or on Ray; `on_trial` is called after each.

        `on_run` gets a line after each run of a trial but its last.

        Raises:
            InterruptedSweep: A signal or the time budget ended a run; the same command goes on.
            LaurelError: Something is wrong that no setting decides, such as a full disk.
        """
        self._on_run = on_run
        trials = self.trials()
        if self.options.num_workers == 1:
            for trial in trials:
                on_trial(self._run_here(trial))
            return
        with ExitStack() as stack:
            groups = _workers(self.base, self.options.num_workers, stack)
            # After Ray has started, which has handlers of its own.
            stop = stack.enter_context(StopRequest())
            under_way: dict[int, Iterator[TrialOutcome | None]] = {}
            is_over = False
            while under_way or not is_over:
                if stop.signal is not None:
                    raise InterruptedSweep(stop.signal.name)
                for index in range(len(groups)):
                    if index not in under_way and not is_over:
                        following = next(trials, None)
                        is_over = following is None
                        if following is not None:
                            under_way[index] = self._run_there(following, groups, index)
                    outcome = next(under_way[index]) if index in under_way else None
                    if outcome is not None:
                        del under_way[index]
                        on_trial(outcome)
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def _run_here(self, trial: Trial) -> TrialOutcome:
        begun = self._begin(trial)
        if isinstance(begun, TrialOutcome):
            return begun
        for run_index, run in enumerate(begun):
            is_new = run.result() is None
            if is_new:
                run.train(partial(self._is_worse, trial, begun, run_index))
            if self._ends(trial, begun, run_index, is_new=is_new):
                break
        return self._end(trial, begun)

    def _run_there(
        self, trial: Trial, groups: list[Callable[[], WorkerGroup]], index: int
    ) -> Iterator[TrialOutcome | None]:
        # Yields None as long as a run is under way.
        begun = self._begin(trial)
        if isinstance(begun, TrialOutcome):
            yield begun
            return
        for run_index, run in enumerate(begun):
            num_lost = 0
            is_new = run.result() is None
            while run.result() is None:
                for name in (STOP, CURVE):
                    (run.directory / name).unlink(missing_ok=True)
                pending: Pending = groups[index]().start("train", run)
                num_seen = 0
                while not pending.done():
                    for step, value in run.curve()[num_seen:]:
                        num_seen += 1
                        if self._is_worse(trial, begun, run_index, step, value):
                            (run.directory / STOP).touch()
                    yield None
                failure = NO_RESULT
                try:
                    pending.wait()
                except WorkerError as error:
                    if isinstance(error.__cause__, InterruptedSweep):
                        raise error.__cause__ from None
                    if not error.is_lost:
                        raise
                    num_lost += 1
                    if num_lost == 1:
                        continue  # from its newest checkpoint
                    failure = f"its worker died twice: {str(error).splitlines()[0]}"
                if run.result() is None:
                    run.directory.mkdir(parents=True, exist_ok=True)
                    with replace_file(run.directory / RESULT) as file:
                        json.dump({"failure": failure}, file)
            if self._ends(trial, begun, run_index, is_new=is_new):
                break
        yield self._end(trial, begun)

    def _begin(self, trial: Trial) -> list[RunOfTrial] | TrialOutcome:
        self._started[trial.number] = time.monotonic()
        params = {dimension.key: dimension.suggest(trial) for dimension in self.dimensions}
        try:
            return self.runs_of(trial, params)
        except ConfigError as error:
            lines = str(error).strip().splitlines()
            return self._tell(trial, "failed", (), failure=f"ConfigError: {lines[-1].strip()}")

    def _is_worse(
        self, trial: Trial, runs: Sequence[RunOfTrial], run_index: int, step: int, value: float
    ) -> bool:
        # A trial is compared by the mean over its finished runs and this one.
        before = [float((run.result() or {})["value"]) for run in runs[:run_index]]
        position = run_index * STEPS_OF_A_RUN + step
        with warnings.catch_warnings():
            # A run that was resumed repeats its last validation, which is known already.
            warnings.simplefilter("ignore")
            trial.report(statistics.fmean([*before, value]), position)
        return self.options.prunes and bool(trial.should_prune())

    def _ends(
        self, trial: Trial, runs: Sequence[RunOfTrial], run_index: int, *, is_new: bool
    ) -> bool:
        result = runs[run_index].result() or {"failure": NO_RESULT}
        if "failure" in result or result["is_pruned"]:
            return True
        if is_new and run_index + 1 < len(runs):
            self._on_run(
                f"trial {trial.number} run {run_index + 1} of {len(runs)}  {result['value']:.4f}"
            )
        return False

    def _end(self, trial: Trial, runs: Sequence[RunOfTrial]) -> TrialOutcome:
        values: tuple[float, ...] = ()
        for run in runs:
            result = run.result() or {"failure": NO_RESULT}
            if "failure" in result:
                where = f" ({run.directory.name})" if len(runs) > 1 else ""
                return self._tell(trial, "failed", values, failure=f"{result['failure']}{where}")
            if result["is_pruned"]:
                return self._tell(trial, "pruned", values)
            values = (*values, result["value"])
        return self._tell(trial, "complete", values)

    def _tell(
        self,
        trial: Trial,
        state: TrialState,
        values: tuple[float, ...],
        *,
        failure: str | None = None,
    ) -> TrialOutcome:
        import optuna

        assert self.study is not None
        trial.set_user_attr("values", list(values))
        trial.set_user_attr("failure", failure)
        seconds = time.monotonic() - self._started[trial.number]
        trial.set_user_attr("seconds", seconds)
        states = optuna.trial.TrialState
        end = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[state]
        value = statistics.fmean(values) if state == "complete" else None
        self.study.tell(trial, value, state=end)
        return TrialOutcome(
            number=trial.number,
            params=dict(trial.params),
            state=state,
            values=values,
            failure=failure,
            seconds=seconds,
        )

    def outcomes(self) -> list[TrialOutcome]:
        """Return the finished trials, in the order of their numbers."""
        import optuna

        assert self.study is not None
        states = optuna.trial.TrialState
        names: dict[Any, TrialState] = {
            states.COMPLETE: "complete",
            states.PRUNED: "pruned",
            states.FAIL: "failed",
        }
        return [
            TrialOutcome(
                number=trial.number,
                params=dict(trial.params),
                state=names[trial.state],
                values=tuple(trial.user_attrs.get("values", ())),
                failure=trial.user_attrs.get("failure"),
                seconds=trial.user_attrs.get("seconds", 0.0),
            )
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state in names
        ]

    def best(self, outcomes: Sequence[TrialOutcome]) -> TrialOutcome:
        """Return the complete trial with the best mean; of equal ones the first.

        Raises:
            TrainingError: No trial is complete; the message names the first failure.
        """
        sign = 1 if self.selection.higher_is_better else -1
        ranked = [
            (sign * mean, outcome) for outcome in outcomes if (mean := outcome.mean) is not None
        ]
        if not ranked:
            failures = [outcome for outcome in outcomes if outcome.failure]
            raise TrainingError(
                f"no trial of {len(outcomes)} has a value"
                + (f"; trial {failures[0].number}: {failures[0].failure}" if failures else "")
            )
        return max(ranked, key=lambda pair: pair[0])[1]


def rows_fingerprint(data: PreferenceData) -> str:
    """Hash the rows that a sweep reads: trials on other rows cannot be compared."""
    digest = hashlib.blake2b(digest_size=16)
    for name, rows in (("train", data.train), *sorted(data.validation.items())):
        digest.update(repr((name, len(rows))).encode())
        for preference in rows:
            digest.update(repr(preference).encode("utf-8", "surrogatepass"))
    for name, benchmark in sorted(data.benchmarks.items()):
        digest.update(repr((name, list(benchmark.rows))).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _workers(
    config: RewardTrainingRun, number: int, stack: ExitStack
) -> list[Callable[[], WorkerGroup]]:
    """Start workers on Ray, each a group of its own: one that dies loses its own trial only.

    Returns:
        Functions that return the group of a worker, anew where the last one has died.
    """
    try:
        from laurel.workers.ray_cluster import RayCluster
        from laurel.workers.ray_group import RayGroup
    except ImportError as error:
        raise MissingDependencyError.of(
            "ray", extra="ray", purpose=f"laurel sweep --workers {number}"
        ) from error
    from laurel.workers.reservations import Resources

    address = config.cluster.address
    cluster = stack.enter_context(
        RayCluster(address) if address else RayCluster(cpus=number, gpus=None)
    )
    has_gpus = config.cluster.device != "cpu" and any(
        state.total.get("GPU") for state in cluster.nodes()
    )
    each = Resources(cpus=0, gpus=1) if has_gpus else Resources(cpus=1)
    reservation = cluster.reserve("trials", number, each)

    def worker(index: int) -> Callable[[], WorkerGroup]:
        made: list[RayGroup] = []

        def group() -> WorkerGroup:
            if made and not all(made[-1].alive()):
                made.pop().shutdown()
            if not made:
                part = reservation.part(f"trials {index + 1}", [index])
                made.append(RayGroup(part, SweepWorker, limit=LONGEST_RUN))
            return made[-1]

        def close() -> None:
            for each in made:
                each.shutdown()

        stack.callback(close)
        return group

    return [worker(index) for index in range(number)]
