"""The rules of the alarms on histories made by hand, and what holds of any history."""

import json
import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laurel.config.grpo import Alarm, HealthConfig
from laurel.observe.health import Alarms
from laurel.observe.history import (
    CONTROL_TOKENS,
    FAILURES,
    LENGTH,
    LENGTH_CORRELATION,
    READ,
    REPETITION,
    REWARD,
    TRUNCATION,
    UPDATES,
    ZERO_SPREAD,
)
from laurel.observe.rules import ALARMS, RULES, advice_of, findings
from laurel.observe.run_record import RunRecord

KL = "train/kl_penalty"
GOLD = "env/both/math/accuracy"
SAMPLES, PROBLEMS = "env/both/math/num_samples", "env/both/math/num_problems_in_batch"
FORMAT = "env/both/form/reward_mean"
PART = "env/reward_model/part/"
MEMBERS = ("left", "right")
SETTINGS: dict[str, Any] = {
    "baseline_steps": 4,
    "window": 3,
    "gold_metric": GOLD,
    "format_metric": FORMAT,
}


def alarms(**changes):
    return Alarms(HealthConfig(**(SETTINGS | changes)), members=MEMBERS)


def events(steps, **changes):
    watching = alarms(**changes)
    return [event for n, step in enumerate(steps, start=1) for event in watching.see(n, step)]


def told(steps, **changes):
    return [(event.step, event.alarm, event.state) for event in events(steps, **changes)]


def line(name, *values, **others):
    return [{name: value, **others} for value in values]


def columns(**by_name):
    names = {
        "reward": REWARD,
        "kl": KL,
        "gold": GOLD,
        "length": LENGTH,
        "correlation": LENGTH_CORRELATION,
    }
    rows = zip(*by_name.values(), strict=True)
    return [{names[n]: v for n, v in zip(by_name, row, strict=True)} for row in rows]


DRIFTS: list[tuple[str, str, float, float, float, float]] = [
    # metric, alarm, at first, much later, a leap, and almost one
    (LENGTH, "length", 10, 18, 15.1, 14.9),
    (LENGTH, "length", 10, 5, 6.6, 6.7),
    (REPETITION, "repetition", 0.1, 0.35, 0.31, 0.29),
    (TRUNCATION, "truncation", 0.0, 0.3, 0.21, 0.19),
    (CONTROL_TOKENS, "control_tokens", 0.0, 0.2, 0.06, 0.04),
]
SAME = ("metric", "alarm", "first", "later", "leap", "almost")


def noisy(*values, by):
    """Alternately a bit above and a bit below."""
    return [value + by * (-1) ** n for n, value in enumerate(values)]


@pytest.mark.parametrize(SAME, DRIFTS)
def test_a_slow_drift_rises_against_the_first_steps(metric, alarm, first, later, leap, almost):
    """Each step is a small one: only the medians of a window tell."""
    slow = [first + (later - first) * n / 16 for n in range(17)]
    (event,) = events(line(metric, *[first] * 8, *slow))
    assert event.alarm == alarm
    assert "in the first steps" in event.finding.text
    assert (event.finding.baseline, event.step < 25) == (first, True)


@pytest.mark.parametrize(SAME, DRIFTS)
def test_a_leap_rises_at_its_step(metric, alarm, first, later, leap, almost):
    (event,) = events(line(metric, *[first] * 6, leap))
    assert (event.step, event.alarm, event.finding.baseline) == (7, alarm, first)
    assert "in the steps before" in event.finding.text
    assert event.finding.threshold == pytest.approx((leap + almost) / 2, rel=0.01)
    for steps in (1, 9):
        assert told(line(metric, *[first] * 6, *[almost] * steps, first)) == []


@pytest.mark.parametrize(SAME, DRIFTS)
def test_the_first_steps_are_not_blind(metric, alarm, first, later, leap, almost):
    """Twice as far is needed while chance is not known; a window of it is told by step 6."""
    twice = first * (leap / first) ** 2 if metric == LENGTH else first + 2 * (leap - first)
    assert told(line(metric, first, twice)) == [(2, alarm, "raised")]
    assert told(line(metric, first, leap)) == []
    found = told(line(metric, *[first] * 3, *[leap] * 3))
    assert [(name, state) for _, name, state in found] == [(alarm, "raised")]
    assert found[0][0] <= 6


