"""Settings beside defaults and beside other runs; evaluations; several runs on one page."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from laurel.config.reward_model import RewardTrainingRun
from laurel.extensions.report.page import (
    _short_paths,
    changed_settings,
    compare_runs,
    write_report,
)
from report_runs import record, reward_model_run, write_lines


def test_only_what_is_not_the_default_is_told():
    config = RewardTrainingRun().model_dump(mode="json")
    assert changed_settings("rm", config) == []
    config["rm"]["seed"] += 1
    config["policy"]["reward_model_cfg"]["attributes"] = ["help", "tone"]
    config["rm"]["from_an_older_version"] = True
    changed = changed_settings("rm", config)
    assert changed is not None
    assert [tuple(setting) for setting in changed] == [
        ("rm.seed", "43", "42"),
        ("rm.from_an_older_version", "true", "unknown"),
        ("policy.reward_model_cfg.attributes", "[help, tone]", "[]"),
    ]
    assert changed_settings("", {"mine": 1}) is None


def test_seeds_are_one_curve_with_a_band_and_other_runs_their_own():
    def run(seed, rate, reward):
        made = record({"train/reward": reward}, kind="grpo")
        return replace(
            made, settings={"grpo": {"seed": seed, "lr": rate}}, path=Path(f"exp_{seed}")
        )

    runs = [run(1, 0.1, [1.0, 2.0]), run(2, 0.1, [3.0, 6.0]), run(3, 0.5, [0.0, 0.5])]
    compared = compare_runs(runs)  # type: ignore[arg-type]
    (chart,) = compared.charts
    seeds, other = chart.lines
    assert (seeds.label, seeds.mark) == ("mean of A and B", "AB")
    assert seeds.series.values == (2.0, 4.0)
    assert seeds.limits is not None
    assert [limit.values for limit in seeds.limits] == [(1.0, 2.0), (3.0, 6.0)]
    assert (other.label, other.mark) == ("C exp_3", "C")
    assert compared.settings == [("grpo.seed", ["1", "2", "3"]), ("grpo.lr", ["0.1", "0.1", "0.5"])]
    assert compared.figures == [("train/reward", ["2", "6", "0.5000"])]
    assert compared.seeds[0].startswith("A and B differ in nothing but seeds")


REPORT = {
    "benchmark": "pairs",
    "model": "m<b>",
    "data": ["d"],
    "laurel": "0",
    "seconds": 1.0,
    "num_rows": 300,
    "num_failures": 2,
    "subsets": [
        {"name": "law", "value": 0.8, "longer_wins": 0.6, "num_rows": 100, "num_failures": 2}
    ],
    "notes": ["a note"],
    "sections": [{"name": "Ties", "value": 0.07, "longer_wins": None, "num_rows": 200}],
    "final": {"name": "all pairs", "value": 0.75, "longer_wins": 0.5, "num_rows": 300},
    "matrix": {"easy": 0.5},
    "diagnostics": {
        "num_pairs": 300,
        "confidence": 0.95,
        "score_length_correlation": 0.96,
        "accuracy": {
            "value": 0.75,
            "low": 0.7,
            "high": 0.8,
            "num_pairs": 300,
            "baselines": {"longer wins": 0.5},
        },
        "by_margin": [
            {
                "name": "0 to 1",
                "accuracy": {
                    "value": 0.6,
                    "low": 0.5,
                    "high": 0.7,
                    "num_pairs": 60,
                    "baselines": {},
                },
            }
        ],
        "calibration": {
            "error": 0.04,
            "rows": [
                {"start": 0.5, "end": 0.55, "num_pairs": 3, "confidence": 0.52, "accuracy": 1.0}
            ],
        },
    },
}


def words_of(html):
    """What the page says; where a long key may be broken says nothing."""
    told = re.sub(r"<script.*?</script>|<[^>]+>", " ", html.replace("<wbr>", ""), flags=re.DOTALL)
    return re.sub(r"\s+", " ", told)


def test_everything_of_a_run_is_on_its_page(tmp_path):
    run = reward_model_run(tmp_path / "exp_001")
    (run / "eval").mkdir()
    (run / "eval" / "pairs-report.json").write_text(json.dumps(REPORT), encoding="utf-8")
    write_lines(
        run / "health.jsonl",
        [
            {
                "step": 41,
                "alarm": "gradient",
                "state": "raised",
                "metric": "train/grad_norm",
                "value": 51.0,
                "threshold": 10.0,
                "baseline": 1.0,
                "text": "It jumped.",
                "advice": "Lower it.",
                "samples": [{"prompt": "why", "completion": "so", "reward": 1.5}],
            },
        ],
    )
    data = {"train": {"rows_read": 10, "rows_kept": 10, "lengths": {"tokens": {"max": 478}}}}
    (run / "data_report.json").write_text(json.dumps(data), encoding="utf-8")
    write_report(tmp_path / "page.html", [run])
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    text = words_of(html)
    for words in (
        "An alarm is still on since step 41: gradient. It jumped. Lower it.",
        "The norm of the gradient jumped: 51 at step 40, 51 times its median of 1",
        "gradient 41 still on train/grad_norm 51 10 1 It jumped. Lower it. Samples of that step "
        "prompt why completion so reward 1.5",
        "Before and after: validation-default/pairs The same pairs at step 50 and at step 100: 60",
        "All 120 samples.",
        "pairs: 75.0%",
        "law 80.0% 60.0% 100 2 Ties 7.0% – 200 0 all pairs 75.0% 50.0% 300 0",
        "margin 0 to 1 60 60.0% 50.0-70.0%",
        "expected calibration error 4.0%",
        "lengths: tokens: max 478",
        "What differs from the defaults (2)",
        "rm.max_num_steps 100 -1",
        "rm.seed 7 42",
        "rm: seed: 7",
    ):
        assert words in text, words
    assert '<td class="key"><b>margin</b></td>' in html, "not the term of that name"
    assert '<td class="key inner">  0 to 1</td>' in html


def test_directories_of_one_name_are_told_apart_by_what_is_above(tmp_path):
    def called(*places):
        records = [SimpleNamespace(path=tmp_path / one, title="run") for one in places]
        return _short_paths(records)  # type: ignore[arg-type]

    assert called("twice/exp_001", "int2/exp_001") == ["twice/exp_001", "int2/exp_001"]
    assert called("a/x/exp_001", "b/x/exp_001") == ["a/x/exp_001", "b/x/exp_001"]
    assert called("a/exp_001", "a/exp_002") == ["exp_001", "exp_002"]
    assert called("a/exp_001", "b/exp_001", "b/exp_002")[2] == "exp_002"
    assert called("a/exp_001", "a/exp_001") == ["exp_001", "exp_001"]
