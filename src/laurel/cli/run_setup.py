"""What every training command does before and around its loop."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laurel.algorithms.selection import Selection
from laurel.algorithms.stopping import Deadline, StopRequest
from laurel.config.load import to_yaml
from laurel.config.schema import CheckpointingConfig, LoggerConfig
from laurel.config.section import Section
from laurel.errors import CheckpointError
from laurel.models.checkpoint import CheckpointStore
from laurel.models.directory_lock import LOCK_NAME
from laurel.observe.counts import counted
from laurel.observe.loggers import next_run_dir, open_loggers
from laurel.observe.progress import TrainingProgress

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.algorithms.run_state import Position, RunState
    from laurel.algorithms.training_loop import Surroundings


def open_store(
    saving: CheckpointingConfig, selection: Selection, stack: ExitStack, console: Console
) -> tuple[Path | None, CheckpointStore | None]:
    """The locked store, and the checkpoint that the run goes on from."""
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
                f"{counted(len(store.steps()), 'step')}; choose another checkpoint_dir or "
                "resume=auto"
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


def choose_run_dir(logging: LoggerConfig, resume_from: Path | None) -> Path:
    """Where the run logs: where it logged before, or the next free directory."""
    from laurel.algorithms.run_state import read_run_dir

    return (resume_from and read_run_dir(resume_from)) or next_run_dir(logging.log_dir)


def surround(
    config: Section,
    logging: LoggerConfig,
    *,
    state: RunState,
    position: Position,
    total_steps: int,
    store: CheckpointStore | None,
    selection: Selection,
    deadline: Deadline,
    is_resumed: bool,
    reports: Mapping[str, Any],
    stack: ExitStack,
    console: Console,
    unit: str = "pairs",
) -> Surroundings:
    """Open the loggers, write what the run was given, and listen to signals.

    Args:
        config: The whole configuration of the run.
        logging: Its logger section.
        state: Writes checkpoints.
        position: Where the run begins.
        total_steps: Where it ends.
        store: Holds checkpoints; None saves none.
        selection: What makes a checkpoint the best.
        deadline: When the run must have saved.
        is_resumed: Whether it goes on from a checkpoint.
        reports: Data reports by name; each has `to_dict`.
        stack: Closes what is opened.
        console: Shows progress.
        unit: What a step takes in.
    """
    from laurel.algorithms.training_loop import Surroundings

    run_dir = state.run_dir
    progress = TrainingProgress(total_steps, position.step, console, unit=unit)
    logger = open_loggers(
        logging,
        run_dir=run_dir,
        run_config=config.model_dump(mode="json"),
        resumed_step=position.step if is_resumed else None,
        warn=progress.message,
    )
    stack.callback(logger.close)
    (run_dir / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    text = json.dumps({name: report.to_dict() for name, report in reports.items()}, indent=1)
    (run_dir / "data_report.json").write_text(text + "\n", encoding="utf-8")
    stop = stack.enter_context(
        StopRequest(lambda name: progress.message(f"{name}: saving after this step, then ending"))
    )
    return Surroundings(
        state=state, store=store, selection=selection, logger=logger, progress=progress,
        stop=stop, deadline=deadline,
    )  # fmt: skip
