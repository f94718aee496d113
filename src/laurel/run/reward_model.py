"""Builds a `laurel rm` run from its configuration; only this file knows all classes it uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from laurel.config.data import DatasetConfig
from laurel.config.reward_model import (
    RATE,
    RATE_OF_SMALL,
    SMALL_MODEL,
    RewardTrainingRun,
    is_small,
)
from laurel.config.yaml_tree import plain_values
from laurel.data.preferences import Fold, hold_out, load_preferences, own_validation_preferences
from laurel.data.reading import encoded, holds_out
from laurel.data.report import DataReport, no_rows_left
from laurel.errors import ConfigError, DataError, ModelError, counted_that
from laurel.evaluation.benchmarks import BenchmarkSet, selectable
from laurel.observe.console import format_parameters
from laurel.observe.loggers import check_available
from laurel.run.cards import facts_of_reward_model
from laurel.run.context import (
    RunContext,
    checkpoint_parts,
    describe_benchmark,
    describe_data,
    describe_output,
    make_services,
)
from laurel.run.model import (
    TrainedModel,
    describe_model,
    load_trained_model,
    model_spec,
    resolve_micro_batches,
    resolve_model,
    saved_settings,
)
from laurel.run.request import epoch_notes, plan_allocation, step_order, why_not_validated
from laurel.training.stopping import Deadline, EarlyStopping, Position, Selection, select_by
from laurel.types import Preference

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

    from laurel.data.forest import Batcher
    from laurel.models.scoring import ScoringContract
    from laurel.training.learner_group import ModelFacts
    from laurel.training.loop import OnValidation, RunOutcome
    from laurel.types import PreferenceSample, TokenGroup


def train_reward_model(
    config: RewardTrainingRun,
    *,
    console: Console,
    fold: Fold | None = None,
    on_validation: OnValidation | None = None,
) -> RunOutcome:
    """Train a reward model (`laurel rm`) from beginning to end, and return the outcome.

    Errors are reported in the order of their cost: first those that need nothing loaded, then those
    that need the data, then those that need the model. torch is imported after the data is read.

    Args:
        fold: The part of the training set that is held out, in the place of
            `data.split_validation_size`.
        on_validation: Called after each validation; a reason that it returns ends the run.
    """
    config = resolve_model(config, console)
    deadline = Deadline(config.checkpointing.checkpoint_must_save_by)
    selection, early_stopping = check_reward_run(config)
    planned = plan_allocation(config)
    with ExitStack() as stack:
        context = RunContext(config=config, console=console, stack=stack, deadline=deadline)
        context = context.with_store(selection)
        data = load_data(config, fold=fold)
        check_figure("checkpointing.metric_name", selection.key, data.benchmarks)
        if early_stopping is not None:
            check_figure("rm.early_stopping.metric_name", early_stopping.key, data.benchmarks)
        context = resolve_rate(resolve_micro_batches(context.with_slots(planned)))
        return _train(context, data, early_stopping, on_validation)


def resolve_rate(context: RunContext[RewardTrainingRun]) -> RunContext[RewardTrainingRun]:
    """Return the context with a number where the learning rate is `auto`, and print the number.

    A run that is resumed keeps the rate that its checkpoint has.
    """
    config, resumed = context.config, context.resume_from
    if not is_rate_auto(config):
        return context
    kept = None
    if resumed is not None:
        kept = rate_kept(plain_values(saved_settings(resumed, RewardTrainingRun)))
    rate, why = _rate_chosen(config) if kept is None else (kept, "as the run began")
    context.console.print(rate_note(rate, why), soft_wrap=True)
    return replace(context, config=with_rate(config, rate))


def is_rate_auto(config: RewardTrainingRun) -> bool:
    """Report whether the learning rate is `auto`."""
    return config.policy.optimizer.kwargs.get("lr") == "auto"


def rate_kept(before: Mapping[str, Any]) -> float | None:
    """Return the rate that goes on in the place of `auto`, from the plain values saved before.

    None if they have `auto`, too.
    """
    kept = before.get("policy", {}).get("optimizer", {}).get("kwargs", {}).get("lr")
    if kept == "auto":
        return None
    return RATE if kept is None else float(kept)  # the only default of older versions


def with_rate(config: RewardTrainingRun, rate: float) -> RewardTrainingRun:
    """Return the configuration with this learning rate in the place of `auto`."""
    if not is_rate_auto(config):
        return config
    optimizer = config.policy.optimizer
    optimizer = optimizer.model_copy(update={"kwargs": {**optimizer.kwargs, "lr": rate}})
    policy = config.policy.model_copy(update={"optimizer": optimizer})
    return config.model_copy(update={"policy": policy})


def rate_note(rate: float, why: str) -> str:
    """Return the line that says which number `auto` became."""
    return f"note    policy.optimizer.kwargs.lr=auto: {rate:g}, {why}"


def _rate_chosen(config: RewardTrainingRun) -> tuple[float, str]:
    from laurel.models.loading.pretrained import count_parameters

    policy, limit = config.policy, f"{SMALL_MODEL / 1e6:.0f} million"
    if policy.scratch is not None or policy.model_name is None:
        return RATE, f"as for pretrained models of {limit} or more; a new one bears 1e-3"
    try:
        number = count_parameters(model_spec(policy))
    except ModelError:  # loading says it
        number = 0
    if not number:
        return RATE, "as for larger models: the size of this one is not known before it is loaded"
    if is_small(number):
        return RATE_OF_SMALL, f"as the model has {format_parameters(number)}, fewer than {limit}"
    return RATE, f"as the model has {format_parameters(number)}, {limit} or more"


def check_reward_run(config: RewardTrainingRun) -> tuple[Selection, EarlyStopping | None]:
    """Check the configuration before anything is loaded.

    Returns:
        How the best checkpoint is chosen, and what ends the run early; None if nothing does.

    Raises:
        UserError: A setting cannot be used; the first problem is reported.
    """
    check_available(config.logger)
    return reward_selection(config)


def reward_selection(config: RewardTrainingRun) -> tuple[Selection, EarlyStopping | None]:
    """Return how the best checkpoint of a run is chosen, and what ends it early, if anything does.

    Raises:
        ConfigError: The run does not measure what they name.
    """
    select = metric_selector(config)
    saving, stopping = config.checkpointing, config.rm.early_stopping
    selection = Selection(key=None)
    if saving.enabled:
        selection = select(saving.metric_name, saving.higher_is_better)
    if stopping.metric_name is None:
        return selection, None
    watched = select(
        stopping.metric_name,
        saving.higher_is_better if stopping.metric_name == saving.metric_name else None,
        setting="rm.early_stopping.metric_name",
    )
    if watched.key is None or not watched.key.startswith("validation"):
        why_not = select.keywords["why_not"]
        raise ConfigError(
            f"rm.early_stopping.metric_name={stopping.metric_name}: early stopping watches a "
            "metric of a validation set, such as validation-default_loss"
            + (f". {why_not}" if why_not else "")
        )
    if config.rm.val_period == 0:
        raise ConfigError(
            "rm.early_stopping: it counts the validations of rm.val_period, which is 0; set it"
        )
    return selection, EarlyStopping(
        key=watched.key,
        higher_is_better=watched.higher_is_better,
        patience=stopping.patience,
        min_delta=stopping.min_delta,
    )


def metric_selector(config: RewardTrainingRun) -> partial[Selection]:
    """Return `select_by` for the metrics that a run measures.

    Raises:
        ConfigError: A benchmark has the name of a validation set.
    """
    sets, benchmarks = list(config.data.validation_sets()), config.data.benchmark_sets()
    if not sets and (holds_out(config.data.train_sets()) or own_validation_of(config)):
        sets = ["default"]
    if twice := benchmarks.keys() & set(sets):
        raise ConfigError(
            f"data: {min(twice)!r} is the name of a benchmark and that of the rows which are held "
            "out for validation; call the benchmark otherwise"
        )
    why_not = why_not_validated(config, has_sets=bool(sets or benchmarks))
    figures = {name: selectable(one.benchmark) for name, one in benchmarks.items()}
    return partial(
        select_by,
        sets=[] if why_not else sets,
        attributes=config.policy.reward_model_cfg.attributes,
        benchmarks={} if why_not else figures,
        why_not=why_not,
        has_steps=config.rm.loss.reads_steps,
    )


def check_figure(setting: str, key: str | None, benchmarks: Mapping[str, BenchmarkSet]) -> None:
    """Check that the loaded benchmarks provide the metric that a setting names.

    Raises:
        ConfigError: The metric is missing, perhaps because the benchmark was limited to some rows.
    """
    for name, benchmark in benchmarks.items():
        figures = {f"validation-{name}_{key}": key for key in selectable(benchmark.benchmark)}
        figure, possible = figures.get(key or ""), benchmark.possible()
        if figure is None or figure in possible:
            continue
        why = "; ".join(benchmark.notes())
        raise ConfigError(
            f"{setting}={key}: these rows of {benchmark.title} give no "
            f"{figure} ({why}). They give: "
            + ", ".join(f"validation-{name}_{key}" for key in possible)
        )


def _train(
    context: RunContext[RewardTrainingRun],
    data: PreferenceData,
    early_stopping: EarlyStopping | None,
    on_validation: OnValidation | None,
) -> RunOutcome:
    """Load the model, tokenize, and run the loop; nothing is written before all is checked."""
    config, console = context.config, context.console
    model = _load_model(context, data)
    from laurel.training.epochs import EpochParts, total_steps
    from laurel.training.loop import Schedule
    from laurel.training.losses import RewardLoss
    from laurel.training.reward_model import RewardTraining
    from laurel.training.state import RewardRunState

    contract = model.facts.contract
    assert contract is not None
    train, validation = _tokenised(context, data, contract)
    loss = RewardLoss(config.rm.loss, reward_weights_K=contract.rules.attribute_weights)
    if not loss.count([sample.preference for sample in train]):
        raise DataError(
            f"no training row teaches rm.loss.type={config.rm.loss.type} anything: its rows are "
            "ties, or have none of the ratings that it reads. Choose another rm.loss.type, or "
            "give rows in which one answer is better"
        )
    card = facts_of_reward_model(
        context, config.rm, data.reports, data.benchmarks, model.facts, ties=config.data.ties
    )
    batcher, units = _batching(context, model, train)
    state = RewardRunState(
        model.learner,
        checkpoint_parts(context, model.facts, card),
        model.facts,
        train=train,
        validation=list(validation.values()),
        batcher=batcher,
    )
    position = state.restore(context.resume_from) if context.resume_from else Position()
    _describe(context, data, model.facts, state.run_dir)
    order = step_order(config, len(train), units=units)
    num_steps = total_steps(config.rm, order)
    for note in epoch_notes(config.policy, len(train), num_steps):
        console.print(f"note    {note}")
    schedule = Schedule(
        section=config.rm,
        saving=config.checkpointing,
        total_steps=num_steps,
        has_validation=bool(validation or data.benchmarks),
        early_stopping=early_stopping,
    )
    services = make_services(
        context,
        schedule=schedule,
        state=state,
        position=position,
        facts=model.facts,
        reports=data.all_reports,
        on_validation=on_validation,
        unit="rows" if config.policy.reward_model_cfg.reward_model_type == "process" else "pairs",
    )
    parts = EpochParts(
        learner=model.learner,
        batcher=batcher,
        train=train,
        order=order,
        validation=validation,
        benchmarks=data.benchmarks,
    )
    training = RewardTraining(
        config.rm, services, parts, loss=loss, contract=contract, logging=config.logger
    )
    return training.run(position)


def _batching(
    context: RunContext[RewardTrainingRun], model: TrainedModel, train: list[PreferenceSample]
) -> tuple[Batcher, list[list[int]] | None]:
    """What fills micro-batches, and the rows that stay together in a step, if any do."""
    from laurel.data.forest import Batcher
    from laurel.training.epochs import rows_of_dialogues

    limits, units = context.config.policy.batch_limits, None
    contract = model.facts.contract
    assert contract is not None
    if context.config.data.group_by_prefix:
        units = rows_of_dialogues(train)
        if model.facts.path == "padded":
            context.console.print(
                "note    data.group_by_prefix: this model reads padded rows, which share nothing; "
                "rows of one dialogue meet in a step all the same"
            )
    batcher = Batcher(
        model.facts.path,
        limits,
        pad_id=contract.rules.pad_id or 0,
        dp_size=model.learner.dp_size,
    )
    return batcher, units


def _tokenised(
    context: RunContext[RewardTrainingRun], data: PreferenceData, contract: ScoringContract
) -> tuple[list[PreferenceSample], dict[str, list[PreferenceSample]]]:
    """Tokenize the training set, and the validation sets by their names."""
    encode = partial(
        tokenise,
        contract=contract,
        overlong=context.config.data.overlong,
        on_bad_row=context.config.data.on_bad_row,
        console=context.console,
    )
    train = encode(data.train, report=data.reports["train"])
    return train, {
        name: encode(preferences, report=data.reports[f"validation-{name}"])
        for name, preferences in data.validation.items()
    }


def _load_model(context: RunContext[RewardTrainingRun], data: PreferenceData) -> TrainedModel:
    config = context.config
    with context.console.status("loading torch"):
        from laurel.models.loading.reward_model import load_reward_model
    load = partial(
        load_reward_model,
        model_spec(config.policy),
        seed=config.rm.seed,
        max_length=config.data.max_input_seq_length or config.policy.max_total_sequence_length,
        truncation_side=config.data.truncation_side,
        texts=tuple(preference_texts(data.train)) if config.policy.scratch is not None else (),
        resume_from=context.resume_from,
        for_training=True,
    )
    return load_trained_model(context, load=load, seed=config.rm.seed)


def _describe(
    context: RunContext[RewardTrainingRun], data: PreferenceData, facts: ModelFacts, run_dir: Path
) -> None:
    console = context.console
    describe_data(data.reports, run_dir, console)
    for benchmark in data.benchmarks.values():
        describe_benchmark(f"validation-{benchmark.name}", benchmark, console)
    describe_model("model", facts, context)
    if not data.validation and not data.benchmarks:
        console.print("note    no validation set: the most recent checkpoints are kept")
    describe_output(context, run_dir)


# Data sets of a run: from the configuration to preferences, and from those to tokens.

SHOWN_AFTER = 512
_AS_RENDERED = "as the chat template writes them"


@dataclass(slots=True, kw_only=True)
class PreferenceData:
    """The preferences and benchmarks of a run before tokenization, with their reports."""

    train: list[Preference]
    validation: dict[str, list[Preference]]
    reports: dict[str, DataReport]
    benchmarks: dict[str, BenchmarkSet] = field(default_factory=dict)
    """The benchmarks among the validation sets, by name."""

    @property
    def all_reports(self) -> dict[str, DataReport | BenchmarkSet]:
        """Return the reports of all data sets and benchmarks, by name."""
        named = {f"validation-{name}": benchmark for name, benchmark in self.benchmarks.items()}
        return {**self.reports, **named}


def load_data(config: RewardTrainingRun, *, fold: Fold | None = None) -> PreferenceData:
    """Read all training and validation sets of the run; a fold decides what is held out.

    Raises:
        DataError: A file or a row cannot be used, no row is left, or no row has a margin that the
            loss needs.
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
    # Each set was limited to as many; together they may be more.
    train = train[: data.max_samples]
    loaded = PreferenceData(train=train, validation={}, reports={})
    for name, benchmark in data.benchmark_sets().items():
        loaded.benchmarks[name] = BenchmarkSet.load(name, benchmark)
    loaded.reports["train"] = (
        reports[0] if len(reports) == 1 else DataReport.merge(reports, name="train")
    )
    _check_margins(config, loaded)
    for name, dataset in data.validation_sets().items():
        loaded.validation[name], loaded.reports[f"validation-{name}"] = _load(
            config, dataset, f"validation-{name}", None
        )
    if loaded.validation:
        return loaded
    own = own_validation_of(config)
    if holds_out(sets):
        shares = [one.split_validation_size for one in sets]
        loaded.train, held = (
            hold_out(train, shares=shares, seed=config.rm.seed)
            if fold is None
            else fold.hold_out(train)
        )
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
    # Margins need both a loss that reads them and rows that have them.
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
    """Return the validation set that comes with the training set; None if there is none.

    A run with several training sets has none.
    """
    sets = config.data.train_sets()
    return own_validation_preferences(sets[0]) if len(sets) == 1 else None


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
        separator=config.policy.reward_model_cfg.step_separator,
        needs_steps=config.rm.loss.reads_steps,
    )


