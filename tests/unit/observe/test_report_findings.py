"""What to look at first: every rule speaks where its figures say so, and only there."""

import pytest

from laurel.observe.console import accuracy_words
from laurel.observe.rules import RULES, findings
from laurel.observe.run_record import alarms_of
from report_runs import record

UP = [i / 100 for i in range(100)]
FLAT = [0.5 + 0.01 * (i % 2) for i in range(100)]
# The first two and the last two are alike by chance, so they alone would tell nothing of the noise.
FEW = [0.30, 0.31, *(0.29, 0.46, 0.33, 0.41) * 4, 0.33, 0.33]


def said(curves, *, kind="grpo", **others):
    return [f"{f.weight}: {f.text}" for f in findings(record(curves, kind=kind, **others))]


def held(accuracy, longer, count=1_000):
    return {
        "validation-default/accuracy": [accuracy],
        "validation-default/longer_wins_baseline": [longer],
        "validation-default/num_valid_samples": [count],
    }


def test_an_accuracy_says_that_it_counts_completions_that_were_cut_off():
    """Beside it stands that of the environment, which does not."""
    figures = {"accuracy": 0.205, "num_valid_samples": 200.0, "truncation_rate": 0.0}
    assert accuracy_words(figures) == "accuracy 0.2050 of 200 completions"
    figures["truncation_rate"] = 0.01
    assert accuracy_words(figures) == "accuracy 0.2050 of 200 completions, with those cut off"
    pairs = accuracy_words(figures | {"longer_wins_baseline": 0.5})
    assert pairs is not None
    assert "cut off" not in pairs


def test_one_curve_under_several_names_is_told_once():
    course = [0.5, 0.9, 0.2]
    names = ("validation/reward_mean", "validation/accuracy", "validation/env/math/accuracy")
    told = [one for one in said(dict.fromkeys(names, course)) if "got worse" in one]
    assert len(told) == 1
    assert "validation/accuracy was" in told[0]


VALIDATED = {"validation/accuracy": [0.5, 0.9, 0.6], "validation/num_valid_samples": [100.0] * 3}


def rewarded(count):
    """A mean reward that falls by 0.1125 over `count` completions of deviation 0.4."""
    return {
        "validation/reward_mean": [0.325, 0.2125],
        "validation/reward_std": [0.4, 0.4],
        "validation/num_valid_samples": [count, count],
    }


FAILED = {
    "train/num_failures": [2.0] * 10,
    "train/total_turns": [16.0] * 10,
    "train/avg_turns_per_sample": [2.0] * 10,
}
TIMEOUTS = FAILED | {"train/reward/failed_timeout": [2.0] * 10}
OTHER_REASONS = FAILED | {"train/reward/failed_other": [2.0] * 10}
SOLVED = {"train/frac_reward_zero_std": UP, "train/baseline_reward/pct_1": [90.0] * 100}
OUT_OF_TURNS = {
    "train/truncation_rate": UP,
    "train/unended_out_of_turns": [26.0] * 100,
    "train/unended_cut_off": [2.0] * 100,
}
JUMP = {"train/grad_norm": [1.0] * 50 + [48.0] + [1.0] * 49}
LEARNT_BY_HEART = {"train/accuracy": [0.95] * 50, "validation-default/accuracy": [0.7]}
LONGER = {"train/mean_gen_tokens_per_sample": [100.0 + 3 * i for i in range(100)]}


