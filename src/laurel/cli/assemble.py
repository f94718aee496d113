"""From a configuration to the objects of a run: the only file that knows every concrete class."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from laurel.algorithms.selection import Selection, select_by
from laurel.algorithms.stopping import Deadline, StopRequest
from laurel.cli.load_scorer import quiet_libraries
from laurel.cli.preference_data import (
    PreferenceData,
    load_data,
    own_validation_of,
    texts_of,
    tokenise_all,
)
from laurel.config.load import to_yaml
from laurel.config.reward_training import RewardTrainingRun
from laurel.data.report import DataReport
from laurel.errors import CheckpointError, DataError, ModelError
from laurel.models.checkpoint import CheckpointStore
from laurel.models.directory_lock import LOCK_NAME
from laurel.observe.loggers import check_available, next_run_dir, open_loggers
from laurel.observe.progress import TrainingProgress

if TYPE_CHECKING:
    from torch import nn

    from laurel.algorithms.learner import Learner
    from laurel.algorithms.reward_training import Outcome
    from laurel.algorithms.run_state import RunState
    from laurel.models.load import LoadedRewardModel
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
    deadline = Deadline(config.checkpointing.checkpoint_must_save_by)
    selection = check_early(config)
    with ExitStack() as stack:
        resume_from, store = _open_store(config, selection, stack, console)
        data = load_data(config)
        return _train(config, data, selection, store, resume_from, deadline, stack, console)


def check_early(config: RewardTrainingRun) -> Selection:
    """What a configuration alone can get wrong.

    Raises:
        UserError: The first thing found.
    """
    check_available(config.logger)
    name = config.policy.model_name
    if config.policy.scratch is None and name and name.startswith((".", "/", "~")):
        directory = Path(name).expanduser()
        if not (directory / "config.json").is_file():
            what = "has no config.json" if directory.is_dir() else "does not exist"
            raise ModelError(
                f"policy.model_name={name} looks like a directory and {what}; name a directory "
                "that holds a Hugging Face model, or a model on the hub"
            )
    sets = list(config.data.validation_sets())
    if not sets and (config.data.split_validation_size or own_validation_of(config)):
        sets = ["default"]
    return select_by(
        config.checkpointing.metric_name,
        config.checkpointing.higher_is_better,
        sets=sets if config.rm.val_period > 0 or config.rm.val_at_end else [],
        attributes=config.policy.reward_model_cfg.attributes,
    )


def _open_store(
    config: RewardTrainingRun, selection: Selection, stack: ExitStack, console: Console
) -> tuple[Path | None, CheckpointStore | None]:
    """The locked store, and the checkpoint that the run goes on from."""
    saving = config.checkpointing
    if not saving.enabled:
        return None, None
    store = CheckpointStore(
        saving.checkpoint_dir,
        keep_top_k=saving.keep_top_k,
        metric_name=selection.key,
        higher_is_better=selection.higher_is_better,
    )
    root = store.root
    made = [path for path in (root, *root.parents) if not path.exists()]
    stack.enter_context(store)
    stack.callback(_remove_unused, made)
    if saving.resume == "never":
        if store.steps():
            raise CheckpointError(
                f"checkpointing.resume=never and {saving.checkpoint_dir} holds checkpoints of "
                f"{len(store.steps())} steps; choose another checkpoint_dir or resume=auto"
            )
        return None, store
    newest = store.newest_whole()
    for skipped in newest.skipped:
        console.print(f"warning: skipped a checkpoint: {skipped}")
    if newest.path is None and (saving.resume == "required" or newest.skipped):
        raise CheckpointError(
            f"{saving.checkpoint_dir} holds no whole checkpoint to go on from"
            + (" (see the warnings above)" if newest.skipped else "")
            + "; start with checkpointing.resume=auto in an empty directory"
        )
    return newest.path, store


def _remove_unused(made: Sequence[Path]) -> None:
    """Take away the directories that were made for checkpoints, if the run never saved one.

    Args:
        made: The checkpoint directory and those above it, innermost first; empty where it was
            there before.
    """
    with contextlib.suppress(OSError):
        if made and os.listdir(made[0]) == [LOCK_NAME]:
            (made[0] / LOCK_NAME).unlink()
            for directory in made:
                directory.rmdir()


# ------------------------------------------------------------------------------------------- run


def _train(
    config: RewardTrainingRun,
    data: PreferenceData,
    selection: Selection,
    store: CheckpointStore | None,
    resume_from: Path | None,
    deadline: Deadline,
    stack: ExitStack,
    console: Console,
) -> Outcome:
    """Everything after the data: model, tokens, loop. Nothing is written before all is well."""
    loaded, difference = _load_model(config, data, resume_from, console)
    from laurel.algorithms.batches import Batcher
    from laurel.algorithms.losses import RewardLoss
    from laurel.algorithms.reward_training import RewardTraining, total_steps
    from laurel.algorithms.run_state import Position, read_run_dir

    contract = loaded.contract
    train, validation = tokenise_all(config, data, contract, console)
    loss = RewardLoss(config.rm.loss, reward_weights_K=contract.rules.attribute_weights)
    if not loss.count([sample.preference for sample in train]):
        raise DataError(f"no training row teaches rm.loss.type={config.rm.loss.type} anything")
    learner = _learner(config, loaded.model)
    run_dir = (resume_from and read_run_dir(resume_from)) or next_run_dir(config.logger.log_dir)
    golden_set = next(iter(validation.values()), train)
    state = _run_state(config, data, loaded, train, golden_set, run_dir)
    position = state.restore(resume_from, learner) if resume_from else Position()
    _describe(config, data, loaded, difference, run_dir, console)
    if resume_from:
        console.print(f"going on from {resume_from}, after step {position.step}")
    progress = TrainingProgress(total_steps(config, len(train)), position.step, console)
    logger = open_loggers(
        config.logger,
        run_dir=run_dir,
        run_config=config.model_dump(mode="json"),
        resumed_step=position.step if resume_from else None,
        warn=progress.message,
    )
    stack.callback(logger.close)
    (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    _write_data_report(run_dir, data)
    stop = stack.enter_context(
        StopRequest(lambda name: progress.message(f"{name}: saving after this step, then ending"))
    )
    training = RewardTraining(
        config, learner=learner, loss=loss,
        batcher=Batcher(loaded.model, config.policy, pad_id=contract.rules.pad_id or 0),
        contract=contract, train=train, validation=validation, selection=selection, state=state,
        store=store, logger=logger, progress=progress, stop=stop, deadline=deadline,
    )  # fmt: skip
    return training.run(position)


def _write_data_report(run_dir: Path, data: PreferenceData) -> None:
    reports = {name: report.to_dict() for name, report in data.reports.items()}
    text = json.dumps(reports, indent=1)
    (run_dir / "data_report.json").write_text(text + "\n", encoding="utf-8")


def _run_state(
    config: RewardTrainingRun,
    data: PreferenceData,
    loaded: LoadedRewardModel,
    train: Sequence[PreferenceSample],
    golden_set: Sequence[PreferenceSample],
    run_dir: Path,
) -> RunState:
    from laurel.algorithms.run_state import NUM_GOLDEN_GROUPS, RunState, settings_of

    return RunState(
        model=loaded.model,
        contract=loaded.contract,
        train=train,
        golden=[sample.preference.group for sample in golden_set[:NUM_GOLDEN_GROUPS]],
        identity=settings_of(config),
        config_yaml=to_yaml(config),
        card=_card(config, data, loaded),
        run_dir=run_dir,
        save_optimizer=config.checkpointing.save_optimizer,
        batch_tokens=config.policy.token_budget(config.policy.sequence_packing),
    )


def _learner(config: RewardTrainingRun, model: nn.Module) -> Learner:
    from laurel.algorithms.learner import Learner

    return Learner(
        model,
        optimizer=config.policy.optimizer,
        scheduler=config.policy.scheduler,
        max_grad_norm=config.policy.max_grad_norm,
    )


def _load_model(
    config: RewardTrainingRun, data: PreferenceData, resume_from: Path | None, console: Console
) -> tuple[LoadedRewardModel, float]:
    """The model and what the self-check of its forests found."""
    with console.status("loading torch and the model"):
        from torch import nn

        from laurel.algorithms.run_state import check_same_run, settings_of
        from laurel.distributed.process import prepare
        from laurel.models.load import load_reward_model
        from laurel.rewards.local import check_golden
        from laurel.rewards.self_check import check_paths

        quiet_libraries()
        if resume_from:
            check_same_run(resume_from, settings_of(config))
        _learner(config, nn.Linear(1, 1))  # what torch refuses is told before anything is loaded
        device = prepare(config.cluster, seed=config.rm.seed)
        loaded = load_reward_model(
            config.policy,
            seed=config.rm.seed,
            max_length=config.data.max_input_seq_length or config.policy.max_total_sequence_length,
            truncation_side=config.data.truncation_side,
            device=device,
            texts=texts_of(data.train),
            resume_from=resume_from,
        )
        difference = check_paths(loaded.model)
        check_golden(loaded.model, loaded.contract)
    return loaded, difference


def _describe(
    config: RewardTrainingRun,
    data: PreferenceData,
    loaded: LoadedRewardModel,
    difference: float,
    run_dir: Path,
    console: Console,
) -> None:
    """Say what was read, loaded and decided."""
    for report in data.reports.values():
        console.print(report.render())
    parameters = sum(p.numel() for p in loaded.model.parameters())
    trained = sum(p.numel() for p in loaded.model.parameters() if p.requires_grad)
    kind = type(loaded.model.classifier).__name__
    console.print(
        f"model   {kind} from {loaded.base_model}: {parameters / 1e6:.1f}M parameters"
        + (f", {trained / 1e6:.2f}M trained" if trained != parameters else "")
        + f", {config.policy.precision} on {loaded.model.device.type}"
    )
    if loaded.model.path == "forest":
        console.print(f"path    token forest; self-check against one-by-one: {difference:.1e}")
    for note in loaded.notes:
        console.print(f"note    {note}")
    if not data.validation:
        console.print("note    no validation set: the most recent checkpoints are kept")
    console.print(f"logs    {run_dir}")
    if config.checkpointing.enabled:
        console.print(f"saves   {config.checkpointing.checkpoint_dir}")


def _card(
    config: RewardTrainingRun, data: PreferenceData, loaded: LoadedRewardModel
) -> dict[str, object]:
    def line(report: DataReport) -> str:
        left_out = ", ".join(f"{v.count} {reason}" for reason, v in report.dropped.items())
        return f"{report.origin or report.name}: {report.num_kept} of {report.num_read} rows" + (
            f" (left out: {left_out})" if left_out else ""
        )

    return {
        "base_model": loaded.base_model,
        "data": {name: line(report) for name, report in data.reports.items()},
        "settings": {
            "loss": config.rm.loss.type,
            "optimizer": f"{config.policy.optimizer.name} {config.policy.optimizer.kwargs}",
            "batch": f"{config.policy.train_global_batch_size} groups",
            "precision": config.policy.precision,
            "seed": config.rm.seed,
        },
    }
