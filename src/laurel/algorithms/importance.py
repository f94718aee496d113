"""Ratios of probabilities, their corrections and divergences: functions of log-probabilities.

Tensors are [U]: one value for each token that the policy wrote; see `PolicyTokens`. `current` is
what the model gives now, `old` what the learner gave before its first update on these rollouts,
`behaviour` what the generator said when it drew the token. Each may differ from the next: the first
two by updates, the others by another engine, another precision or older weights.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from laurel.algorithms.policy_labels import PolicyTokens
from laurel.config.policy_loss import PolicyLossConfig

LIMIT = 20.0
"""Logarithms of ratios are cut to plus and minus this before `exp`: e^20 is 5e8, far beyond any
clip range, and its products stay finite in float32. Beyond it there is no gradient; the metric
`num_extreme_ratios` says how often that was so."""


def ratio_of(log_ratio: Tensor) -> Tensor:
    """`exp`, without overflow."""
    return torch.exp(log_ratio.clamp(-LIMIT, LIMIT))


def divergence(
    current_U: Tensor,
    reference_U: Tensor,
    *,
    kind: Literal["k1", "k2", "k3"],
    input_clamp: float | None = None,
    output_clamp: float | None = None,
) -> Tensor:
    """Estimate [U] of the divergence of the policy from the reference, on the policy's own tokens.

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
    """What tokens are weighted by because another policy drew them."""

    weights_U: Tensor
    outside_U: Tensor
    """bool [U]: what the range cut or left out."""


def correction(old_U: Tensor, tokens: PolicyTokens, config: PolicyLossConfig) -> Correction:
    """Weights `old / behaviour` of the policy-gradient term, without a gradient.

    One per token, or with sequence-level ratios the product over the completion. Then, with
    `[a, b]` the range (a is 0 where none is given):

    - `tis`: cut to it (truncated importance sampling, Yao et al. 2025)
    - `icepop`: 0 outside it (Ling team, 2025)
    - `seq-mask-tis`: unchanged, but 0 for completions whose geometric mean lies outside it
    - `seq-tis`: the product over the completion, cut to it
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
    judged_U = weights_U
    if kind == "seq-mask-tis":
        judged_U = tokens.spread(ratio_of(tokens.means(log_U)))
    outside_U = (judged_U < low) | (judged_U > high)
    if kind in ("tis", "seq-tis"):
        weights_U = weights_U.clamp(low, high)
    else:
        weights_U = torch.where(outside_U, torch.zeros_like(weights_U), weights_U)
    return Correction(weights_U, outside_U)


def mismatch(old_U: Tensor, behaviour_U: Tensor) -> dict[str, Tensor]:
    """Sums over tokens that say how far the generator is from the learner.

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
