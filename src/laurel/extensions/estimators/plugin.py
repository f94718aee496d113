"""The estimators of advantages that stand beside `grpo.estimators`.

Let `r_i` be the reward of completion i of a group of n, and `l_i` the number of tokens that the
policy wrote in it. The advantages are

    gpg        a (r_i - mean of the group), where a is the number of completions of the batch over
               that of those in groups whose rewards differ: groups without a signal do not thin
               the gradient out                                        (arXiv 2504.02546)
    opo        r_i - (sum of l_j r_j) / (sum of l_j): of the baselines that the whole group shares,
               the one of least variance, if all tokens have gradients of about the same norm
                                                                       (arXiv 2505.23585)
    pass_at_k  the mean of max(S) - max(S without i) over the sets S of k completions of the group
               that include i: what the completion adds to the best of k. With k = n, the default,
               it is the lead of the best one over the second, and 0 for all others
                                                                       (arXiv 2503.19595)
    remax      r_i - the reward of the greedy completion of the same prompt
                                                                       (arXiv 2310.10505)
    tree       for completions that branch (`grpo.tree`): the advantage within the group, plus the
               same within the tree, the completions that go back to one first completion
                                                                       (arXiv 2509.21240)

With `tree.credit: segment` each segment of a completion, between the places at which completions
part, has an advantage of its own (Monte-Carlo values, as in arXiv 2410.01679): V of the segment
minus the mean V of the others that begin where it does, or of all of them. V of a completion's last
segment is its reward, and of any other the mean V of those that continue it. Let n be the number of
completions of the group, m of those with the segment, and p the share of the segment: 1 for the
prompt, divided by the number of branches wherever completions part. The advantage is weighted by
n p / m, so a beginning that many continue weighs no more than one that nobody continued: the
estimate of the gradient has no bias, however places are chosen without looking at rewards.

Only `pass_at_k` and `tree` may be divided by the group's standard deviation (`scale: group`).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from laurel.config.yaml_tree import Section
from laurel.grpo.estimators import undivided
from laurel.plugins import Advantage

if TYPE_CHECKING:
    from laurel.config.grpo import GRPOConfig
    from laurel.grpo.advantages import AdvantageRule, Compared, Floats, Rewards
    from laurel.grpo.branching import Segment


class _Undivided(Advantage):
    baseline: ClassVar[Literal["mean", "own", "greedy"]] = "own"
    divides = False

    def make(self, section: None, settings: AdvantageRule) -> Callable[[Rewards], Compared]:
        """Return the comparison within groups."""
        return self._compare

    @staticmethod
    @abstractmethod
    def _compare(rewards: Rewards) -> Compared: ...

    def without_effect(self, settings: GRPOConfig) -> dict[str, str]:
        """Return the keys about a deviation."""
        return undivided(settings)


class _OfGroup(Advantage):
    def check(self, settings: GRPOConfig) -> None:
        """Refuse a deviation of the batch."""
        estimator = settings.adv_estimator
        if estimator.scale == "batch":
            raise ValueError(
                f"adv_estimator.scale=batch is not read by adv_estimator.name={estimator.name}, "
                "which compares within groups; use group or none"
            )

    def without_effect(self, settings: GRPOConfig) -> dict[str, str]:
        """Return the keys about a deviation where nothing is divided by one."""
        return undivided(settings)


class Gpg(_Undivided):
    """GPG: against the group, undivided, and scaled up where groups have no signal."""

    @staticmethod
    def _compare(rewards: Rewards) -> Compared:
        from laurel.grpo.advantages import Compared, centred, teaches

        values = [centred(row) for row in rewards.values_B]
        with_signal = sum(len(row) for row in values if teaches(row))
        scale = sum(map(len, values)) / max(with_signal, 1)
        return Compared(values=[scale * row for row in values])


class Opo(_Undivided):
    """OPO: against the mean of the group in which longer completions weigh more."""

    @staticmethod
    def _compare(rewards: Rewards) -> Compared:
        from laurel.grpo.advantages import Compared, centred

        values = []
        for row, lengths in zip(rewards.values_B, rewards.lengths_B, strict=True):
            ahead = centred(row)  # so equal rewards give exactly 0
            total = lengths.sum()
            values.append(ahead - (float(lengths @ ahead) / total if total else 0.0))
        return Compared(values=values)


class PassAtKConfig(Section):
    """Which best-of-k is trained."""

    k: int | None = Field(default=None, ge=2)
    """Completions of which the best one counts; null: all of the group. Default: as verl has it."""


class PassAtK(_OfGroup):
    """Pass@k: what a completion adds to the best of k."""

    section = PassAtKConfig
    baseline = "own"

    def check(self, settings: GRPOConfig) -> None:
        """Refuse a k beyond the group, and a deviation of the batch."""
        estimator, size = settings.adv_estimator, settings.num_generations_per_prompt
        k = estimator.settings_of(Advantage, estimator.name)[1].k
        if k is not None and k > size:
            raise ValueError(
                f"adv_estimator.{estimator.name}.k={k} is more than "
                f"num_generations_per_prompt={size}: no group has as many completions; use at most "
                "that"
            )
        super().check(settings)

    def make(
        self, section: PassAtKConfig, settings: AdvantageRule
    ) -> Callable[[Rewards], Compared]:
        """Return the comparison within groups."""
        return partial(_pass_at_k, section.k, settings)


def _pass_at_k(k: int | None, rule: AdvantageRule, rewards: Rewards) -> Compared:
    from laurel.grpo.advantages import divided

    values = [_added_to_best(row, k or len(row)) for row in rewards.values_B]
    return divided(values, rewards.values_B, rule, rewards.noise_B)


def _added_to_best(rewards: Floats, k: int) -> Floats:
    n = len(rewards)
    k = min(k, n)  # failures may leave fewer
    if k < 2:
        return np.zeros(n)
    ascending = np.sort(rewards)[:-1]
    # The best of k - 1 others is the one above j of the n - 1 others if the rest are among these.
    chances = np.array([math.comb(j, k - 2) / math.comb(n - 1, k - 1) for j in range(n - 1)])
    leads = np.maximum(rewards[:, None] - ascending, 0.0)
    added: Floats = leads @ chances
    return added


class Remax(_Undivided):
    """ReMax: against the greedy completion of the prompt, which is sampled besides."""

    baseline = "greedy"

    def check(self, settings: GRPOConfig) -> None:
        """Refuse what looks for differences within groups."""
        if settings.use_dynamic_sampling:
            raise ValueError(
                "use_dynamic_sampling keeps groups whose rewards differ, and "
                f"adv_estimator.name={settings.adv_estimator.name} learns from others as well: "
                "from all that differ from the greedy completion; use one of them"
            )

    @staticmethod
    def _compare(rewards: Rewards) -> Compared:
        from laurel.grpo.advantages import Compared

        # Without a baseline nothing is learned from a group.
        return Compared(
            values=[
                np.zeros(len(row)) if greedy is None else row - greedy
                for row, greedy in zip(rewards.values_B, rewards.greedy_B, strict=True)
            ]
        )


class TreeEstimatorConfig(Section):
    """What a completion that branches is compared with."""

    credit: Literal["completion", "segment"] = "completion"
    """`completion`: its tokens share one advantage, that within the group plus that within its
    tree (Tree-GRPO, arXiv 2509.21240). `segment`: each segment has the difference between its
    Monte-Carlo value and that of those beside it (VinePPO, arXiv 2410.01679). Default: the
    method's own."""


