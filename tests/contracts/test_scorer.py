"""What every `Scorer` promises, asked of each of them."""

import asyncio
import functools
import math
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scoring_groups
from fakes import WordScorer
from foreign_servers import FOREIGN, foreign_server
from judges import tiny_judge, word_judge, word_judge_config
from laurel.config.environments import FunctionConfig
from laurel.extensions.judges.loaded import ModelJudge
from laurel.extensions.judges.served import JudgeScorer
from laurel.extensions.reward_functions.scorer import FunctionScorer
from laurel.models.spec import ParallelShape
from laurel.rewards.ensemble import EnsembleScorer, Member
from laurel.rewards.remote.dialects import dialect_of
from laurel.rewards.remote.http import HttpScorer
from laurel.rewards.remote.router import Router
from laurel.types import Completion, Group, Message, group_of
from laurel.workers.reservations import Resources
from local_group import LocalGroup
from process_group import ProcessGroup
from reward_servers import RewardServer
from scoring_groups import MAX_LENGTH
from scripted_replicas import ScorerReplica

pytestmark = [
    pytest.mark.slow_parameters(
        "group of two replicas on Ray",
        "group of two ranks",
        "slime over HTTP",
        "sglang over HTTP",
        "openrlhf over HTTP",
    ),
    pytest.mark.usefixtures("warm_processes"),
]

OF_EVERY_ONE = (
    "test_there_is_one_score_per_completion_in_order",
    "test_what_is_too_long_is_scored_and_flagged",
    "test_a_completion_without_a_finite_score_fails_alone",
    "test_a_completion_that_cannot_be_rendered_fails_alone",
    "test_calls_at_the_same_time_do_not_disturb_each_other",
    "test_a_call_that_is_given_up_disturbs_no_other",
)
"""Asked of those as well that differ from a group in one process in how many share its work."""
POISON = "~"
"""A word that no other text has a token of."""


def in_one_group(**fault):
    make_group = functools.partial(LocalGroup, "reward_model")
    return scoring_groups.grouped(make_group, shape=ParallelShape(), **fault)


def in_two_ranks(**fault):
    make_group = functools.partial(ProcessGroup, "reward_model", 2)
    return scoring_groups.grouped(make_group, shape=ParallelShape(tp=2), **fault)


class Served(HttpScorer):
    """Two servers, and the client that asks them."""

    def __init__(self, servers, **options):
        self.servers = servers
        super().__init__([server.url for server in servers], **options)

    async def aclose(self):
        await super().aclose()
        for server in self.servers:
            server.stop()


def routed(**fault):
    scorers = [WordScorer(max_length=MAX_LENGTH, **fault) for _ in range(2)]
    return Router(ScorerReplica(one, str(i)) for i, one in enumerate(scorers))


def served(**fault):
    return Served([RewardServer(max_length=MAX_LENGTH, **fault) for _ in range(2)])


@functools.cache
def contract():
    return scoring_groups.loaded(True).contract


def served_in(protocol, **fault):
    servers = [foreign_server(protocol, contract(), **fault) for _ in range(2)]
    return Served(servers, dialect=dialect_of(protocol, contract=contract()))


def judged(**fault):
    server = word_judge(WordScorer(max_length=MAX_LENGTH, **fault))
    return JudgedBy(server)


class JudgedBy(JudgeScorer):
    """A judge that counts words, and its server."""

    def __init__(self, server):
        self._server = server
        super().__init__(word_judge_config(server))

    async def aclose(self):
        await super().aclose()
        self._server.stop()


def called(num_workers=0, **fault):
    path = f"{Path(__file__).parents[1]}/word_function.py:compute_score"
    kwargs = {"max_length": MAX_LENGTH, **fault}
    return FunctionScorer(FunctionConfig(path=path, kwargs=kwargs), num_workers=num_workers)


def together(**fault):
    scorers = [WordScorer(max_length=MAX_LENGTH, **fault), routed(**fault)]
    return EnsembleScorer(
        [Member(name=str(i), scorer=one, weight=0.5 + i) for i, one in enumerate(scorers)]
    )


MAKERS = {
    "forest": functools.partial(scoring_groups.local, True),
    "padded": functools.partial(scoring_groups.local, False),
    "fake": functools.partial(WordScorer, max_length=MAX_LENGTH),
    "group": in_one_group,
    "group of two ranks": in_two_ranks,
    "router": routed,
    "laurel over HTTP": served,
    **{f"{name} over HTTP": functools.partial(served_in, name) for name in FOREIGN},
    "judge": judged,
    "judge by log-probability": tiny_judge,
    "function": called,
    "function in processes": functools.partial(called, 2),
    "ensemble": together,
}
REPLICAS = "group of two replicas on Ray"
LIKE_A_GROUP = ("group of two ranks", REPLICAS)


