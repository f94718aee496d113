"""JudgeBench: pairs of which one answer is known to be right, by what they are about.

As in Tan et al. (2024, arXiv:2410.12784). Judges that read both answers are asked in both orders;
a model that scores each answer alone says the same in either, so it is asked once.
"""

from __future__ import annotations

from collections.abc import Sequence

from laurel.evaluation.measured import Measured, pair_credits, share, shares_by_subset
from laurel.evaluation.scored_pairs import ScoredPair

CATEGORIES: dict[str, str] = {
    "mmlu-pro": "Knowledge",
    "livebench-reasoning": "Reasoning",
    "livebench-math": "Math",
    "livecodebench": "Coding",
}
"""What the names of sources begin with, and the category of each."""
FINAL = "all pairs"


def category_of(source: str) -> str:
    """The category of a source, such as `Knowledge` of `mmlu-pro-law`; itself where unknown."""
    for start, category in CATEGORIES.items():
        if source.startswith(start):
            return category
    return source


def measure(pairs: Sequence[ScoredPair]) -> Measured:
    """The accuracy of each category and over all pairs.

    Args:
        pairs: Their subset is the source of the question.
    """
    credits = pair_credits(pairs)
    found = shares_by_subset(
        (None if pair.subset is None else category_of(pair.subset), credits[pair.id])
        for pair in pairs
    )
    known = list(dict.fromkeys(CATEGORIES.values()))
    missing = [name for name in known if name not in found]
    order = [name for name in known if name in found]
    order += [name for name in found if name not in known]
    return Measured(
        subsets=tuple(found[name] for name in order),
        final=share(FINAL, credits.values()),
        notes=(f"absent: {', '.join(missing)}",) if missing else (),
        credits=credits,
    )
