"""The losses of a policy that stand beside `training.loss_kinds`.

Let `r = current / old` be the ratio of a token and `A` its advantage, as in `training.policy_loss`,
`T` the number of the policy's tokens in the completion, and `sg(x)` x without a gradient. The term
of a token is

    cispo -A sg(C(r)) log current, C(r) as in `training.policy_loss`   (arXiv 2506.13585)
    reinforce  -A log current                                          (arXiv 2402.14740)
    gmpo  -mean(A) exp(sum of m(log r) / T)   m(x) is min(x, clip(x)) where A > 0, else the larger
          one, and clip(x) limits x to [-clip_low, clip_high]          (arXiv 2507.20673)
    sapo  -A sigmoid(tau (r - 1)) 4 / tau     tau is tau_positive where A > 0, else tau_negative
                                                                       (arXiv 2511.20347)
    dppo  -A sg(min(r, max_ratio)) log current, 0 where the update would go on beyond the trust
          region: A > 0, current > old and D > high, or A <= 0, current < old and D > low. D is the
          divergence of the two policies about this token alone, of its being sampled or not:
          |current - old| (tv), or old log(old / current) + (1 - old) log((1 - old) / (1 - current))
          (kl)                                                         (arXiv 2602.04879)

At r = 1, as in the first update on a batch, all have the gradient of REINFORCE: -A times that of
log current. (Of GMPO it is that of a completion's mean.)
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from laurel.config.yaml_tree import Section
from laurel.plugins import Loss

if TYPE_CHECKING:
    from torch import Tensor

    from laurel.config.grpo import PolicyLossConfig
    from laurel.training.policy_loss import TokenValues

_OF_PPO = ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c")


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
        found = dict.fromkeys(_OF_PPO, "REINFORCE clips no ratio (loss_type)")
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


class _OwnRange(Loss):
    # Ratios of tokens, which are not clipped to PPO's range.

    clips = False

    @staticmethod
    @abstractmethod
    def term(section: Any, values: TokenValues) -> Tensor:
        """Return the losses of tokens."""

    def make(self, section: Any, settings: PolicyLossConfig) -> Callable[[TokenValues], Tensor]:
        """Return the loss of tokens."""
        return partial(self.term, section)

    def check(self, settings: PolicyLossConfig) -> None:
        """Refuse one ratio for a whole completion, and ratios that are all 1."""
        if settings.force_on_policy_ratio:
            raise ValueError(
                "force_on_policy_ratio=true takes every ratio to be 1, where "
                f"loss_type={settings.loss_type} is REINFORCE; leave it out, or set "
                "loss_type: reinforce"
            )
        if settings.sequence_level_importance_ratios:
            raise ValueError(
                "sequence_level_importance_ratios=true is GSPO, and "
                f"loss_type={settings.loss_type} reads the ratios of tokens; leave it out, or set "
                "loss_type: ppo"
            )

    def unread(self, settings: PolicyLossConfig) -> dict[str, str]:
        """Return the keys of PPO's range."""
        own = f"loss_type={settings.loss_type} has its own range, loss_fn.{settings.loss_type}"
        return dict.fromkeys(_OF_PPO, own)


class GmpoConfig(Section):
    """The range of ratios."""

    clip_low: float = Field(default=0.4, ge=0)
    """Logarithms of ratios below minus this give no gradient that lowers them further. Default: the
    paper's, which is wider than PPO's because one token moves the mean little."""
    clip_high: float = Field(default=0.4, ge=0)
    """Those above this give no gradient that raises them further."""


class Gmpo(_OwnRange):
    """GMPO: the geometric mean of a completion's clipped ratios, times its advantage."""

    section = GmpoConfig
    of_completions = True

    @staticmethod
    def term(section: GmpoConfig, values: TokenValues) -> Tensor:
        """Return the losses of tokens, which all have that of their completion."""
        import torch

        from laurel.training.policy_loss import ratio_of

        tokens, advantages_U = values.tokens, values.advantages_U
        log_ratio_U = values.current_U - values.old_U
        clipped_U = log_ratio_U.clamp(-section.clip_low, section.clip_high)
        limited_U = torch.where(
            advantages_U > 0,
            torch.minimum(log_ratio_U, clipped_U),
            torch.maximum(log_ratio_U, clipped_U),
        )
        return tokens.spread(-tokens.means(advantages_U) * ratio_of(tokens.means(limited_U)))


class SapoConfig(Section):
    """How quickly tokens lose their gradient as their ratio leaves 1."""

    tau_positive: float = Field(default=1.0, gt=0)
    """How quickly tokens with a positive advantage lose their gradient as their ratio leaves 1; a
    larger number is quicker. Default: the paper's."""
    tau_negative: float = Field(default=1.05, gt=0)
    """The same of tokens with a negative advantage. Default: the paper's, a little quicker, because
    what lowers one token raises all others."""


class Sapo(_OwnRange):
    """SAPO: a smooth gate in place of the clipped ratio."""

    section = SapoConfig

    @staticmethod
    def term(section: SapoConfig, values: TokenValues) -> Tensor:
        """Return the losses of tokens."""
        import torch

        advantages_U = values.advantages_U
        tau_U = torch.full_like(advantages_U, section.tau_negative)
        tau_U[advantages_U > 0] = section.tau_positive
        return -advantages_U * torch.sigmoid(tau_U * (values.ratio_U - 1.0)) * 4.0 / tau_U


class DppoConfig(Section):
    """The trust region."""

    divergence: Literal["tv", "kl"] = "tv"
    """How far the policies are apart about a token: total variation, or the KL divergence. Default:
    the difference of two probabilities, which is read off."""
    low: float = Field(default=0.15, ge=0)
    """Largest divergence up to which a token with a negative advantage becomes less probable.
    Default: that of verl's example for `tv`; for `kl` 0.05 is common."""
    high: float = Field(default=0.15, ge=0)
    """Largest divergence up to which one with a positive advantage becomes more probable."""
    max_ratio: float = Field(default=20.0, gt=0)
    """Largest ratio that weights a token. Default: so large that only rare tokens reach it."""


class Dppo(_OwnRange):
    """DPPO: the ratio as a weight, inside a region of small divergence instead of small ratios."""

    section = DppoConfig

    @staticmethod
    def term(section: DppoConfig, values: TokenValues) -> Tensor:
        """Return the losses of tokens."""
        import torch

        advantages_U, current_U = values.advantages_U, values.current_U.detach()
        now_U, old_U = current_U.exp(), values.old_U.exp()
        apart_U = (now_U - old_U).abs()
        if section.divergence == "kl":
            least = torch.finfo(now_U.dtype).tiny  # probabilities of 1 leave nothing for the others
            rest_U = torch.log((1.0 - old_U).clamp(min=least) / (1.0 - now_U).clamp(min=least))
            apart_U = old_U * (values.old_U - current_U) + (1.0 - old_U) * rest_U
        is_out_U = torch.where(
            advantages_U > 0,
            (now_U > old_U) & (apart_U > section.high),
            (now_U < old_U) & (apart_U > section.low),
        )
        weights_U = values.ratio_U.detach().clamp(max=section.max_ratio) * ~is_out_U
        return -advantages_U * weights_U * values.current_U
