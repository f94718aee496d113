"""The learner: micro-batches in, one optimizer step out.

It knows nothing of the algorithm. A micro-batch carries what the model reads and the labels that
the loss reads; the loss counts its denominator over all micro-batches before the first of them is
computed, so how a batch is cut into micro-batches, and over how many ranks, changes nothing.

`local_learner.LocalLearner` is one process, which may be one rank of many;
`learner_group.LearnerGroup` is all the ranks, as the loops see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, SupportsFloat, TypeVar

import torch
from torch import Tensor

from laurel.algorithms.losses import LossOutput
from laurel.models.scoring import ScoringContract
from laurel.types import PaddedRows, TokenForest, Weights

Label = TypeVar("Label")
LabelIn = TypeVar("LabelIn", contravariant=True)

Inputs = TokenForest | PaddedRows
Asked = Literal["model", "reference"]

NOTHING_TO_LEARN = "no row of the batch teaches this loss anything"
ELSEWHERE = "the loss of another rank is not finite"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch(Generic[Label]):
    """What one forward pass computes, and what its outputs are judged by."""

    inputs: Inputs
    labels: Sequence[Label]
    num_tokens: int
    """Tokens that are computed: distinct ones in a forest, padding included in rows."""


class Loss(Protocol[LabelIn]):
    """How outputs of the model are judged. See `losses.RewardLoss`."""

    def count(self, batch: Sequence[LabelIn], /) -> float:
        """What the batch adds to the denominator."""

    def __call__(
        self, outputs: Any, batch: Sequence[LabelIn], /, *, num_groups: float
    ) -> LossOutput:
        """The loss of a micro-batch, already divided by the global denominator.

        `outputs` is what the model gives: scores [N, K], or `TokenOutputs` of a policy.
        """

    def metrics(self, sums: Mapping[str, SupportsFloat], /) -> dict[str, float]:
        """Figures from the totals of `LossOutput.sums`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What came of one step."""

    metrics: dict[str, float]
    """Those of the loss, `grad_norm` and `lr`."""
    failure: str | None = None
    """Why the step was not applied; None where it was."""
    performance: dict[str, float] = field(default_factory=dict)
    """How well the work was divided, where it was; logged as `performance/...`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """What one rank says of a step."""

    sums: dict[str, Tensor]
    """Of its own micro-batches."""
    learning_rate: float
    """That the step was taken with."""
    grad_norm: float | None = None
    """Of all ranks together; None where it was not measured."""
    failure: str | None = None
    """As in `Update`."""


class Learner(Protocol):
    """A model with its optimizer and schedule, wherever they are."""

    @property
    def learning_rate(self) -> float:
        """That of the next step (of the first parameter group)."""

    @property
    def num_places(self) -> int:
        """How many micro-batches are computed side by side."""

    def update(self, batch: Sequence[MicroBatch[Label]], loss: Loss[Label]) -> Update:
        """Take one optimizer step.

        The step is applied only if the loss and the gradient are finite. A batch that teaches
        nothing skips the optimizer too: Adam moves even with a gradient of zero.
        """

    def outputs(
        self,
        batches: Sequence[Inputs],
        *,
        of: Asked = "model",
        in_full_precision: bool = False,
        temperature: float | None = None,
    ) -> Iterator[Any]:
        """What the model gives for each batch, in order, without gradients and dropout.

        Scores `[N, K]` of a reward model; of a policy `TokenOutputs` without entropy. Any number
        of batches; those not asked for need not be computed.

        Args:
            batches: As in `MicroBatch.inputs`.
            of: The model, or the policy as it was before its training.
            in_full_precision: Compute in the dtype of the weights.
            temperature: Of the log-probabilities; None: that of the run.
        """

    def named_weights(self, *, changing_only: bool = False) -> Iterable[tuple[str, Tensor]]:
        """Names and values as `from_pretrained` knows them, adapters merged.

        Nobody ever holds the whole model on the way. Copy what you keep.

        Args:
            changing_only: Leave out what training cannot change; see `merged_weights`.
        """

    def weights(self, version: int) -> Weights:
        """The same for a generator.

        Args:
            version: Training steps taken so far.
        """

    def export(
        self,
        directory: Path,
        card: str,
        *,
        contract: ScoringContract | None = None,
        in_background: bool = False,
    ) -> None:
        """Write a directory that Hugging Face loads.

        Args:
            directory: Exists.
            card: The README.
            contract: Of reward models: what is saved as their scoring contract.
            in_background: Come back when all that training changes has been copied to the host;
                `written` tells the rest.

        Raises:
            OSError: The disk refuses.
        """

    def save_state(
        self, directory: Path, extra: Mapping[str, Any], *, in_background: bool = False
    ) -> None:
        """Write optimizer, schedule and random generators: see `models.training_state`.

        `in_background` as in `export`.
        """

    def written(self, *, is_awaited: bool = False) -> float | None:
        """What became of what was left to the background since this was last told.

        Args:
            is_awaited: Do not come back before all of it is written.

        Returns:
            Seconds that the writing took, of the slowest rank; None while it goes on. It may be
            asked again, with the same answer.

        Raises:
            OSError: The disk refused. Nobody writes any more.
        """

    def load_state(self, directory: Path) -> dict[str, Any]:
        """Put them back; returns `extra`."""

    def resting(self) -> AbstractContextManager[None]:
        """Give device memory back for a while; the model is not to be asked meanwhile."""


def weights_of(learner: Learner, version: int, *, is_partly_frozen: bool) -> Weights:
    """See `Learner.weights`; some of its parameters take no gradients, or all of them do."""
    return Weights(
        version=version,
        tensors=learner.named_weights,
        changing=partial(learner.named_weights, changing_only=True) if is_partly_frozen else None,
    )


def denominator_of(batch: Iterable[MicroBatch[Label]], loss: Loss[Label]) -> float:
    """What the loss of a batch is divided by."""
    return sum(loss.count(micro_batch.labels) for micro_batch in batch)


def update_of(steps: Sequence[Step], loss: Loss[Any]) -> Update:
    """What came of a step that the places of the data took together, in their order."""
    first = steps[0]
    failures = [step.failure for step in steps if step.failure is not None]
    # Who only heard of it says less than who saw it.
    failure = next((f for f in failures if f != ELSEWHERE), failures[0] if failures else None)
    if first.grad_norm is None:
        return Update(metrics={}, failure=failure)
    totals: dict[str, Tensor] = {}
    for step in steps:
        add_up(totals, step.sums)
    metrics = loss.metrics(totals)
    metrics |= {"grad_norm": first.grad_norm, "lr": first.learning_rate}
    return Update(metrics=metrics, failure=failure)


def add_up(totals: dict[str, Tensor], sums: Mapping[str, Tensor]) -> None:
    """Add the sums of one micro-batch to those of the batch.

    What is named `..._min` or `..._max` is no sum: the smallest, or the largest, is kept.
    """
    for name, value in sums.items():
        if name not in totals:
            totals[name] = value
        elif name.endswith("_min"):
            totals[name] = torch.minimum(totals[name], value)
        elif name.endswith("_max"):
            totals[name] = torch.maximum(totals[name], value)
        else:
            totals[name] = totals[name] + value
