"""Figures of a policy, by hand."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laurel.extensions.evaluation.pass_metrics import pass_at, pass_metrics, reward_metrics


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_all_choices_of_k(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    choices = list(itertools.combinations(passed, k))
    share = sum(any(choice) for choice in choices) / len(choices)
    assert pass_at(k, num_sampled=len(passed), num_passed=sum(passed)) == pytest.approx(share)


@pytest.mark.parametrize(("k", "drawn", "passed"), [(0, 2, 1), (3, 2, 1), (1, 2, 3), (1, 2, -1)])
def test_what_cannot_be_asked(k, drawn, passed):
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at(k, num_sampled=drawn, num_passed=passed)


def test_pass_figures_leave_out_tasks_with_too_few_completions():
    figures = pass_metrics([[1.0, 0.0, 0.0], [0.0, None, 1.0], [None, None, None]])
    assert figures == pytest.approx(
        {"pass@1": (1 / 3 + 1 / 2) / 2, "pass@2": (2 / 3 + 1.0) / 2, "pass@3": 1.0}
    )
    assert pass_metrics([[None], []]) == {}
    assert pass_metrics([[0.9, 1.5]]) == pytest.approx({"pass@1": 0.5, "pass@2": 1.0})


def test_reward_figures_by_hand():
    figures = reward_metrics([[1.0, 0.0], [1.0, None], [None, None], [0.25, 0.25]])
    means = [0.5, 1.0, 0.25]
    mean = sum(means) / 3
    spread = math.sqrt(sum((m - mean) ** 2 for m in means) / 2)
    assert figures == pytest.approx(
        {
            "num_tasks": 4.0,
            "num_tasks_unjudged": 1.0,
            "num_completions": 8.0,
            "num_failures": 3.0,
            "reward_mean": mean,
            "reward_standard_error": spread / math.sqrt(3),
        }
    )


def test_a_failure_never_becomes_a_number():
    figures = reward_metrics([[None]])
    assert "reward_mean" not in figures
    assert figures["num_failures"] == 1.0
    assert "reward_standard_error" not in reward_metrics([[0.5, 0.7]])
