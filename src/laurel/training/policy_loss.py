"""Computes the losses of GRPO and of supervised fine-tuning of a policy.

Let `r = current / old` be a ratio of probabilities (see `PolicyTokens`), `A` the advantage of a
completion or of one of its tokens, `C(r)` the ratio clipped to `[1 - ratio_clip_min, 1 +
ratio_clip_max]`, and `sg(x)` the value of x without a gradient. The loss of a token is
`w * actor + beta * k * s + mu * nll`:

    actor  that of ppo: max(-A r, -A C(r)); if A < 0, at most -A ratio_clip_c
           (arXiv 1707.06347; uneven range: 2503.14476; dual clip: 1912.09729);
           others in `extensions.policy_losses`
    w      1, or the importance-sampling weight `old / behaviour` of `correction`
    k      the k1, k2 or k3 estimate of the KL divergence from the reference policy
    s      `current / sg(current)`, which is 1; its gradient completes that of `E[k]`, because the
           tokens are sampled from the policy itself (arXiv 2506.09477). With
           `use_on_policy_kl_approximation` it is `current / behaviour`.
    nll    -log current, for completions with a positive reward (VAPO, arXiv 2504.05118, which
           divides by the tokens of these completions; here it is divided by those of all)

With `distillation` (arXiv 2306.13649) the advantage of a token is `A + weight * (teacher - old)`,
the difference of its log-probabilities under the teacher and the policy, clamped; A is 0 without
`rewards`. For r = 1 that is the gradient of the KL divergence of the policy from the teacher.

With GSPO (arXiv 2507.18071) all tokens of a completion share one `r`, the exponential of their mean
log ratio. `normalizer` combines the token losses: `tokens` divides their sum by the number of
tokens; `sequences` averages the means of the completions; `max_length` divides the sum by the
number of completions times the maximum length (Dr. GRPO, arXiv 2503.20783). These numbers are
counted over the whole batch of an update, so splitting it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsFloat

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laurel.config.grpo import PolicyLossConfig
from laurel.models.forest.outputs import TokenOutputs
from laurel.plugins import Loss
from laurel.training.losses import LossOutput

if TYPE_CHECKING:
    from laurel.types import LogProbs, Mask


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenValues:
    """What the loss of a token is computed from; tensors are [U], the tokens of a micro-batch."""

    ratio_U: Tensor
    """The ratio of probabilities `current / old`, with a gradient."""
    current_U: Tensor
    """The log-probabilities under the model, with a gradient."""
    old_U: Tensor
    """Those under the learner's weights before its first update on these rollouts."""
    advantages_U: Tensor
    tokens: PolicyTokens
    """The tokens: their completions, and what the generator sampled them with."""


