"""Several scorers as one: how their scores are combined, and that a failure stays one."""

from __future__ import annotations

import asyncio
import math

import pytest

import scoring_groups
from fakes import WordScorer
from laurel.rewards.blocking import BlockingScorer
from laurel.rewards.ensemble import EnsembleScorer, Member
from laurel.rewards.loop_scorer import LoopScorer
from laurel.rewards.scorer import LocalScorer
from laurel.types import Group, Message, Score, group_of

GROUPS = [
    group_of((Message("user", "Where?"),), ("By the gate.", "No."), group_id="a"),
    group_of((Message("user", "Why?"),), ("Because.",), group_id="b"),
]


class Scripted:
    """Gives the scores that it was made with, in order."""

    def __init__(self, *scores: Score | float | None, **traits: object) -> None:
        self.scores = [
            one if isinstance(one, Score) else Score(value=one, failure=None) for one in scores
        ]
        self.closed = 0
        for name, value in traits.items():
            setattr(self, name, value)

    async def score(self, groups: list[Group]) -> list[tuple[Score, ...]]:
        left = iter(self.scores)
        return [tuple(next(left) for _ in group.completions_G) for group in groups]

    def close(self) -> None:
        self.closed += 1


def members(*scorers, **changes):
    return [
        Member(name=name, scorer=scorer, **{k: v[i] for k, v in changes.items()})
        for i, (name, scorer) in enumerate(zip("abc", scorers, strict=False))
    ]


def values(scorer):
    scores = asyncio.run(scorer.score(GROUPS))
    assert list(map(len, scores)) == [2, 1]
    return [one.value for scores_G in scores for one in scores_G]


class Resting(LocalScorer):
    """Notes when it rests."""

    def __init__(self) -> None:
        like = scoring_groups.local(True)
        super().__init__(like.model, like.contract, batch_tokens=scoring_groups.BATCH_TOKENS)
        self.notes: list[str] = []

    def sleep(self) -> None:
        self.notes.append("sleep")

    def wake(self) -> None:
        self.notes.append("wake")


def test_models_of_this_run_rest_together_and_others_are_left_as_they_are():
    resting, other = Resting(), Scripted(*A)
    scorer = BlockingScorer(EnsembleScorer(members(resting, other)))
    with scorer.resting():
        assert resting.notes == ["sleep"]
    assert resting.notes == ["sleep", "wake"]
    scorer.close()
    with BlockingScorer(Scripted()).resting():
        pass


def test_what_members_remember_is_computed_again_where_that_is_asked_for():
    counted = scoring_groups.local(True)
    batches: list[int] = []
    compute = counted._values

    def counting(tokens, *args, **kwargs):
        batches.append(len(tokens))
        return compute(tokens, *args, **kwargs)

    counted._values = counting
    loop = LoopScorer(counted)
    scorer = BlockingScorer(EnsembleScorer(members(loop, Scripted(*A))))
    first = scorer.score_now(GROUPS)
    assert scorer.score_now(GROUPS) == first
    asked = len(batches)
    afresh = scorer.score_afresh(GROUPS)
    assert len(batches) == asked + 1
    values_of = [[s.value for row in found for s in row] for found in (first, afresh)]
    assert values_of[1] == pytest.approx(values_of[0], abs=1e-5)
    scorer.close()


A, B = (1.0, 2.0, 4.0), (10.0, 30.0, -10.0)
NORMAL = {"mean": (0.0, 10.0), "std": (1.0, 10.0)}


def test_a_weighted_sum_of_normalised_scores():
    made = members(Scripted(*A), Scripted(*B), weight=(2.0, -0.5), **NORMAL)
    assert values(EnsembleScorer(made)) == [2.0, 4.0 - 1.0, 8.0 + 1.0]


def test_the_least_of_normalised_scores():
    made = members(Scripted(*A), Scripted(*B), **NORMAL)
    assert values(EnsembleScorer(made, combine="min")) == [0.0, 2.0, -2.0]


