"""Data sets of a run: from the configuration to judged groups, and from those to tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console

from laurel.config.preference_data import DatasetConfig
from laurel.config.reward_training import RewardTrainingRun
from laurel.data.preferences import hold_out, load_preferences, own_validation
from laurel.data.report import DataReport
from laurel.errors import DataError
from laurel.evaluation.benchmark_sets import BenchmarkSet
from laurel.types import Preference

if TYPE_CHECKING:
    from laurel.models.scoring import ScoringContract
    from laurel.types import PreferenceSample

ENCODE_AT_ONCE = 512


@dataclass(slots=True, kw_only=True)
class PreferenceData:
    """The judged groups of a run, before they are tokens."""

    train: list[Preference]
    validation: dict[str, list[Preference]]
    reports: dict[str, DataReport]
    benchmarks: dict[str, BenchmarkSet] = field(default_factory=dict)
    """What is validated on besides."""

    @property
    def all_reports(self) -> dict[str, DataReport | BenchmarkSet]:
        """What was read, by name."""
        named = {f"validation-{name}": benchmark for name, benchmark in self.benchmarks.items()}
        return {**self.reports, **named}


def load_data(config: RewardTrainingRun) -> PreferenceData:
    """Read every data set of the run.

    Raises:
        DataError: A file, a row, or nothing left; or margins are asked for that no row has.
    """
    data = config.data
    train: list[Preference] = []
    reports: list[DataReport] = []
    sets = data.train_sets()
    for index, dataset in enumerate(sets):
        name = "train" if len(sets) == 1 else f"train-{index + 1}"
        preferences, report = _load(config, dataset, name, data.max_samples)
        train += preferences
        reports.append(report)
    train = train[: data.max_samples]
    loaded = PreferenceData(train=train, validation={}, reports={})
    for name, benchmark in data.benchmark_sets().items():
        loaded.benchmarks[name] = BenchmarkSet.load(name, benchmark)
    loaded.reports["train"] = reports[0] if len(reports) == 1 else DataReport.merge(
        reports, name="train"
    )  # fmt: skip
    _check_margins(config, loaded)
    for name, dataset in data.validation_sets().items():
        loaded.validation[name], loaded.reports[f"validation-{name}"] = _load(
            config, dataset, f"validation-{name}", None
        )
    if loaded.validation:
        return loaded
    own = own_validation_of(config)
    if data.split_validation_size:
        loaded.train, held = hold_out(train, share=data.split_validation_size, seed=config.rm.seed)
        loaded.validation["default"] = held
        loaded.reports["validation-default"] = loaded.reports["train"].move_out(
            kept=loaded.train, held_out=held, name="validation-default"
        )
    elif own is not None:
        loaded.validation["default"], loaded.reports["validation-default"] = _load(
            config, own, "validation-default", None
        )
    return loaded


def _check_margins(config: RewardTrainingRun, data: PreferenceData) -> None:
    """Margins take a loss that reads them and rows that have them: with one alone, say so."""
    if config.rm.loss.use_margin:
        if not any(preference.margin for preference in data.train):
            raise DataError(
                "rm.loss.use_margin=true, but no training row has a margin other than 0. Name the "
                "column that says how much better the chosen answer is (data.margin_key=COLUMN), "
                "or take use_margin out"
            )
        return
    keys = [one.margin_key for one in config.data.train_sets() if one.margin_key is not None]
    if keys:
        data.reports["train"].notes.append(
            f"data.margin_key={keys[0]} has no effect: the loss does not read margins "
            "(rm.loss.use_margin=true would)"
        )


def own_validation_of(config: RewardTrainingRun) -> DatasetConfig | None:
    """The validation set that the only training set of a run brings with it, if it does."""
    sets = config.data.train_sets()
    return own_validation(sets[0]) if len(sets) == 1 else None


def _load(
    config: RewardTrainingRun, dataset: DatasetConfig, name: str, max_samples: int | None
) -> tuple[list[Preference], DataReport]:
    return load_preferences(
        dataset,
        name=name,
        ties="keep" if config.rm.loss.uses_ties else config.data.ties,
        duplicates=config.data.duplicates,
        on_bad_row=config.data.on_bad_row,
        attributes=config.policy.reward_model_cfg.attributes,
        max_samples=max_samples,
    )


def texts_of(preferences: Sequence[Preference]) -> Iterator[str]:
    """Every text of judged groups, prompts and completions."""
    for preference in preferences:
        yield from (message.content for message in preference.group.prompt)
        for completion in preference.group.completions_G:
            yield from (message.content for message in completion.messages)


def tokenise(
    preferences: Sequence[Preference],
    contract: ScoringContract,
    report: DataReport,
    *,
    overlong: str,
    console: Console,
) -> list[PreferenceSample]:
    """Judged groups as tokens; what is too long is cut or left out, and counted in the report."""
    from laurel.types import PreferenceSample

    samples: list[PreferenceSample] = []
    with console.status(f"tokenising {report.name}") as status:
        for first in range(0, len(preferences), ENCODE_AT_ONCE):
            part = preferences[first : first + ENCODE_AT_ONCE]
            tokens = contract.encode(
                [preference.group for preference in part],
                sources=[preference.source for preference in part],
            )
            samples += [
                PreferenceSample(preference=preference, tokens=group)
                for preference, group in zip(part, tokens, strict=True)
            ]
            status.update(f"tokenising {report.name}: {len(samples)} of {len(preferences)}")
    if overlong == "drop":
        kept = [sample for sample in samples if not any(sample.tokens.truncated_G)]
        for sample in samples:
            if any(sample.tokens.truncated_G):
                report.drop("over-long", sample.preference.source)
        if not kept:
            raise DataError(
                f"{report.name}: all {len(samples)} rows are longer than "
                f"{contract.rules.max_length} tokens; raise data.max_input_seq_length or set "
                "data.overlong=truncate"
            )
        samples = kept
        report.describe([sample.preference for sample in samples])
    report.num_truncated = sum(sum(sample.tokens.truncated_G) for sample in samples)
    lengths = [length for sample in samples for length in sample.tokens.lengths_G]
    report.set_lengths(lengths)
    warning = report.warning_of_cuts(len(lengths), contract.rules.max_length)
    if warning is not None:
        console.print(f"warning: {warning}")
    return samples


def tokenise_all(
    config: RewardTrainingRun, data: PreferenceData, contract: ScoringContract, console: Console
) -> tuple[list[PreferenceSample], dict[str, list[PreferenceSample]]]:
    """The training set and the validation sets as tokens."""
    overlong = config.data.overlong
    train = tokenise(
        data.train, contract, data.reports["train"], overlong=overlong, console=console
    )
    validation = {
        name: tokenise(
            preferences,
            contract,
            data.reports[f"validation-{name}"],
            overlong=overlong,
            console=console,
        )
        for name, preferences in data.validation.items()
    }
    return train, validation