class PolicyLoss:
    """The policy loss that `loss_fn` configures.

    `max_length` is the maximum length of a completion, which only `normalizer: max_length` uses.
    """

    def __init__(self, config: PolicyLossConfig, *, max_length: int) -> None:
        self._config = config
        self._max_length = max_length
        loss, section = config.settings_of(Loss, config.loss_type)
        self._term, self._clips = loss.make(section, config), loss.clips
        self.normalizer: Literal["tokens", "sequences", "max_length"]
        if config.normalizer == "auto":
            self.normalizer = "tokens" if config.token_level_loss else "sequences"
        else:
            self.normalizer = config.normalizer
        # Importance weights are truncated only where an upper limit is set.
        is_limited = config.truncated_importance_sampling_ratio is not None
        self._truncation = config.truncated_importance_sampling_type if is_limited else None

    @property
    def needs_reference(self) -> bool:
        """Whether labels must carry the log-probabilities of the reference policy."""
        return self._config.reference_policy_kl_penalty > 0 and not self._config.use_kl_in_reward

    @property
    def needs_teacher(self) -> bool:
        """Whether labels must carry the log-probabilities of the teacher."""
        return self._config.distillation.model_name is not None

    def has_signal(self, labels: PolicyLabels) -> bool:
        """Report whether the loss without its KL term has a nonzero gradient for any token."""
        if self.needs_teacher:
            return labels.num_samples > 0
        imitates = self._config.positive_example_nll_weight > 0.0
        return any(
            used and (teaches or (imitates and reward is not None and reward > 0.0))
            for used, teaches, reward in zip(
                labels.used_G, labels.teaches_G, labels.rewards_G, strict=True
            )
        )

    def count(self, batch: Sequence[PolicyLabels]) -> float:
        """Return what a batch adds to the denominator of the token losses, by `normalizer`."""
        if self.normalizer == "tokens":
            return float(sum(labels.num_tokens for labels in batch))
        num_samples = sum(labels.num_samples for labels in batch)
        return float(num_samples * (self._max_length if self.normalizer == "max_length" else 1))

    def __call__(
        self, outputs: TokenOutputs, batch: Sequence[PolicyLabels], *, num_groups: float
    ) -> LossOutput:
        """Compute the loss of a micro-batch.

        Args:
            outputs: The outputs for all M branch tokens, branch after branch, in order of groups.
            num_groups: The global denominator, the sum of `count` over all micro-batches and ranks.
        """
        assert num_groups > 0, "nothing to learn from: skip the step"
        config = self._config
        logprobs_M = _full_precision(outputs.logprobs_M)
        tokens = PolicyTokens.of(batch, like=logprobs_M)
        current_U = logprobs_M.index_select(0, tokens.place_U)
        old_U = tokens.old_U
        if old_U is None or config.force_on_policy_ratio:
            old_U = current_U.detach()
        log_ratio_U = current_U - old_U
        if config.sequence_level_importance_ratios:
            log_ratio_U = tokens.spread(tokens.means(log_ratio_U))
        ratio_U = ratio_of(log_ratio_U)
        advantages_U, gap_U = tokens.advantages_U, None
        if self.needs_teacher:
            gap_U = self._behind_teacher(old_U, tokens)
            learned_U = advantages_U if config.distillation.rewards else 0.0
            advantages_U = learned_U + config.distillation.weight * gap_U
        corrected = self.correction(old_U, tokens)
        loss_U = self._term(
            TokenValues(
                ratio_U=ratio_U,
                current_U=current_U,
                old_U=old_U,
                advantages_U=advantages_U,
                tokens=tokens,
            )
        )
        assert loss_U.shape == current_U.shape, (
            f"loss_fn.loss_type={config.loss_type} gives losses of shape {tuple(loss_U.shape)} for "
            f"{len(current_U)} tokens"
        )
        if config.use_importance_sampling_correction:
            loss_U = corrected.weights_U * loss_U
        sums = dict[str, Tensor]()
        if self.needs_reference:
            kl_U = self._divergence(current_U, tokens)
            loss_U = loss_U + config.reference_policy_kl_penalty * kl_U
            sums["kl_penalty"] = self._total(kl_U.detach(), tokens)
        if config.positive_example_nll_weight:
            nll_U = torch.where(tokens.is_positive_U, -current_U, torch.zeros_like(current_U))
            loss_U = loss_U + config.positive_example_nll_weight * nll_U
            sums["positive_nll_loss"] = nll_U.detach().sum()
            sums["num_positive_tokens"] = tokens.is_positive_U.sum().to(loss_U.dtype)
        total = self._total(loss_U, tokens)
        sums["loss"] = total.detach()
        sums["denominator"] = total.new_full((), self.count(batch))
        if outputs.entropy_M is not None:
            entropy_U = _full_precision(outputs.entropy_M).index_select(0, tokens.place_U)
            sums["entropy"] = entropy_U.detach().sum()
        if gap_U is not None:
            sums["teacher_gap"] = gap_U.sum()
        log_ratio_U = log_ratio_U.detach()
        sums |= self._figures(current_U.detach(), old_U, log_ratio_U, advantages_U, tokens)
        sums["sampling_importance_ratio"] = corrected.weights_U.sum()
        sums["sampling_importance_ratio_before_truncation"] = corrected.whole_U.sum()
        outside_U = corrected.outside_U.to(corrected.weights_U.dtype)
        if self._truncation in ("seq-tis", "seq-mask-tis"):
            sums["outside_samples"] = tokens.means(outside_U).sum()
        elif self._truncation is not None:
            sums["is_oob_ratio"] = outside_U.sum()
        return LossOutput(loss=total / num_groups, sums=sums)

    def metrics(self, sums: Mapping[str, SupportsFloat]) -> dict[str, float]:
        """Compute the metrics of an update from its totals of `LossOutput.sums`.

        - `loss`, and `kl_penalty` without its weight, combined by `normalizer`.
        - `global_valid_toks`, `global_valid_seqs`, `num_valid_samples`, `num_extreme_ratios`:
          counts.
        - `probs_ratio[_clamped][_min|_max]`: the ratios.
        - `clip_ratio/{low_mean,high_mean}`: the share of tokens below the range with a negative, or
          above it with a positive advantage, which get no gradient in PPO; `region_mean`: of both.
          REINFORCE, which clips no ratio, has neither these nor `probs_ratio_clamped`.
        - `token_mult_prob_error`, `gen_kl_error`, `policy_kl_error`, `js_divergence_error`: as
          `mismatch` defines them; `token_mult_prob_error_max`: of the token that is furthest off.
        - `sampling_importance_ratio`: the mean weight, after truncation, and
          `sampling_importance_ratio_before_truncation`; `is_oob_ratio`: the share outside the
          range, of completions for the `seq-...` kinds and of tokens otherwise.
        - `approx_entropy`: `-log current`, weighted by `current / behaviour`; `entropy`: measured.
        - `teacher_gap`: how much likelier the teacher finds tokens, on average: minus an estimate
          of the KL divergence of the policy from it. It rises to 0.
        - `positive_nll_loss`: the mean over the tokens of positive examples.

        A mean over nothing is absent.
        """
        totals = {name: float(value) for name, value in sums.items()}
        num_tokens, num_samples = totals["global_valid_toks"], totals["global_valid_seqs"]
        metrics = {name: totals[name] for name in (*_COUNTS, *_EXTREMES) if name in totals}
        metrics["num_valid_samples"] = num_samples
        if totals.get("num_positive_tokens"):
            metrics["positive_nll_loss"] = (
                totals["positive_nll_loss"] / totals["num_positive_tokens"]
            )
        if not num_tokens:
            return metrics
        for name in ("loss", "kl_penalty"):
            if name in totals:
                metrics[name] = totals[name] / totals["denominator"]
        for name in _PER_TOKEN:
            if name in totals:
                metrics[name] = totals[name] / num_tokens
        if "outside_samples" in totals:
            metrics["is_oob_ratio"] = totals["outside_samples"] / num_samples
        return metrics

    def correction(self, old_U: Tensor, tokens: PolicyTokens) -> Correction:
        """Compute the weights `old / behaviour` of the policy-gradient term, without a gradient.

        There is one weight per token, or with sequence-level ratios the product over the
        completion. The kind of truncation then decides by the range `[a, b]`, where a defaults to
        0:

        - `tis`: clipped to the range (truncated importance sampling, Yao et al. 2025)
        - `icepop`: 0 outside the range (Ling team, 2025)
        - `seq-mask-tis`: unchanged, but 0 for completions whose geometric mean lies outside the
          range
        - `seq-tis`: the product over the completion, clipped to the range
        """
        log_U = (old_U - tokens.behaviour_U).detach()
        config, kind = self._config, self._truncation
        high = config.truncated_importance_sampling_ratio
        if config.sequence_level_importance_ratios or kind == "seq-tis":
            weights_U = tokens.spread(ratio_of(tokens.sums(log_U)))
        else:
            weights_U = ratio_of(log_U)
        if kind is None:
            outside_U = torch.zeros_like(weights_U, dtype=torch.bool)
            return Correction(weights_U, weights_U, outside_U)
        assert high is not None, "without it nothing is truncated"
        low = config.truncated_importance_sampling_ratio_min or 0.0
        whole_U = checked_U = weights_U
        if kind == "seq-mask-tis":
            checked_U = tokens.spread(ratio_of(tokens.means(log_U)))
        outside_U = (checked_U < low) | (checked_U > high)
        if kind in ("tis", "seq-tis"):
            weights_U = weights_U.clamp(low, high)
        else:
            weights_U = torch.where(outside_U, torch.zeros_like(weights_U), weights_U)
        return Correction(weights_U, whole_U, outside_U)

    def _behind_teacher(self, old_U: Tensor, tokens: PolicyTokens) -> Tensor:
        assert tokens.teacher_U is not None, "the labels lack the teacher's log-probabilities"
        most = self._config.distillation.clamp_value or math.inf
        return (tokens.teacher_U - old_U).clamp(-most, most)

    def _divergence(self, current_U: Tensor, tokens: PolicyTokens) -> Tensor:
        config = self._config
        assert tokens.reference_U is not None, "the labels lack the reference's log-probabilities"
        kl_U = token_divergence(
            current_U,
            tokens.reference_U,
            kind=config.reference_policy_kl_type,
            input_clamp=config.kl_input_clamp_value,
            output_clamp=config.kl_output_clamp_value,
        )
        sampler_U = current_U.detach()
        if config.use_on_policy_kl_approximation:
            sampler_U = tokens.behaviour_U
        return ratio_of(current_U - sampler_U) * kl_U

    def _total(self, values_U: Tensor, tokens: PolicyTokens) -> Tensor:
        if self.normalizer == "sequences":
            return tokens.means(values_U).sum()
        return values_U.sum()

    def _figures(
        self,
        current_U: Tensor,
        old_U: Tensor,
        log_ratio_U: Tensor,
        advantages_U: Tensor,
        tokens: PolicyTokens,
    ) -> dict[str, Tensor]:
        count = current_U.new_full((), len(current_U))
        ratios = {"probs_ratio": ratio_of(log_ratio_U)}
        extreme_U = torch.maximum(log_ratio_U.abs(), (old_U - tokens.behaviour_U).abs())
        sampling_ratio_U = ratio_of(current_U - tokens.behaviour_U)
        sums = {
            "global_valid_toks": count,
            "global_valid_seqs": count.new_full((), tokens.num_samples),
            "num_extreme_ratios": (extreme_U > LIMIT).sum().to(count.dtype),
            "approx_entropy": -(sampling_ratio_U * current_U).sum(),
            **mismatch(old_U, tokens.behaviour_U),
        }
        if self._clips:
            ratio_U = ratios["probs_ratio"]
            ratios["probs_ratio_clamped"] = clamped_U = clipped(ratio_U, self._config)
            is_low_U = (ratio_U < clamped_U) & (advantages_U < 0)
            is_high_U = (ratio_U > clamped_U) & (advantages_U > 0)
            sums |= {
                "clip_ratio/low_mean": is_low_U.sum().to(count.dtype),
                "clip_ratio/high_mean": is_high_U.sum().to(count.dtype),
                "clip_ratio/region_mean": (is_low_U | is_high_U).sum().to(count.dtype),
            }
        for name, values_U in ratios.items():
            sums[name] = values_U.sum()
            if len(values_U):
                sums |= {f"{name}_min": values_U.min(), f"{name}_max": values_U.max()}
        if len(old_U):
            apart_U = (old_U - tokens.behaviour_U).detach().abs()
            sums["token_mult_prob_error_max"] = ratio_of(apart_U).max()
        return sums


