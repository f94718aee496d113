"""From a configuration to the objects of a run: the only file that knows every concrete class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from laurel.algorithms.selection import Selection, select_by
from laurel.algorithms.stopping import Deadline
from laurel.cli.benchmark_setup import describe_benchmark
from laurel.cli.card_facts import facts_of_reward_model
from laurel.cli.found_model import with_found_model
from laurel.cli.places import Places, open_places, plan_places
from laurel.cli.preference_data import (
    PreferenceData,
    load_data,
    own_validation_of,
    texts_of,
    tokenise_all,
)
from laurel.cli.run_setup import choose_run_dir, describe_data, open_store, surround
from laurel.cli.trained_model import TrainedModel, describe_model, load_trained_model
from laurel.config.load import to_yaml
from laurel.config.reward_training import RewardTrainingRun
from laurel.errors import ConfigError, DataError
from laurel.evaluation.benchmark_sets import BenchmarkSet, selectable
from laurel.models.checkpoint import CheckpointStore
from laurel.observe.loggers import check_available

if TYPE_CHECKING:
    from laurel.algorithms.learner_worker import ModelFacts
    from laurel.algorithms.reward_run_state import RewardRunState
    from laurel.algorithms.training_loop import Outcome
    from laurel.models.scoring import ScoringContract
    from laurel.types import PreferenceSample


def train_reward_model(
    config: RewardTrainingRun, *, console: Console, warnings: Sequence[str] = ()
) -> Outcome:
    """Run `laurel rm` from beginning to end.

    What can be told wrong without loading anything is told first, then what needs only the data,
    then what needs the model; torch is imported after the data is read.
    """
    for warning in warnings:
        console.print(f"warning: {warning}")
    config = with_found_model(config, console)
    deadline = Deadline(config.checkpointing.checkpoint_must_save_by)
    selection = check_early(config)
    planned = plan_places(config)
    with ExitStack() as stack:
        resume_from, store = open_store(config.checkpointing, selection, stack, console)
        data = load_data(config)
        check_figure(selection, data.benchmarks)
        places = open_places(planned, stack, console)
        return _train(config, data, places, selection, store, resume_from, deadline, stack, console)


def check_early(config: RewardTrainingRun) -> Selection:
    """What a configuration alone can get wrong.

    Raises:
        UserError: The first thing found.
    """
    check_available(config.logger)
    sets, benchmarks = list(config.data.validation_sets()), config.data.benchmark_sets()
    if not sets and (config.data.split_validation_size or own_validation_of(config)):
        sets = ["default"]
    if twice := benchmarks.keys() & set(sets):
        raise ConfigError(
            f"data: {min(twice)!r} is the name of a benchmark and that of the rows which are held "
            "out for validation; call the benchmark otherwise"
        )
    is_validated = config.rm.val_period > 0 or config.rm.val_at_end
    figures = {name: selectable(one.benchmark) for name, one in benchmarks.items()}
    return select_by(
        config.checkpointing.metric_name,
        config.checkpointing.higher_is_better,
        sets=sets if is_validated else [],
        attributes=config.policy.reward_model_cfg.attributes,
        benchmarks=figures if is_validated else {},
    )


def check_figure(selection: Selection, benchmarks: Mapping[str, BenchmarkSet]) -> None:
    """Refuse to select by a figure that the rows of a benchmark do not give.

    Raises:
        ConfigError: It is absent, or there is none because the benchmark was cut.
    """
    for name, benchmark in benchmarks.items():
        figures = {f"validation-{name}_{key}": key for key in selectable(benchmark.benchmark)}
        figure, possible = figures.get(selection.key or ""), benchmark.possible()
        if figure is None or figure in possible:
            continue
        why = "; ".join(benchmark.notes())
        raise ConfigError(
            f"checkpointing.metric_name={selection.key}: these rows of {benchmark.title} give no "
            f"{figure} ({why}). They give: "
            + ", ".join(f"validation-{name}_{key}" for key in possible)
        )


# ------------------------------------------------------------------------------------------- run


def _train(
    config: RewardTrainingRun,
    data: PreferenceData,
    places: Places,
    selection: Selection,
    store: CheckpointStore | None,
    resume_from: Path | None,
    deadline: Deadline,
    stack: ExitStack,
    console: Console,
) -> Outcome:
    """Everything after the data: model, tokens, loop. Nothing is written before all is well."""
    model = _load_model(config, data, places, resume_from, console)
    from laurel.algorithms.batches import Batcher
    from laurel.algorithms.epoch_training import EpochParts, total_steps
    from laurel.algorithms.losses import RewardLoss
    from laurel.algorithms.reward_training import RewardTraining
    from laurel.algorithms.run_state import Position

    contract = model.facts.contract
    assert contract is not None
    train, validation = tokenise_all(config, data, contract, console)
    loss = RewardLoss(config.rm.loss, reward_weights_K=contract.rules.attribute_weights)
    if not loss.count([sample.preference for sample in train]):
        raise DataError(
            f"no training row teaches rm.loss.type={config.rm.loss.type} anything: its rows are "
            "ties, or have none of the ratings that it reads. Choose another rm.loss.type, or "
            "give rows in which one answer is better"
        )
    run_dir = choose_run_dir(config.logger, resume_from, console)
    golden_set = next(iter(validation.values()), train)
    state = _run_state(config, data, model, contract, train, golden_set, run_dir)
    position = state.restore(resume_from) if resume_from else Position()
    _describe(config, data, model.facts, places, run_dir, console)
    if resume_from:
        console.print(f"going on from {resume_from}, after step {position.step}")
    surroundings = surround(
        config, state=state, position=position, facts=model.facts,
        total_steps=total_steps(config, len(train)), store=store, selection=selection,
        deadline=deadline, is_resumed=resume_from is not None, reports=data.all_reports,
        stack=stack, console=console,
    )  # fmt: skip
    batcher = Batcher(
        model.facts.path, config.policy, pad_id=contract.rules.pad_id or 0,
        places=model.learner.num_places,
    )  # fmt: skip
    parts = EpochParts(
        learner=model.learner, batcher=batcher, train=train, validation=validation,
        benchmarks=data.benchmarks,
    )  # fmt: skip
    training = RewardTraining(config, surroundings, parts, loss=loss, contract=contract)
    return training.run(position)


def _run_state(
    config: RewardTrainingRun,
    data: PreferenceData,
    model: TrainedModel,
    contract: ScoringContract,
    train: Sequence[PreferenceSample],
    golden_set: Sequence[PreferenceSample],
    run_dir: Path,
) -> RewardRunState:
    from laurel.algorithms.reward_run_state import NUM_GOLDEN_GROUPS, RewardRunState, settings_of

    return RewardRunState(
        model.learner,
        contract=contract,
        path=model.facts.path,
        weights_dtype=model.facts.weights_dtype,
        train=train,
        golden=[sample.preference.group for sample in golden_set[:NUM_GOLDEN_GROUPS]],
        identity=settings_of(config),
        config_yaml=to_yaml(config),
        card=facts_of_reward_model(config, data.reports, data.benchmarks, model.facts),
        run_dir=run_dir,
        save_optimizer=config.checkpointing.save_optimizer,
        saves_in_background=config.checkpointing.saves_in_background(model.facts.device),
        batch_tokens=config.policy.token_budget(config.policy.sequence_packing),
    )


def _load_model(
    config: RewardTrainingRun,
    data: PreferenceData,
    places: Places,
    resume_from: Path | None,
    console: Console,
) -> TrainedModel:
    with console.status("loading torch"):
        from laurel.algorithms.reward_run_state import settings_of
        from laurel.models.load import load_reward_model
    load = partial(
        load_reward_model,
        config.policy,
        seed=config.rm.seed,
        max_length=config.data.max_input_seq_length or config.policy.max_total_sequence_length,
        truncation_side=config.data.truncation_side,
        texts=tuple(texts_of(data.train)) if config.policy.scratch is not None else (),
        resume_from=resume_from,
    )
    return load_trained_model(
        config.policy, config.cluster, places, load=load, seed=config.rm.seed,
        identity=settings_of(config), resume_from=resume_from, console=console,
    )  # fmt: skip


def _describe(
    config: RewardTrainingRun,
    data: PreferenceData,
    facts: ModelFacts,
    places: Places,
    run_dir: Path,
    console: Console,
) -> None:
    """Say what was read, loaded and decided."""
    describe_data(data.reports, run_dir, console)
    for benchmark in data.benchmarks.values():
        describe_benchmark(f"validation-{benchmark.name}", benchmark, console)
    describe_model("model", facts, config.policy, places, console)
    if not data.validation and not data.benchmarks:
        console.print("note    no validation set: the most recent checkpoints are kept")
    console.print(f"logs    {run_dir}")
    if config.checkpointing.enabled:
        console.print(f"saves   {config.checkpointing.checkpoint_dir}")