@pytest.mark.parametrize(SAME, DRIFTS)
def test_noise_raises_nothing(metric, alarm, first, later, leap, almost):
    by = abs(leap - first) / 3
    values = noisy(*[max(first, by)] * 30, by=by)
    assert told(line(metric, *values)) == []
    odd = max(first, by) + 2 * by  # of the size of what was seen between two steps
    assert told(line(metric, *values, odd, *values)) == []


SHARES = [
    (ZERO_SPREAD, "zero_spread_groups", 0.9),
    (FAILURES, "failures", 0.1),
]


@pytest.mark.parametrize(("metric", "alarm", "share"), SHARES)
def test_a_share_that_is_too_large_from_the_beginning(metric, alarm, share):
    assert told(line(metric, *[share] * 5)) == [(3, alarm, "raised")]
    assert told(line(metric, *[share - 0.01] * 5)) == []


def test_a_window_without_an_update_is_told_and_over_after_a_window_with_some():
    told_of = line(UPDATES, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    assert told(told_of) == [(4, "no_updates", "raised"), (8, "no_updates", "over")]
    assert told(line(UPDATES, 0.0, 0.0, 1.0, 0.0, 0.0)) == []


@pytest.mark.parametrize("metric", [LENGTH, FORMAT])
def test_what_is_usual_in_the_first_steps_is_no_drift(metric):
    """Median 0.5, median absolute deviation 0.075: four standard deviations reach beyond 0.9."""
    first, far = [0.5, 0.65, 0.5, 0.35], 0.85 if metric != FORMAT else 0.15
    assert told(line(metric, *first, *[far] * 9)) == []
    assert len(told(line(metric, *first, *[far] * 9), num_spreads=0.0)) == 1


def test_an_alarm_is_over_after_a_window_of_good_steps():
    values = [0.0, 0.2, 0.2, 0.0, 0.0, 0.2, 0.0, 0.0, 0.0, 0.0]
    found = told(line(FAILURES, *values))
    # Medians of three: 0, 0.2, 0.2, 0, 0, 0, 0, 0 from the third step on: fresh ones count anew.
    assert found == [(3, "failures", "raised"), (7, "failures", "over")]
    # Good ones count anew after a bad one.
    values = [0.2, 0.2, 0.2, 0.0, 0.0, 0.2, 0.2, 0.0, 0.0, 0.0, 0.0]
    assert told(line(FAILURES, *values)) == [(3, "failures", "raised"), (11, "failures", "over")]


def measured(gold, *, samples=6400.0, problems=1600.0, **others):
    """Gold of so many completions a step, while the reward rises."""
    rows = columns(gold=gold, **({"reward": [0.1 * n for n in range(len(gold))]} | others))
    return [{**row, SAMPLES: samples, PROBLEMS: problems} for row in rows]


def test_gold_that_falls_while_the_reward_rises():
    """With thousands of completions a tenth less is beyond chance at once."""
    gold = [0.8, 0.8, 0.8, 0.8, 0.8, 0.8, 0.7, 0.7, 0.7, 0.7]
    (event,) = events(measured(gold, kl=[0.01 * n for n in range(10)]))
    assert (event.step, event.alarm, event.finding.metric) == (7, "overoptimisation", GOLD)
    assert event.finding.baseline == pytest.approx(0.8)
    assert event.finding.threshold == pytest.approx(0.72)
    assert KL not in event.finding.text
    assert "0.8" in event.finding.text
    assert "divergence" in event.finding.text


def test_chance_of_a_fall_is_that_of_two_shares():
    """64 completions of 16 problems are 64 / (1 + 0.5 x 3) = 25.6 draws: half right, then none.

    Both together 0.25; with half a draw more 6.9 of 26.6, whose deviation is 0.438. Over the root
    of 25.6 that is 0.0866, times the root of 1/1 + 1/1 and 4 it is 0.490, and 0.5 is more.
    With 0.02 instead of none it is 0.496, and 0.48 is less.
    """
    (event,) = events(measured([0.5, 0.0], samples=64, problems=16))
    assert event.step == 2
    assert event.finding.threshold == pytest.approx(0.5 - 0.490, abs=0.001)
    assert told(measured([0.5, 0.02], samples=64, problems=16)) == []
    assert told(measured([0.5, 0.02, 0.0], samples=64, problems=16)) != [], "two steps are enough"
    assert told(measured([0.5, 0.0], samples=32, problems=16)) == [], "half as many are not"


def test_a_single_step_of_gold_that_was_better_by_chance_is_no_peak():
    """0.55 less 2 x 0.1 is less than the mean of three, 0.5, less 2 x 0.046."""
    watching = alarms(baseline_steps=10)
    for n, row in enumerate(measured([0.55, 0.47, 0.48], samples=64, problems=16)):
        watching.see(n, row)
    peak = watching.state_dict()["history"]["peak"]
    assert peak[1:3] == [pytest.approx(0.5), 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"gold": [0.8] * 6 + [0.73] * 4},  # less than a tenth
        {"gold": [0.8, 0.7, 0.9, 0.8, 0.8, 0.8, 0.7, 0.7, 0.7, 0.7], "samples": 64},  # chance
        {"reward": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.1, 0.1, 0.1, 0.1]},  # falls as well
        {"kl": [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.1, 0.1, 0.1, 0.1]},  # goes back
    ],
)
def test_other_falls_of_gold_are_no_overoptimisation(changes):
    bad = {"kl": [0.01 * n for n in range(10)], "gold": [0.8] * 6 + [0.7] * 4}
    assert len(told(measured(**bad))) == 1
    assert told(measured(**(bad | changes))) == []


