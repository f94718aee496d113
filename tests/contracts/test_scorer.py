"""What every `Scorer` promises, asked of each of them."""

import asyncio
import copy
import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import WordScorer
from laurel.config.schema import PackingConfig, PolicyConfig, ScratchConfig, TokenizerConfig
from laurel.models.load import load_reward_model
from laurel.rewards.local import LocalScorer
from laurel.types import Completion, Group, Message, group_of

MAX_LENGTH = 64
POISON = "~"
"""A word that no other text has a token of."""
TEXTS = ("the laurel grows by the western gate", "bread and wine", "an old man of the river")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ message['role'] }}: {{ message['content'] }}\n"
    "{% endfor %}"
)


@functools.cache
def loaded(packing):
    """A random model with weights so large that every word shows in the score."""
    config = PolicyConfig(
        model_name=None,
        scratch=ScratchConfig(hidden_size=32, vocab_size=400),
        tokenizer=TokenizerConfig(chat_template=TEMPLATE),
        precision="float32",
        sequence_packing=PackingConfig(enabled=packing),
    )
    model = load_reward_model(
        config,
        seed=0,
        max_length=MAX_LENGTH,
        truncation_side="left",
        device=torch.device("cpu"),
        texts=TEXTS,
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2, generator=generator)
    return model


def local(packing, *, weight=1.0, poison=""):
    """A `LocalScorer`, its head multiplied by `weight` and one word made NaN."""
    torch.set_num_threads(1)
    source = loaded(packing)
    model = copy.deepcopy(source.model)
    with torch.no_grad():
        model.classifier.score.weight.mul_(weight)
        if poison:
            (token,) = source.contract.tokenizer(poison)["input_ids"]
            model.classifier.get_input_embeddings().weight[token] = math.nan
    return LocalScorer(model, source.contract, batch_tokens=100)


MAKERS = {
    "forest": functools.partial(local, True),
    "padded": functools.partial(local, False),
    "fake": functools.partial(WordScorer, max_length=MAX_LENGTH),
}


@pytest.fixture(params=MAKERS, scope="module")
def make(request):
    return MAKERS[request.param]


@pytest.fixture(scope="module")
def scorer(make):
    return make()


def score(scorer, groups):
    return asyncio.run(scorer.score(groups))


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
            assert one.values_K == (one.value,)
            assert one.failure is None
            assert not one.truncated
            assert 0 < one.num_tokens <= MAX_LENGTH


@settings(max_examples=15, deadline=None)
@given(order=st.lists(st.integers(0, len(GROUPS) - 1), min_size=1, max_size=9))
def test_scores_do_not_depend_on_what_else_is_in_the_call(scorer, order):
    together = score(scorer, [GROUPS[i] for i in order])
    for index, scores_G in zip(order, together, strict=True):
        assert values(scores_G) == near(values(score(scorer, [GROUPS[index]])[0]))


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

    for scores, one_group in zip(asyncio.run(all_at_once()), GROUPS, strict=True):
        assert values(scores[0]) == near(values(score(scorer, [one_group])[0]))


def test_both_paths_give_the_same_scores():
    forest, padded = (score(MAKERS[name](), GROUPS) for name in ("forest", "padded"))
    for one, other in zip(forest, padded, strict=True):
        assert values(one) == near(values(other))