_COUNTS = ("global_valid_toks", "global_valid_seqs", "num_extreme_ratios")
_EXTREMES = (
    "probs_ratio_min",
    "probs_ratio_max",
    "probs_ratio_clamped_min",
    "probs_ratio_clamped_max",
    "token_mult_prob_error_max",
)
_PER_TOKEN = (
    "probs_ratio",
    "probs_ratio_clamped",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
    "sampling_importance_ratio_before_truncation",
    "is_oob_ratio",
    "approx_entropy",
    "entropy",
    "teacher_gap",
)


class DemonstrationLoss:
    """The loss of supervised fine-tuning: the mean negative log-likelihood of learned tokens."""

    def count(self, batch: Sequence[DemonstrationLabels]) -> float:
        """Return the number of tokens that are learned, the denominator of the loss."""
        return float(sum(labels.num_tokens for labels in batch))

    def __call__(
        self, outputs: TokenOutputs, batch: Sequence[DemonstrationLabels], *, num_groups: float
    ) -> LossOutput:
        """Compute the loss of a micro-batch; `num_groups` is the sum of `count` over the batch."""
        assert num_groups > 0, "nothing to learn from: skip the step"
        logprobs_M = _full_precision(outputs.logprobs_M)
        place_U = kept_places([mask for labels in batch for mask in labels.masks_GL], logprobs_M)
        total = -logprobs_M.index_select(0, place_U).sum()
        num_samples = sum(bool(mask.any()) for labels in batch for mask in labels.masks_GL)
        sums = {
            "loss": total.detach(),
            "num_valid_tokens": total.new_full((), len(place_U)),
            "num_valid_samples": total.new_full((), num_samples),
        }
        if outputs.entropy_M is not None:
            entropy_M = _full_precision(outputs.entropy_M)
            sums["entropy"] = entropy_M.index_select(0, place_U).detach().sum()
        return LossOutput(loss=total / num_groups, sums=sums)

    def metrics(self, sums: Mapping[str, SupportsFloat]) -> dict[str, float]:
        """Compute the means `loss` and `entropy` (if measured), and `perplexity` (`e^loss`).

        The counts are `num_valid_tokens` and `num_valid_samples`. A mean over nothing is absent.
        """
        totals = {name: float(value) for name, value in sums.items()}
        metrics = {name: totals[name] for name in ("num_valid_tokens", "num_valid_samples")}
        if totals["num_valid_tokens"]:
            metrics["loss"] = totals["loss"] / totals["num_valid_tokens"]
            # Above the limit, it says no more than the loss does, and finally overflows.
            metrics["perplexity"] = math.exp(min(metrics["loss"], 100.0))
            if "entropy" in totals:
                metrics["entropy"] = totals["entropy"] / totals["num_valid_tokens"]
        return metrics


