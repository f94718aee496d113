"""Which completions of a batch are compared with which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PairIndex:
    """The pairs within each group of a batch, as indices into its N completions in a row.

    Pairs come group by group, and within a group by their better completion.
    """

    better_P: Tensor
    """int64 [P]: the completion of lower rank; in a tie, the first of the two."""
    worse_P: Tensor
    """int64 [P]"""
    is_tie_P: Tensor
    """bool [P]"""
    group_P: Tensor
    """int64 [P]: index of the group in the batch."""
    weight_P: Tensor
    """float [P]: one over the number of pairs of its group, so every group weighs 1."""
    gap_P: Tensor
    """float [P]: levels between the two ranks as a share of those between best and worst; 1 in a
    group of two, 0 for a tie."""
    num_groups: int
    """B: groups of the batch, those without a pair included."""
    with_ties: bool
    """Whether ties were asked for."""

    def to(self, scores: Tensor) -> PairIndex:
        """The same on the device, and with the floating-point type, of these scores."""
        device, dtype = scores.device, scores.dtype
        return PairIndex(
            better_P=self.better_P.to(device),
            worse_P=self.worse_P.to(device),
            is_tie_P=self.is_tie_P.to(device),
            group_P=self.group_P.to(device),
            weight_P=self.weight_P.to(device, dtype),
            gap_P=self.gap_P.to(device, dtype),
            num_groups=self.num_groups,
            with_ties=self.with_ties,
        )


def pairs_of(ranks_per_group: Sequence[Sequence[int]], *, with_ties: bool) -> PairIndex:
    """Every pair of different rank (and every tie, where asked) of every group, on the CPU.

    The pairs of a group share its weight of 1 (the mean over all pairs of InstructGPT,
    arXiv 2203.02155), so a long list does not drown the short ones.
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
