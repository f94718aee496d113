"""Scores from a group of workers: who gets what, and that they are those of one process."""

import functools
import threading
from collections import Counter
from contextlib import closing, nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scoring_groups
from laurel.config.environments import RewardModelEnvironmentConfig
from laurel.environments.reward_model_environment import RewardModelEnvironment
from laurel.errors import ConfigError, WorkerError
from laurel.models.spec import ParallelShape
from laurel.rewards.replicas import GroupScorer, ScoringWorker, divide_evenly
from laurel.types import Message, group_of
from laurel.workers.calls import GroupCalls, Success, attempt, error_of
from laurel.workers.rendezvous import RankPlace
from local_group import LocalGroup
from process_group import ProcessGroup

WORDS = ["laurel", "grows", "by", "western", "gate", "bread", "wine", "an", "old", "man", "river"]


class FakeWorkers(GroupCalls):
    """A group of several workers in this process, which notes what each is asked."""

    def __init__(self, size, worker_class, *args, **kwargs):
        self.role, self.size, self.asked, self.is_open = "reward_model", size, [], True
        self.limits = []
        self.workers = [
            worker_class(RankPlace(role=self.role, rank=rank, world_size=size), *args, **kwargs)
            for rank in range(size)
        ]

    def _submit(self, calls):
        self.asked.append(calls)
        outcomes = {r: attempt(self.workers[r], call, rank=r) for r, call in calls.items()}
        return Answer(self, calls, list(outcomes.values()))

    def shutdown(self):
        self.is_open = False


class Answer:
    def __init__(self, workers, calls, outcomes):
        self.workers, self.calls, self.outcomes = workers, calls, outcomes

    def wait(self, *, timeout=None):
        self.workers.limits.append(timeout)
        failures = [one for one in self.outcomes if not isinstance(one, Success)]
        if failures:
            method = next(iter(self.calls.values())).method
            raise error_of(self.workers.role, self.workers.size, method, failures, limit=0)
        return [one.value for one in self.outcomes]


def crew_scorer(size):
    return scoring_groups.grouped(
        functools.partial(FakeWorkers, size), shape=ParallelShape(dp_replicate=size)
    )


@pytest.fixture(scope="module")
def alone():
    return scoring_groups.local(True)


@pytest.fixture(scope="module")
def two():
    return crew_scorer(2)


def groups_of(sizes, *, seed=0):
    """One group per entry, with so many answers of different lengths."""
    random = np.random.default_rng(seed)

    def text():
        return " ".join(random.choice(WORDS, size=random.integers(1, 12)))

    return [
        group_of((Message("user", text()),), tuple(text() for _ in range(size)), group_id=str(i))
        for i, size in enumerate(sizes)
    ]


def values(scores):
    return [one.value for scores_G in scores for one in scores_G]


@pytest.mark.parametrize("sizes", [(), (1,), (3, 1), (2, 2, 2), (1, 0, 4, 2, 1, 3, 1)])
def test_replicas_score_any_number_of_groups_in_order(alone, two, sizes):
    groups = groups_of(sizes)
    found, expected = two.score_now(groups), alone.score_now(groups)
    assert list(map(len, found)) == list(sizes)
    assert values(found) == pytest.approx(values(expected), abs=5e-6)
    assert [[s.num_tokens for s in row] for row in found] == [
        [s.num_tokens for s in row] for row in expected
    ]


def test_one_rank_gives_the_very_bits_of_one_process(alone):
    grouped = crew_scorer(1)
    for groups in (groups_of([2] * 9), groups_of([5, 1, 3], seed=1)):
        assert grouped.score_now(groups) == alone.score_now(groups)
        assert grouped.score_exactly(groups) == alone.score_exactly(groups)


@pytest.mark.slow
def test_two_tensor_parallel_ranks_give_the_scores_of_one_process(alone):
    groups = groups_of([2, 1, 3, 2])
    make_group = functools.partial(ProcessGroup, "reward_model", 2)
    with closing(scoring_groups.grouped(make_group, shape=ParallelShape(tp=2))) as scorer:
        assert values(scorer.score_now(groups)) == pytest.approx(
            values(alone.score_now(groups)), abs=1e-5
        )
        # In float64 the sums of two ranks round to the same float32.
        assert values(scorer.score_exactly(groups)) == pytest.approx(
            values(alone.score_exactly(groups)), abs=1e-6
        )


def test_every_replica_gets_its_share_of_the_tokens(two):
    groups = groups_of([1, 4, 2, 3] * 5)
    two.score_now(groups)
    asked = two._group.asked[-1]
    given = {rank: [g for batch in call.args[0] for g in batch] for rank, call in asked.items()}
    assert Counter(g.id for mine in given.values() for g in mine) == Counter(g.id for g in groups)
    loads = [sum(g.num_tokens for g in given[rank]) for rank in (0, 1)]
    assert max(loads) - min(loads) <= max(g.num_tokens for g in given[0] + given[1])
    for call in asked.values():
        for batch in call.args[0]:
            assert len(batch) == 1 or sum(g.num_tokens for g in batch) <= two.batch_tokens


