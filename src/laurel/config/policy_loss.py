"""The `loss_fn` section: what a policy's update minimises. Names follow NeMo RL's files."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from laurel.config.section import Section


class PolicyLossConfig(Section):
    """What an update minimises. Formulas: `laurel/algorithms/policy_losses.py`."""

    reference_policy_kl_penalty: float = Field(default=0.01, ge=0)
    """Weight of the divergence from the reference policy; 0 needs no reference. Default: a light
    pull back; where a rule checks the reward, 0 is common and saves the reference's memory."""
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Which estimator of it. Default: never negative, and of low variance."""
    kl_input_clamp_value: float | None = Field(default=20.0, gt=0)
    """Largest difference of log-probabilities that the estimator is given. Default: its exponential
    is still a number of float32."""
    kl_output_clamp_value: float | None = Field(default=10.0, gt=0)
    """Largest divergence of one token. Default: no single token outweighs a batch."""
    use_kl_in_reward: bool = False
    """Subtract the divergence from the reward instead of adding it to the loss. Default: in the
    loss every token has its own, and baselines do not see it."""
    use_on_policy_kl_approximation: bool = False
    """Correct the divergence by the ratio of learner to generator."""
    ratio_clip_min: float = Field(default=0.2, ge=0)
    """Ratios below 1 minus this give no gradient where that would push them further. Default: PPO's
    (arXiv 1707.06347)."""
    ratio_clip_max: float = Field(default=0.2, ge=0)
    """Ratios above 1 plus this, likewise (DAPO: 0.28). Default: the same on both sides."""
    ratio_clip_c: float | None = Field(default=None, gt=1)
    """Dual clipping: largest ratio under a negative advantage. Default: one update a batch has
    ratios of 1."""
    loss_type: Literal["ppo", "cispo", "reinforce"] = "ppo"
    """`ppo`: the clipped ratio; `cispo`: its detached value times the log-probability; `reinforce`:
    the log-probability alone. Default: GRPO's own."""
    use_cispo: bool = False
    """Same as `loss_type: cispo`."""
    disable_ppo_ratio: bool = False
    """Same as `loss_type: reinforce`."""
    sequence_level_importance_ratios: bool = False
    """GSPO: one ratio per completion, the geometric mean of its tokens'. Needs `token_level_loss:
    false`. Default: GRPO's ratios are those of tokens."""
    token_level_loss: bool = True
    """True: the mean over all tokens (DAPO). False: the mean over completions of their means.
    Default: long answers weigh by what they say, so bad tokens are not cheaper in them."""
    normalizer: Literal["auto", "tokens", "sequences", "max_length"] = "auto"
    """What the loss is divided by. `max_length` is Dr. GRPO: completions times their longest
    length. `auto` follows `token_level_loss`."""
    use_importance_sampling_correction: bool = False
    """Weight tokens by the ratio of the learner's to the generator's probability. Default: the
    engine in process computes what the learner does; turn it on with vLLM, bfloat16 engines or
    staleness."""
    truncated_importance_sampling_type: (
        Literal["tis", "icepop", "seq-mask-tis", "seq-tis"] | None
    ) = None
    """`tis`: weights cut to the range; `icepop`: 0 outside it; `seq-mask-tis`: whole completions
    left out by the geometric mean of their weights; `seq-tis`: the product of a completion's
    weights, cut."""
    truncated_importance_sampling_ratio: float | None = Field(default=None, gt=0)
    """Upper end of the range."""
    truncated_importance_sampling_ratio_min: float | None = Field(default=None, ge=0)
    """Lower end of the range."""
    force_on_policy_ratio: bool = False
    """Take the ratio to be 1 (its gradient remains)."""
    positive_example_nll_weight: float = Field(default=0.0, ge=0)
    """VAPO: weight of the negative log-likelihood of completions with a positive reward. Default:
    no part of GRPO."""
    entropy: bool = True
    """Measure the entropy of the policy's distribution over the tokens it wrote. Default: a
    collapse is first seen in it."""

    @model_validator(mode="after")
    def _fits_together(self) -> PolicyLossConfig:
        if self.use_cispo and self.disable_ppo_ratio:
            raise ValueError(
                "use_cispo and disable_ppo_ratio contradict each other; set one of them to false"
            )
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise ValueError(
                "sequence_level_importance_ratios needs token_level_loss: false (GSPO)"
            )
        if self.kind == "cispo" and (
            self.ratio_clip_c is not None or self.sequence_level_importance_ratios
        ):
            raise ValueError(
                "CISPO has neither ratio_clip_c nor sequence-level ratios; leave them out, or set "
                "use_cispo: false"
            )
        if self.kind == "reinforce" and self.ratio_clip_c is not None:
            raise ValueError(
                "ratio_clip_c has no meaning for REINFORCE, which clips no ratio; leave it out, or "
                "set disable_ppo_ratio: false"
            )
        kind = self.truncated_importance_sampling_type
        low, high = (
            self.truncated_importance_sampling_ratio_min,
            self.truncated_importance_sampling_ratio,
        )
        if kind is None and (low is not None or high is not None):
            raise ValueError(
                "truncated_importance_sampling_ratio and ..._ratio_min do nothing without "
                "truncated_importance_sampling_type; tis cuts weights to that range"
            )
        if low is not None and high is not None and not low < high:
            raise ValueError(
                f"truncated_importance_sampling_ratio_min={low} must be below "
                f"truncated_importance_sampling_ratio={high}"
            )
        if high is not None and not self.use_importance_sampling_correction:
            raise ValueError(
                f"truncated_importance_sampling_ratio={high} needs "
                "use_importance_sampling_correction: true"
            )
        return self

    @property
    def truncation(self) -> Literal["tis", "icepop", "seq-mask-tis", "seq-tis"] | None:
        """How weights are cut; None where they are not, as the range has no upper end."""
        if self.truncated_importance_sampling_ratio is None:
            return None
        return self.truncated_importance_sampling_type

    def without_effect(self) -> dict[str, str]:
        """See `Section`."""
        if self.truncated_importance_sampling_ratio is not None:
            return {}
        why = "weights are cut where truncated_importance_sampling_ratio says how far"
        keys = ("truncated_importance_sampling_type", "truncated_importance_sampling_ratio_min")
        return {key: why for key in keys if getattr(self, key) is not None}

    @property
    def kind(self) -> Literal["ppo", "cispo", "reinforce"]:
        """The type of loss, in either spelling."""
        if self.use_cispo:
            return "cispo"
        return "reinforce" if self.disable_ppo_ratio else self.loss_type
