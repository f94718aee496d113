import math

import pytest
import torch

import tiny
import tiny_tokenizers
from laurel.environments.reward_model_environment import RESOLUTION, measure_noise
from laurel.models.scoring import ScoringContract
from laurel.rewards.scorer import LocalScorer
from laurel.types import Message, Score, group_of

GROUPS = [
    group_of((Message("user", "Where?"),), ("By the gate.", "No."), group_id="a"),
    group_of((Message("user", "Bread and wine?"),), ("Wine, old man.", "Bread."), group_id="b"),
]


def length(group, index):
    return float(sum(len(message.content) for message in group.conversation(index)))


def scores(groups, noise=lambda groups, group: 0.0):
    return [
        tuple(
            Score(value=length(group, index) + noise(groups, group))
            for index in range(len(group.completions_G))
        )
        for group in groups
    ]


def test_a_scorer_without_noise_has_that_of_float32():
    # lengths of the conversations: 6 + 12, 6 + 3, 15 + 14, 15 + 6
    sizes = [18.0, 9.0, 29.0, 21.0]
    rms = math.sqrt(sum(size * size for size in sizes) / 4)
    assert measure_noise(scores, GROUPS) == pytest.approx(RESOLUTION * rms)


def test_the_largest_deviation_from_a_conversations_mean():
    """0.4 more where a group comes alone, which is one layout of the four: deviations are 0.3
    there and -0.1 in the others."""

    def alone(groups, group):
        return 0.4 if len(groups) == 1 else 0.0

    assert measure_noise(lambda g: scores(g, alone), GROUPS) == pytest.approx(0.3)


def test_the_noise_of_steps_is_that_of_each_of_them():
    """Each group's answers have 2 steps, and their product as score; alone, the second is 0.4
    more: deviations of 0 and 0.3, and of the product 0.5 * 0.3."""

    def stepped(groups):
        added = 0.4 if len(groups) == 1 else 0.0
        values = (0.5, 0.5 + added)
        one = Score(value=math.prod(values), values_K=values)
        return [tuple(one for _ in group.completions_G) for group in groups]

    assert measure_noise(stepped, GROUPS) == pytest.approx(0.15)
    assert measure_noise(stepped, GROUPS, of_steps=True) == pytest.approx(0.3 / math.sqrt(2))


def test_conversations_are_pooled_by_their_squares():
    """Only prompt a is noisy: sqrt((0.3^2 + 0.3^2 + 0 + 0) / 4)."""

    def alone(groups, group):
        return 0.4 if len(groups) == 1 and group.id == "a" else 0.0

    found = measure_noise(lambda g: scores(g, alone), GROUPS)
    assert found == pytest.approx(0.3 / math.sqrt(2), rel=1e-4)


def test_company_and_order_count():
    """Deviations of 1 and -1 are seen where only the order of the groups is another."""

    def last(groups, group):
        return 1.0 if len(groups) == 2 and groups[-1].id == group.id else 0.0

    # of four layouts (together, alone, prompts unshared, reversed), b is last in the first and a in
    # the fourth: each deviates 0.75 at most
    assert measure_noise(lambda g: scores(g, last), GROUPS) == pytest.approx(0.75)


def test_what_has_no_score_is_left_out():
    def some(groups):
        return [
            tuple(Score(value=None, failure="no") for _ in one) if group.id == "a" else one
            for group, one in zip(groups, scores(groups), strict=True)
        ]

    assert measure_noise(some, GROUPS) == measure_noise(scores, GROUPS[1:])
    with pytest.raises(ValueError, match="cannot be measured"):
        measure_noise(some, GROUPS[:1])


def test_errors_against_exact_scores_are_compared_within_a_prompt():
    """Errors 1.5, 0.5 of prompt a and -3, -3 of b: a's deviate by 0.5 from their mean, b's by
    nothing, and (0.25 + 0.25 + 0 + 0) / 2 is 0.25."""
    errors = iter([1.5, 0.5, -3.0, -3.0])

    def exact(groups):
        return [
            tuple(Score(value=one.value - next(errors)) for one in scores_G)
            for scores_G in scores(groups)
        ]

    assert measure_noise(scores, GROUPS, exact=exact) == pytest.approx(0.5)


def test_errors_of_single_answers_are_compared_with_each_other():
    single = [
        group_of(group.prompt, [group.completions_G[0].messages[0].content], group_id=group.id)
        for group in GROUPS
    ]
    errors = iter([1.0, 3.0])

    def exact(groups):
        return [(Score(value=one.value - next(errors)),) for (one,) in scores(groups)]

    assert measure_noise(scores, single, exact=exact) == pytest.approx(math.sqrt(2.0))


@pytest.mark.parametrize(
    ("weights", "precision", "low", "high"),
    [
        (torch.float32, torch.float32, 1e-8, 1e-5),
        (torch.bfloat16, torch.bfloat16, 1e-3, 0.1),
        (torch.float32, torch.bfloat16, 1e-3, 0.1),
        (torch.float16, torch.float16, 1e-5, 1e-2),
    ],
)
def test_the_noise_of_a_model_is_that_of_its_arithmetic(weights, precision, low, high):
    """Scores are about 0.5 here."""
    contract = ScoringContract.create(
        tiny_tokenizers.chatml(), max_length=256, truncation_side="left", append_eos=True
    )
    model = tiny.tiny_reward_model("qwen3", dtype=weights, precision=precision)
    scorer = LocalScorer(model, contract)
    assert low < measure_noise(scorer.score_now, GROUPS, exact=scorer.score_exactly) < high
