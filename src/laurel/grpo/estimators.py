"""The estimators of advantages by name: what each reads of `grpo`, and what it computes.

The classes are plug-ins (`laurel.plugins`), which the configuration asks. Their formulas are in
`grpo.advantages`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from laurel.plugins import Advantage

if TYPE_CHECKING:
    from laurel.config.grpo import GRPOConfig
    from laurel.grpo.advantages import AdvantageRule, Compared, Rewards


def undivided(settings: GRPOConfig) -> dict[str, str]:
    """Return the keys about a deviation that are set where nothing is divided by one."""
    if settings.scale != "none":
        return {}
    keys = ["std_eps", "std_ddof"]
    keys += [] if settings.use_dynamic_sampling else ["noise_floor_factor"]
    given = settings.adv_estimator
    fields = type(given).model_fields
    changed = [key for key in keys if getattr(given, key) != fields[key].default]
    why = "nothing is divided by a deviation"
    return dict.fromkeys([f"adv_estimator.{key}" for key in changed], why)


class Grpo(Advantage):
    """Against the group."""

    compares_steps = True

    def without_effect(self, settings: GRPOConfig) -> dict[str, str]:
        """Return the keys about a deviation where nothing is divided by one."""
        return undivided(settings)

    def make(self, section: None, settings: AdvantageRule) -> Callable[[Rewards], Compared]:
        """Return the comparison within groups."""
        from laurel.grpo.advantages import against_groups

        return partial(against_groups, settings)


class Gdpo(Advantage):
    """Each component against its group, then weighted and normalised over the batch."""

    reads_components = True
    keys = ("reward_weights",)

    def check(self, settings: GRPOConfig) -> None:
        """Refuse weights that are all 0, and a scale without effect."""
        given = settings.adv_estimator
        weights = given.reward_weights
        values = weights.values() if isinstance(weights, dict) else weights
        if values is not None and not any(values):
            raise ValueError(
                "adv_estimator.reward_weights has no weight other than 0, so every advantage "
                "would be 0, and nothing learned"
            )
        if given.scale == "batch":
            raise ValueError(
                "adv_estimator.scale=batch has no effect with adv_estimator.name=gdpo, which "
                "divides the sum of the components by the deviation of the batch anyway; use group "
                "or none for the components themselves"
            )

    def make(self, section: None, settings: AdvantageRule) -> Callable[[Rewards], Compared]:
        """Return the comparison by components."""
        from laurel.grpo.advantages import by_component

        return partial(by_component, settings)


class ReinforcePlusPlus(Advantage):
    """Over the batch."""

    whitens = True
    keys = ("minus_baseline",)

    def make(self, section: None, settings: AdvantageRule) -> Callable[[Rewards], Compared]:
        """Return the comparison over the batch."""
        from laurel.grpo.advantages import whitened

        return partial(whitened, settings)