def _full_precision(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


# Ratios of probabilities, their corrections and divergences, as functions of log-probabilities.
#
# Tensors are [U], with one value for each token that the policy generated (`PolicyTokens`).
# `current` is the model's value now, `old` the learner's before its first update on these rollouts,
# and `behaviour` the generator's when it sampled the token. The first two differ by updates, the
# last two by engine, precision or the age of the weights.

LIMIT = 20.0
"""The absolute value to which logarithms of ratios are clipped before `exp`.

e^20 is 5e8, which is far beyond any clip range, and its products stay finite in float32. Beyond the
limit there is no gradient; the metric `num_extreme_ratios` counts such ratios."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Return the ratio `exp(log_ratio)`, limited so that it does not overflow."""
    return torch.exp(log_ratio.clamp(-LIMIT, LIMIT))


def token_divergence(
    current_U: Tensor,
    reference_U: Tensor,
    *,
    kind: Literal["k1", "k2", "k3"],
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """Estimate the KL divergence [U] of the policy from the reference, on the policy's own tokens.

    With `d = reference - current`, k1 is `-d`, k2 is `d^2 / 2` and k3 is `e^d - 1 - d` (Schulman,
    "Approximating KL divergence", 2020).
    """
    lead_U = reference_U - current_U
    lead_U = lead_U.clamp(-(input_clamp or math.inf), input_clamp or math.inf)
    if kind == "k1":
        values_U = -lead_U
    elif kind == "k2":
        values_U = lead_U.square() / 2.0
    else:
        values_U = _k3(lead_U)
    return values_U.clamp(-(output_clamp or math.inf), output_clamp or math.inf)


def clipped(ratio_U: Tensor, config: PolicyLossConfig) -> Tensor:
    """Return the ratio clipped to `[1 - ratio_clip_min, 1 + ratio_clip_max]`."""
    return ratio_U.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)


def ppo(config: PolicyLossConfig, given: TokenValues) -> Tensor:
    """Return the clipped loss of each token, float32 [U] (Schulman et al. 2017, equation 7).

    With `ratio_clip_c` the loss of a negative advantage is bounded (Ye et al. 2020, equation 5).
    """
    advantages_U = given.advantages_U
    clipped_U = clipped(given.ratio_U, config)
    loss_U = torch.maximum(-advantages_U * given.ratio_U, -advantages_U * clipped_U)
    if config.ratio_clip_c is None:
        return loss_U
    limited_U = torch.minimum(loss_U, -advantages_U * config.ratio_clip_c)
    return torch.where(advantages_U < 0, limited_U, loss_U)


class Correction(NamedTuple):
    """The importance-sampling weights of tokens that another policy sampled."""

    weights_U: Tensor
    whole_U: Tensor
    """The weights before truncation."""
    outside_U: Tensor
    """bool [U]: the tokens whose weight the range limited or set to 0."""


def mismatch(old_U: Tensor, behaviour_U: Tensor) -> dict[str, Tensor]:
    """Return sums over tokens of measures of the mismatch between generator and learner.

    `token_mult_prob_error` is `e^|old - behaviour|`, which is 1 if they agree. The others are k3
    estimates of the KL divergence of the generator from the learner, of the reverse, and of the
    Jensen-Shannon divergence.
    """
    old_U, behaviour_U = old_U.detach(), behaviour_U.detach()
    middle_U = torch.logaddexp(old_U, behaviour_U) - math.log(2.0)
    return {
        "token_mult_prob_error": ratio_of((old_U - behaviour_U).abs()).sum(),
        "gen_kl_error": _k3(old_U - behaviour_U).sum(),
        "policy_kl_error": _k3(behaviour_U - old_U).sum(),
        "js_divergence_error": (_k3(middle_U - old_U) + _k3(middle_U - behaviour_U)).sum() / 2.0,
    }


def _k3(lead: Tensor) -> Tensor:
    lead = lead.clamp(max=LIMIT)
    return torch.expm1(lead) - lead


# The labels that the losses of a policy read besides its outputs, by group and by batch.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLabels:
    """The labels of one group for `PolicyLoss`; every tuple has one entry per branch."""

    masks_GL: tuple[Mask, ...]
    """bool [L]: which tokens of each branch the policy sampled."""
    advantages_G: tuple[float, ...]
    """The advantage of each completion; with `advantages_GL` not read."""
    advantages_GL: tuple[npt.NDArray[np.float64], ...] | None = None
    """float64 [L]: the advantage of each token, ignored outside the mask. None: every token has
    that of its completion."""
    used_G: tuple[bool, ...]
    """Whether the completion is used; otherwise its other values are ignored."""
    behaviour_GL: tuple[LogProbs, ...]
    """The generator's log-probabilities when it sampled; ignored outside the mask."""
    old_GL: tuple[LogProbs, ...] | None = None
    """The log-probabilities under the learner's weights before its first update on these rollouts;
    ignored outside the mask. None: this is the first update, so they equal the model's outputs.
    """
    reference_GL: tuple[LogProbs, ...] | None = None
    """The log-probabilities under the reference policy; ignored outside the mask."""
    teacher_GL: tuple[LogProbs, ...] | None = None
    """The log-probabilities under the teacher; ignored outside the mask."""
    rewards_G: tuple[float | None, ...]
    """The rewards of the environment, which select positive examples."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Each kind has one array for all completions, because pickling many small arrays takes
        # longer than copying them.
        lengths = [len(mask_L) for mask_L in self.masks_GL]
        arrays = (
            self.masks_GL,
            self.behaviour_GL,
            self.old_GL,
            self.reference_GL,
            self.teacher_GL,
            self.advantages_GL,
        )
        flat = [None if rows is None else np.concatenate(rows) for rows in arrays]
        return _labels_of, (lengths, flat, self.advantages_G, self.used_G, self.rewards_G)

    def advantage_of_tokens(self) -> Sequence[npt.NDArray[np.float64]]:
        """Return the advantages of the tokens of each completion, float64 [L]."""
        if self.advantages_GL is not None:
            return self.advantages_GL
        pairs = zip(self.masks_GL, self.advantages_G, strict=True)
        return [np.full(len(mask_L), value, np.float64) for mask_L, value in pairs]

    @property
    def teaches_G(self) -> tuple[bool, ...]:
        """Whether any token of each completion has an advantage other than 0."""
        pairs = zip(self.advantage_of_tokens(), self.masks_GL, strict=True)
        return tuple(bool(np.any(values_L[mask_L] != 0.0)) for values_L, mask_L in pairs)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the policy sampled, in the completions that are used."""
        pairs = zip(self.masks_GL, self.used_G, strict=True)
        return sum(int(np.count_nonzero(mask_L)) for mask_L, used in pairs if used)

    @property
    def num_completions(self) -> int:
        """The number of completions."""
        return len(self.masks_GL)

    @property
    def num_samples(self) -> int:
        """The number of completions that are used and have a token of the policy."""
        pairs = zip(self.masks_GL, self.used_G, strict=True)
        return sum(used and bool(mask_L.any()) for mask_L, used in pairs)

    def subset(self, indices: Iterable[int]) -> PolicyLabels:
        """Select the labels of these completions, in this order."""
        chosen = tuple(indices)
        return PolicyLabels(
            masks_GL=tuple(self.masks_GL[i] for i in chosen),
            advantages_G=tuple(self.advantages_G[i] for i in chosen),
            advantages_GL=(
                None if self.advantages_GL is None else tuple(self.advantages_GL[i] for i in chosen)
            ),
            used_G=tuple(self.used_G[i] for i in chosen),
            teacher_GL=(
                None if self.teacher_GL is None else tuple(self.teacher_GL[i] for i in chosen)
            ),
            behaviour_GL=tuple(self.behaviour_GL[i] for i in chosen),
            old_GL=None if self.old_GL is None else tuple(self.old_GL[i] for i in chosen),
            reference_GL=(
                None if self.reference_GL is None else tuple(self.reference_GL[i] for i in chosen)
            ),
            rewards_G=tuple(self.rewards_G[i] for i in chosen),
        )


def _labels_of(
    lengths: Sequence[int],
    flat: Sequence[np.ndarray | None],
    advantages_G: tuple[float, ...],
    used_G: tuple[bool, ...],
    rewards_G: tuple[float | None, ...],
) -> PolicyLabels:
    ends = np.cumsum(lengths)[:-1]
    masks, behaviour, old, reference, teacher, advantages = (
        None if values is None else tuple(np.split(values, ends)) for values in flat
    )
    assert masks is not None
    assert behaviour is not None
    return PolicyLabels(
        masks_GL=masks,
        advantages_G=advantages_G,
        advantages_GL=advantages,
        used_G=used_G,
        behaviour_GL=behaviour,
        old_GL=old,
        reference_GL=reference,
        teacher_GL=teacher,
        rewards_G=rewards_G,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DemonstrationLabels:
    """The labels of one group for `DemonstrationLoss`: which tokens of each branch are learned."""

    masks_GL: tuple[Mask, ...]

    @property
    def num_completions(self) -> int:
        """The number of completions."""
        return len(self.masks_GL)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are learned."""
        return sum(int(mask_L.sum()) for mask_L in self.masks_GL)

    def subset(self, indices: Iterable[int]) -> DemonstrationLabels:
        """Select the labels of these completions, in this order."""
        return DemonstrationLabels(masks_GL=tuple(self.masks_GL[i] for i in indices))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyTokens:
    """The tokens of a micro-batch that count in the loss.

    U is the number of the policy's tokens in the completions that are used, and N the number of
    these completions. Other values are never read, so a NaN outside the mask cannot spread, not
    even through a gradient of 0.
    """

    place_U: Tensor
    """int64 [U]: the index among the M tokens of the branches."""
    sample_U: Tensor
    """int64 [U]: the index of the completion among the N."""
    lengths_N: Tensor
    advantages_U: Tensor
    is_positive_U: Tensor
    """bool [U]: whether the token's completion has a positive reward."""
    behaviour_U: Tensor
    old_U: Tensor | None
    reference_U: Tensor | None
    teacher_U: Tensor | None

    @classmethod
    def of(cls, batch: Sequence[PolicyLabels], *, like: Tensor) -> PolicyTokens:
        """Return the tokens of a micro-batch; `like` [M] are its outputs' log-probabilities."""
        places = _places(
            [
                mask_L & used
                for labels in batch
                for mask_L, used in zip(labels.masks_GL, labels.used_G, strict=True)
            ],
            like,
        )
        lengths = np.array([len(m) for labels in batch for m in labels.masks_GL], np.int64)
        branch_M = np.repeat(np.arange(len(lengths)), lengths)
        branches_N, sample_U, lengths_N = np.unique(
            branch_M[places], return_inverse=True, return_counts=True
        )
        advantages_M = _flat(
            [row_L for labels in batch for row_L in labels.advantage_of_tokens()], np.float64
        )
        is_positive = np.array(
            [r is not None and r > 0.0 for labels in batch for r in labels.rewards_G], bool
        )

        def given(values: Sequence[LogProbs]) -> Tensor:
            values_M = _flat(values, np.float32)
            assert len(values_M) == len(like), f"{len(like)} tokens, but {len(values_M)} values"
            return to_device(values_M[places], like)

        def given_by_all(rows: list[tuple[LogProbs, ...] | None], name: str) -> Tensor | None:
            streams = [row for row in rows if row is not None]
            assert len(streams) in (0, len(batch)), f"some groups have {name} values, others none"
            if len(streams) < len(batch):
                return None
            return given([row_L for row in streams for row_L in row])

        return cls(
            place_U=torch.from_numpy(places).to(like.device, non_blocking=True),
            sample_U=torch.from_numpy(sample_U).to(like.device, non_blocking=True),
            lengths_N=to_device(lengths_N, like),
            advantages_U=to_device(advantages_M[places], like),
            is_positive_U=torch.from_numpy(is_positive[branches_N][sample_U]).to(
                like.device, non_blocking=True
            ),
            behaviour_U=given([row for labels in batch for row in labels.behaviour_GL]),
            old_U=given_by_all([labels.old_GL for labels in batch], "old"),
            reference_U=given_by_all([labels.reference_GL for labels in batch], "reference"),
            teacher_U=given_by_all([labels.teacher_GL for labels in batch], "teacher"),
        )

    @property
    def num_samples(self) -> int:
        """The number of completions, N."""
        return len(self.lengths_N)

    def sums(self, values_U: Tensor) -> Tensor:
        """Return the sums over the tokens of each completion [N], deterministic on a GPU too."""
        return values_U.new_zeros(self.num_samples).index_put(
            (self.sample_U,), values_U, accumulate=True
        )

    def means(self, values_U: Tensor) -> Tensor:
        """Return the means over the tokens of each completion [N]."""
        return self.sums(values_U) / self.lengths_N

    def spread(self, values_N: Tensor) -> Tensor:
        """Repeat the value of each completion for its tokens [U]."""
        return values_N[self.sample_U]


def kept_places(masks: Sequence[Mask], like: Tensor) -> Tensor:
    """Return the indices, int64 [U], of the masked tokens among the M of the outputs `like`."""
    return torch.from_numpy(_places(masks, like)).to(like.device, non_blocking=True)


def _places(masks: Sequence[Mask], like: Tensor) -> np.ndarray:
    keep_M = _flat(masks, bool)
    assert like.shape == keep_M.shape, (
        f"{len(keep_M)} tokens in the branches, but outputs of shape {tuple(like.shape)}"
    )
    return np.flatnonzero(keep_M)


def to_device(values: np.ndarray, like: Tensor) -> Tensor:
    """Convert an array to the device and floating-point type of a tensor."""
    return torch.from_numpy(values).to(like.device, like.dtype, non_blocking=True)


def _flat(rows: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([*rows, np.zeros(0, dtype)]).astype(dtype, copy=False)
