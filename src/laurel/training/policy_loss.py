"""Losses of GRPO and of supervised fine-tuning of a policy.

With `r = current / old` (probabilities; see `importance`), `A` the advantage of a completion,
`C(r)` the ratio cut to `[1 - ratio_clip_min, 1 + ratio_clip_max]`, `sg` a value without gradient,
the loss of a token is `w * actor + beta * k * s + mu * nll`:

    actor  ppo        max(-A r, -A C(r)); where A < 0 at most -A ratio_clip_c
                      (arXiv 1707.06347; uneven range: 2503.14476; dual clip: 1912.09729)
           cispo      -A sg(C(r)) log current           (arXiv 2506.13585)
           reinforce  -A log current                    (arXiv 2402.14740)
    w      1, or the importance-sampling correction `old / behaviour`; see `importance.correction`
    k      k1, k2 or k3 estimate of the divergence from the reference
    s      `current / sg(current)`: 1, and its gradient is what makes that of `E[k]` complete, since
           the tokens come from the policy itself (arXiv 2506.09477). With
           `use_on_policy_kl_approximation` it is `current / behaviour`.
    nll    -log current, for completions with a positive reward (VAPO, arXiv 2504.05118; divided by
           the tokens of all completions here, by those of the positive ones there)

GSPO (arXiv 2507.18071): all tokens of a completion share `r`, the exponential of their mean log
ratio. The token losses are put together by `normalizer`: `tokens`, all of them over their number;
`sequences`, the mean of each completion over the number of completions; `max_length`, all of them
over completions times their longest length (Dr. GRPO, arXiv 2503.20783). These numbers are counted
over the whole batch of an update, so splitting it changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from laurel.config.grpo import PolicyLossConfig
from laurel.models.forest.outputs import TokenOutputs
from laurel.training.losses import LossOutput

if TYPE_CHECKING:
    from laurel.types import LogProbs, Mask


class PolicyLoss:
    """The policy loss of the configuration's `loss_fn`.

    `max_length` is the longest completion, which only `normalizer: max_length` reads.
    """

    def __init__(self, config: PolicyLossConfig, *, max_length: int) -> None:
        self._config = config
        self._max_length = max_length
        self.normalizer: Literal["tokens", "sequences", "max_length"]
        if config.normalizer == "auto":
            self.normalizer = "tokens" if config.token_level_loss else "sequences"
        else:
            self.normalizer = config.normalizer

    @property
    def needs_reference(self) -> bool:
        """Whether labels must carry the log-probabilities of the reference policy."""
        return self._config.reference_policy_kl_penalty > 0 and not self._config.use_kl_in_reward

    def has_signal(self, labels: PolicyLabels) -> bool:
        """Report whether the loss without its KL term has a nonzero gradient for any token."""
        imitates = self._config.positive_example_nll_weight > 0.0
        return any(
            used and (advantage != 0.0 or (imitates and reward is not None and reward > 0.0))
            for used, advantage, reward in zip(
                labels.used_G, labels.advantages_G, labels.rewards_G, strict=True
            )
        )

    def count(self, batch: Sequence[PolicyLabels]) -> float:
        """Count the denominator of the token losses, as `normalizer` defines it."""
        if self.normalizer == "tokens":
            return float(sum(labels.num_tokens for labels in batch))
        num_samples = sum(labels.num_samples for labels in batch)
        return float(num_samples * (self._max_length if self.normalizer == "max_length" else 1))

    def __call__(
        self, outputs: TokenOutputs, batch: Sequence[PolicyLabels], *, num_groups: float
    ) -> LossOutput:
        """Compute the loss of a micro-batch.

        Args:
            outputs: Outputs for all M branch tokens, one branch after the other, groups in order.
            batch: The groups of the micro-batch.
            num_groups: The global denominator: `count` over every micro-batch and rank.
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
        corrected = correction(old_U, tokens, config)
        loss_U = self._actor(ratio_U, current_U, tokens.advantages_U)
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
        sums |= self._figures(current_U.detach(), old_U, log_ratio_U.detach(), tokens)
        sums |= self._corrections(corrected, tokens)
        return LossOutput(loss=total / num_groups, sums=sums)

    def metrics(self, sums: Mapping[str, SupportsFloat]) -> dict[str, float]:
        """Compute the metrics of an update from its totals of `LossOutput.sums`.

        `loss`, `kl_penalty` (before its weight): as the loss is put together.
        `global_valid_toks`, `global_valid_seqs`, `num_valid_samples`, `num_extreme_ratios`: counts.
        `probs_ratio[_clamped][_min|_max]`: the ratios. `clip_ratio/{low_mean,high_mean}`: share of
        tokens below the range with a negative, above it with a positive advantage (PPO gives them
        no gradient); `region_mean`: of both. `token_mult_prob_error`, `gen_kl_error`,
        `policy_kl_error`, `js_divergence_error`: see `importance.mismatch`.
        `sampling_importance_ratio`: mean weight, after truncation; `is_oob_ratio`: share outside
        the range, of completions for the `seq-...` kinds and of tokens otherwise.
        `approx_entropy`: `-log current`, weighted by `current / behaviour`; `entropy`: measured.
        `positive_nll_loss`: mean over the tokens of positive examples.

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

    def _actor(self, ratio_U: Tensor, current_U: Tensor, advantages_U: Tensor) -> Tensor:
        # The policy-gradient term, before its weight.
        config = self._config
        if config.kind == "reinforce":
            return -advantages_U * current_U
        clamped_U = self._clamped(ratio_U)
        if config.kind == "cispo":
            return -advantages_U * clamped_U.detach() * current_U
        loss_U = torch.maximum(-advantages_U * ratio_U, -advantages_U * clamped_U)
        if config.ratio_clip_c is None:
            return loss_U
        limited_U = torch.minimum(loss_U, -advantages_U * config.ratio_clip_c)
        return torch.where(advantages_U < 0, limited_U, loss_U)

    def _clamped(self, ratio_U: Tensor) -> Tensor:
        return ratio_U.clamp(1.0 - self._config.ratio_clip_min, 1.0 + self._config.ratio_clip_max)

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
        self, current_U: Tensor, old_U: Tensor, log_ratio_U: Tensor, tokens: PolicyTokens
    ) -> dict[str, Tensor]:
        count = current_U.new_full((), len(current_U))
        ratio_U = ratio_of(log_ratio_U)
        clamped_U = self._clamped(ratio_U)
        is_low_U = (ratio_U < clamped_U) & (tokens.advantages_U < 0)
        is_high_U = (ratio_U > clamped_U) & (tokens.advantages_U > 0)
        extreme_U = torch.maximum(log_ratio_U.abs(), (old_U - tokens.behaviour_U).abs())
        sampling_ratio_U = ratio_of(current_U - tokens.behaviour_U)
        sums = {
            "global_valid_toks": count,
            "global_valid_seqs": count.new_full((), tokens.num_samples),
            "num_extreme_ratios": (extreme_U > LIMIT).sum().to(count.dtype),
            "probs_ratio": ratio_U.sum(),
            "probs_ratio_clamped": clamped_U.sum(),
            "clip_ratio/low_mean": is_low_U.sum().to(count.dtype),
            "clip_ratio/high_mean": is_high_U.sum().to(count.dtype),
            "clip_ratio/region_mean": (is_low_U | is_high_U).sum().to(count.dtype),
            "approx_entropy": -(sampling_ratio_U * current_U).sum(),
            **mismatch(old_U, tokens.behaviour_U),
        }
        if len(ratio_U):
            for name, values_U in (("probs_ratio", ratio_U), ("probs_ratio_clamped", clamped_U)):
                sums |= {f"{name}_min": values_U.min(), f"{name}_max": values_U.max()}
        return sums

    def _corrections(self, corrected: Correction, tokens: PolicyTokens) -> dict[str, Tensor]:
        sums = {"sampling_importance_ratio": corrected.weights_U.sum()}
        outside_U = corrected.outside_U.to(corrected.weights_U.dtype)
        kind = self._config.truncation
        if kind in ("seq-tis", "seq-mask-tis"):
            sums["outside_samples"] = tokens.means(outside_U).sum()
        elif kind is not None:
            sums["is_oob_ratio"] = outside_U.sum()
        return sums


_COUNTS = ("global_valid_toks", "global_valid_seqs", "num_extreme_ratios")
_EXTREMES = (
    "probs_ratio_min",
    "probs_ratio_max",
    "probs_ratio_clamped_min",
    "probs_ratio_clamped_max",
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
    "is_oob_ratio",
    "approx_entropy",
    "entropy",
)


class DemonstrationLoss:
    """The loss of supervised fine-tuning: mean negative log-likelihood of the tokens to imitate."""

    def count(self, batch: Sequence[DemonstrationLabels]) -> float:
        """Count the tokens to imitate."""
        return float(sum(labels.num_tokens for labels in batch))

    def __call__(
        self, outputs: TokenOutputs, batch: Sequence[DemonstrationLabels], *, num_groups: float
    ) -> LossOutput:
        """Compute the loss of a micro-batch; `num_groups` is the total of `count`."""
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
        """Compute the means `loss`, `entropy` (where measured) and `perplexity` (`e^loss`).

        The counts are `num_valid_tokens` and `num_valid_samples`. A mean over nothing is absent.
        """
        totals = {name: float(value) for name, value in sums.items()}
        metrics = {name: totals[name] for name in ("num_valid_tokens", "num_valid_samples")}
        if totals["num_valid_tokens"]:
            metrics["loss"] = totals["loss"] / totals["num_valid_tokens"]
            # Beyond, it says no more than the loss does, and overflows in the end.
            metrics["perplexity"] = math.exp(min(metrics["loss"], 100.0))
            if "entropy" in totals:
                metrics["entropy"] = totals["entropy"] / totals["num_valid_tokens"]
        return metrics


def _full_precision(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


# --------------------------------------------------------------------------------------------------
# Ratios of probabilities, their corrections and divergences: functions of log-probabilities.
#
# Tensors are [U]: one value for each token that the policy wrote; see `PolicyTokens`. `current` is
# what the model gives now, `old` what the learner gave before its first update on these rollouts,
# `behaviour` the generator's value when it sampled the token. Each may differ from the next: the
# first
# two by updates, the others by another engine, another precision or older weights.

LIMIT = 20.0
"""Logarithms of ratios are cut to plus and minus this before `exp`: e^20 is 5e8, far beyond any
clip range, and its products stay finite in float32. Beyond it there is no gradient; the metric
`num_extreme_ratios` says how often that was so."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """Compute `exp` without overflow."""
    return torch.exp(log_ratio.clamp(-LIMIT, LIMIT))


def token_divergence(
    current_U: Tensor,
    reference_U: Tensor,
    *,
    kind: Literal["k1", "k2", "k3"],
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """Estimate the divergence [U] of the policy from the reference, on the policy's own tokens.

    With `d = reference - current`: k1 is `-d`, k2 `d^2 / 2`, k3 `e^d - 1 - d`
    (Schulman, "Approximating KL divergence", 2020).
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


