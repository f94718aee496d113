"""Trains on rows that exist before the run, epoch after epoch.

    rows --tokens--> micro-batches --model--> outputs --loss--> gradient --step--> figures

Reward-model training and supervised fine-tuning share this loop. Each defines its rows, its
reaction to a step that was not applied, and its metrics.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
from torch import Tensor

from laurel.config.reward_model import RewardTrainingConfig
from laurel.config.sft import SFTConfig
from laurel.data.forest import Batcher, MicroBatch
from laurel.evaluation.benchmarks import BenchmarkSet
from laurel.models.scoring import ScoringContract
from laurel.observe.metrics import (
    answer_length,
    attribute_metrics,
    preference_metrics,
    step_metrics,
)
from laurel.observe.progress import ProgressPhase
from laurel.rewards.scorer import by_completion
from laurel.training.learner import Learner, LossFunction, Update, add_up
from laurel.training.loop import RunServices, StepSummary, TrainingLoop
from laurel.training.losses import RewardLoss
from laurel.training.stopping import Position
from laurel.types import Conversation, Preference, PreferenceSample, TokenGroup

# Validating a reward model on ranked groups.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Validation:
    """The results of validating on one set."""

    metrics: dict[str, float]
    """The metrics by their names without a prefix; undefined metrics are absent."""
    scores_BG: tuple[tuple[float, ...], ...] = ()
    """The reward of every completion of every group; empty for a policy."""


def validate(
    learner: Learner,
    samples: Sequence[PreferenceSample],
    micro_batches: Sequence[MicroBatch[Preference]],
    *,
    loss: RewardLoss,
    contract: ScoringContract,
    on_groups: Callable[[int], None] = lambda done: None,
) -> Validation:
    """Score a validation set and measure how well the scores agree with the preferences.

    Args:
        micro_batches: The same groups as micro-batches, in any order.
        contract: The scoring contract, which combines the outputs of a regression head.
        on_groups: Called with the number of groups of each micro-batch that has been scored.
    """
    totals: dict[str, Tensor] = {}
    values: dict[str, np.ndarray] = {}
    found = learner.outputs([micro_batch.inputs for micro_batch in micro_batches])
    for micro_batch, outputs_NK in zip(micro_batches, found, strict=True):
        # Not divided here: `loss.metrics` divides each sum by what it counts.
        add_up(totals, loss(outputs_NK, micro_batch.labels, num_groups=1.0).sums)
        rows_NK, first = outputs_NK.float().cpu().numpy(), 0
        for preference in micro_batch.labels:
            size = sum(preference.num_outputs_G)
            # Micro-batches have the groups in another order, which the ids undo.
            values[preference.group.id] = rows_NK[first : first + size]
            first += size
        on_groups(len(micro_batch.labels))
    values_BGK = [values[sample.preference.group.id] for sample in samples]
    outputs_BG = [
        by_completion(group, sample.preference.num_outputs_G)
        for group, sample in zip(values_BGK, samples, strict=True)
    ]
    scores_BG = tuple(tuple(map(contract.scalar, outputs_G)) for outputs_G in outputs_BG)
    metrics = preference_metrics(
        scores_BG,
        [sample.preference.ranks_G for sample in samples],
        [
            [answer_length(one.messages) for one in sample.preference.group.completions_G]
            for sample in samples
        ],
    )
    attributes = contract.rules.attributes
    if attributes:
        targets = [row for s in samples for row in s.preference.attributes_GK or ()]
        metrics |= attribute_metrics(np.concatenate(values_BGK), np.asarray(targets), attributes)
    if contract.rules.steps is not None:
        metrics |= step_metrics(
            [contract.values(outputs) for outputs_G in outputs_BG for outputs in outputs_G],
            [steps_S for sample in samples for steps_S in sample.preference.steps_GS or ()],
        )
    loss_value = loss.metrics(totals).get("loss")
    if loss_value is not None and np.isfinite(loss_value):
        metrics = {"loss": loss_value, **metrics}
    return Validation(metrics=metrics, scores_BG=scores_BG)


class Tokenised(Protocol):
    """A row whose prompt and completions are tokens."""

    @property
    def tokens(self) -> TokenGroup:
        """The tokens of the prompt and the completions."""
        ...


Sample = TypeVar("Sample", bound=Tokenised)
Label = TypeVar("Label")

EpochSection = RewardTrainingConfig | SFTConfig


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EpochParts(Generic[Sample]):
    """The components of a run that trains on rows."""

    learner: Learner
    batcher: Batcher
    train: Sequence[Sample]
    order: StepOrder
    """Chooses the training rows of each step."""
    validation: Mapping[str, Sequence[Sample]]
    """The validation sets by name."""
    benchmarks: Mapping[str, BenchmarkSet] = field(default_factory=dict)
    """Further benchmarks on which a reward model is validated, by name."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepResult(Generic[Sample]):
    """The outcome of a step of the learner, and the rows of the step."""

    samples: Sequence[Sample]
    update: Update
    num_micro_batches: int
    num_computed: int
    """The number of tokens that the model computed, as `MicroBatch.num_tokens` counts them."""


