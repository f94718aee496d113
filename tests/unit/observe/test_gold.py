"""Which metric of a run is its gold metric: one answer for reports and alarms."""

import re

import pytest

from laurel.extensions.report.charts import charts_of
from laurel.extensions.report.page import page_of
from laurel.extensions.report.samples import RunSamples
from laurel.observe.history import gold_metric
from laurel.observe.rules import findings
from report_runs import record

COMPOSITE = {
    "env": {
        "composite": {
            "both": {
                "parts": [
                    {"env": "reward_model", "weight": 1.0, "gate": None},
                    {"env": "form", "weight": 0.0, "gate": 0.5},
                    {"env": "math", "weight": 0.0, "gate": None},
                ]
            }
        }
    }
}
ALL = [
    f"env/both/{part}/{figure}"
    for part in ("reward_model", "form", "math")
    for figure in ("reward_mean", "accuracy")
]


@pytest.mark.parametrize(
    ("settings", "measured", "expected"),
    [
        ({}, ALL, None),
        ({"grpo": None, "env": {"composite": {"both": None}}}, ALL, None),
        (COMPOSITE, ALL, "env/both/math/accuracy"),
        (COMPOSITE, ["env/both/math/reward_mean"], "env/both/math/reward_mean"),
        (COMPOSITE, ["env/both/reward_model/accuracy"], None),
        ({**COMPOSITE, "grpo": {"health": {"gold_metric": None}}}, ALL, "env/both/math/accuracy"),
        (
            {**COMPOSITE, "grpo": {"health": {"gold_metric": "validation/accuracy"}}},
            ALL,
            "validation/accuracy",
        ),
    ],
)
def test_the_gold_metric_is_the_named_one_or_a_part_that_is_not_rewarded(
    settings, measured, expected
):
    assert gold_metric(settings, measured) == expected


def run(gold, *, reward=None, **others):
    curves = {
        "env/both/math/accuracy": gold,
        "train/reward": reward or [1.2 + 0.01 * i for i in range(len(gold))],
        "train/reward_min": [0.0] * len(gold),
        "train/reward_max": [2.0] * len(gold),
    }
    return record(curves, settings=COMPOSITE, **others)


FALLEN_AT_ONCE = [0.84, 0.86] * 12 + [0.08] * 6
FALLEN_FROM_ITS_PEAK = [0.5 + 0.02 * i for i in range(20)] + [0.6] * 10
NEVER_HIGHER = [0.60 + 0.1 * (i % 2) for i in range(20)] + [0.57 + 0.1 * (i % 2) for i in range(20)]


@pytest.mark.parametrize("gold", [[0.84, 0.08], FALLEN_AT_ONCE, FALLEN_FROM_ITS_PEAK])
def test_a_run_whose_gold_metric_fell_is_bad_first_of_all(gold):
    first, *others = findings(run(gold))
    assert first.weight == "bad"
    assert "The gold metric env/both/math/accuracy fell from" in first.text
    assert "while the reward rose from" in first.text
    assert "good" not in [one.weight for one in others]


def test_nothing_is_well_where_gold_is_lower_by_what_chance_explains():
    first, *others = findings(run(NEVER_HIGHER))
    assert (first.weight, "did not rise: 0.6500 at first" in first.text) == ("look", True)
    assert "good" not in [one.weight for one in others]


def test_gold_that_rises_is_said_beside_the_reward():
    found = findings(run([0.3 + 0.01 * i for i in range(40)]))
    assert [one.weight for one in found] == ["good", "good"]
    assert "env/both/math/accuracy went from 0.3150 to 0.6750" in found[0].text


def test_gold_is_the_first_figure_and_the_first_curve_of_the_page():
    one = run(FALLEN_AT_ONCE)
    assert charts_of(one)[0].lines[0].label == "env/both/math/accuracy"
    page = page_of([one], [RunSamples()], title="t")
    summary = page[page.index('id="summary"') : page.index('id="findings"')]
    figures = re.findall(r'<dt>(.*?)</dt><dd class="value">(.*?)</dd>', summary)
    named = [(re.sub("<.*?>", "", name).split(": ")[1], value) for name, value in figures]
    assert named == [("env/both/math/accuracy", "8.0%"), ("train/reward", "1.490")]
    assert re.findall(r'hidden="true"><abbr.*?>(.*?)<', summary) == ["Gold metric", "Reward"]
