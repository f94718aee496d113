"""The losses by name: what each reads of `rm.loss`, and what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from laurel.plugins import PreferenceLoss
from laurel.training.loss_kinds import OF_PAIRS

if TYPE_CHECKING:
    from torch import Tensor

    from laurel.config.reward_model import LossConfig
    from laurel.training.losses import PairIndex, ScoredPairs


class Davidson(PreferenceLoss):
    """Pairs with ties, by Davidson."""

    uses_ties = True
    keys = (*OF_PAIRS, "tie_parameter")

    def make(self, section: None, settings: LossConfig) -> Callable[[ScoredPairs], Tensor]:
        """Return the loss of pairs."""
        from laurel.extensions.reward_losses.losses import davidson

        return partial(_with_ties, davidson, settings, nu=settings.tie_parameter)


class RaoKupper(PreferenceLoss):
    """Pairs with ties, by Rao and Kupper."""

    uses_ties = True
    keys = (*OF_PAIRS, "tie_parameter")

    def make(self, section: None, settings: LossConfig) -> Callable[[ScoredPairs], Tensor]:
        """Return the loss of pairs."""
        from laurel.extensions.reward_losses.losses import rao_kupper

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
        from laurel.extensions.reward_losses.losses import plackett_luce

        return plackett_luce


class Regression(PreferenceLoss):
    """Ratings of attributes."""

    reads = "ratings"
    uses_ties = True

    def make(self, section: None, settings: LossConfig) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss of completions."""
        from laurel.extensions.reward_losses.losses import regression

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
    from laurel.extensions.reward_losses.losses import steps_right
    from laurel.training.losses import like

    labels_S = like([label for steps_S in steps_NS for label in steps_S], logits_S)
    return steps_right(logits_S, labels_S, label_smoothing=settings.label_smoothing)


class StepRanking(PreferenceLoss):
    """Right steps above wrong ones."""

    reads = "steps"
    uses_ties = True
    keys = ("step_margin",)

    def make(self, section: None, settings: LossConfig) -> Callable[[Tensor, Steps], Tensor]:
        """Return the loss of answers."""
        from laurel.extensions.reward_losses.losses import steps_ranked

        return partial(steps_ranked, margin=settings.step_margin)

    def count_steps(self, steps_NS: Steps) -> int:
        """Return the number of answers with a step that is right or wrong."""
        return sum(any(s > 0.5 or s < 0.5 for s in steps_S) for steps_S in steps_NS)
