"""Computes losses of pairs with ties, of ranked lists, of ratings and of steps.

The notation and the way to compute comparisons are those of `training.losses`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from laurel.training.losses import PairIndex, expected, full_precision, lead_of, like, ranked_pairs


def davidson(
    better_P: Tensor,
    worse_P: Tensor,
    is_tie_P: Tensor,
    *,
    nu: float,
    margin_P: Tensor | None = None,
    target_P: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute Davidson's loss [P], by `i wins : j wins : tie = e^i : e^j : nu e^((i+j)/2)` (1970).

    A tie is most likely between equal scores, with probability `nu / (2 + nu)`. As nu goes to 0
    this becomes Bradley-Terry. The options are those of `bradley_terry`, and do not apply to ties,
    whose margin must be 0.

    Raises:
        ValueError: nu is not above 0.
    """
    if not nu > 0.0:
        raise ValueError(f"Davidson's nu must be above 0, got {nu}")
    log_nu = math.log(nu)
    lead_P = lead_of(better_P, worse_P, margin_P)
    # In logarithms: the exponential of a large lead would overflow.
    win_P = -logsigmoid(-torch.logaddexp(-lead_P, log_nu - lead_P / 2))
    lose_P = -logsigmoid(-torch.logaddexp(lead_P, log_nu + lead_P / 2))
    tie_P = -logsigmoid(log_nu - torch.logaddexp(lead_P / 2, -lead_P / 2))
    return torch.where(is_tie_P, tie_P, expected(win_P, lose_P, target_P, label_smoothing))