def test_a_reward_that_is_a_bit_lower_by_chance_has_not_fallen():
    """What games a reward may reach its top before gold falls: it then moves by chance alone."""
    reward = noisy(*[0.7] * 8, by=0.02)
    gold = [0.8] * 6 + [0.2] * 2
    assert told(measured(gold, reward=reward)) == [(7, "overoptimisation", "raised")]
    assert told(measured(gold, reward=reward[:6] + [0.5] * 2)) == [(8, "collapse", "raised")]


def test_gold_that_falls_with_the_reward_is_a_collapse():
    """Half of it, over two steps, and another evidence than of a reward that is gamed."""
    reward = [0.7] * 6
    (event,) = events(measured([0.8] * 6 + [0.3] * 2, reward=reward + [0.3] * 2))
    assert (event.step, event.alarm, event.finding.metric) == (8, "collapse", GOLD)
    assert (event.finding.baseline, event.finding.evidence) == (pytest.approx(0.8), "worst")
    assert event.finding.threshold == pytest.approx(0.4)
    one_bad_step = measured([0.8] * 6 + [0.3] + [0.8] * 5, reward=reward + [0.3] + [0.7] * 5)
    assert told(one_bad_step) == []
    assert told(measured([0.8] * 6 + [0.5] * 5, reward=reward + [0.5] * 5)) == []
    back = {"kl": [0.5] * 6 + [0.1] * 2, "reward": reward + [0.7] * 2}
    assert told(measured([0.8] * 6 + [0.3] * 2, **back)) == [(8, "collapse", "raised")]


def test_gold_of_validations_is_graded_by_a_few_of_them():
    name = "validation/reward_mean"
    watching = alarms(gold_metric=name, window=5)
    found = []
    for n, gold in enumerate([0.6, 0.8, 0.8, 0.8, 0.5, 0.5], start=1):
        for _ in range(5):
            found += watching.see(n, {REWARD: float(n)})
        found += watching.see(n, {name: gold})
    assert [(event.step, event.alarm) for event in found] == [(6, "overoptimisation")]


def test_negative_gold_is_measured_by_its_size():
    gold = [-1.0] * 6 + [-1.2] * 3
    steps = columns(reward=[float(n) for n in range(9)], gold=gold)
    assert told(steps) == [(7, "overoptimisation", "raised")]
    steps = columns(reward=[float(n) for n in range(9)], gold=[-1.0] * 6 + [-1.05] * 3)
    assert told(steps) == []


