"""Small learners, in this process and over ranks, and what all of them are given to do."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tiny
from laurel.config.grpo import GRPOPolicyConfig
from laurel.config.policy import ClusterConfig, NamedCall, RewardPolicyConfig
from laurel.config.reward_model import LossConfig
from laurel.data.forest import MicroBatch, to_forest
from laurel.models.forest.policy import Reference, fast_matmul
from laurel.models.loading.policy import load_policy
from laurel.models.loading.reward_model import load_reward_model
from laurel.models.spec import ParallelShape
from laurel.run.model import model_spec
from laurel.training.learner import Learner, LocalLearner, Update
from laurel.training.learner_group import LearnerGroup, LearnerWorker
from laurel.training.losses import LossOutput, RewardLoss
from laurel.types import Preference, TokenGroup, group_of
from model_directories import save_model
from policy_batches import labels, loss_of

SHAPES = [(9, [5, 3]), (4, [2, 6]), (13, [1, 8]), (2, [4, 4]), (30, [9, 2])]
"""Of groups: trunk and two completions each, other numbers of tokens in every group."""
GROUPS = tiny.random_groups(3, SHAPES)
PART = 12
"""Tokens of a pass where some of the groups are computed in parts."""
LIMIT = 0.05
"""Of the gradient's norm; always exceeded."""
TRAINING: dict[str, Any] = {
    # The change of a weight is the gradient, so comparing weights compares gradients.
    "optimizer": NamedCall(name="torch.optim.SGD", kwargs={"lr": 1.0, "momentum": 0.5}),
    "scheduler": [NamedCall(name="torch.optim.lr_scheduler.ExponentialLR", kwargs={"gamma": 0.5})],
    "max_grad_norm": LIMIT,
}
CPU = ClusterConfig(device="cpu", cpu_threads=1)


def write(kind: str, directory: Path, name: str = "qwen3") -> Path:
    """A small model with large random weights."""
    options: dict[str, Any] = {"std": 0.05, "seed": 1, "num_hidden_layers": 2}
    if kind == "policy":
        network = tiny.tiny_policy(name, **options).causal_lm
    else:
        network = tiny.tiny_reward_model(name, **options).classifier
    network.set_attn_implementation("eager")
    return save_model(directory, network)


def section(kind: str, directory: Path, *, tp: int = 1, cp: int = 1, **changes: Any) -> Any:
    """The policy section of a run with such a model."""
    parallel = {"tensor_parallel_size": tp, "context_parallel_size": cp}
    changes["dtensor_cfg"] = {**parallel, **changes.get("dtensor_cfg", {})}
    settings = {"model_name": str(directory), "precision": "float32", **TRAINING, **changes}
    if kind == "policy":
        return GRPOPolicyConfig(**settings)
    return RewardPolicyConfig(**settings)


def loader(kind: str, policy: Any) -> Callable[..., Any]:
    """Loads the model of a section, as a worker wants it."""
    spec = model_spec(policy)
    if kind == "policy":
        return partial(load_policy, spec, seed=1, max_length=128)
    return partial(load_reward_model, spec, seed=1, max_length=128, truncation_side="left")


def local(kind: str, directory: Path, **changes: Any) -> LocalLearner:
    """A learner of this process alone."""
    policy = section(kind, directory, **changes)
    loaded = loader(kind, policy)(device=torch.device("cpu"))
    is_policy = kind == "policy"
    learner = LocalLearner(
        loaded.model,
        optimizer=policy.optimizer,
        scheduler=policy.scheduler,
        max_grad_norm=policy.max_grad_norm,
        reference=Reference.of(loaded.model) if is_policy else None,
        tokenizer=loaded.tokenizer if is_policy else loaded.contract.tokenizer,
    )
    learner.matmul = fast_matmul if is_policy else None
    return learner


class HeldWorker(LearnerWorker):
    """A worker whose writing in the background can be held back."""

    def hold(self, gates: list[Path]) -> None:
        """Let nothing be written before somebody opens this rank's gate, a named pipe."""
        self._learner._writing.start(gates[self._place.rank].read_bytes)


def hold(learner: Any, directory: Path) -> list[Path]:
    """Hold back what a learner writes in the background; the gates, for `let_go`."""
    ranks = learner.group.size if isinstance(learner, LearnerGroup) else 1
    gates = [directory / f"gate-{rank}" for rank in range(ranks)]
    for gate in gates:
        os.mkfifo(gate)
    if isinstance(learner, LearnerGroup):
        learner.group.call("hold", gates)
    else:
        learner._writing.start(gates[0].read_bytes)
    return gates


def let_go(gates: list[Path]) -> None:
    """Let all ranks write."""
    for gate in gates:
        gate.write_bytes(b"")


def grouped(
    kind: str, directory: Path, make: Callable[..., Any], sizes: dict[str, int], **changes: Any
) -> LearnerGroup:
    """A learner over the group that `make(worker_class, ...)` makes."""
    shape = ParallelShape(**sizes)
    policy = section(kind, directory, tp=shape.tp, cp=shape.cp, **changes)
    group = make(
        HeldWorker,
        loader(kind, policy),
        shape=shape,
        optimizer=policy.optimizer,
        scheduler=policy.scheduler,
        max_grad_norm=policy.max_grad_norm,
        cluster=CPU,
        seed=1,
        load_reference=loader(kind, policy) if kind == "policy" else None,
    )
    return LearnerGroup(group, shape)


