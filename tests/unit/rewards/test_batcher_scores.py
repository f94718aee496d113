"""Scores do not depend on who shared the batch."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scoring_groups
from laurel.rewards.batching import BatcherLimits, BatchingScorer
from laurel.types import Message, group_of


def asked(prompt, *answers):
    return group_of((Message("user", prompt),), answers, group_id=prompt)


WORDS = st.sampled_from(
    ["the", "laurel", "grows", "by", "western", "gate", "bread", "and", "wine", "old"]
)
TEXT = st.lists(WORDS, min_size=1, max_size=12).map(" ".join)
GROUPS = st.lists(
    st.builds(
        lambda prompt, answers: asked(prompt, *answers),
        TEXT,
        st.lists(TEXT, min_size=1, max_size=5),
    ),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module", params=[True, False], ids=["forest", "padded"])
def local(request):
    return scoring_groups.local(request.param)


class Shared:
    """A model that several batchers get in turn; the same weights in float64 if asked."""

    def __init__(self, scorer, *, exactly):
        self._scorer = scorer
        self._exactly = exactly
        self.prepare = scorer.prepare
        self.prepare_rendered = scorer.prepare_rendered

    def score_tokens(self, tokens):
        rows = iter(self._scorer._values(tokens, None, exactly=self._exactly).tolist())
        return [tuple(self._scorer._verdicts(group, rows)) for group in tokens]

    def close(self):
        """It is needed again."""


@pytest.mark.slow_parameters("forest-float64", "padded-float64")
@pytest.mark.parametrize(
    ("exactly", "tolerance"), [(True, 1e-6), (False, 1e-5)], ids=["float64", "float32"]
)
@settings(max_examples=25, deadline=None)
@given(groups=GROUPS, seed=st.integers(0, 2**16), budget=st.sampled_from([30, 100, 8192]))
def test_scores_are_those_of_a_scorer_alone(local, exactly, tolerance, groups, seed, budget):
    """In float64 they differ by no more than what they are rounded to in the end."""
    by_itself = local.score_exactly if exactly else local.score_now
    alone = [by_itself([group])[0] for group in groups]

    async def score():
        limits = BatcherLimits(max_delay=0, batch_tokens=budget, cache_entries=3)
        backend = Shared(local, exactly=exactly)
        scorer = BatchingScorer(backend, model_version="1", limits=limits)
        order = random.Random(seed).sample(range(len(groups)), len(groups))
        try:
            found = await asyncio.gather(*(scorer.score([groups[i]]) for i in order))
            return dict(zip(order, (scores for (scores,) in found), strict=True))
        finally:
            await asyncio.to_thread(scorer.close)

    together = asyncio.run(score())
    for i, expected in enumerate(alone):
        for one, other in zip(together[i], expected, strict=True):
            assert one.num_tokens == other.num_tokens
            assert one.truncated == other.truncated
            assert one.value == pytest.approx(other.value, abs=tolerance, rel=tolerance)
