"""What to look at first: rules over the figures of a run, in plain words with their numbers.

A rule says nothing where its figures are missing, and never more than its figures show: it points
to where a person should look, and what usually helps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from laurel.observe.reporting import grpo_findings as of_grpo
from laurel.observe.reporting import reward_model_findings as of_reward_models
from laurel.observe.reporting import training_findings as of_training
from laurel.observe.reporting.finding import Finding, Weight
from laurel.observe.run_record import RunRecord

Rule = Callable[[RunRecord], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    of_grpo.gold_fell,
    of_grpo.reward_without_success,
    of_training.alarms_going_on,
    of_training.not_finite,
    of_training.validation_got_worse,
    of_training.loss_did_not_fall,
    of_reward_models.against_length,
    of_grpo.failed_rewards,
    of_training.gradient_jumps,
    of_training.steps_lost,
    of_grpo.groups_without_spread,
    of_grpo.cut_off,
    of_grpo.entropy_collapse,
    of_grpo.lengths_grew,
    of_reward_models.scores_follow_length,
    of_training.overfitting,
    of_grpo.sampler_mismatch,
    of_training.data_left_out,
)
"""Every rule, the most telling first."""

_WEIGHTS: tuple[Weight, ...] = ("bad", "look", "good", "note")


def findings(record: RunRecord) -> list[Finding]:
    """What the figures of a run say, the worst first and what is only to be known last."""
    found = [finding for rule in RULES for finding in rule(record)]
    return sorted(found, key=lambda finding: _WEIGHTS.index(finding.weight))