def test_replicas_lay_out_what_groups_share_as_it_was_divided(alone, two, monkeypatch):
    question = (Message("user", "the laurel grows by the western gate and by the old river"),)
    groups = [group_of(question, [word], group_id=word) for word in WORDS[:8]]
    sizes = []
    for worker in two._group.workers:
        model = worker._scorer.model
        monkeypatch.setattr(
            model,
            "forward",
            lambda batch, own=model.forward: sizes.append(len(batch.ids_T)) or own(batch),
        )
    found = two.score_now(groups)
    for ours, theirs in zip(found, alone.score_now(groups), strict=True):
        assert ours[0].value == pytest.approx(theirs[0].value, abs=5e-6)
    assert max(sizes) <= scoring_groups.BATCH_TOKENS
    assert sum(sizes) < 0.75 * sum(group.num_tokens for group in alone.encode(groups))


def test_progress_is_told_of_all_groups_and_tokens(two):
    groups, told = groups_of([2, 1, 3]), []
    two.score_now(groups, lambda *done: told.append(done))
    assert sum(done for done, _ in told) == 3
    assert sum(tokens for _, tokens in told) == sum(g.num_tokens for g in two.encode(groups))


@given(sizes=st.lists(st.integers(0, 1000), max_size=40), shares=st.integers(1, 7))
def test_shares_are_near_each_other(sizes, shares):
    taken = divide_evenly(sizes, shares)
    assert len(taken) == shares
    assert sorted(i for items in taken for i in items) == list(range(len(sizes)))
    assert all(items == sorted(items) for items in taken)
    loads = [sum(sizes[i] for i in items) for items in taken]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_the_largest_goes_to_the_least_so_far():
    # 7 | 5 4, then 3 to the 7, then 1 to the 9: 10 and 10
    assert divide_evenly([1, 7, 3, 5, 4], 2) == [[1, 2], [0, 3, 4]]


@pytest.mark.parametrize("fails", [False, True])
def test_whoever_asks_while_it_rests_waits(two, fails):
    groups, found = groups_of([2]), []
    expected = two.score_now(groups)
    asker = threading.Thread(target=lambda: found.append(two.score_now(groups)))
    first = len(two._group.asked)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext(), two.resting():
        asker.start()
        asker.join(0.2)
        assert found == []
        if fails:
            _ = 1 / 0
    asker.join(30)
    assert found == [expected]
    asked = [calls[0].method for calls in two._group.asked[first:]]
    assert asked == ["sleep", "wake", "score"]


def test_a_worker_that_fails_is_named():
    broken = crew_scorer(2)
    broken._group.workers[1].score = lambda *_: 1 / 0
    with pytest.raises(
        WorkerError, match=r"reward_model rank 1 of 2 failed in score: ZeroDiv"
    ) as e:
        broken.score_now(groups_of([1, 1]))
    assert e.value.ranks == (1,)
    environment = RewardModelEnvironment(RewardModelEnvironmentConfig(), scorer=broken)
    log = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    with pytest.raises(WorkerError, match="reward_model rank 1 of 2"):
        environment.step([log], [None])
    environment.shutdown()
    assert not broken._group.is_open


def test_ranks_that_make_no_whole_replicas_are_refused():
    load = functools.partial(scoring_groups.load, weight=1.0, poison="")
    for shape in (ParallelShape(dp_shard=1, tp=2), ParallelShape(dp_shard=2)):
        with pytest.raises(WorkerError, match="does not make replicas of whole models") as caught:
            LocalGroup("reward_model", ScoringWorker, load, shape=shape, device="cpu")
        assert isinstance(caught.value.__cause__, ConfigError)


def test_the_environment_uses_contract_noise_and_exact_scores_of_a_group(alone):
    log = [{"role": "user", "content": "the gate"}, {"role": "assistant", "content": "old wine"}]
    other = [*log[:1], {"role": "assistant", "content": "bread"}]
    expected = RewardModelEnvironment(RewardModelEnvironmentConfig(), scorer=alone)
    grouped = GroupScorer(crew_scorer(1)._group, batch_tokens=scoring_groups.BATCH_TOKENS)
    with RewardModelEnvironment(RewardModelEnvironmentConfig(), scorer=grouped) as environment:
        found = environment.step([log, other], [None, None])
        assert found.rewards.tolist() == expected.step([log, other]).rewards.tolist()
        data, same = environment.preprocess_data([log]), expected.preprocess_data([log])
        assert data["input_ids"].tolist() == same["input_ids"].tolist()
        assert environment.noise_floor() == expected.noise_floor() > 0
        calls = [call[0] for call in grouped._group.asked]
        assert any(call.method == "score" and call.args[1] for call in calls), "exact scores"
    assert not grouped._group.is_open


def test_a_replica_has_so_long_for_each_of_its_batches():
    scorer = scoring_groups.grouped(
        functools.partial(FakeWorkers, 2), shape=ParallelShape(dp_replicate=2), batch_timeout=7.0
    )
    workers = scorer._group
    for sizes, limits in (((2,) * 12, None), ((1,), [7.0])):
        del workers.asked[:], workers.limits[:]
        scorer.score_now(groups_of(sizes))
        most = max(len(call.args[0]) for call in workers.asked[0].values())
        assert workers.limits == (limits or [7.0 * most])
        assert (most > 1) == (limits is None)
    del workers.limits[:]
    scorer.score_exactly(groups_of((2,)))
    with scorer.resting():
        pass
    assert workers.limits == [None, 7.0, 7.0]