class TreeAdvantage(_OfGroup):
    """Against the group, and against those that branched from the same completion."""

    section = TreeEstimatorConfig
    compares_branches = True

    def keys_of_tokens(self, section: TreeEstimatorConfig) -> list[str]:
        """Return `credit`, where it is that of segments."""
        return ["adv_estimator.tree.credit=segment"] if section.credit == "segment" else []

    def make(
        self, section: TreeEstimatorConfig, settings: AdvantageRule
    ) -> Callable[[Rewards], Compared]:
        """Return the comparison within groups and their trees."""
        of_segments = section.credit == "segment"
        return partial(_by_segment if of_segments else _by_tree, settings)


def _by_tree(rule: AdvantageRule, rewards: Rewards) -> Compared:
    from laurel.grpo.advantages import Compared, Rewards, against_groups

    of_groups = against_groups(rule, rewards)
    values = []
    for row, of_group, noise, paths in zip(
        rewards.values_B, of_groups.values, rewards.noise_B, rewards.segments_B, strict=True
    ):
        roots = np.array([path[0].id for path in paths], np.int64)
        total = of_group.copy()
        for root in np.unique(roots):
            tree = roots == root
            alone = Rewards(values_B=[row[tree]], components_B=[[]], noise_B=[noise])
            total[tree] += against_groups(rule, alone).values[0]
        values.append(total)
    return Compared(values=values, noise=of_groups.noise, at_floor=of_groups.at_floor)