def rao_kupper(
    better_P: Tensor,
    worse_P: Tensor,
    is_tie_P: Tensor,
    *,
    theta: float,
    margin_P: Tensor | None = None,
    target_P: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Compute the loss [P] of Rao and Kupper, by `P(i > j) = e^i / (e^i + theta e^j)` (1967).

    A tie has the remaining probability, `(theta^2 - 1) P(i > j) P(j > i)`. As theta goes to 1 this
    becomes Bradley-Terry. The options are those of `bradley_terry`, and do not apply to ties, whose
    margin must be 0.

    Raises:
        ValueError: theta is not above 1.
    """
    if not theta > 1.0:
        raise ValueError(f"Rao and Kupper's theta must be above 1, got {theta}")
    log_theta = math.log(theta)
    lead_P = lead_of(better_P, worse_P, margin_P)
    win_P, lose_P = -logsigmoid(lead_P - log_theta), -logsigmoid(-lead_P - log_theta)
    # As a product: theta^2 - 1 would lose its digits where theta is close to 1.
    tie_P = win_P + lose_P - (math.log(theta - 1.0) + math.log(theta + 1.0))
    return torch.where(is_tie_P, tie_P, expected(win_P, lose_P, target_P, label_smoothing))


def plackett_luce(scores_N: Tensor, pairs: PairIndex) -> Tensor:
    """Compute the loss [B] of ranked lists: each item is chosen before all that rank below it.

    The loss of an item is `logsumexp(its own score and those of all strictly worse items) - its own
    score`. Items of one rank do not compete, and items of the worst rank do not count. The loss of
    a list is the mean over the items that count, not the sum, so lists of any length have the same
    weight, and a list of two gives exactly the Bradley-Terry loss. A list of a single rank has
    loss 0. `pairs` must be without ties.
    """
    assert not pairs.with_ties, "a tie says nothing about who is picked first"
    scores_N = full_precision(scores_N)
    behind_P = scores_N[pairs.worse_P] - scores_N[pairs.better_P]
    items_I, item_P = torch.unique_consecutive(pairs.better_P, return_inverse=True)
    group_I = torch.zeros_like(items_I).index_put((item_P,), pairs.group_P)
    # log-sum of each item's rivals. Accumulating by index_put is deterministic on a GPU too.
    zeros_I = behind_P.new_zeros(len(items_I))
    # The largest of them is taken out, so that no exponential overflows. It cancels, so that its
    # gradient is not needed.
    nearest_I = (zeros_I - math.inf).scatter_reduce(0, item_P, behind_P.detach(), "amax")
    rivals_I = zeros_I.index_put(
        (item_P,), torch.exp(behind_P - nearest_I[item_P]), accumulate=True
    )
    loss_I = -logsigmoid(-(nearest_I + torch.log(rivals_I)))
    num_items_B = torch.bincount(group_I, minlength=pairs.num_groups)
    return behind_P.new_zeros(pairs.num_groups).index_put(
        (group_I,), loss_I / num_items_B[group_I], accumulate=True
    )


def regression(predictions_NK: Tensor, targets_NK: Tensor) -> Tensor:
    """Compute the squared error [N], as the mean over the attributes that were rated.

    NaN in `targets_NK` means that an attribute was not rated; without any rating the loss is 0.
    """
    predictions_NK = full_precision(predictions_NK)
    rated_NK = ~torch.isnan(targets_NK)
    errors_NK = predictions_NK - targets_NK.to(predictions_NK.dtype)
    # The mask comes before the square, because NaN times a zero gradient would still be NaN.
    squares_NK = torch.where(rated_NK, errors_NK, torch.zeros_like(errors_NK)).square()
    return squares_NK.sum(-1) / rated_NK.sum(-1).clamp(min=1)


def steps_right(logits_S: Tensor, labels_S: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Compute the binary cross-entropy [S] of steps, whose labels are probabilities.

    It is the loss of Lightman et al. (2023, arXiv 2305.20050), with the soft labels of
    Math-Shepherd (2023, arXiv 2312.08935). NaN in `labels_S` means that a step was not labelled;
    its loss is 0.
    """
    logits_S = full_precision(logits_S)
    has_label_S = ~torch.isnan(labels_S)
    labels_S = torch.where(has_label_S, labels_S, torch.zeros_like(labels_S))
    right_S, wrong_S = -logsigmoid(logits_S), -logsigmoid(-logits_S)
    loss_S = expected(right_S, wrong_S, labels_S, label_smoothing)
    return torch.where(has_label_S, loss_S, torch.zeros_like(loss_S))


def steps_ranked(logits_S: Tensor, steps_NS: Sequence[Sequence[float]], *, margin: float) -> Tensor:
    """Compute the ranking loss [N] of answers with labelled steps.

    It is the loss of process Q-value models (Li and Li 2024, arXiv 2410.11287): a right step is
    chosen before the right steps before it, as the answer comes closer to its end, and before all
    wrong steps, by a margin. The state before the first step counts as a right step with the logit
    0, so logits above 0 mean right steps. A label above 1/2 is right, one below is wrong; other
    steps do not count.

    Args:
        logits_S: The logits of the steps of all answers, one answer after the other.
        steps_NS: The labels of the steps of each answer.
        margin: By how much right steps should lead wrong ones.
    """
    logits_S = full_precision(logits_S)
    chosen: list[int] = []
    ranks_NG: list[list[int]] = []
    start = 0
    for steps_S in steps_NS:
        used = [s for s, label in enumerate(steps_S) if label > 0.5 or label < 0.5]
        num_right = sum(steps_S[s] > 0.5 for s in used)
        ranks, right_after = [num_right], num_right
        for s in used:
            if steps_S[s] > 0.5:
                right_after -= 1
            ranks.append(right_after if steps_S[s] > 0.5 else num_right + 1)
        ranks_NG.append(ranks)
        # The state before the first step comes after all logits.
        chosen += [len(logits_S), *(start + s for s in used)]
        start += len(steps_S)
    with_start = torch.cat([logits_S, logits_S.new_zeros(1)])
    lead = [
        margin if rank == max(ranks) and rank > ranks[0] else 0.0
        for ranks in ranks_NG
        for rank in ranks
    ]
    index = torch.tensor(chosen, dtype=torch.int64, device=logits_S.device)
    scores = with_start[index] + like(lead, logits_S)
    return plackett_luce(scores, ranked_pairs(ranks_NG, with_ties=False).to(scores))
