"""How often a reward model prefers what people preferred, on any set of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from laurel.evaluation.measured import Figure, Measured, pair_credits, share, shares_by_subset
from laurel.evaluation.scored_pairs import ScoredPair

FINAL = "all pairs"
TIES = "share of equal scores"
"""A share of the pairs, not a subset of them whose accuracy it would be."""


def measure(pairs: Sequence[ScoredPair]) -> Measured:
    """The accuracy of each subset and over all pairs, and the share of ties among what is wrong."""
    credits = pair_credits(pairs)
    found = shares_by_subset((pair.subset, credits[pair.id]) for pair in pairs)
    return Measured(
        subsets=tuple(found.values()) if len(found) > 1 else (),
        sections=(tie_share(pairs),),
        final=share(FINAL, credits.values()),
        credits=credits,
    )


def tie_share(pairs: Sequence[ScoredPair]) -> Figure:
    """The share of pairs whose answers have the same score, which counts as wrong."""
    equal = [
        None if pair.is_right is None else float(pair.score_chosen == pair.score_rejected)
        for pair in pairs
    ]
    return replace(share(TIES, equal), is_aside=True)