def test_the_mean_minus_standard_deviations():
    made = members(
        Scripted(*A), Scripted(*B), Scripted(0.0, 2.0, 0.0), mean=(0, 10, 0), std=(1, 10, 1)
    )
    rows = [(1.0, 0.0, 0.0), (2.0, 2.0, 2.0), (4.0, -2.0, 0.0)]
    means = [sum(row) / 3 for row in rows]
    stds = [
        math.sqrt(sum((x - m) ** 2 for x in row) / 3) for row, m in zip(rows, means, strict=True)
    ]
    scorer = EnsembleScorer(made, combine="mean_minus_std", uncertainty_penalty=1.5)
    expected = [m - 1.5 * s for m, s in zip(means, stds, strict=True)]
    assert values(scorer) == pytest.approx(expected, abs=1e-12)
    assert values(scorer)[1] == 2.0, "members that agree are not penalised"


def test_what_each_member_said_is_kept_as_it_was():
    first = Scripted(*(Score(value=v, num_tokens=5, parts={"acc": v / 2}) for v in A))
    second = Scripted(*(Score(value=v, num_tokens=9, truncated=v < 0) for v in B))
    scores = asyncio.run(EnsembleScorer(members(first, second, **NORMAL)).score(GROUPS))
    assert scores[0][1].values_K == (2.0, 30.0)
    assert scores[0][1].parts == {"a": 2.0, "b": 30.0, "a/acc": 1.0}
    assert [one.truncated for one in (*scores[0], *scores[1])] == [False, False, True]
    assert scores[0][0].num_tokens == 9


@pytest.mark.parametrize("combine", ["weighted_sum", "min", "mean_minus_std"])
def test_a_failure_of_one_member_is_a_failure_of_that_completion_alone(combine):
    late = Score(value=None, failure="timeout: no answer in 3 s")
    made = members(Scripted(*A), Scripted(10.0, late, 10.0))
    scores = asyncio.run(EnsembleScorer(made, combine=combine).score(GROUPS))
    flat = [one for scores_G in scores for one in scores_G]
    assert [one.value is None for one in flat] == [False, True, False]
    assert flat[1].failure == "timeout: b: no answer in 3 s"


def test_a_reason_that_nobody_counts_gets_the_name_in_front():
    made = members(Scripted(*A), Scripted(Score(value=None, failure="not finite"), 1.0, 1.0))
    scores = asyncio.run(EnsembleScorer(made).score(GROUPS))
    assert scores[0][0].failure == "b: not finite"


def test_what_cannot_be_added_up_is_a_failure():
    huge = 1.7e308
    for made in (
        members(Scripted(huge, 0.0, 0.0), Scripted(huge, 0.0, 0.0)),
        members(Scripted(huge, 0.0, 0.0), Scripted(0.0, 0.0, 0.0), std=(1e-10, 1.0)),
        members(Scripted(math.inf, 0.0, 0.0), Scripted(-math.inf, 0.0, 0.0)),
    ):
        scores = asyncio.run(EnsembleScorer(made).score(GROUPS))
        assert scores[0][0].value is None
        assert scores[0][0].failure == "nan: the scores of the models cannot be combined"
        assert scores[1][0].value == 0.0


def test_it_needs_what_any_member_needs():
    plain = EnsembleScorer(members(WordScorer(), WordScorer()))
    assert (plain.reads_metadata, plain.judges_groups, plain.noise) == (False, False, None)
    mixed = EnsembleScorer(
        members(WordScorer(), Scripted(reads_metadata=True, judges_groups=True, noise=0.25))
    )
    assert (mixed.reads_metadata, mixed.judges_groups, mixed.noise) == (True, True, 0.25)


def test_members_are_asked_side_by_side_and_ended_with_it():
    class Waiting(Scripted):
        async def score(self, groups):
            arrived.append(self)
            while len(arrived) < 2:
                await asyncio.sleep(0)
            return await super().score(groups)

    arrived: list[object] = []
    first, second = Waiting(*A), Waiting(*B)
    scorer = EnsembleScorer(members(first, second))
    assert values(scorer) == [11.0, 32.0, -6.0]
    asyncio.run(scorer.aclose())
    assert (first.closed, second.closed) == (1, 1)


def test_whoever_prepares_for_a_member_ends_with_it():
    class Preparing:
        def close(self) -> None:
            ended.append("preparers")

    class Computing(Scripted):
        preparers = Preparing()

        async def aclose(self) -> None:
            ended.append("model")

    ended: list[str] = []
    asyncio.run(EnsembleScorer(members(Computing(*A), Scripted(*B))).aclose())
    assert ended == ["model", "preparers"]