def _by_segment(rule: AdvantageRule, rewards: Rewards) -> Compared:
    from laurel.grpo.advantages import Compared, divided

    # What a difference of rewards is divided by is that of the group.
    ones = [np.ones(len(row)) for row in rewards.values_B]
    scales = divided(ones, rewards.values_B, rule, rewards.noise_B)
    segments_B, values = [], []
    for row, paths, scale in zip(rewards.values_B, rewards.segments_B, scales.values, strict=True):
        raw_leads = _segment_leads(row, paths, leave_one_out=rule.leave_one_out)
        leads = [lead * factor for lead, factor in zip(raw_leads, scale.tolist(), strict=True)]
        lengths = [np.array([part.num_sampled for part in path], np.float64) for path in paths]
        segments_B.append(leads)
        pairs = zip(leads, lengths, strict=True)
        values.append(np.array([float(lead @ n) / max(float(n.sum()), 1.0) for lead, n in pairs]))
    return Compared(
        values=values, segments_B=segments_B, noise=scales.noise, at_floor=scales.at_floor
    )


def _segment_leads(
    rewards: Floats, paths: Sequence[Sequence[Segment]], *, leave_one_out: bool
) -> list[Floats]:
    from laurel.grpo.advantages import centred

    ahead = centred(rewards)  # so equal rewards give exactly 0
    slack = len(rewards) * float(np.finfo(np.float64).eps) * float(np.abs(ahead).max(initial=0.0))
    branches: dict[int, list[int]] = {}  # the segments that follow each; -1 is the prompt
    values: dict[int, float] = {}
    num_leaves = Counter(segment.id for path in paths for segment in path)
    for path, value in zip(paths, ahead.tolist(), strict=True):
        values[path[-1].id] = value
        for before, segment in pairwise([-1, *(segment.id for segment in path)]):
            if segment not in branches.setdefault(before, []):
                branches[before].append(segment)

    def mean(segments: Sequence[int]) -> float:
        return float(np.sort([value_of(segment) for segment in segments]).mean())

    def value_of(segment: int) -> float:
        if segment not in values:
            values[segment] = mean(branches[segment])
        return values[segment]

    leads = []
    for path in paths:
        own, share = [], float(len(rewards))
        for before, segment in pairwise([-1, *(segment.id for segment in path)]):
            beside = branches[before]
            share /= len(beside)
            others = [other for other in beside if other != segment] if leave_one_out else beside
            ahead_of = value_of(segment) - mean(others) if len(beside) > 1 else 0.0
            ahead_of = 0.0 if abs(ahead_of) <= slack else ahead_of
            own.append(ahead_of * share / num_leaves[segment])
        leads.append(np.array(own))
    return leads
