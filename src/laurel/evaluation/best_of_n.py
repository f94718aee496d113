"""Best of n: how often the answer that a reward model likes best is right.

Between drawing at random and knowing what is right, a model is worth what it picks.
"""

from __future__ import annotations

from collections.abc import Sequence

from laurel.evaluation.measured import Measured, share, shares_by_subset
from laurel.evaluation.scored_lists import ScoredList

FINAL = "best-scored answer is right"
RANDOM = "an answer drawn at random is right"
ORACLE = "any answer is right"


def measure(lists: Sequence[ScoredList]) -> Measured:
    """The share of prompts whose best-scored answer is right, against random and oracle.

    Of answers that share the highest score one is drawn. A prompt with an answer that could not be
    scored has no best one: it is counted as failed, also in random and oracle, so that all three
    stand on the same prompts.

    Raises:
        ValueError: Two lists share an id.
    """
    credits = {one.id: one.best_credit for one in lists}
    if len(credits) < len(lists):
        raise ValueError("two lists share an id")
    found = shares_by_subset((one.subset, credits[one.id]) for one in lists)
    has_scores = [one.whole_scores_G is not None for one in lists]
    random = [
        sum(one.is_right_G) / len(one.is_right_G) if is_whole else None
        for one, is_whole in zip(lists, has_scores, strict=True)
    ]
    oracle = [
        float(any(one.is_right_G)) if is_whole else None
        for one, is_whole in zip(lists, has_scores, strict=True)
    ]
    return Measured(
        subsets=tuple(found.values()) if len(found) > 1 else (),
        sections=(share(RANDOM, random), share(ORACLE, oracle)),
        final=share(FINAL, credits.values()),
        notes=tuple(_notes(lists)),
        credits=credits,
    )


def _notes(lists: Sequence[ScoredList]) -> list[str]:
    same = sum(len(set(one.is_right_G)) == 1 for one in lists)
    if not same:
        return []
    return [f"in {same:,} of {len(lists):,} prompts all answers are right, or all are wrong"]
