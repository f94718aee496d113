"""Computes the losses of reward-model training, as functions of scores and as the configured loss.

The functions return one loss per pair, list or completion, never a mean over a batch. `RewardLoss`
gives every group the weight 1, and divides by a denominator that the caller counts over all
micro-batches and ranks before the first of them, so splitting a batch changes nothing.

Notation: `d` is the better score minus the worse, and `l(x) = -log sigmoid(x) = log(1 + e^-x)`.
Every comparison is computed as `l` of the lead of the observed outcome over the log-sum of the
others. That never overflows, and keeps the last digits of small losses. torch's `softplus` does
not: it is linear above 20, which is wrong from the ninth digit on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any, SupportsFloat

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from laurel.config.reward_model import LossConfig
from laurel.errors import DataError
from laurel.plugins import PreferenceLoss
from laurel.types import Preference


def bradley_terry(
    better_P: Tensor,
    worse_P: Tensor,
    *,
    margin_P: Tensor | None = None,
    target_P: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the Bradley-Terry loss [P], by `P(i > j) = e^i / (e^i + e^j)`.

    `margin_P` requires a lead of that size: `l(d - margin)` (Llama 2, arXiv 2307.09288). `target_P`
    is the probability that `better` is really better (a soft label), and `label_smoothing` = e is
    the share of labels that are assumed to be reversed. With `q = target (1 - e) + (1 - target) e`
    the loss is `q l(d) + (1 - q) l(-d)`.
    """
    lead_P = lead_of(better_P, worse_P, margin_P)
    return expected(-logsigmoid(lead_P), -logsigmoid(-lead_P), target_P, label_smoothing)


def centering(better_P: Tensor, worse_P: Tensor) -> Tensor:
    """Compute the centering loss `(i + j)^2` [P], which keeps scores near 0 (arXiv 2312.09244).

    The other losses depend only on differences of scores.
    """
    return (full_precision(better_P) + full_precision(worse_P)).square()


def full_precision(scores: Tensor) -> Tensor:
    """Return scores in float32 or float64."""
    # In bfloat16 the rounding of scores would decide close pairs.
    assert scores.is_floating_point(), f"scores are {scores.dtype}, not floating point"
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()


def lead_of(better_P: Tensor, worse_P: Tensor, margin_P: Tensor | None) -> Tensor:
    """Return the better score less the worse [P], less the margin."""
    lead_P = full_precision(better_P) - full_precision(worse_P)
    return lead_P if margin_P is None else lead_P - margin_P.to(lead_P.dtype)


def expected(
    win_P: Tensor, lose_P: Tensor, target_P: Tensor | None, label_smoothing: float
) -> Tensor:
    """Return the loss [P] of labels that hold only with some probability."""
    if target_P is None:
        if label_smoothing == 0.0:
            return win_P
        return (1.0 - label_smoothing) * win_P + label_smoothing * lose_P
    target_P = target_P.to(win_P.dtype)
    right_P = target_P * (1.0 - label_smoothing) + (1.0 - target_P) * label_smoothing
    return right_P * win_P + (1.0 - right_P) * lose_P


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """The loss of a micro-batch, and the sums from which metrics are computed."""

    loss: Tensor
    """The scalar to differentiate, divided by the global denominator, so micro-batches add up."""
    sums: dict[str, Tensor]
    """Detached scalars that are not divided. `learner.add_up` adds them over micro-batches, ranks
    and batches, and the loss's `metrics` converts the totals."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredPairs:
    """The pairs of completions of a micro-batch, P, that a loss compares."""

    better_P: Tensor
    """The scores of the better completions, with a gradient."""
    worse_P: Tensor
    is_tie_P: Tensor
    """bool [P]: whether the two have the same rank; never without `uses_ties`."""
    margin_P: Tensor | None
    """The margins of the rows; None without `rm.loss.use_margin`."""
    target_P: Tensor
    """The probabilities that `better` is really better: 1, or the rows' soft labels."""


