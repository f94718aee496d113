"""Trains a policy by supervised fine-tuning.

demonstrations --tokens--> forests --policy--> log-probs --mean over the answers--> gradient

`epochs.py` has the loop that the training of reward models shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from laurel.config.sft import SFTConfig
from laurel.data.forest import MicroBatch
from laurel.errors import counted
from laurel.models.chat import Demonstration
from laurel.training.epochs import EpochParts, EpochTraining, StepResult, Validation
from laurel.training.learner import add_up
from laurel.training.loop import RunServices
from laurel.training.policy_loss import DemonstrationLabels, DemonstrationLoss
from laurel.training.stopping import Position


class SupervisedFineTuning(EpochTraining[Demonstration, DemonstrationLabels]):
    """Trains a policy on demonstrations."""

    def __init__(
        self, section: SFTConfig, services: RunServices, parts: EpochParts[Demonstration]
    ) -> None:
        super().__init__(section, services, parts, loss=DemonstrationLoss())

    def label(self, sample: Demonstration) -> DemonstrationLabels:
        """Return which tokens of a row are learned."""
        return DemonstrationLabels(masks_GL=(sample.mask_L,))

    def count_bad_steps(self, position: Position, taken: StepResult[Demonstration]) -> int:
        """Report a step that was not applied; return the number of bad steps in a row after it."""
        step = position.step + 1
        if taken.update.failure is not None:
            self.services.progress.message(f"step {step} not applied: {taken.update.failure}")
        shown = ", ".join(sample.tokens.id for sample in taken.samples[:8])
        return self.bad_steps(
            taken.update,
            position.bad_steps,
            where=f"step {step}, rows {shown}",
            kept="The metrics of the steps before tell how it came about",
        )

    def validate(
        self,
        samples: Sequence[Demonstration],
        micro_batches: Sequence[MicroBatch[DemonstrationLabels]],
        on_rows: Callable[[int], None],
    ) -> Validation:
        """Measure the loss on a set."""
        totals: dict[str, Tensor] = {}
        found = self.learner.outputs([micro_batch.inputs for micro_batch in micro_batches])
        for micro_batch, outputs in zip(micro_batches, found, strict=True):
            add_up(totals, self.loss(outputs, micro_batch.labels, num_groups=1.0).sums)
            on_rows(len(micro_batch.labels))
        metrics = self.loss.metrics(totals)
        return Validation(metrics={k: v for k, v in metrics.items() if math.isfinite(v)})

    def report(
        self, name: str, samples: Sequence[Demonstration], validation: Validation, *, step: int
    ) -> None:
        """Print the results of validating on a set."""
        figures = validation.metrics
        shown = [f"{k} {v:.4f}" for k, v in figures.items() if not k.startswith("num_")]
        tokens = counted(round(figures["num_valid_tokens"]), "token")
        rows = counted(round(figures["num_valid_samples"]), "conversation")
        shown.append(f"of {tokens} in {rows}")
        self.services.progress.message(
            f"step {step}  validation-{name}  {'  '.join(shown)}", is_routine=True
        )
