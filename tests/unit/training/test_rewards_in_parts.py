"""Preferences of groups larger than the budget: a step in parts is the step in one pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from laurel.config.policy import BatchLimits, NamedCall
from laurel.config.reward_model import LossConfig
from laurel.data.forest import Batcher
from laurel.training.learner import LocalLearner
from laurel.training.losses import RewardLoss
from laurel.types import Preference, group_of
from tiny import PAD, random_groups, tiny_reward_model

GROUPS = random_groups(3, [(20, [15, 9]), (4, [30, 6, 2]), (5, [3, 4])])
LOSSES = {"pairs": {}, "lists": {"type": "plackett_luce"}, "steps": {"type": "step_bce"}}
SGD = NamedCall(name="torch.optim.SGD", kwargs={"lr": 0.0})


def labelled(kind: str) -> tuple[list[Any], list[Preference]]:
    """The groups, of steps those with several to a completion; and what the loss reads of them."""
    groups, labels = [], []
    for group in GROUPS:
        count = len(group.branches_ids_G)
        asked = group_of([], ["a"] * count, group_id="a group")
        label = Preference(group=asked, ranks_G=tuple(range(count)))
        if kind == "steps":
            # The first step of all completions of a group ends with their prompt, and is shared.
            first = len(group.trunk_ids) - 1
            reads_G = tuple((first, n - 2, n - 1) for n in group.lengths_G)
            group = replace(group, reads_G=reads_G)
            label = replace(label, steps_GS=((1.0, 0.25, 0.0),) * count)
        groups.append(group)
        labels.append(label)
    return groups, labels


@pytest.mark.parametrize("budget", [7, 25])
@pytest.mark.parametrize("kind", LOSSES)
def test_a_step_in_parts_is_the_step_in_one_pass(kind: str, budget: int) -> None:
    groups, labels = labelled(kind)
    found = []
    for tokens, in_parts in ((1000, False), (budget, True)):
        model = tiny_reward_model("qwen3", dtype=torch.float64, precision=torch.float64)
        learner = LocalLearner(model, optimizer=SGD)
        limits = BatchLimits(forest_tokens=tokens)
        batch = Batcher("forest", limits, pad_id=PAD).cut(groups, labels)
        assert any(one.inputs.is_in_parts for one in batch) == in_parts
        update = learner.update(batch, RewardLoss(LossConfig.model_validate(LOSSES[kind])))
        assert update.failure is None
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((update.metrics, gradients))
    (expected, wanted), (metrics, gradients) = found
    assert metrics == pytest.approx(expected, rel=1e-6)
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-12, name