def micro_batches(
    kind: str,
    cut: list[list[int]],
    *,
    spoilt: int | None = None,
    is_tie: bool = False,
    part_tokens: int | None = None,
) -> list[Any]:
    """Groups as micro-batches; the loss of group `spoilt` is not a number."""
    return [
        MicroBatch(
            inputs=replace(to_forest([GROUPS[i] for i in part]), part_tokens=part_tokens),
            labels=[label(kind, GROUPS[i], is_spoilt=i == spoilt, is_tie=is_tie) for i in part],
            num_tokens=sum(GROUPS[i].num_tokens for i in part),
        )
        for part in cut
    ]


def label(kind: str, group: TokenGroup, *, is_spoilt: bool = False, is_tie: bool = False) -> Any:
    """What the loss reads of a group: the first completion is better."""
    if kind == "policy":
        rows = [list(np.linspace(-1, -3, len(ids))) for ids in group.branches_ids_G]
        masks = [[i % 4 != 3 for i in range(len(row))] for row in rows]
        return labels([math.nan if is_spoilt else 1.0, -0.5], rows, masks=masks)
    ranks_G = (0, 0) if is_tie else (0, 1)
    preference = Preference(group=group_of([], ["a", "b"], group_id=group.id), ranks_G=ranks_G)
    return replace(preference, margin=math.nan if is_spoilt else 0.1)


def loss(kind: str) -> Any:
    return loss_of() if kind == "policy" else RewardLoss(LossConfig(use_margin=True))


class Changed(ABC):
    """A loss of preferences that is another for one group."""

    def __init__(self, loss: Any, *, at: str) -> None:
        self.loss, self.at = loss, at
        self.count, self.metrics = loss.count, loss.metrics

    def __call__(self, outputs: Any, batch: Any, *, num_groups: float) -> LossOutput:
        found: LossOutput = self.loss(outputs, batch, num_groups=num_groups)
        is_there = any(preference.group.id == self.at for preference in batch)
        return replace(found, loss=self.change(found.loss)) if is_there else found

    @abstractmethod
    def change(self, loss: torch.Tensor) -> torch.Tensor:
        """What the loss is then."""


class Steep(Changed):
    """Finite, with a slope that is not."""

    def change(self, loss: torch.Tensor) -> torch.Tensor:
        return loss + (loss - loss.detach()).sqrt()


class Broken(Changed):
    def change(self, loss: torch.Tensor) -> torch.Tensor:
        raise ValueError("this one is too much")


def numbers(outputs: Any) -> torch.Tensor:
    """Scores, or log-probabilities."""
    return torch.as_tensor(getattr(outputs, "logprobs_M", outputs)).clone()


def asked(
    learner: Learner, count: int, *, part_tokens: int | None = None, **options: Any
) -> list[torch.Tensor]:
    """What a learner says of so many batches of a group each."""
    groups = [GROUPS[i % len(GROUPS)] for i in range(count)]
    batches = [replace(to_forest([group]), part_tokens=part_tokens) for group in groups]
    return [numbers(outputs) for outputs in learner.outputs(batches, **options)]


def weights_of(learner: Learner) -> dict[str, torch.Tensor]:
    """Copies of all weights."""
    return {name: weight.clone() for name, weight in learner.named_weights()}


CUTS = {
    "three micro-batches": [[0], [1, 2], [3]],
    "one micro-batch": [[0, 1, 2, 3]],
    "five micro-batches": [[0], [1], [2], [3], [4]],
}


def played(kind: str, learner: Learner) -> dict[str, Any]:
    """All that a learner is asked to do in a test, and what came of it."""
    record: dict[str, Any] = {}
    record["outputs"] = [asked(learner, count) for count in (0, 1, 3, 17)]
    record["in parts"] = asked(learner, 3, part_tokens=PART)
    if kind == "policy":
        record["first reference"] = asked(learner, 3, role="reference")
        record["hot"] = asked(learner, 3, temperature=2.0)
    record["weights"] = [weights_of(learner)]
    updates: list[Update] = []
    for cut in CUTS.values():
        # In parts, one rank has passes for which others have only a filler.
        part_tokens = PART if len(cut) == 1 else None
        updates.append(
            learner.update(micro_batches(kind, cut, part_tokens=part_tokens), loss(kind))
        )
        record.setdefault("rates", []).append(learner.learning_rate)
    record["updates"] = updates
    record["after"] = asked(learner, 3)
    spoilt = micro_batches(kind, CUTS["one micro-batch"], spoilt=2)  # others have only a filler
    record["spoilt"] = learner.update(spoilt, loss(kind))
    record["after spoilt"] = asked(learner, 3)
    if kind == "policy":
        record["last reference"] = asked(learner, 3, role="reference")
    record["weights"].append(weights_of(learner))
    return record
