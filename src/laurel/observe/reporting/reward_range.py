"""Where the reward of a run stands among the rewards that were seen: solved, hopeless, or between.

Groups whose rewards are all equal are an end that was wished for where all are right, and an
illness where none is.
"""

from __future__ import annotations

from statistics import fmean
from typing import Literal

from laurel.observe.reporting.finding import ending
from laurel.observe.run_record import RunRecord

Standing = Literal["top", "between", "bottom"]

CLOSE = 0.1
"""Share of the range of rewards, or of the groups, that may be missing to its end."""


def seen_rewards(record: RunRecord) -> tuple[float, float] | None:
    """The lowest and the highest reward of any completion of training; None where nobody knows."""
    low, high = record.series("train/reward_min"), record.series("train/reward_max")
    return (min(low.values), max(high.values)) if low and high else None


def standing(record: RunRecord) -> Standing | None:
    """Where the mean reward of the last steps stands; None where that cannot be told.

    Where only one reward was ever seen it is told from the share of groups that are all right, or
    all wrong, of rewards from 0 to 1.
    """
    reward, seen = record.series("train/reward"), seen_rewards(record)
    if not reward or seen is None:
        return None
    low, high = seen
    last = fmean(ending(reward))
    if high > low:
        share = (last - low) / (high - low)
        return "top" if share >= 1 - CLOSE else "bottom" if share <= CLOSE else "between"
    for name, where in (("pct_1", "top"), ("pct_0", "bottom")):
        groups = record.series(f"train/baseline_reward/{name}")
        if groups and fmean(ending(groups)) >= 100 * (1 - CLOSE):
            return "top" if where == "top" else "bottom"
    return None
