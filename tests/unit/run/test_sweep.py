"""What a sweep searches, how trials are told apart, and which rows a fold has."""

import math

import pytest

from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.data.reading import prompts_of_folds
from laurel.errors import ConfigError, DataError
from laurel.run.sweep import TrialOutcome, parse_words

LR, SMOOTHING = "policy.optimizer.kwargs.lr", "rm.loss.label_smoothing"


def values_of(words, params):
    dimensions, fixed = parse_words(words)
    chosen = [one.set_to(params[one.key]) for one in dimensions]
    config = load_config(RewardTrainingRun, None, [*fixed, *chosen]).config
    return config.policy.optimizer.kwargs["lr"], config.rm.loss.label_smoothing


def test_lists_and_ranges_are_searched_and_other_words_hold_for_all_trials():
    words = [f"{LR}=log(1e-5, 1e-3)", f"{SMOOTHING}=0.1", "rm.max_num_steps=range(4,8)"]
    dimensions, fixed = parse_words(words)
    assert [(one.key, one.is_log, one.is_whole) for one in dimensions] == [
        (LR, True, False),
        ("rm.max_num_steps", False, True),
    ]
    assert dimensions[0].ends() == [1e-5, 1e-3]
    assert dimensions[1].ends() == [4, 8]
    assert [one.text for one in fixed] == [words[1]]
    assert values_of(words[:2], {LR: 2e-4}) == (2e-4, 0.1)
    assert values_of([f"{LR}=[1e-3,2e-3]", f"{SMOOTHING}=0.1"], {LR: "0.002"}) == (0.002, 0.1)


def test_a_list_of_one_is_that_value_so_that_lists_can_be_tried_and_fixed():
    dimensions, fixed = parse_words([f"{LR}=[1,2]", "a.betas=[[0.9,0.95]]", "b=[[1,2],[3,4]]"])
    assert [one.value for one in fixed[0].value.value] == [0.9, 0.95]
    assert list(dimensions[1].choices) == ["[1, 2]", "[3, 4]"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([f"{LR}=[]"], "the list is empty"),
        ([LR], "a value is missing"),
        ([f"{LR}=1e-3"], "nothing is searched"),
        ([f"{LR}=[1e-3,1e-3]"], "a value is named twice"),
        ([f"{LR}=[1,2]", f"{LR}=[3,4]"], "is searched twice"),
        ([f"{LR}=[1,2]", f"{LR}=3"], "is searched too"),
        ([f"{LR}=3", f"{LR}=log(1,2)"], "is searched too"),
        ([f"{LR}=log(0,1)"], "above 0"),
        ([f"{LR}=range(2,1)"], "first end must be below"),
        ([f"{LR}=range(1)"], "Write a range as"),
        ([f"{LR}=uniform(1,2)"], "it is no range"),
        (["rm.seed=[1,2]"], "--seeds N"),
        (["logger.log_dir=[a,b]"], "sets logger.log_dir of every run itself"),
    ],
)
def test_words_that_search_nothing_are_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        parse_words(words)


def test_no_prompt_is_in_two_folds_and_folds_are_of_similar_size():
    prompts = [bytes([i % 7]) for i in range(100)] + [bytes([i]) for i in range(50)]
    folds = prompts_of_folds(prompts, 5, 3)
    assert sorted(one for fold in folds for one in fold) == sorted({*prompts})
    sizes = [sum(one in fold for one in prompts) for fold in folds]
    assert max(sizes) - min(sizes) <= 16  # a prompt has 15 rows at most
    assert prompts_of_folds(prompts[::-1], 5, 3) == folds
    assert prompts_of_folds(prompts, 5, 4) != folds
    with pytest.raises(DataError, match="cannot be divided into 4 folds"):
        prompts_of_folds([b"a", b"a", b"b"], 4, 0)


def test_the_interval_of_a_mean_is_students():
    of_two = TrialOutcome(number=0, params={}, state="complete", values=(0.5, 0.7))
    assert of_two.mean == pytest.approx(0.6)
    # By hand: the deviation is 0.1 sqrt(2), over sqrt(2) runs, times 12.706.
    assert of_two.half_width == pytest.approx(1.2706)
    many = TrialOutcome(number=0, params={}, state="complete", values=(0.0, 1.0) * 30)
    assert many.half_width == pytest.approx(
        2.0 * 0.5 * math.sqrt(60 / 59) / math.sqrt(60), rel=0.01
    )
    failed = TrialOutcome(number=0, params={}, state="failed", values=(0.5,))
    assert (failed.mean, failed.half_width) == (None, None)