class RewardLoss:
    """The loss that `rm.loss` configures.

    `reward_weights_K` combines the outputs of a regression head into the reward by which accuracy
    is measured (None: their mean); it does not change the loss.

    A group of more than two completions is trained by all its pairs, and has the weight 1 like any
    other. Its margin is that between best and worst; a pair between them has a share of it, by
    levels of rank. Ties in a group contribute to `davidson` and `rao_kupper` only.
    """

    def __init__(
        self, config: LossConfig, *, reward_weights_K: Sequence[float] | None = None
    ) -> None:
        self._config = config
        loss, section = config.settings_of(PreferenceLoss, config.type)
        self._reads, self._uses_ties = loss.reads, loss.uses_ties
        self._count_steps = loss.count_steps
        self._computed = loss.make(section, config)
        self._reward_weights_K = reward_weights_K

    def teaches(self, preference: Preference) -> bool:
        """Report whether a row contributes to the loss.

        Raises:
            DataError: The row has a soft label, which the loss cannot use.
        """
        if self._reads == "ratings":
            return any(map(_is_rated, preference.attributes_GK or ()))
        if self._reads == "steps":
            return self.count([preference]) > 0
        if self._reads == "lists" and preference.target != 1.0:
            raise DataError(
                f"{preference.source or preference.group.id}: a soft label "
                f"({preference.target}) cannot be used by rm.loss.type={self._config.type}; "
                f"choose one of {', '.join(_PAIRWISE)}, or leave out data.target_key"
            )
        if self._uses_ties:
            return len(preference.ranks_G) > 1
        return len(set(preference.ranks_G)) > 1

    def count(self, batch: Sequence[Preference]) -> float:
        """Return the number of groups, labelled steps or answers that contribute to the loss.

        Its sum over all ranks is the denominator of a step; a step with 0 should be skipped.
        """
        if self._reads == "steps":
            steps_NS = [steps_S for one in batch for steps_S in one.steps_GS or ()]
            return float(self._count_steps(steps_NS))
        return float(sum(map(self.teaches, batch)))

    def __call__(
        self, scores_NK: Tensor, batch: Sequence[Preference], *, num_groups: float
    ) -> LossOutput:
        """Compute the loss of a micro-batch whose completions, in order, have these scores.

        Args:
            scores_NK: The scores; K is 1 except for the type `regression`.
            num_groups: The global denominator, the sum of `count` over all micro-batches and ranks.
                The scores of a process reward model are the logits of all steps.

        Raises:
            DataError: The number of a row's ratings differs from that of the head's outputs.
        """
        assert num_groups > 0, "nothing to learn from: skip the step"
        if self._reads == "steps":
            return self._steps(scores_NK, batch, num_groups=num_groups)
        ranks_per_group = [preference.ranks_G for preference in batch]
        num_completions = sum(map(len, ranks_per_group))
        assert scores_NK.shape == (num_completions, scores_NK.shape[-1]), (
            f"{num_completions} completions, but scores of shape {tuple(scores_NK.shape)}"
        )
        scores_NK = full_precision(scores_NK)
        if self._reward_weights_K is None:
            rewards_N = scores_NK.mean(-1)
        else:
            # This is not a matrix product, because autocast would round that to bfloat16.
            rewards_N = (scores_NK * like(self._reward_weights_K, scores_NK)).sum(-1)
        ranked = ranked_pairs(ranks_per_group, with_ties=False).to(scores_NK)
        if self._reads == "ratings":
            total = self._attributes(scores_NK, batch)
        else:
            assert scores_NK.shape[1] == 1, "comparisons need one score per completion"
            total = self._comparisons(rewards_N, batch, ranked)
        # Detached, as metrics are kept for longer than the graph. `metrics` divides the first three
        # by the number of pairs.
        detached_N = rewards_N.detach()
        better_P, worse_P = detached_N[ranked.better_P], detached_N[ranked.worse_P]
        sums = {
            "accuracy": (better_P > worse_P).sum().to(detached_N.dtype),
            "rewards_chosen_mean": better_P.sum(),
            "rewards_rejected_mean": worse_P.sum(),
            "num_valid_samples": detached_N.new_full((), len(ranked.better_P)),
            "loss": total.detach(),
            "num_groups": total.new_full((), self.count(batch)),
        }
        return LossOutput(loss=total / num_groups, sums=sums)

    def metrics(self, sums: Mapping[str, SupportsFloat]) -> dict[str, float]:
        """Compute the metrics of a step or a validation set from its totals of `LossOutput.sums`.

        `loss` is the mean over what `count` counts, and `num_valid_samples` the number of pairs of
        different rank, or of steps whose label is not 1/2 and whose logit is finite. Of steps,
        `accuracy` is the share whose value is on the label's side of 1/2. Over pairs, it is the
        share whose better side scores strictly higher, and `rewards_chosen_mean` and
        `rewards_rejected_mean` are the means of their sides, all as in
        `observe.metrics.preference_metrics`. A mean over nothing is absent.
        """
        totals = {name: float(value) for name, value in sums.items()}
        metrics = {"num_valid_samples": totals["num_valid_samples"]}
        if totals["num_groups"]:
            metrics["loss"] = totals["loss"] / totals["num_groups"]
        if totals["num_valid_samples"]:
            for name in ("accuracy", "rewards_chosen_mean", "rewards_rejected_mean"):
                if name in totals:
                    metrics[name] = totals[name] / totals["num_valid_samples"]
        return metrics

    def _steps(
        self, logits_S1: Tensor, batch: Sequence[Preference], *, num_groups: float
    ) -> LossOutput:
        steps_NS = [steps_S for one in batch for steps_S in one.steps_GS or ()]
        labels = [label for steps_S in steps_NS for label in steps_S]
        assert logits_S1.shape == (len(labels), 1), (
            f"{len(labels)} steps, but scores of shape {tuple(logits_S1.shape)}"
        )
        logits_S = full_precision(logits_S1)[:, 0]
        labels_S = like(labels, logits_S)
        total = self._computed(logits_S, steps_NS).sum()
        is_clear_S = ((labels_S > 0.5) | (labels_S < 0.5)) & logits_S.isfinite()
        is_right_S = (logits_S.detach() >= 0) == (labels_S > 0.5)
        sums = {
            "accuracy": (is_right_S & is_clear_S).sum().to(total.dtype),
            "num_valid_samples": is_clear_S.sum().to(total.dtype),
            "loss": total.detach(),
            "num_groups": total.new_full((), self.count(batch)),
        }
        return LossOutput(loss=total / num_groups, sums=sums)

    def _comparisons(
        self, rewards_N: Tensor, batch: Sequence[Preference], ranked: PairIndex
    ) -> Tensor:
        config, pairs = self._config, ranked
        if self._uses_ties:
            ranks_per_group = [preference.ranks_G for preference in batch]
            pairs = ranked_pairs(ranks_per_group, with_ties=True).to(rewards_N)
        better_P, worse_P = rewards_N[pairs.better_P], rewards_N[pairs.worse_P]
        if self._reads == "lists":
            total = self._computed(rewards_N, pairs).sum()
        else:
            scored = self._scored(better_P, worse_P, batch, pairs)
            total = (pairs.weight_P * self._computed(scored)).sum()
        if config.center_rewards_coefficient:
            penalty = (pairs.weight_P * centering(better_P, worse_P)).sum()
            total = total + config.center_rewards_coefficient * penalty
        return total

    def _scored(
        self, better_P: Tensor, worse_P: Tensor, batch: Sequence[Preference], pairs: PairIndex
    ) -> ScoredPairs:
        margin_P = None
        if self._config.use_margin:
            margins_B = like([preference.margin for preference in batch], better_P)
            margin_P = margins_B[pairs.group_P] * pairs.gap_P
        return ScoredPairs(
            better_P=better_P,
            worse_P=worse_P,
            is_tie_P=pairs.is_tie_P,
            margin_P=margin_P,
            target_P=like([preference.target for preference in batch], better_P)[pairs.group_P],
        )

    def _attributes(self, scores_NK: Tensor, batch: Sequence[Preference]) -> Tensor:
        # The total sums, over groups, the mean over the rated completions of each.
        width = scores_NK.shape[1]
        targets, weights = list[Sequence[float]](), list[float]()
        for preference in batch:
            size = len(preference.ranks_G)
            rows_GK = preference.attributes_GK or ((math.nan,) * width,) * size
            if len(rows_GK) != size or any(len(row_K) != width for row_K in rows_GK):
                raise DataError(
                    f"{preference.source or preference.group.id}: ratings of shape "
                    f"{len(rows_GK)} x {sorted({len(row_K) for row_K in rows_GK})} for {size} "
                    f"completions and a head of {width} attributes; give each completion one "
                    f"rating, or NaN, for each of policy.reward_model_cfg.attributes"
                )
            num_rated = max(sum(map(_is_rated, rows_GK)), 1)
            targets += rows_GK
            weights += [1.0 / num_rated] * size
        loss_N = self._computed(scores_NK, like(targets, scores_NK).view(-1, width))
        return (like(weights, scores_NK) * loss_N).sum()