WEIGHTLESS = {
    "env": {
        "composite": {
            "both": {
                "parts": [
                    {"env": "reward_model", "weight": 1.0, "gate": None},
                    {"env": "math", "weight": 0.0, "gate": None},
                ]
            }
        }
    }
}


@pytest.mark.parametrize(
    "gold", [[0.84, 0.08], [0.84, 0.45, 0.08], [0.82, 0.85, 0.84] * 4 + [0.45, 0.08]]
)
def test_gold_that_falls_in_two_steps_rises_at_once(gold):
    """Wherever in a run, with nothing set: the part of weight 0 is the gold metric."""
    watching = Alarms(HealthConfig(), settings=WEIGHTLESS)
    found = [
        event
        for n, value in enumerate(gold, start=1)
        for event in watching.see(n, {REWARD: 1.0 + 0.1 * n, GOLD: value})
    ]
    assert [event.alarm for event in found] == ["overoptimisation"]
    assert len(gold) - 1 <= found[0].step <= len(gold)
    assert found[0].finding.metric == GOLD
    again = Alarms(HealthConfig(), settings=WEIGHTLESS)
    again.load_state_dict(json.loads(json.dumps(watching.state_dict())))
    assert again.raised == ("overoptimisation",)
    assert again.see(99, {REWARD: 2.0, GOLD: 0.9}) == [], "still the same metric, now better"


@pytest.mark.parametrize(
    "gold",
    [
        noisy(*[0.5] * 30, by=0.12),
        [0.2, 0.05, 0.2, 0.1, 0.0, 0.2, 0.1],  # few right answers: nothing is all of them
        [1.5, 0.1, 1.0, 0.2, 1.4, 0.1],  # no share: nothing is believed before chance is known
        [0.5] * 8 + [0.3] + [0.5] * 8,  # less than half
    ],
)
def test_gold_that_is_noisy_does_not_leap(gold):
    assert told(columns(gold=gold)) == []


def test_a_divergence_that_leaps():
    """Roots 0, 0.2, 0.4 and 0.6 lead to 0.8, whose square is 0.64: three times that is a leap."""
    at_speed = [0.0, 0.04, 0.16, 0.36]
    (event,) = events(columns(kl=[*at_speed, 1.93]))
    assert (event.step, event.alarm, event.finding.baseline) == (5, "kl_jump", pytest.approx(0.64))
    assert event.finding.threshold == pytest.approx(1.92)
    assert told(columns(kl=[*at_speed, 1.91])) == []
    assert told(columns(kl=[0.2] * 6 + [0.61])) == [(7, "kl_jump", "raised")], "no speed at all"
    assert told(columns(kl=[0.05, 0.6])) == [(2, "kl_jump", "raised")], "the first steps"
    assert told(columns(kl=[0.01] * 6 + [0.49])) == [], "below KL_LEAST"
    assert told(columns(kl=[0.02 * 1.2**n for n in range(24)])) == [], "it grows in any run"
    assert told(columns(kl=noisy(*[1.0] * 30, by=0.5))) == []


def test_a_leap_that_the_reward_did_not_pay_for_is_a_bad_update():
    """The reward is compared with the median of the steps before, 0.6."""
    kl, reward = [0.1] * 5 + [0.7], [0.5, 0.6, 0.7, 0.6, 0.6]
    assert told(columns(kl=kl, reward=[*reward, 0.6])) == [(6, "kl_jump", "raised")]
    assert told(columns(kl=kl, reward=[*reward, 0.59])) == []


@pytest.mark.parametrize("speed", [0.03, 0.2, 0.7])
def test_a_divergence_at_a_constant_speed_is_no_leap(speed):
    """Whatever the learning rate: 4 times as much at the second step is how it begins."""
    assert told(columns(kl=[(speed * n) ** 2 for n in range(20)])) == []


