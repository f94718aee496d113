"""The losses by name: what each reads of its section, and what it computes.

The classes are plug-ins (`laurel.plugins`). The configuration asks them what they read, so they
import torch only where they compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from laurel.plugins import Loss, PreferenceLoss

if TYPE_CHECKING:
    from torch import Tensor

    from laurel.config.grpo import PolicyLossConfig
    from laurel.config.reward_model import LossConfig
    from laurel.training.losses import PairIndex, ScoredPairs
    from laurel.training.policy_loss import TokenValues


class Ppo(Loss):
    """The clipped ratio times the advantage."""

    def make(self, section: None, settings: PolicyLossConfig) -> Callable[[TokenValues], Tensor]:
        """Return the loss of tokens."""
        return partial(_ppo, settings)


def _ppo(config: PolicyLossConfig, given: TokenValues) -> Tensor:
    import torch

    from laurel.training.policy_loss import clipped

    advantages_U = given.advantages_U
    clipped_U = clipped(given.ratio_U, config)
    loss_U = torch.maximum(-advantages_U * given.ratio_U, -advantages_U * clipped_U)
    if config.ratio_clip_c is None:
        return loss_U
    limited_U = torch.minimum(loss_U, -advantages_U * config.ratio_clip_c)
    return torch.where(advantages_U < 0, limited_U, loss_U)


class Cispo(Loss):
    """The clipped ratio, without a gradient, times the log-probability."""

    def check(self, settings: PolicyLossConfig) -> None:
        """Refuse what CISPO does not have."""
        if settings.ratio_clip_c is not None or settings.sequence_level_importance_ratios:
            raise ValueError(
                "CISPO has neither ratio_clip_c nor sequence-level ratios; leave them out, or set "
                "loss_type: ppo"
            )

    def make(self, section: None, settings: PolicyLossConfig) -> Callable[[TokenValues], Tensor]:
        """Return the loss of tokens."""
        return partial(_cispo, settings)


def _cispo(config: PolicyLossConfig, given: TokenValues) -> Tensor:
    from laurel.training.policy_loss import clipped

    return -given.advantages_U * clipped(given.ratio_U, config).detach() * given.current_U


class Reinforce(Loss):
    """The log-probability times the advantage."""

    clips = False

    def unread(self, settings: PolicyLossConfig) -> dict[str, str]:
        """Return the keys about ratios, which REINFORCE has only to correct the sampling."""
        clips = ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c")
        found = dict.fromkeys(clips, "REINFORCE clips no ratio (loss_type)")
        if not settings.use_importance_sampling_correction:
            ratios = ("force_on_policy_ratio", "sequence_level_importance_ratios")
            why = "REINFORCE has ratios only with use_importance_sampling_correction"
            found |= dict.fromkeys(ratios, why)
        return found

    def make(self, section: None, settings: PolicyLossConfig) -> Callable[[TokenValues], Tensor]:
        """Return the loss of tokens."""
        return _reinforce


def _reinforce(given: TokenValues) -> Tensor:
    return -given.advantages_U * given.current_U


# The losses of reward models. Their formulas are in `training.losses`.

_OF_PAIRS = ("use_margin", "label_smoothing", "center_rewards_coefficient")


class BradleyTerry(PreferenceLoss):
    """Pairs of different ranks."""

    keys = _OF_PAIRS

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


class Davidson(PreferenceLoss):
    """Pairs with ties, by Davidson."""

    uses_ties = True
    keys = _OF_PAIRS

    def make(self, section: None, settings: LossConfig) -> Callable[[ScoredPairs], Tensor]:
        """Return the loss of pairs."""
        from laurel.training.losses import davidson

        return partial(_with_ties, davidson, settings, nu=settings.tie_parameter)


class RaoKupper(PreferenceLoss):
    """Pairs with ties, by Rao and Kupper."""

    uses_ties = True
    keys = _OF_PAIRS

    def make(self, section: None, settings: LossConfig) -> Callable[[ScoredPairs], Tensor]:
        """Return the loss of pairs."""
        from laurel.training.losses import rao_kupper

        return partial(_with_ties, rao_kupper, settings, theta=1.0 + settings.tie_parameter)


def _with_ties(
    loss: Callable[..., Tensor], settings: LossConfig, pairs: ScoredPairs, **parameter: float
) -> Tensor:
    return loss(
        pairs.better_P,
        pairs.worse_P,
        pairs.is_tie_P,
        margin_P=pairs.margin_P,
        target_P=pairs.target_P,
        label_smoothing=settings.label_smoothing,
        **parameter,
    )


class PlackettLuce(PreferenceLoss):
    """Whole ranked lists."""

    reads = "lists"
    keys = ("center_rewards_coefficient",)

    def make(self, section: None, settings: LossConfig) -> Callable[[Tensor, PairIndex], Tensor]:
        """Return the loss of lists."""
        from laurel.training.losses import plackett_luce

        return plackett_luce


class Regression(PreferenceLoss):
    """Ratings of attributes."""

    reads = "ratings"
    uses_ties = True

    def make(self, section: None, settings: LossConfig) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss of completions."""
        from laurel.training.losses import regression

        return regression


Steps = Sequence[Sequence[float]]


class StepBce(PreferenceLoss):
    """Whether each step is right."""

    reads = "steps"
    uses_ties = True
    keys = ("label_smoothing",)

    def make(self, section: None, settings: LossConfig) -> Callable[[Tensor, Steps], Tensor]:
        """Return the loss of steps."""
        return partial(_steps_right, settings)


def _steps_right(settings: LossConfig, logits_S: Tensor, steps_NS: Steps) -> Tensor:
    from laurel.training.losses import like, steps_right

    labels_S = like([label for steps_S in steps_NS for label in steps_S], logits_S)
    return steps_right(logits_S, labels_S, label_smoothing=settings.label_smoothing)


class StepRanking(PreferenceLoss):
    """Right steps above wrong ones."""

    reads = "steps"
    uses_ties = True
    keys = ("step_margin",)

    def make(self, section: None, settings: LossConfig) -> Callable[[Tensor, Steps], Tensor]:
        """Return the loss of answers."""
        from laurel.training.losses import steps_ranked

        return partial(steps_ranked, margin=settings.step_margin)

    def count_steps(self, steps_NS: Steps) -> int:
        """Return the number of answers with a step that is right or wrong."""
        return sum(any(s > 0.5 or s < 0.5 for s in steps_S) for steps_S in steps_NS)