class EpochTraining(TrainingLoop[StepResult[Sample]], Generic[Sample, Label]):
    """Trains on the rows of a training set; subclasses define rows, steps and validation."""

    def __init__(
        self,
        section: EpochSection,
        services: RunServices,
        parts: EpochParts[Sample],
        *,
        loss: LossFunction[Label],
    ) -> None:
        super().__init__(services)
        self.section = section
        self.learner = parts.learner
        self.batcher = parts.batcher
        self.train = parts.train
        self.validation = {
            name: rows_to_validate(rows, section) for name, rows in parts.validation.items()
        }
        self.loss = loss
        self.order = parts.order

    @abstractmethod
    def label(self, sample: Sample) -> Label:
        """Return the label of a row that the loss reads."""

    @abstractmethod
    def validate(
        self,
        samples: Sequence[Sample],
        micro_batches: Sequence[MicroBatch[Label]],
        on_rows: Callable[[int], None],
    ) -> Validation:
        """Validate on a set, which is also given as micro-batches.

        `on_rows` must be called with the number of rows of each micro-batch that is finished.
        """

    @abstractmethod
    def report(
        self, name: str, samples: Sequence[Sample], validation: Validation, *, step: int
    ) -> None:
        """Print the results of validating on a set; the caller logs the metrics."""

    def step(self, position: Position) -> StepResult[Sample]:
        """Train on the rows of the step that follows this position."""
        samples = [self.train[row] for row in self.order.rows(position.step)]
        micro_batches = self._cut(samples)
        update = self.learner.update(micro_batches, self.loss)
        return StepResult(
            samples=samples,
            update=update,
            num_micro_batches=len(micro_batches),
            num_computed=sum(micro_batch.num_tokens for micro_batch in micro_batches),
        )

    @abstractmethod
    def count_bad_steps(self, position: Position, taken: StepResult[Sample]) -> int:
        """Report a step that was not applied; return the number of bad steps in a row after it."""

    def summarize(
        self, position: Position, taken: StepResult[Sample], timing: Mapping[str, float]
    ) -> StepSummary:
        """Return the metrics of the loss and of the speed."""
        num_tokens = sum(sum(sample.tokens.lengths_G) for sample in taken.samples)
        seconds = timing["total_step_time"]
        metrics = {
            **{f"train/{name}": value for name, value in taken.update.metrics.items()},
            "train/epoch": float(self.order.epoch_of(position.step)),
            "timing/train/total_step_time": seconds,
            "performance/num_micro_batches": float(taken.num_micro_batches),
            "performance/tokens_per_second": num_tokens / seconds,
            **{f"performance/{name}": v for name, v in taken.update.performance.items()},
        }
        return StepSummary(
            metrics=metrics,
            kept={f"train_{name}": value for name, value in taken.update.metrics.items()},
            bad_steps=self.count_bad_steps(position, taken),
            num_rows=len(taken.samples),
            num_tokens=num_tokens,
        )

    def measure(self, step: int) -> tuple[dict[str, float], dict[str, float]]:
        """Validate on all sets; return metrics by their names in logs, and in `metric_name`."""
        logged: dict[str, float] = {}
        keyed: dict[str, float] = {}
        for name, samples in self.validation.items():
            with (
                self.services.progress.phase(f"validating {name}", len(samples)) as phase,
                self.timers.time("total_validation_time"),
            ):
                micro_batches = self._cut(samples)
                validation = self.validate(samples, micro_batches, partial(self._validated, phase))
            seconds = self.timers.collect()["total_validation_time"]
            logged |= {f"validation-{name}/{k}": v for k, v in validation.metrics.items()}
            logged[f"timing/validation-{name}/total_validation_time"] = seconds
            keyed |= {f"validation-{name}_{k}": v for k, v in validation.metrics.items()}
            self.report(name, samples, validation, step=step)
        return logged, keyed

    def _validated(self, phase: ProgressPhase, count: int) -> None:
        phase.advance(count)
        self.check_stop()

    def info(self, position: Position) -> dict[str, object]:
        """Return the entries of `training_info.json` that describe a position."""
        return {
            "epoch": self.order.epoch_of(max(position.step - 1, 0)),
            "step": position.step % self.order.steps_per_epoch,
            "total_steps": position.step,
            "consumed_samples": self.order.samples_before(position.step),
            **position.metrics,
        }

    def _cut(self, samples: Sequence[Sample]) -> list[MicroBatch[Label]]:
        return self.batcher.cut(
            [sample.tokens for sample in samples],
            [self.label(sample) for sample in samples],
        )


