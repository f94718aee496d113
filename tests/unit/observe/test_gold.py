"""Which metric of a run is its gold metric: one answer for reports and alarms."""

from __future__ import annotations

import pytest

from laurel.observe.gold import gold_metric

COMPOSITE = {
    "env": {"composite": {"both": {"parts": [
        {"env": "reward_model", "weight": 1.0, "gate": None},
        {"env": "form", "weight": 0.0, "gate": 0.5},
        {"env": "math", "weight": 0.0, "gate": None},
    ]}}}
}  # fmt: skip
ALL = [f"env/both/{part}/{figure}" for part in ("reward_model", "form", "math")
       for figure in ("reward_mean", "accuracy")]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "measured", "expected"),
    [
        ({}, ALL, None),
        ({"grpo": None, "env": {"composite": {"both": None}}}, ALL, None),
        (COMPOSITE, ALL, "env/both/math/accuracy"),
        (COMPOSITE, ["env/both/math/reward_mean"], "env/both/math/reward_mean"),
        (COMPOSITE, ["env/both/reward_model/accuracy"], None),
        ({**COMPOSITE, "grpo": {"health": {"gold_metric": None}}}, ALL, "env/both/math/accuracy"),
        ({**COMPOSITE, "grpo": {"health": {"gold_metric": "validation/accuracy"}}}, ALL,
         "validation/accuracy"),
    ],
)  # fmt: skip
def test_the_gold_metric_is_the_named_one_or_a_part_that_is_not_rewarded(
    settings: dict[str, object], measured: list[str], expected: str | None
) -> None:
    assert gold_metric(settings, measured) == expected