@pytest.mark.parametrize(
    ("curves", "kind", "expected"),
    [
        (held(0.79, 0.80), "rm", "bad: validation-default: accuracy is 79.0% on 1,000 pairs, and"),
        (held(0.81, 0.80), "rm", "no better than length alone, within two standard errors"),
        (held(0.70, 0.25), "rm", "always taking the shorter answer gives 75.0%: no better"),
        (held(0.90, 0.60), "rm", "longer answer gives 60.0%: 30.0 points better than length."),
        (VALIDATED, "grpo", "validation/accuracy was 0.9000 at step 2 and is 0.6000 at step 3"),
        ({"validation-a/loss": [0.5, 0.4, 0.6]}, "rm", "validation-a/loss was 0.4000 at step 2"),
        (rewarded(80), "grpo", "validation/reward_mean was 0.3250 at step 1 and is 0.2125 at"),
        (JUMP, "rm", "look: The norm of the gradient jumped: 48 at step 51, 48 times its median"),
        ({"train/loss": [0.7] * 40}, "rm", "bad: The loss did not fall: 0.7000 over the first"),
        ({"train/loss": [0.7, float("nan")]}, "rm", "NaN or infinite at 1 step, first at step 2."),
        ({"train/bad_steps_in_a_row": [0.0, 1.0, 2.0, 0.0]}, "rm", "look: There were 2 bad steps"),
        (TIMEOUTS, "grpo", "bad: 20 of 80 completions got no reward (25%: 20 timeout)"),
        (OTHER_REASONS, "grpo", "(25%: 20 for reasons of the environment's own, which stand in "),
        (SOLVED, "grpo", "look: In 94% of the groups of the last steps all completions got the"),
        ({"train/truncation_rate": UP}, "grpo", "look: 94% of the completions"),
        (OUT_OF_TURNS, "grpo", "out of turns. A larger grpo.max_rollout_turns"),
        ({"train/entropy": [1.0 - 0.0095 * i for i in range(100)]}, "grpo", "look: Entropy fell"),
        ({"train/reward": UP, "validation/accuracy": [0.6, 0.4]}, "grpo", "learned to please the"),
        ({"train/reward": UP}, "grpo", "good: The reward rose from 0.04500 to 0.9450"),
        ({"train/reward": FLAT}, "grpo", "bad: The reward did not rise beyond its noise"),
        ({"train/reward": FEW}, "grpo", "bad: The reward did not rise beyond its noise"),
        (
            LONGER,
            "grpo",
            "look: Completions had 113.5 tokens in the first steps and have 383.5 now. Read the",
        ),
        ({"train/gen_kl_error": [0.05] * 10}, "grpo", "look: The generator and the learner differ"),
        ({"validation-a/score_length_correlation": [0.9]}, "rm", "(Spearman's correlation 0.90)"),
        ({"validation-a/score_ties": [0.2]}, "rm", "20.0% of the pairs have the same score"),
        ({"validation-a/ece": [0.25]}, "rm", "confidence and accuracy are 25.0% apart"),
        (LEARNT_BY_HEART, "rm", "ahead of validation: accuracy 95.0% over the last steps, 70.0%"),
    ],
)
def test_each_rule_with_its_numbers(curves, kind, expected):
    found = said(curves, kind=kind)
    assert sum(expected in text for text in found) == 1, found


def test_the_ends_of_a_run_differ_by_as_many_spreads_as_its_alarms_ask_for():
    """The first ten lengths have a median of 113.5 and a spread of 11.1."""
    for num_spreads, is_said in ((24.0, True), (25.0, False)):
        settings = {"grpo": {"health": {"num_spreads": num_spreads}}}
        found = said(LONGER, settings=settings)
        assert any("Completions had 113.5 tokens" in one for one in found) == is_said, found


def test_rules_of_alarms_that_the_report_does_not_apply_are_none_of_its_rules():
    others = {name for name, rule in RULES.items() if not rule.is_in_report}
    assert others == {"collapse", "kl_jump", "ensemble"}


@pytest.mark.parametrize(
    ("values", "staleness", "expected"),
    [
        ([0.05] * 10, 2, "0.05000 nats per token at step 1"),
        ([0.001] + [0.3] * 9, 2, "up to 2 steps older"),
        ([0.001] + [0.3] * 9, 0, "0.3000 nats per token over the last steps"),
        ([0.001] + [0.05] * 9, 2, None),
        ([0.05] + [0.001] * 9, 0, None),
    ],
)
def test_a_generator_may_be_as_stale_as_the_setting_permits(values, staleness, expected):
    """At step 1 the weights are the same: what differs there is no staleness."""
    settings = {"grpo": {"max_staleness": staleness}}
    found = said({"train/gen_kl_error": values}, settings=settings)
    assert [expected in text for text in found] == ([] if expected is None else [True]), found


SLIGHTLY_WORSE = {"validation/accuracy": [0.5, 0.62, 0.6]}
NONE_FAILED = {"train/num_failures": [0.0], "train/total_turns": [8.0]}
CALIBRATED = {
    "validation-a/ece": [0.05],
    "validation-a/score_ties": [0.0],
    "validation-a/score_length_correlation": [0.3],
}


@pytest.mark.parametrize(
    ("curves", "kind"),
    [
        (SLIGHTLY_WORSE | {"validation/num_valid_samples": [100.0] * 3}, "grpo"),
        ({"validation-a/loss": [0.5, 0.4, 0.405]}, "rm"),
        (rewarded(8), "grpo"),
        ({"train/grad_norm": [1.0 + (i % 3) for i in range(100)]}, "rm"),
        ({"train/grad_norm": [1.0, 48.0]}, "rm"),
        ({"train/loss": [0.7 - 0.005 * i for i in range(40)]}, "rm"),
        ({"train/loss": [0.0] * 40}, "grpo"),
        (NONE_FAILED | {"train/avg_turns_per_sample": [1.0]}, "grpo"),
        ({"train/frac_reward_zero_std": FLAT[:1] * 9, "train/truncation_rate": [0.01] * 9}, "grpo"),
        ({"train/entropy": FLAT, "train/mean_gen_tokens_per_sample": FLAT}, "grpo"),
        ({"train/accuracy": [0.75] * 50, "validation-default/accuracy": [0.7]}, "rm"),
        (CALIBRATED, "rm"),
    ],
)
def test_sound_figures_are_not_spoken_of(curves, kind):
    assert said(curves, kind=kind) == []


