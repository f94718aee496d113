"""Runs that an older Laurel began and was killed in go on, bit for bit, after any redesign.

`tests/golden/older_runs` holds a run of each kind as version 0.1.0 left it on 23 November 2026,
before its modules moved: rows, overrides, the checkpoint of step 2, and the figures of the steps
that this version took next when it was not stopped. They are never made anew. That version computed
attention segment by segment: so does the test that asks for every bit. With today's kernel the
figures are the same but for rounding. The runs were made on an AMD processor with AVX-512, where
policies multiply with oneDNN: another kind of processor rounds otherwise.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import policy_runs
import runs
from laurel.models.forest import attention
from laurel.models.forest.policy import prefers_onednn
from laurel.observe.loggers import read_metrics

OLDER = Path(__file__).parents[1] / "golden" / "older_runs"
COMMANDS: dict[str, Callable[[list[str]], Any]] = {
    "rm": runs.train,
    "sft": policy_runs.sft,
    "grpo": policy_runs.grpo,  # adapters, one step ahead
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_it_goes_on_bit_for_bit(kind, tmp_path, monkeypatch):
    if not prefers_onednn():
        pytest.skip("the figures are of an AMD processor with AVX-512: another rounds otherwise")
    monkeypatch.setattr(attention, "_suits_cascade", lambda *_: False)
    assert steps_after_resuming(kind, tmp_path, monkeypatch) == expected_steps(kind)


@pytest.mark.parametrize("kind", COMMANDS)
def test_it_goes_on_with_the_kernel_of_today(kind, tmp_path, monkeypatch):
    found = steps_after_resuming(kind, tmp_path, monkeypatch)
    expected = expected_steps(kind)
    assert found.keys() == expected.keys()
    for step, figures in expected.items():
        assert found[step]["train/loss"] == pytest.approx(figures["train/loss"], abs=1e-6)
        assert found[step]["train/grad_norm"] == pytest.approx(figures["train/grad_norm"], rel=1e-5)


def steps_after_resuming(kind, tmp_path, monkeypatch):
    shutil.copytree(OLDER / kind, tmp_path / kind)
    monkeypatch.chdir(tmp_path / kind)
    done = COMMANDS[kind](Path("overrides.txt").read_text().splitlines())
    assert ("with settings that are gone: grpo.health.kl_growth" in done.text) is (kind == "grpo")
    return {
        str(row["step"]): {name: row[name] for name in ("train/loss", "train/grad_norm")}
        for path in Path("logs").rglob("metrics.jsonl")
        for row in read_metrics(path)
        if "train/loss" in row
    }


def expected_steps(kind):
    return json.loads((OLDER / kind / "expected.json").read_text())