_PAIRWISE = ("bradley_terry", "davidson", "rao_kupper")


def _is_rated(ratings_K: Sequence[float]) -> bool:
    return not all(map(math.isnan, ratings_K))


def like(values: Sequence[Any], scores: Tensor) -> Tensor:
    """Return values as a tensor of the type and on the device of scores."""
    # A non-blocking copy: the host does not wait for the device.
    return torch.tensor(values, dtype=scores.dtype).to(scores.device, non_blocking=True)


# The pairs of completions of a batch that are compared.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairIndex:
    """The pairs within each group of a batch, as indices into the N completions of the batch.

    Pairs are ordered by group, and within a group by their better completion.
    """

    better_P: Tensor
    """int64 [P]: the completion of lower (better) rank; in a tie, the first of the two."""
    worse_P: Tensor
    """int64 [P]: the completion of higher rank."""
    is_tie_P: Tensor
    """bool [P]: whether the pair is a tie."""
    group_P: Tensor
    """int64 [P]: the index of the group in the batch."""
    weight_P: Tensor
    """float [P]: one over the number of pairs of its group, so every group weighs 1."""
    gap_P: Tensor
    """float [P]: the number of levels between the two ranks, as a share of those between best and
    worst; 1 in a group of two, 0 for a tie."""
    num_groups: int
    """The number of groups of the batch, B, including those without a pair."""
    with_ties: bool
    """Whether ties are included."""

    def to(self, scores: Tensor) -> PairIndex:
        """Move the index to the device and floating-point type of these scores."""
        there = partial(Tensor.to, device=scores.device, non_blocking=True)
        return PairIndex(
            better_P=there(self.better_P),
            worse_P=there(self.worse_P),
            is_tie_P=there(self.is_tie_P),
            group_P=there(self.group_P),
            weight_P=there(self.weight_P, dtype=scores.dtype),
            gap_P=there(self.gap_P, dtype=scores.dtype),
            num_groups=self.num_groups,
            with_ties=self.with_ties,
        )