def pytest_generate_tests(metafunc):
    is_of_all = metafunc.function.__name__ in OF_EVERY_ONE
    for fixture, names in (("maker", [*MAKERS]), ("scorer", [*MAKERS, REPLICAS])):
        if fixture in metafunc.fixturenames:
            names = [name for name in names if is_of_all or name not in LIKE_A_GROUP]
            metafunc.parametrize(fixture, names, indirect=True, scope="module")


RUNNER = asyncio.Runner()
"""One loop for all calls, so that scorers keep their connections."""


@pytest.fixture(scope="module", autouse=True)
def _runner():
    with RUNNER:
        yield


@pytest.fixture(scope="module")
def maker(request):
    return MAKERS[request.param]


@pytest.fixture
def make(maker):
    """Makes a scorer, perhaps one with a fault."""
    with ExitStack() as stack:

        def made(**fault):
            return closed_by(stack, maker(**fault))

        yield made


@pytest.fixture(scope="module")
def scorer(request):
    with ExitStack() as stack:
        if request.param == REPLICAS:
            made = on_ray(request.getfixturevalue("small_cluster"), stack)
        else:
            made = MAKERS[request.param]()
        yield closed_by(stack, made)


def closed_by(stack, scorer):
    if hasattr(scorer, "aclose"):
        stack.callback(lambda: RUNNER.run(scorer.aclose()))
    elif hasattr(scorer, "close"):
        stack.callback(scorer.close)
    return scorer


def on_ray(cluster, stack):
    from laurel.workers.ray_group import RayGroup

    slots = cluster.reserve("reward_model", 2, Resources(cpus=0.5))
    stack.callback(slots.release)
    make_group = functools.partial(RayGroup, slots, limit=180.0)
    return scoring_groups.grouped(make_group, shape=ParallelShape(dp_replicate=2))


def score(scorer, groups):
    return RUNNER.run(scorer.score(groups))


def says_no_tokens(scorer):
    """Whether the server renders, and its protocol has no place for how long that became; or what
    scores reads no tokens at all."""
    if isinstance(scorer, JudgeScorer | ModelJudge | FunctionScorer):
        return True
    # Under load all requests may go to one of the two servers.
    return isinstance(scorer, Served) and any(
        request.path == "/" for server in scorer.servers for request in server.asked
    )


def group(prompt, *answers, group_id="g"):
    return group_of((Message("user", prompt),), answers, group_id=group_id)


def values(scores_G):
    return [score.value for score in scores_G]


def near(values_G):
    """Equal but for the order of float32 sums: scores here are of size 1."""
    return pytest.approx(values_G, abs=5e-6)


GROUPS = (
    group("Where is the laurel?", "By the gate.", "In the river, old man."),
    group("Bread?", "Wine."),
    group("Where is the laurel?", "No.", "Yes, by the western gate.", "The man has it."),
    group("", "An answer to nothing", "and another"),
)


def test_there_is_one_score_per_completion_in_order(scorer):
    scores = score(scorer, GROUPS)
    assert list(map(len, scores)) == [2, 1, 3, 2]
    alone = [values(score(scorer, [g])[0]) for g in GROUPS]
    flat = [value for values_G in alone for value in values_G]
    assert len(set(flat)) == len(flat), "a test of order needs scores that differ"
    for scores_G, alone_G in zip(scores, alone, strict=True):
        assert values(scores_G) == near(alone_G)


def test_a_score_is_a_number_without_a_failure(scorer):
    for scores_G in score(scorer, GROUPS):
        for one in scores_G:
            assert math.isfinite(one.value)
            if not isinstance(scorer, EnsembleScorer):
                assert one.values_K == (one.value,)
            assert one.failure is None
            assert not one.truncated
            assert 0 < one.num_tokens <= MAX_LENGTH or says_no_tokens(scorer)


def test_scores_do_not_depend_on_what_else_is_in_the_call(scorer):
    alone = [near(values(score(scorer, [g])[0])) for g in GROUPS]

    @settings(max_examples=15, deadline=None)
    @given(order=st.lists(st.integers(0, len(GROUPS) - 1), min_size=1, max_size=9))
    def ask(order):
        together = score(scorer, [GROUPS[i] for i in order])
        assert [values(scores_G) for scores_G in together] == [alone[index] for index in order]

    ask()


def test_scores_do_not_depend_on_the_other_completions(scorer):
    whole = GROUPS[2]
    for index, completion in enumerate(whole.completions_G):
        alone = Group(id="alone", prompt=whole.prompt, completions_G=(completion,))
        assert values(score(scorer, [alone])[0]) == near([score(scorer, [whole])[0][index].value])


def test_equal_prompts_stay_separate_groups(scorer):
    first, second = group("Bread?", "Wine."), group("Bread?", "Wine.", "No.")
    scores = score(scorer, [first, second, first])
    assert list(map(len, scores)) == [1, 2, 1]
    assert scores[0][0].value == near(scores[1][0].value)
    assert scores[0][0].value == near(scores[2][0].value)