def test_data_that_was_left_out_and_its_notes():
    lost = {"duplicate": {"count": 15}, "too_long": {"count": 5}}
    data = {
        "rows_read": 100,
        "rows_kept": 80,
        "notes": ["7 rows contradict others"],
        "rows_left_out": lost,
    }
    assert said({}, data={"train": data}) == [
        "look: Data 'train': 20 of 100 rows were left out (15 duplicate, 5 too long).",
        "look: Data 'train': 7 rows contradict others.",
    ]
    # Where rows come from is no problem; what is held out is not lost.
    notes = ["read as GSM8K, recognized by: the answer", "b.jsonl: no row rates x"]
    data |= {"rows_left_out": {"held out": {"count": 25}}, "notes": notes}
    assert said({"train/reward": UP}, data={"train": data})[::2] == [
        "look: Data 'train': b.jsonl: no row rates x.",
        "note: Data 'train': read as GSM8K, recognized by: the answer.",
    ]
    assert said({}, data={"train": {"rows_read": 100, "rows_kept": 99}}) == []


ALARMS = [
    {
        "step": 5,
        "alarm": "length",
        "state": "raised",
        "metric": "m",
        "value": 900,
        "threshold": 500,
        "baseline": 200,
        "text": "Completions are long.",
        "advice": "look at them.",
        "samples": [{"prompt": "p", "completion": "c", "reward": 1.0}] * 5,
    },
    {"step": 6, "alarm": "entropy", "state": "raised", "value": "NaN"},
    {"step": 7, "alarm": "length", "state": "raised", "value": 950},
    {"step": 9, "alarm": "entropy", "state": "over"},
    {"step": 9, "alarm": "never raised", "state": "over"},
    {"broken": True},
]


def test_the_first_gradients_are_no_jump():
    begun = [48.0] * 10 + [1.0] * 90
    assert not any("gradient" in one for one in said({"train/grad_norm": begun}))
    assert any("step 11, 48" in one for one in said({"train/grad_norm": [1.0, *begun]}))


def test_alarms_from_when_to_when():
    first, second = alarms_of(ALARMS)
    assert (first.name, first.since, first.until) == ("length", 5, None)
    assert (first.value, first.threshold, first.baseline) == (900.0, 500.0, 200.0)
    assert len(first.samples) == 3
    assert (second.name, second.since, second.until) == ("entropy", 6, 9)


EQUAL = [
    {
        "step": 15,
        "alarm": "zero_spread_groups",
        "state": "raised",
        "value": 1.0,
        "text": "all equal",
    }
]


def rewarded(rewards, low, high, **shares):
    """The end of a run in which all rewards of each group are equal."""
    size = len(rewards)
    curves = {
        "train/reward": rewards,
        "train/reward_min": [low] * size,
        "train/reward_max": [high] * size,
        "train/frac_reward_zero_std": [1.0] * size,
    }
    return curves | {f"train/baseline_reward/{k}": [v] * size for k, v in shares.items()}


@pytest.mark.parametrize("health", [EQUAL, []])
def test_equal_rewards_are_success_at_the_top_and_an_illness_at_the_bottom(health):
    def found(*given, **shares):
        return said(rewarded(*given, **shares), health=health)

    solved = found([0.2] * 30 + [1.0] * 30, 0.0, 1.0)
    assert all(one.startswith("good") for one in solved), solved
    assert len(solved) == 2
    assert sum("at the top of what was seen" in one for one in solved) == 1
    # Other scales, and only one reward ever seen.
    assert found([-3.0] * 30 + [5.0] * 30, -4.0, 5.0)[0].startswith("good")
    perfect = found([1.0] * 60, 1.0, 1.0, pct_1=100.0, pct_0=0.0)
    assert all(one.startswith("good") for one in perfect), perfect
    hopeless = found([0.0] * 60, 0.0, 0.0, pct_1=0.0, pct_0=100.0)
    assert [one[:4] for one in hopeless] == (
        ["bad:", "bad:", "look"] if health else ["bad:", "look"]
    )
    assert any(one.startswith("bad") for one in found([0.6] * 60, 0.0, 1.0))
    fallen = found([1.0] * 30 + [0.05] * 30, 0.0, 1.0)
    assert fallen[0].startswith("bad")


def test_alarms_that_are_still_on_come_first():
    found = said({"train/loss": [float("nan")]}, health=ALARMS)
    assert found[0] == (
        "bad: An alarm is still on since step 5: length. Completions are long. Look at them."
    )
    assert found[-1] == "look: Raised in the course of the run, and over by now: 1 alarm."