def total_steps(section: EpochSection, order: StepOrder) -> int:
    """Return the number of steps of the run: those of all epochs, or the configured limit."""
    steps = section.max_num_epochs * order.steps_per_epoch
    return steps if section.max_num_steps < 0 else min(steps, section.max_num_steps)


def rows_to_validate(rows: Sequence[Sample], section: EpochSection) -> Sequence[Sample]:
    """Return the rows of a validation set that are used: its first `val_batches`, or all."""
    if section.val_batches <= 0:
        return rows
    return rows[: section.val_batches * section.val_global_batch_size]


# The choice of the rows of a step.


class StepOrder:
    """Chooses the rows of every step as a pure function of the step and a seed.

    There is no state to save: a resumed run reads at step `n` what an uninterrupted run reads at
    step `n`. Each epoch has its own permutation, and its last step takes the remaining rows.
    """

    def __init__(
        self,
        num_rows: int,
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        units: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Choose the order.

        Args:
            batch_size: The number of rows of a step.
            shuffle: Whether each epoch has its own order; otherwise it is that of the rows.
            units: Rows that stay together, each row in one unit; the units are shuffled instead.
                The rows of a unit may be divided where a step ends. None: each row by itself.
        """
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.steps_per_epoch = math.ceil(num_rows / batch_size)
        self._units = units
        self._epoch = -1
        self._order = self._together(np.arange(num_rows if units is None else len(units)))

    def epoch_of(self, step: int) -> int:
        """Return the epoch of step `step`; both count from 0."""
        return step // self.steps_per_epoch

    def rows(self, step: int) -> list[int]:
        """Return the indices of the rows of step `step`, which counts from 0."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if self.shuffle and epoch != self._epoch:
            count = self.num_rows if self._units is None else len(self._units)
            self._order = self._together(permutation(count, self.seed, epoch))
            self._epoch = epoch
        first = within * self.batch_size
        return [int(row) for row in self._order[first : first + self.batch_size]]

    def _together(self, order: np.ndarray) -> np.ndarray:
        if self._units is None:
            return order
        return np.array([row for unit in order for row in self._units[unit]], dtype=np.int64)

    def samples_before(self, step: int) -> int:
        """Return the number of rows read before step `step`, which counts from 0."""
        epoch, within = divmod(step, self.steps_per_epoch)
        return epoch * self.num_rows + within * self.batch_size


def rows_of_dialogues(rows: Sequence[PreferenceSample]) -> list[list[int]]:
    """Divide rows into those with the same messages up to the first question, by their indices."""
    units: dict[Conversation, list[int]] = {}
    for index, row in enumerate(rows):
        prompt = row.preference.group.prompt
        first = next((i for i, m in enumerate(prompt) if m.role == "user"), len(prompt) - 1)
        units.setdefault(prompt[: first + 1], []).append(index)
    return list(units.values())


def permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return a random order of the rows of an epoch."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    # Sorting random keys depends only on the bit generator, unlike numpy's `permutation`.
    return np.argsort(generator.random(num_rows), kind="stable")