def test_no_groups_give_no_scores(scorer):
    assert score(scorer, []) == []


def test_a_group_without_completions_gives_no_scores(scorer):
    empty = group("Bread?")
    assert score(scorer, [empty]) == [()]
    among = score(scorer, [GROUPS[0], empty, GROUPS[1]])
    assert list(map(len, among)) == [2, 0, 1]
    assert values(among[2]) == near(values(score(scorer, [GROUPS[1]])[0]))


def test_seventeen_completions(scorer):
    answers = [f"answer {'very ' * i}good" for i in range(17)]
    (scores_G,) = score(scorer, [group("How good?", *answers)])
    assert len(scores_G) == 17
    for answer, one in zip(answers, scores_G, strict=True):
        assert values(score(scorer, [group("How good?", answer)])[0]) == near([one.value])


def test_identical_completions_get_identical_scores(scorer):
    """Bit for bit: a learner divides by the spread of a group, however small it is."""
    answers = ["By the gate.", "No.", "By the gate.", "In the river, old man.", "By the gate."]
    for prompt in ("Where?", "Where is the laurel?", "Bread and wine and an old man?"):
        (scores_G,) = score(scorer, [group(prompt, *answers)])
        assert scores_G[0] == scores_G[2] == scores_G[4]
        assert scores_G[0] != scores_G[1]


def test_what_is_too_long_is_scored_and_flagged(scorer):
    long = "the old man " * 100
    (scores_G,) = score(scorer, [group("Where?", "By the gate.", long)])
    short, cut = scores_G
    if not says_no_tokens(scorer):
        assert (short.truncated, cut.truncated) == (False, True)
        assert short.num_tokens < cut.num_tokens == MAX_LENGTH
    assert cut.failure is None
    assert math.isfinite(cut.value)
    assert short.value == near(score(scorer, [group("Where?", "By the gate.")])[0][0].value)


def test_weights_that_are_nan_give_failures_and_never_a_number(make):
    broken = make(weight=math.nan)
    for scores_G in score(broken, GROUPS):
        for one in scores_G:
            assert one.value is None
            assert one.values_K == ()
            assert one.failure


def test_a_completion_without_a_finite_score_fails_alone(make):
    whole, poisoned = make(), make(poison=POISON)
    asked = [group("Where?", "No.", f"By the {POISON} gate.", "Yes."), GROUPS[0]]
    scores = score(poisoned, asked)
    assert [one.value is None for one in scores[0]] == [False, True, False]
    assert [bool(one.failure) for one in scores[0]] == [False, True, False]
    expected = score(whole, asked)
    assert scores[0][0].value == near(expected[0][0].value)
    assert scores[0][2].value == near(expected[0][2].value)
    assert values(scores[1]) == near(values(expected[1]))


def test_a_completion_that_cannot_be_rendered_fails_alone(scorer):
    tool = Completion(messages=(Message("tool", "42"), Message("assistant", "Yes.")))
    plain = group("Where?", "No.", "Yes.")
    mixed = Group(
        id="mixed",
        prompt=plain.prompt,
        completions_G=(plain.completions_G[0], tool, plain.completions_G[1]),
    )
    only_tool = Group(id="tool", prompt=plain.prompt, completions_G=(tool,))
    scores = score(scorer, [GROUPS[0], mixed, only_tool, GROUPS[1]])
    assert [one.value is None for one in scores[1]] == [False, True, False]
    assert "no tools" in scores[1][1].failure
    assert [one.value for one in scores[2]] == [None]
    expected = score(scorer, [plain])[0]
    assert values((scores[1][0], scores[1][2])) == near(values(expected))
    assert values(scores[3]) == near(values(score(scorer, [GROUPS[1]])[0]))


def test_calls_at_the_same_time_do_not_disturb_each_other(scorer):
    async def all_at_once():
        return await asyncio.gather(*(scorer.score([g]) for g in GROUPS))

    for scores, one_group in zip(RUNNER.run(all_at_once()), GROUPS, strict=True):
        assert values(scores[0]) == near(values(score(scorer, [one_group])[0]))


def test_a_call_that_is_given_up_disturbs_no_other(scorer):
    async def main():
        given_up, other = (asyncio.create_task(scorer.score(GROUPS)) for _ in range(2))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        return await other, await scorer.score(GROUPS)

    expected = [near(values(scores_G)) for scores_G in score(scorer, GROUPS)]
    for scores in RUNNER.run(main()):
        assert [values(scores_G) for scores_G in scores] == expected


def test_both_paths_give_the_same_scores():
    forest, padded = (score(MAKERS[name](), GROUPS) for name in ("forest", "padded"))
    for one, other in zip(forest, padded, strict=True):
        assert values(one) == near(values(other))