def test_length_that_is_paid_for():
    growing = [10.0] * 4 + [12.0] * 4
    assert told(columns(length=growing, correlation=[0.6] * 8)) == [(6, "length_bias", "raised")]
    assert told(columns(length=growing, correlation=[0.4] * 8)) == []
    assert told(columns(length=[10.0] * 8, correlation=[0.6] * 8)) == [], "nothing grows"


def members(left, right, std=0.5):
    return [
        {
            f"{PART}left/mean": a,
            f"{PART}left/std": std,
            f"{PART}right/mean": b,
            f"{PART}right/std": std,
        }
        for a, b in zip(left, right, strict=True)
    ]


def test_models_that_go_apart():
    steps = members([0.0] * 4 + [0.75] * 3, [2.0] * 4 + [2.125] * 3)
    (event,) = events(steps)
    assert (event.step, event.alarm) == (6, "ensemble")
    assert event.finding.value == 1.25
    assert told(members([0.0] * 4 + [0.6] * 3, [2.0] * 4 + [2.6] * 3)) == [], "both gain"
    assert told(members([0.0] * 4 + [0.6] * 3, [2.0] * 7, std=0.0)) == [], "no unit to measure in"
    others = Alarms(HealthConfig(**SETTINGS), members=("left", "other"))
    assert [e for n, step in enumerate(steps) for e in others.see(n, step)] == []


def bad_history():
    """Everything goes wrong after eight steps."""
    bad: dict[str, tuple[float, float]] = {
        LENGTH: (10, 30),
        LENGTH_CORRELATION: (0.1, 0.9),
        REPETITION: (0.0, 0.5),
        TRUNCATION: (0.0, 0.9),
        CONTROL_TOKENS: (0.0, 0.9),
        ZERO_SPREAD: (0.1, 1.0),
        UPDATES: (1.0, 0.0),
        FAILURES: (0.0, 0.9),
        FORMAT: (1.0, 0.1),
        KL: (0.1, 9.0),
        GOLD: (0.9, 0.1),
        REWARD: (0.5, 0.5),
        f"{PART}left/mean": (0.0, 9.0),
        f"{PART}left/std": (1.0, 1.0),
        f"{PART}right/mean": (0.0, 0.0),
        f"{PART}right/std": (1.0, 1.0),
    }
    steps = [{name: pair[n >= 8] for name, pair in bad.items()} for n in range(20)]
    return steps[:16] + [{**step, REWARD: 0.1} for step in steps[16:]]


NEEDS: dict[str, set[str]] = {
    "overoptimisation": {GOLD},
    "collapse": {GOLD},
    "kl_jump": {KL},
    "length": {LENGTH},
    "length_bias": {LENGTH, LENGTH_CORRELATION},
    "repetition": {REPETITION},
    "truncation": {TRUNCATION},
    "control_tokens": {CONTROL_TOKENS},
    "format": {FORMAT},
    "zero_spread_groups": {ZERO_SPREAD},
    "no_updates": {UPDATES},
    "ensemble": {f"{PART}left/mean", f"{PART}left/std", f"{PART}right/mean"},
    "failures": {FAILURES},
}


def test_every_alarm_has_a_rule_and_rises_where_all_goes_wrong():
    assert set(ALARMS) == set(get_args(Alarm)) == set(NEEDS)
    assert {alarm for _, alarm, _ in told(bad_history())} == set(ALARMS)


@pytest.mark.parametrize("rule", [name for name, one in RULES.items() if one.compares_ends])
def test_the_report_checks_a_whole_run_by_the_same_rule(rule):
    """Unless its alarm is still on, which the report tells already, or is not wanted."""

    def told_of(health=(), **settings):
        steps = [dict(step) for step in bad_history() for _ in range(2)]
        settings = {"grpo": {"health": {"format_metric": FORMAT, **settings}}}
        run = RunRecord(path=Path(), kind="grpo", metrics=steps, settings=settings, health=health)
        return [one for one in findings(run) if advice_of(rule)[1:] in one.text]

    assert len(told_of()) == 1
    assert told_of(ignore=[rule]) == []
    assert told_of(health=[{"step": 9, "alarm": rule, "state": "raised"}]) == []


