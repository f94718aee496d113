"""Saves GRPO state in checkpoints: the position in the task stream, and batches generated ahead."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laurel.config.grpo import HealthConfig
from laurel.data.tasks import EndlessTasks
from laurel.grpo.grading import RolloutStats
from laurel.grpo.source import Batch, RolloutSource
from laurel.observe.health import Alarms
from laurel.protocols import Environment
from laurel.training.learner import Learner
from laurel.training.state import CheckpointParts, PolicyRunState, hash_of, write_bad_rows
from laurel.types import Branch, Message, Rollout, RolloutGroup, StepReward, Task, Turn


class GRPORunState(PolicyRunState):
    """Saves and restores a GRPO run.

    A checkpoint holds the policy, the position in the task stream, the rollouts generated ahead,
    and the state of environments and alarms.
    """

    def __init__(
        self,
        learner: Learner,
        parts: CheckpointParts,
        rows: Mapping[str, str],
        *,
        source: RolloutSource,
        environments: Mapping[str, Environment],
        alarms: Alarms | None = None,
    ) -> None:
        super().__init__(learner, parts, rows)
        self._source = source
        self._environments = environments
        self.alarms = alarms or Alarms(HealthConfig(enabled=False))

    def more(self) -> dict[str, Any]:
        """Return the state that only GRPO adds to a checkpoint.

        This is the position in the task stream, the batches generated ahead, and the states of
        environments and alarms. The call waits until no rollout is in progress.
        """
        return {
            "consumed": self._source.consumed,
            "ahead": [batch_to_dict(batch) for batch in self._source.settle()],
            "environments": {
                name: environment.state_dict()
                for name, environment in self._environments.items()
                if environment.spec.has_state
            },
            "alarms": self.alarms.state_dict(),
        }

    def restore_more(self, more: Mapping[str, Any]) -> None:
        """Restore the state of GRPO from `more`, which the method `more` returned."""
        known = self._source.tasks
        if isinstance(known, EndlessTasks):
            saved = {group["task"] for batch in more["ahead"] for group in batch["groups"]}
            tasks = {task_id: known.of_id(task_id) for task_id in saved}
        else:
            tasks = {task.id: task for task in known}
        if "notes" in more:
            # Older checkpoints hold notes apart, by environment.
            left = {name: iter(_notes_of_rollouts(noted)) for name, noted in more["notes"].items()}
            for group in (group for batch in more["ahead"] for group in batch["groups"]):
                name = tasks[group["task"]].environment
                for rollout in group["rollouts"]:
                    if name in left and rollout["reward"] is not None:
                        rollout["note"] = next(left[name], None)
        ahead = [batch_from_dict(batch, tasks) for batch in more["ahead"]]
        self._source.put_back(ahead, consumed=more["consumed"])
        for name, state in more["environments"].items():
            self._environments[name].load_state_dict(state)
        if "alarms" in more:  # older checkpoints have none
            self.alarms.load_state_dict(more["alarms"])


_ARRAYS = ("ids_L", "mask_L", "logprobs_L")


def batch_to_dict(batch: Batch) -> dict[str, Any]:
    """Convert a batch to a dict that a checkpoint can hold; each task is saved as its id."""
    return {
        "step": batch.step,
        "clock": asdict(batch.stats),
        "num_batches": batch.num_batches,
        "num_discarded": batch.num_discarded,
        "num_without_signal": batch.num_without_signal,
        "num_replaced": batch.num_replaced,
        "failures_left_out": batch.failures_left_out,
        "groups": [
            {
                "id": group.id,
                "task": group.task.id,
                "prompt_ids": torch.from_numpy(np.array(group.prompt_ids)),
                "rollouts": [_rollout_to_dict(rollout) for rollout in group.rollouts_G],
                "greedy": None if group.greedy is None else _rollout_to_dict(group.greedy),
            }
            for group in batch.groups
        ],
    }


def _rollout_to_dict(rollout: Rollout) -> dict[str, Any]:
    return {name: getattr(rollout, name) for name in Rollout.__dataclass_fields__} | {
        "messages": [[m.role, m.content] for m in rollout.messages],
        "components": dict(rollout.components),
        "steps": None if rollout.steps is None else [list(s) for s in rollout.steps],
        "branch": None if rollout.branch is None else list(rollout.branch),
        "turns": [list(turn) for turn in rollout.turns],
        **{k: torch.from_numpy(np.array(getattr(rollout, k))) for k in _ARRAYS},
    }


def batch_from_dict(saved: Mapping[str, Any], tasks: Mapping[str, Task]) -> Batch:
    """Convert the result of `batch_to_dict` to a batch."""
    return Batch(
        step=saved["step"],
        stats=RolloutStats(**saved["clock"]),
        num_batches=saved["num_batches"],
        num_discarded=saved["num_discarded"],
        num_without_signal=saved["num_without_signal"],
        num_replaced=saved.get("num_replaced", 0),  # older checkpoints have neither
        failures_left_out=dict(saved.get("failures_left_out", {})),
        groups=[
            RolloutGroup(
                id=group["id"],
                task=tasks[group["task"]],
                prompt_ids=group["prompt_ids"].numpy(),
                rollouts_G=tuple(map(_rollout_from_dict, group["rollouts"])),
                greedy=_rollout_from_dict(group["greedy"]) if group.get("greedy") else None,
            )
            for group in saved["groups"]
        ],
    )


def _rollout_from_dict(saved: Mapping[str, Any]) -> Rollout:
    return Rollout(
        **{
            **saved,
            "messages": tuple(Message(*said) for said in saved["messages"]),
            "steps": _steps_from(saved.get("steps")),
            "turns": tuple(Turn(*one) for one in saved.get("turns", ())),
            "invalid_turns": tuple(saved.get("invalid_turns", ())),
            "branch": Branch(*saved["branch"]) if saved.get("branch") else None,
            "begins": tuple(saved.get("begins", ())),
            **{name: saved[name].numpy() for name in _ARRAYS},
        }
    )


def _steps_from(saved: Sequence[Sequence[Any]] | None) -> tuple[StepReward, ...] | None:
    # Older checkpoints have none.
    return None if saved is None else tuple(StepReward(*step) for step in saved)


def _notes_of_rollouts(noted: Any) -> Sequence[Any]:
    if not isinstance(noted, Mapping):
        return noted or ()
    # A composite has notes of its own and of its parts, which may be composites.
    parts = {name: _notes_of_rollouts(of_part) for name, of_part in noted["parts"].items()}
    return [
        rewards and {"rewards": rewards, "parts": {name: p[i] for name, p in parts.items() if p}}
        for i, rewards in enumerate(noted["own"])
    ]


def fingerprint_of_tasks(tasks: Sequence[Task]) -> str:
    """Return a hash of the prompts and metadata of a task set, in order."""
    rows = ([[m.role, m.content] for m in task.prompt] for task in tasks)
    return hash_of(
        json.dumps([row, task.id, task.environment, dict(task.metadata)], default=repr)
        for row, task in zip(rows, tasks, strict=True)
    )


def write_bad_rollouts(
    run_dir: Path, step: int, groups: Sequence[RolloutGroup], reason: str
) -> Path:
    """Write the rollouts of a step whose update was not applied to a file; return its path."""
    rows = (
        {
            "source": group.task.source,
            "prompt": [[m.role, m.content] for m in group.task.prompt],
            "completions": [
                [[m.role, m.content] for m in rollout.messages] for rollout in group.rollouts_G
            ],
            "rewards": [rollout.reward for rollout in group.rollouts_G],
            "steps": [rollout.steps for rollout in group.rollouts_G],
            "lengths": [len(rollout.ids_L) for rollout in group.rollouts_G],
        }
        for group in groups
    )
    return write_bad_rows(run_dir, step, rows, reason=reason)
