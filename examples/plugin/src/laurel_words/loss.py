"""`loss_fn.loss_type=asymmetric`: REINFORCE that learns less from what was worse than the group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import Field

from laurel.config.yaml_tree import Section
from laurel.plugins import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from laurel.training.policy_loss import TokenValues


class AsymmetricConfig(Section):
    """The weight of one side."""

    worse: float = Field(default=0.5, ge=0)
    """Weight of tokens with a negative advantage."""


class Asymmetric(Loss):
    """The log-probability times the advantage, with less weight where that is negative."""

    section = AsymmetricConfig
    clips = False

    def check(self, settings: Any) -> None:
        """Refuse what this loss does not have."""
        if settings.ratio_clip_c is not None:
            raise ValueError("ratio_clip_c is not read by loss_type=asymmetric; leave it out")

    def make(self, section: AsymmetricConfig, settings: Any) -> Callable[[TokenValues], Tensor]:
        """Return the loss of tokens."""
        return partial(_loss, section.worse)  # a function of a module, so that workers get it


def _loss(worse: float, given: TokenValues) -> Tensor:
    advantages_U = given.advantages_U
    weights_U = (advantages_U >= 0) + worse * (advantages_U < 0)
    return -weights_U * advantages_U * given.current_U