class Correction(NamedTuple):
    """Weights of tokens that another policy sampled."""

    weights_U: Tensor
    outside_U: Tensor
    """bool [U]: tokens that the range limited or excluded."""


def correction(old_U: Tensor, tokens: PolicyTokens, config: PolicyLossConfig) -> Correction:
    """Compute weights `old / behaviour` of the policy-gradient term, without a gradient.

    There is one weight per token, or with sequence-level ratios the product over the completion.
    The kind of truncation then decides by the range `[a, b]`, where a defaults to 0:

    - `tis`: clipped to the range (truncated importance sampling, Yao et al. 2025)
    - `icepop`: 0 outside the range (Ling team, 2025)
    - `seq-mask-tis`: unchanged, but 0 for completions whose geometric mean lies outside the range
    - `seq-tis`: the product over the completion, clipped to the range
    """
    log_U = (old_U - tokens.behaviour_U).detach()
    kind = config.truncation
    if config.sequence_level_importance_ratios or kind == "seq-tis":
        weights_U = tokens.spread(ratio_of(tokens.sums(log_U)))
    else:
        weights_U = ratio_of(log_U)
    if kind is None:
        return Correction(weights_U, torch.zeros_like(weights_U, dtype=torch.bool))
    low = config.truncated_importance_sampling_ratio_min or 0.0
    high = config.truncated_importance_sampling_ratio
    assert high is not None, "the configuration demands it"
    checked_U = weights_U
    if kind == "seq-mask-tis":
        checked_U = tokens.spread(ratio_of(tokens.means(log_U)))
    outside_U = (checked_U < low) | (checked_U > high)
    if kind in ("tis", "seq-tis"):
        weights_U = weights_U.clamp(low, high)
    else:
        weights_U = torch.where(outside_U, torch.zeros_like(weights_U), weights_U)
    return Correction(weights_U, outside_U)