def preference_texts(preferences: Sequence[Preference]) -> Iterator[str]:
    """Yield the texts of all prompts and completions of preferences."""
    for preference in preferences:
        yield from (message.content for message in preference.group.prompt)
        for completion in preference.group.completions_G:
            yield from (message.content for message in completion.messages)


def tokenise(
    preferences: Sequence[Preference],
    *,
    contract: ScoringContract,
    report: DataReport,
    overlong: Literal["truncate", "drop"],
    on_bad_row: Literal["error", "skip"],
    console: Console,
) -> list[PreferenceSample]:
    """Tokenize preferences; what is left out or truncated is counted in the report.

    Left out are rows that the template refuses (if `on_bad_row` is `skip`), over-long ones (if
    `overlong` is `drop`, and those of a process reward model always, because their steps cannot all
    be read), and answers that have the tokens of an answer with another rank: their scores are
    equal, so that they teach nothing.
    """
    from laurel.types import PreferenceSample

    rules = contract.rules
    reads_steps = rules.steps is not None
    drops_cut = overlong == "drop" or reads_steps
    if rules.has_plain_contents:
        groups = ((one.source, one.group) for one in preferences)
        report.note_control_tokens(
            (
                (source, (group.prompt, *(one.messages for one in group.completions_G)))
                for source, group in groups
            ),
            contract.control_token_in,
        )
    samples: list[PreferenceSample] = []
    num_same = 0

    def encode(some: Sequence[Preference]) -> list[TokenGroup]:
        return contract.encode(
            [preference.group for preference in some],
            sources=[preference.source for preference in some],
            exact_steps=reads_steps,
        )

    with console.status(f"tokenising {report.name}") as status:
        rows = encoded(preferences, encode, report=report, on_bad_row=on_bad_row)
        for number, (preference, tokens) in enumerate(rows, start=1):
            if number % SHOWN_AFTER == 0:
                status.update(f"tokenising {report.name}: {number} of {len(preferences)}")
            is_cut = any(tokens.truncated_G)
            if reads_steps and not is_cut and tokens.num_reads_G != preference.num_outputs_G:
                raise DataError(
                    f"{preference.source}: the answers have {list(preference.num_outputs_G)} "
                    f"steps, and {list(tokens.num_reads_G)} are found in their texts: the "
                    "end of a step and the separator after it make another separator. Choose "
                    "another policy.reward_model_cfg.step_separator"
                )
            if drops_cut and is_cut:
                report.drop("over-long", preference.source)
                continue
            kept = distinct_answers(preference, tokens)
            if not kept:
                why = f"cut to {rules.max_length:,} tokens" if is_cut else _AS_RENDERED
                report.drop("same tokens", preference.source, kind=why)
                continue
            if len(kept) < len(preference.ranks_G):
                num_same += len(preference.ranks_G) - len(kept)
                preference, tokens = preference.select(kept), tokens.select(kept)
            samples.append(PreferenceSample(preference=preference, tokens=tokens))
    if num_same:
        report.notes.append(
            f"{counted_that(num_same, 'answer', 'were')} left out of rows of several, because each "
            "has the tokens of an answer with another rank"
        )
    if not samples:
        over_long = report.dropped.get("over-long")
        if over_long is not None and over_long.count == len(preferences):
            raise DataError(
                f"{report.name}: all {len(preferences)} rows are longer than {rules.max_length} "
                "tokens; raise data.max_input_seq_length or set data.overlong=truncate"
                + (" (not of a process reward model)" if reads_steps else "")
            )
        same = report.dropped.get("same tokens")
        are_cut = same is not None and any(kind.startswith("cut") for kind in same.kinds)
        raise DataError(
            no_rows_left(report)
            + (
                ". Raise data.max_input_seq_length or policy.max_total_sequence_length, or cut the "
                "other side (data.truncation_side)"
                if are_cut
                else ""
            )
        )
    if (place := _lost_thoughts(samples, contract)) is not None:
        report.notes.append(
            "the chat template leaves out the thoughts of answers (<think> ... </think>), so that "
            f"nothing is learned from them (first in {place})"
        )
    if num_same or len(samples) < len(preferences):
        report.describe([sample.preference for sample in samples])
    report.num_truncated = sum(sum(sample.tokens.truncated_G) for sample in samples)
    lengths = [length for sample in samples for length in sample.tokens.lengths_G]
    report.set_lengths(lengths)
    warning = report.warning_of_cuts(len(lengths), rules.max_length)
    if warning is not None:
        console.print(f"warning: {warning}")
    return samples


def _lost_thoughts(samples: Sequence[PreferenceSample], contract: ScoringContract) -> str | None:
    """Return the place of the first answer with thoughts if the template leaves these out."""
    for preference in (sample.preference for sample in samples):
        is_lost = contract.loses_thoughts(preference.group)
        if is_lost is not None:
            return preference.source if is_lost else None
    return None


def distinct_answers(preference: Preference, tokens: TokenGroup) -> list[int]:
    """Return the indices of the answers whose tokens are not those of one with another rank.

    The list is empty if less than a comparison is left, or if all of several answers are the same.
    """
    texts = [ids.tobytes() for ids in tokens.branches_ids_G]
    ranks: dict[bytes, set[int]] = {}
    for text, rank in zip(texts, preference.ranks_G, strict=True):
        ranks.setdefault(text, set()).add(rank)
    kept = [index for index, text in enumerate(texts) if len(ranks[text]) == 1]
    compares = len(set(preference.ranks_G)) > 1
    is_left = (
        len({preference.ranks_G[index] for index in kept}) > 1
        if compares
        else len(ranks) > 1 or len(texts) == 1
    )
    return kept if is_left else []
