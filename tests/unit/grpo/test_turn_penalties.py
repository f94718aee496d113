"""Advantages of malformed turns, and completions that the generator computed too differently."""

import math
from dataclasses import replace

import numpy as np
import pytest

from laurel.config.grpo import GRPOConfig
from laurel.grpo.advantages import (
    Advantages,
    is_malformed_thinking,
    leave_out_mismatched,
    penalize_turns,
    sequence_errors,
)
from laurel.types import Message, Turn
from policy_fakes import rollout, rollout_group


@pytest.mark.parametrize(
    ("text", "is_malformed"),
    [
        ("no thoughts", False),
        ("<think>a</think>b", False),
        ("a</think>b", False),  # the prompt opened it
        ("<think>a", True),
        ("</think>a<think>", True),
        ("<think>a</think>b</think>", True),
        ("<think>a<think>b</think></think>", True),
    ],
)
def test_what_is_malformed(text, is_malformed):
    assert is_malformed_thinking(text) is is_malformed


def two_turns(environment="user", text="abc..d"):
    """Three tokens of the policy, some of the environment, one of the policy."""
    said = (
        Message("assistant", "<think>"),
        Message(environment, ".."),
        Message("assistant", "d"),
    )
    turns = (Turn(0, 0, 3), Turn(2, len(text) - 1, len(text)))
    return rollout(text, 1.0, messages=said, turns=turns)


@pytest.mark.parametrize("text", ["abc..d", "abcd"])  # a template may show nothing of it
def test_a_turn_is_what_the_policy_wrote_whatever_its_environment_says(text):
    group = rollout_group(two_turns("assistant", text))
    chosen = GRPOConfig(malformed_thinking_advantage=-5.0)
    found = penalize_turns(advantages_of(group, [2.0]), [group], chosen)
    assert found.tokens_BGL is not None
    assert found.tokens_BGL[0][0][[0, 1, 2, -1]].tolist() == [-5.0, -5.0, -5.0, 2.0]
    assert found.metrics["turns/malformed_thinking"] == 1 / 2


def advantages_of(group, values):
    return Advantages(values_BG=[np.array(values)], metrics={"reward": 1.0})


def test_the_tokens_of_a_malformed_turn_have_the_given_advantage():
    group = rollout_group(two_turns(), rollout("xy", 0.0))
    given = advantages_of(group, [2.0, -1.0])
    assert penalize_turns(given, [group], GRPOConfig()) is given
    chosen = GRPOConfig(malformed_thinking_advantage=-5.0)
    found = penalize_turns(given, [group], chosen)
    assert found.tokens_BGL is not None
    first, second = found.tokens_BGL[0]
    assert first[[0, 1, 2, 5]].tolist() == [-5.0, -5.0, -5.0, 2.0]
    assert second.tolist() == [-1.0, -1.0]
    # The mean over its four tokens.
    assert found.values_BG[0].tolist() == [-13 / 4, -1.0]
    assert given.values_BG[0].tolist() == [2.0, -1.0]
    assert found.metrics == {
        "reward": 1.0,
        "turns/malformed_thinking": 1 / 3,
        "turns/invalid_tool_call": 0.0,
    }


def test_an_invalid_call_goes_before_a_malformed_thought_and_all_is_clipped():
    one = replace(two_turns(), invalid_turns=(0, 1))
    group = rollout_group(one)
    chosen = GRPOConfig(
        malformed_thinking_advantage=-7.0, invalid_tool_call_advantage=-5.0, advantage_clip_low=-4.0
    )
    found = penalize_turns(advantages_of(group, [2.0]), [group], chosen)
    assert found.tokens_BGL is not None
    assert found.tokens_BGL[0][0][[0, 1, 2, 5]].tolist() == [-4.0] * 4
    # Without a value for calls, a turn that is both has that of its thought.
    chosen = GRPOConfig(malformed_thinking_advantage=-7.0)
    found = penalize_turns(advantages_of(group, [2.0]), [group], chosen)
    assert found.tokens_BGL is not None
    assert found.tokens_BGL[0][0][[0, 5]].tolist() == [-7.0, 2.0]


def test_advantages_of_steps_are_kept_where_turns_are_well_formed():
    group = rollout_group(two_turns())
    steps = [[np.arange(6.0)]]
    given = replace(advantages_of(group, [1.0]), tokens_BGL=steps)
    chosen = GRPOConfig(invalid_tool_call_advantage=-5.0)
    found = penalize_turns(given, [group], chosen)
    assert found.tokens_BGL is not None
    assert found.tokens_BGL[0][0].tolist() == steps[0][0].tolist()


def test_how_far_the_generator_is_off():
    # Differences 0, log 2 and log 4 are factors 1, 2 and 4; the environment's tokens do not count.
    old_L = np.array([0.0, math.log(2), -math.log(4), 9.0], np.float32)
    group = rollout_group(rollout("abc.", 1.0), rollout("..", 0.0))
    ((first, second),) = sequence_errors([group], [[old_L, np.zeros(2, np.float32)]])
    assert first == pytest.approx(7 / 3, rel=1e-6)
    assert second == 1.0
    old_L[0] = -math.inf
    ((first, _),) = sequence_errors([group], [[old_L, np.zeros(2, np.float32)]])
    assert math.isnan(first)


def test_what_is_too_far_off_is_left_out_and_counted_once():
    used = [[True, True, False], [True, False]]
    errors = [[2.0, 2.1, 9.0], [math.nan, 1.0]]
    kept, metrics = leave_out_mismatched(used, errors, threshold=2.0)
    assert kept == [[True, False, False], [False, False]]
    # Completions that had no reward are not left out for this.
    assert metrics == {
        "num_masked_seqs_by_logprob_error": 2.0,
        "max_seq_mult_prob_error": 9.0,
    }
    assert leave_out_mismatched([[True]], [[math.nan]], threshold=2.0) == (
        [[False]],
        {"num_masked_seqs_by_logprob_error": 1.0},
    )


def test_a_threshold_that_leaves_all_out_is_refused():
    with pytest.raises(ValueError, match="greater than 1"):
        GRPOConfig(seq_logprob_error_threshold=1.0)
