"""What is measured for the alarms, worked by hand; the samples and the file that they write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laurel.config.grpo import HealthConfig
from laurel.grpo.metrics import (
    HEALTH_FILE,
    HealthWatch,
    completion_metrics,
    length_correlation,
    repeated_share,
    samples_of,
)
from laurel.observe.health import Alarms
from laurel.types import Message, Rollout, RolloutGroup
from policy_fakes import ids_of, rollout, rollout_group


def group(prompt: str, *rollouts: Rollout) -> RolloutGroup:
    return rollout_group(*rollouts, prompt=prompt)


def test_repeated_grams_by_hand() -> None:
    assert repeated_share(ids_of("abc")) is None, "no 4-gram"
    assert repeated_share(ids_of("abcd")) == 0.0
    assert repeated_share(ids_of("aaaaaaaa")) == 1 - 1 / 5
    assert repeated_share(ids_of("abababab")) == 1 - 2 / 5
    assert repeated_share(ids_of("abcdabcd")) == 1 - 4 / 5


def test_the_correlation_is_within_groups() -> None:
    """Between the groups the longer ones are worse; within each, the longer one is better."""
    groups = [
        group("p", rollout("a", 5.0), rollout("aaa", 6.0)),
        group("q", rollout("aaaaaaa", 1.0), rollout("aaaaaaaaa", 2.0)),
    ]
    assert length_correlation(groups) == pytest.approx(1.0)
    turned = [group("p", rollout("a", 6.0), rollout("aaa", 5.0), rollout("aa", None))]
    assert length_correlation(turned) == pytest.approx(-1.0)


@pytest.mark.parametrize(
    "rollouts",
    [
        [rollout("a", 1.0), rollout("aaa", 1.0)],
        [rollout("a", 1.0), rollout("b", 2.0)],
        [rollout("a", 1.0), rollout("aaa", None)],
        [],
    ],
)
def test_without_differences_there_is_no_correlation(rollouts: list[Rollout]) -> None:
    assert length_correlation([group("p", *rollouts)]) is None


def test_figures_of_a_step_by_hand() -> None:
    groups = [
        group("p", rollout("aaaaaaaa", 1.0), rollout("abcdefg", 0.0)),
        group("q", rollout("x", None), rollout("yz", 1.0)),
    ]
    asked = {"train/num_failures_left_out": 4.0}
    assert completion_metrics(groups, asked) == {
        "train/completions/repetition": pytest.approx(0.4),
        "train/completions/reward_length_correlation": pytest.approx(1.0),
        "train/completions/failure_share": pytest.approx(5 / 8),
    }
    assert completion_metrics([], {}) == {}


def test_only_what_the_policy_wrote_is_looked_at() -> None:
    mask = np.array([True] * 4 + [False] * 8)
    one = rollout("abcdaaaaaaaa", 1.0, mask_L=mask)
    assert completion_metrics([group("p", one)], {})["train/completions/repetition"] == 0.0


GROUPS = [
    group("p", rollout("aa", 1.0), rollout("bbbbbb", 2.0, truncated=True), rollout("c", 3.0)),
    group("q", rollout("dddd", 0.5), rollout("eeeee", 0.5), rollout("f", None)),
]


@pytest.mark.parametrize(
    ("evidence", "texts"),
    [
        ("longest", ["bbbbbb", "eeeee", "dddd"]),
        ("shortest", ["c", "dddd", "aa"]),
        ("best", ["c", "dddd", "bbbbbb"]),
        ("worst", ["dddd", "aa", "eeeee"]),
        ("repetitive", ["bbbbbb", "eeeee", "aa"]),
        ("cut_off", ["bbbbbb"]),
        ("failed", ["f"]),
        ("equal", ["dddd", "eeeee"]),
    ],
)
def test_samples_show_what_an_alarm_is_about(evidence: Any, texts: list[str]) -> None:
    """The clearest of each prompt first, then the clearest of all."""
    found = samples_of(GROUPS, evidence)
    assert [sample["completion"] for sample in found] == texts
    assert all(len(s["prompt"]) == 1 and ("failure" in s) == (s["reward"] is None) for s in found)


def test_samples_of_control_tokens_spell_them() -> None:
    marks = group("p", rollout("aa", 1.0), rollout("b<|im_end|>", 0.0), rollout("c", 3.0))
    found = samples_of([marks, group("q", rollout("dd", 9.0))], "control_tokens")
    assert [sample["completion"] for sample in found] == ["b<|im_end|>", "dd", "aa"]


def test_a_sample_is_not_longer_than_people_read() -> None:
    (sample,) = samples_of([group("p", rollout("x" * 20_000, 1.0))], "best")
    assert len(sample["completion"]) <= 4_100
    assert sample["num_tokens"] == 20_000


def watch(directory: Path, said: list[str]) -> HealthWatch:
    alarms = Alarms(HealthConfig(window=1))
    return HealthWatch(alarms, run_dir=directory, say=said.append)


BROKEN = (Message("assistant", "a\u2028\ud800"),)
"""Ends a line for some readers, and has half a character."""
FAILED = [group("p", rollout("a", None, messages=BROKEN), rollout("b", 1.0))]


def test_what_a_resumed_run_will_write_again_is_dropped(tmp_path: Path) -> None:
    said: list[str] = []
    watching, path = watch(tmp_path, said), tmp_path / HEALTH_FILE
    watching.resumed(3)
    assert not path.exists()
    for step in (1, 2, 3):
        watching.step(step, FAILED if step != 2 else [group("p", rollout("b", 1.0))], {})
    lines = path.read_bytes().split(b"\n")[:-1]
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    with path.open("ab") as file:
        file.write(b'{"step": 1, "al')
    watch(tmp_path, said).resumed(2)
    assert path.read_bytes().split(b"\n")[:-1] == lines[:2]


def test_an_alarm_is_told_at_length_once(tmp_path: Path) -> None:
    said: list[str] = []
    watching = watch(tmp_path, said)
    for step in (1, 2, 3):
        watching.step(step, FAILED if step != 2 else [group("p", rollout("b", 1.0))], {})
    assert [text.partition(":")[0] for text in said] == [
        "step 1  alarm raised",
        "step 2  alarm over",
        "step 3  alarm raised",
    ]
    assert [len(text.splitlines()) for text in said] == [5, 1, 1]
    assert "what people do" in said[0]
    assert "completions without a reward" in said[2]
    entries = list(map(json.loads, (tmp_path / HEALTH_FILE).read_bytes().split(b"\n")[:-1]))
    assert all(entry["advice"] for entry in entries)
    assert [len(entry["samples"]) > 0 for entry in entries] == [True, False, True]


def test_a_file_that_cannot_be_written_is_told_and_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / HEALTH_FILE).mkdir()
    said: list[str] = []
    figures = watch(tmp_path, said).step(1, FAILED, {})
    assert figures["health/failures"] == 1.0
    assert "alarm raised: failures" in said[0]
    assert "could not be written" in said[1]


def test_a_watch_that_is_off_does_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    alarms = Alarms(HealthConfig(enabled=False))
    watching = HealthWatch(alarms, run_dir=tmp_path, say=said.append)
    assert watching.step(1, FAILED, {}) == {}
    watching.validated(1, FAILED, {"validation/reward_mean": 0.0})
    assert (said, watching.reason_to_stop, list(tmp_path.iterdir())) == ([], None, [])