@pytest.mark.parametrize("alarm", ALARMS)
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_without_a_metric_its_rules_are_silent(alarm, value):
    """Not measured and not finite are the same: the rule never judges, whatever the others say."""
    for name in NEEDS[alarm]:
        steps = [{k: v for k, v in step.items() if k != name} for step in bad_history()]
        if value is not None:
            steps = [{**step, name: value} for step in steps]
        watching = alarms()
        found = [e.alarm for n, step in enumerate(steps) for e in watching.see(n, step)]
        assert alarm not in found
        assert alarm not in watching.known
        unaffected = {other for other in ALARMS if name not in NEEDS[other]}
        assert unaffected <= set(found)


def test_a_metric_that_pauses_changes_nothing():
    """What was raised stays so, and what is missing is no good step."""
    steps: list[dict[str, float]] = [{FAILURES: 0.5}] * 3 + [{REWARD: 1.0}] * 9
    watching = alarms()
    found = [e.state for n, step in enumerate(steps) for e in watching.see(n, step)]
    assert (found, watching.raised) == (["raised"], ("failures",))


def test_ignored_alarms_do_not_rise_and_chosen_ones_stop():
    watching = alarms(ignore=["length", "kl_jump"], stop_on=["failures", "repetition"])
    for n, step in enumerate(bad_history()):
        watching.see(n, step)
    assert not {"length", "kl_jump"} & {*watching.raised, *watching.known}
    assert set(watching.stopping) == {"failures", "repetition"}


OF_MEMBERS = [f"{PART}{member}/{kind}" for member in MEMBERS for kind in ("mean", "std")]
NAMES = [*sorted(READ), GOLD, FORMAT, *OF_MEMBERS]
RELATIVE = [name for name in NAMES if name not in (ZERO_SPREAD, FAILURES)]
FINITE = st.floats(-1e6, 1e6)


@given(
    step=st.dictionaries(st.sampled_from(RELATIVE), st.floats(1e-3, 1e3), min_size=1),
    count=st.integers(1, 40),
)
@settings(max_examples=60, deadline=None)
def test_a_run_that_stays_as_it_began_raises_nothing(step, count):
    assert told([step] * count) == []


ANY_VALUE = st.one_of(FINITE, st.just(math.nan), st.just(math.inf), st.sampled_from([0.0, 1.0]))
ANY_STEP = st.dictionaries(st.sampled_from(NAMES), ANY_VALUE)


@given(steps=st.lists(ANY_STEP, max_size=30), cut=st.integers(0, 30))
@settings(max_examples=100, deadline=None)
def test_a_run_that_was_resumed_gives_the_same_events(steps, cut):
    straight = events(steps)
    first = alarms()
    found = [e for n, step in enumerate(steps[:cut], start=1) for e in first.see(n, step)]
    saved = json.loads(json.dumps(first.state_dict()))
    second = alarms()
    second.load_state_dict(saved)
    for n, step in enumerate(steps[cut:], start=cut + 1):
        found += second.see(n, step)
    assert found == straight
    assert len(json.dumps(second.state_dict())) < 20_000, "it does not grow with the run"


@given(steps=st.lists(ANY_STEP, max_size=30))
@settings(max_examples=60, deadline=None)
def test_alarms_rise_and_end_in_turn_with_finite_figures(steps):
    open_now: set[str] = set()
    for event in events(steps):
        assert (event.alarm in open_now) == (event.state == "over")
        open_now ^= {event.alarm}
        assert math.isfinite(event.finding.value)
        assert math.isfinite(event.finding.threshold)
        assert event.finding.is_bad == (event.state == "raised")


def test_a_state_of_other_settings_can_be_taken():
    """What is no longer read, or no longer wanted, is forgotten."""
    before = alarms()
    for n, step in enumerate(bad_history()):
        before.see(n, step)
    after = alarms(gold_metric=None, ignore=["failures"], window=2, baseline_steps=3)
    after.load_state_dict(before.state_dict())
    assert "failures" not in after.raised
    assert after.see(21, {GOLD: 0.0, FAILURES: 1.0}) == []