def mismatch(old_U: Tensor, behaviour_U: Tensor) -> dict[str, Tensor]:
    """Sum measures of the mismatch between generator and learner over tokens.

    `token_mult_prob_error` is `e^|old - behaviour|`: 1 where they agree. The others estimate, with
    k3, the divergence of the generator from the learner, the reverse, and Jensen-Shannon's.
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


# --------------------------------------------------------------------------------------------------
# What the losses of a policy read beside its outputs: one value per group, flattened per batch.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLabels:
    """Labels of one group for `PolicyLoss`; every list follows the branches of its tree."""

    masks_GL: tuple[Mask, ...]
    """bool [L]: the tokens of each branch that the policy sampled."""
    advantages_G: tuple[float, ...]
    used_G: tuple[bool, ...]
    """False: the completion takes part in nothing, whatever its other values are."""
    behaviour_GL: tuple[LogProbs, ...]
    """Log-probabilities at sampling time. Like the next two, read only under the mask."""
    old_GL: tuple[LogProbs, ...] | None = None
    """Log-probabilities under the learner's weights before its first update on these rollouts.
    None: this is that update, so they equal the model's outputs.
    """
    reference_GL: tuple[LogProbs, ...] | None = None
    """Log-probabilities under the reference policy."""
    rewards_G: tuple[float | None, ...]
    """Rewards of the environment: they select positive examples."""

    def __reduce__(self) -> tuple[Any, ...]:
        # One array for all completions of each kind: so many small ones take longer to pickle than
        # to copy.
        lengths = [len(mask_L) for mask_L in self.masks_GL]
        arrays = (self.masks_GL, self.behaviour_GL, self.old_GL, self.reference_GL)
        flat = [None if rows is None else np.concatenate(rows) for rows in arrays]
        return _labels_of, (lengths, flat, self.advantages_G, self.used_G, self.rewards_G)

    @property
    def num_tokens(self) -> int:
        """Count the tokens of the policy in completions in use."""
        pairs = zip(self.masks_GL, self.used_G, strict=True)
        return sum(int(np.count_nonzero(mask_L)) for mask_L, used in pairs if used)

    @property
    def num_samples(self) -> int:
        """Count the completions in use with a token of the policy."""
        pairs = zip(self.masks_GL, self.used_G, strict=True)
        return sum(used and bool(mask_L.any()) for mask_L, used in pairs)

    def subset(self, indices: Iterable[int]) -> PolicyLabels:
        """Select the labels of these completions, in this order."""
        chosen = tuple(indices)
        return PolicyLabels(
            masks_GL=tuple(self.masks_GL[i] for i in chosen),
            advantages_G=tuple(self.advantages_G[i] for i in chosen),
            used_G=tuple(self.used_G[i] for i in chosen),
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
    masks, behaviour, old, reference = (
        None if values is None else tuple(np.split(values, ends)) for values in flat
    )
    assert masks is not None
    assert behaviour is not None
    return PolicyLabels(
        masks_GL=masks,
        advantages_G=advantages_G,
        used_G=used_G,
        behaviour_GL=behaviour,
        old_GL=old,
        reference_GL=reference,
        rewards_G=rewards_G,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DemonstrationLabels:
    """Labels of one group for `DemonstrationLoss`: the tokens of each branch to imitate."""

    masks_GL: tuple[Mask, ...]

    @property
    def num_tokens(self) -> int:
        """Count the tokens to imitate."""
        return sum(int(mask_L.sum()) for mask_L in self.masks_GL)

    def subset(self, indices: Iterable[int]) -> DemonstrationLabels:
        """Select the labels of these completions, in this order."""
        return DemonstrationLabels(masks_GL=tuple(self.masks_GL[i] for i in indices))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyTokens:
    """The tokens of a micro-batch that count in the loss.

    U runs over the policy's tokens of the completions in use, N over those completions. Nothing
    else is ever read, so a NaN in a masked place cannot spread, not even through a gradient of 0.
    """

    place_U: Tensor
    """int64 [U]: index among the M tokens of the branches."""
    sample_U: Tensor
    """int64 [U]: index among the N completions."""
    lengths_N: Tensor
    advantages_U: Tensor
    is_positive_U: Tensor
    """bool [U]: token of a completion with a positive reward."""
    behaviour_U: Tensor
    old_U: Tensor | None
    reference_U: Tensor | None

    @classmethod
    def of(cls, batch: Sequence[PolicyLabels], *, like: Tensor) -> PolicyTokens:
        """Collect the tokens of a micro-batch whose log-probabilities are `like` [M]."""
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
        advantages = np.array([a for labels in batch for a in labels.advantages_G], np.float64)
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
            advantages_U=to_device(advantages[branches_N][sample_U], like),
            is_positive_U=torch.from_numpy(is_positive[branches_N][sample_U]).to(
                like.device, non_blocking=True
            ),
            behaviour_U=given([row for labels in batch for row in labels.behaviour_GL]),
            old_U=given_by_all([labels.old_GL for labels in batch], "old"),
            reference_U=given_by_all([labels.reference_GL for labels in batch], "reference"),
        )

    @property
    def num_samples(self) -> int:
        """N: number of completions."""
        return len(self.lengths_N)

    def sums(self, values_U: Tensor) -> Tensor:
        """Sum over the tokens of each completion: [N] (deterministic on a GPU too)."""
        return values_U.new_zeros(self.num_samples).index_put(
            (self.sample_U,), values_U, accumulate=True
        )

    def means(self, values_U: Tensor) -> Tensor:
        """Average over the tokens of each completion: [N]."""
        return self.sums(values_U) / self.lengths_N

    def spread(self, values_N: Tensor) -> Tensor:
        """Repeat the value of each completion for its tokens: [U]."""
        return values_N[self.sample_U]


def kept_places(masks: Sequence[Mask], like: Tensor) -> Tensor:
    """Index the tokens under the masks among those whose outputs are `like` [M]: int64 [U]."""
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
