"""The losses by name: what each reads of its section, and what it computes.

The classes are plug-ins (`laurel.plugins`). The configuration asks them what they read, so they
import torch only where they compute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from laurel.plugins import Loss, PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor

    from laurel.config.grpo import PolicyLossConfig
    from laurel.config.reward_model import LossConfig
    from laurel.training.losses import ScoredPairs
    from laurel.training.policy_loss import TokenValues


class Ppo(Loss):
    """The clipped ratio times the advantage."""

    def make(self, section: None, settings: PolicyLossConfig) -> Callable[[TokenValues], Tensor]:
        """Return the loss of tokens."""
        from laurel.training.policy_loss import ppo

        return partial(ppo, settings)


# The loss of a reward model; `training.losses` has its formula.

OF_PAIRS = ("use_margin", "label_smoothing", "center_rewards_coefficient")
"""The keys that losses of pairs read."""


class BradleyTerry(PreferenceLoss):
    """Pairs of different ranks."""

    keys = OF_PAIRS

    def make(self, section: None, settings: LossConfig) -> Callable[[ScoredPairs], Tensor]:
        """Return the loss of pairs."""
        return partial(_bradley_terry, settings)


def _bradley_terry(settings: LossConfig, pairs: ScoredPairs) -> Tensor:
    from laurel.training.losses import bradley_terry

    return bradley_terry(
        pairs.better_P,
        pairs.worse_P,
        margin_P=pairs.margin_P,
        target_P=pairs.target_P,
        label_smoothing=settings.label_smoothing,
    )
