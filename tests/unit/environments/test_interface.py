"""What every environment shares: settings, what need not be written, figures."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laurel.environments.interface import (
    accuracy_metrics,
    batch_metrics,
    mean_of,
    pass_at_k,
    response_of,
    settings_of,
)
from laurel.errors import ConfigError
from laurel.extensions.math.settings import MathEnvironmentConfig


def said(*texts, role="assistant"):
    return [{"role": "user", "content": "?"}, *({"role": role, "content": t} for t in texts)]


def test_settings_from_a_dictionary():
    config = settings_of(MathEnvironmentConfig, {"num_workers": 2}, where="env.math")
    assert (config.num_workers, config.timeout_seconds) == (2, 3.0)
    assert settings_of(MathEnvironmentConfig, config, where="env.math") is config
    known_elsewhere = {"num_workers": 2, "math_verify_impl": "hf_math_verify"}
    assert settings_of(MathEnvironmentConfig, known_elsewhere, where="env.math") == config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_worker": 2}, "env.math: num_worker: unknown key; did you mean 'num_workers'"),
        ({"num_workers": 0}, "num_workers: must be a whole number of at least 1"),
        ({"verifier_type": "mth"}, "did you mean 'math'"),
        ([("num_workers", 2)], "must be a MathEnvironmentConfig or a dictionary, not list"),
    ],
)
def test_settings_that_cannot_be_used_are_told(given, message):
    with pytest.raises(ConfigError, match=message):
        settings_of(MathEnvironmentConfig, given, where="env.math")


def test_the_response_is_all_that_the_policy_said():
    log = [*said("a", "b"), {"role": "environment", "content": "x"}, *said("c")[1:]]
    assert response_of(log) == "abc"


def test_pass_at_k_by_hand():
    # Group a: 4 samples, 1 right. Group b: 4 samples, none right.
    groups = ["a", "a", "b", "a", "b", "a", "b", "b"]
    right = [True, False, False, False, False, False, False, False]
    assert pass_at_k(groups, right) == {
        "pass@samples_per_prompt": 0.5,
        "pass@1": 0.125,  # (1/4 + 0) / 2
        "pass@2": 0.25,  # (1 - C(3,2)/C(4,2) + 0) / 2 = (1/2) / 2
        "pass@4": 0.5,
    }


def test_d11_equal_prompts_stay_two_groups():
    batch = {
        "group_ids": ["step1-0", "step1-0", "step1-1", "step1-1"],
        "is_end": torch.tensor([True, True, True, False]),
        "prompt_lengths": torch.tensor([3, 3, 3, 3]),
        "generation_lengths": torch.tensor([1, 2, 3, 4]),
        "num_failures": 1,
    }
    assert batch_metrics(batch) == {
        "num_samples": 4.0,
        "num_problems_in_batch": 2.0,
        "num_failures": 1.0,
        "fraction_of_samples_properly_ended": 0.75,
        "generation_lengths": 2.5,
        "prompt_lengths": 3.0,
    }
    assert pass_at_k(batch["group_ids"], [True, True, False, False])["pass@2"] == 0.5
    # Of the four, the last reached the reward and was cut, and the third missed it by a little.
    figures, correct = accuracy_metrics({**batch, "rewards": [1.0, 1.0, 0.999, 1.0]})
    assert correct == [True, True, False, False]
    assert figures == {
        **batch_metrics(batch),
        "accuracy": 0.5,
        **pass_at_k(batch["group_ids"], correct),
    }
    _, correct = accuracy_metrics({**batch, "rewards": [1.0, 0.5, 0.999, 1.0]}, right=0.9)
    assert correct == [True, False, True, False]


def test_a_mean_over_nothing_is_absent():
    assert mean_of("accuracy", []) == {}
    assert pass_at_k([], []) == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), min_size=1, max_size=24))
def test_pass_at_k_grows_with_k_and_ends_at_any_of_them(samples):
    groups, right = [g for g, _ in samples], [r for _, r in samples]
    figures = pass_at_k(groups, right)
    by_k = [v for name, v in figures.items() if name != "pass@samples_per_prompt"]
    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(by_k))
    assert all(value <= figures["pass@samples_per_prompt"] + 1e-12 for value in by_k)
