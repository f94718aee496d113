"""Validating a reward model on judged groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from laurel.algorithms.learner import Learner, MicroBatch, add_up
from laurel.algorithms.losses import RewardLoss
from laurel.models.scoring import ScoringContract
from laurel.observe.lengths import answer_length
from laurel.observe.metrics import attribute_metrics, preference_metrics
from laurel.types import Preference, PreferenceSample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Validation:
    """What validating one set gave."""

    metrics: dict[str, float]
    """By bare name; what is undefined is absent."""
    scores_BG: tuple[tuple[float, ...], ...] = ()
    """Scalar reward of every completion of every group; of a policy there are none."""


def validate(
    learner: Learner,
    samples: Sequence[PreferenceSample],
    micro_batches: Sequence[MicroBatch[Preference]],
    *,
    loss: RewardLoss,
    contract: ScoringContract,
    on_groups: Callable[[int], None] = lambda done: None,
) -> Validation:
    """Score a validation set and measure how well the scores agree with the judgements.

    Args:
        learner: Holds the model.
        samples: The set.
        micro_batches: The same groups, cut up in any order.
        loss: Gives the validation loss.
        contract: Turns the outputs of a regression head into the scalar.
        on_groups: Called with the number of groups of each micro-batch when it is done.
    """
    totals: dict[str, Tensor] = {}
    values: dict[str, np.ndarray] = {}
    found = learner.outputs([micro_batch.inputs for micro_batch in micro_batches])
    for micro_batch, outputs_NK in zip(micro_batches, found, strict=True):
        add_up(totals, loss(outputs_NK, micro_batch.labels, num_groups=1.0).sums)
        rows_NK, first = outputs_NK.float().cpu().numpy(), 0
        for preference in micro_batch.labels:
            size = len(preference.ranks_G)
            values[preference.group.id] = rows_NK[first : first + size]
            first += size
        on_groups(len(micro_batch.labels))
    values_BGK = [values[sample.preference.group.id] for sample in samples]
    scores_BG = tuple(tuple(contract.scalar(row) for row in group.tolist()) for group in values_BGK)
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
    loss_value = loss.metrics(totals).get("loss")
    if loss_value is not None and np.isfinite(loss_value):
        metrics = {"loss": loss_value, **metrics}
    return Validation(metrics=metrics, scores_BG=scores_BG)