def ranked_pairs(ranks_per_group: Sequence[Sequence[int]], *, with_ties: bool) -> PairIndex:
    """Return the pairs of different rank, and optionally the ties, of every group, on the CPU.

    The pairs of a group share its weight of 1 (as the mean over all pairs in InstructGPT, arXiv
    2203.02155), so a long list does not outweigh short ones.
    """
    better, worse, is_tie, group = list[int](), list[int](), list[bool](), list[int]()
    weight, gap = list[float](), list[float]()
    start = 0
    for index, ranks_G in enumerate(ranks_per_group):
        levels = {rank: level for level, rank in enumerate(sorted(set(ranks_G)))}
        first = len(better)
        for i, j in permutations(range(len(ranks_G)), 2):
            step = levels[ranks_G[j]] - levels[ranks_G[i]]
            if step > 0 or (with_ties and step == 0 and i < j):
                better.append(start + i)
                worse.append(start + j)
                is_tie.append(step == 0)
                gap.append(step / max(len(levels) - 1, 1))
        num_pairs = len(better) - first
        group += [index] * num_pairs
        weight += [1.0 / num_pairs] * num_pairs if num_pairs else []
        start += len(ranks_G)
    return PairIndex(
        better_P=torch.tensor(better, dtype=torch.int64),
        worse_P=torch.tensor(worse, dtype=torch.int64),
        is_tie_P=torch.tensor(is_tie, dtype=torch.bool),
        group_P=torch.tensor(group, dtype=torch.int64),
        weight_P=torch.tensor(weight, dtype=torch.float64),
        gap_P=torch.tensor(gap, dtype=torch.float64),
        num_groups=len(ranks_per_group),
        with_ties=with_ties,
    )
