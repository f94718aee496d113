"""Labels and outputs for the tests of the policy's losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laurel.config.grpo import PolicyLossConfig
from laurel.models.forest.outputs import TokenOutputs
from laurel.training.policy_loss import PolicyLabels, PolicyLoss

Rows = Sequence[Sequence[float]]


def streams(rows_GL: Rows) -> tuple[Any, ...]:
    """One float32 array per completion."""
    return tuple(np.array(row, np.float32) for row in rows_GL)


def labels(
    advantages: Sequence[float],
    behaviour: Rows,
    *,
    masks: Sequence[Sequence[bool]] | None = None,
    used: Sequence[bool] | None = None,
    old: Rows | None = None,
    reference: Rows | None = None,
    teacher: Rows | None = None,
    rewards: Sequence[float | None] | None = None,
) -> PolicyLabels:
    """A group; without masks, every token is the policy's and every completion in use."""
    masks = masks or [[True] * len(row) for row in behaviour]
    return PolicyLabels(
        masks_GL=tuple(np.array(mask, bool) for mask in masks),
        advantages_G=tuple(advantages),
        used_G=tuple(used or (True,) * len(behaviour)),
        behaviour_GL=streams(behaviour),
        old_GL=None if old is None else streams(old),
        reference_GL=None if reference is None else streams(reference),
        teacher_GL=None if teacher is None else streams(teacher),
        rewards_G=tuple(rewards or (1.0,) * len(behaviour)),
    )


def loss_of(*, max_length: int = 8, **chosen: Any) -> PolicyLoss:
    """A loss without divergence, unless asked for one."""
    options = {"reference_policy_kl_penalty": 0.0, **chosen}
    return PolicyLoss(PolicyLossConfig(**options), max_length=max_length)


def outputs(values: Sequence[float] | Tensor, entropy: Sequence[float] | None = None) -> Any:
    """float64 leaves, so numbers worked by hand can be compared to the last digits."""
    leaf = torch.as_tensor(values, dtype=torch.float64).clone().requires_grad_()
    return TokenOutputs(leaf, None if entropy is None else torch.tensor(entropy))


def gradient(loss: PolicyLoss, given: TokenOutputs, batch: list[PolicyLabels]) -> list[float]:
    """Of the undivided loss by each log-probability."""
    loss(given, batch, num_groups=1.0).loss.backward()  # type: ignore[no-untyped-call]
    assert given.logprobs_M.grad is not None
    values: list[float] = given.logprobs_M.grad.tolist()
    given.logprobs_M.grad = None
    return values
