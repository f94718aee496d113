"""`laurel doctor --trial`: what works passes, what is broken fails, what is missing is skipped."""

import json
import time
from importlib.util import find_spec

import pytest
import torch
from typer.testing import CliRunner

from laurel.cli.main import app
from laurel.extensions.doctor import checks
from laurel.extensions.doctor.checks import ALL_CHECKS, SMALL, Sizes, Trial, run_trial
from laurel.extensions.doctor.doctor import run_doctor_trial, trial_row
from laurel.planning.operations import Workload
from laurel.types import TokenForest

pytestmark = pytest.mark.usefixtures("warm_processes")

EXACT = {name: check for name, check in ALL_CHECKS.items() if name.startswith("forest")}
TINY = Sizes(
    small=SMALL,
    large=SMALL,
    work=Workload(num_prompts=2, per_prompt=2, prompt_tokens=8, completion_tokens=4),
    vocabulary=2048,
)


def trial(*, seconds=600.0):
    end = time.monotonic() + seconds
    return Trial(device=torch.device("cpu"), num_devices=2, sizes=TINY, end=end)


def tried(*names, **given):
    outcomes = run_trial(trial(**given), checks={name: ALL_CHECKS[name] for name in names})
    return {outcome.name: outcome for outcome in outcomes}


@pytest.fixture
def broken_positions(monkeypatch):
    """Every token of a forest counts as the first of its conversation."""

    def first(forest):
        return torch.zeros(len(forest.ids_T), dtype=torch.int64)

    monkeypatch.setattr(TokenForest, "positions_T", property(first))


@pytest.mark.slow
def test_a_forest_is_exact_in_every_type():
    found = tried(*EXACT)
    assert [outcome.status for outcome in found.values()] == ["pass"] * 3
    assert found["forest in float32"].figures["scores"]["forest"] < 1e-6
    assert found["forest in bfloat16"].figures["gradients"]["own"] > 1e-4


@pytest.mark.slow
def test_memory_and_speed():
    names = ["memory of training"]
    names += [f"speed of {phase}" for phase in ("training", "scoring", "generation")]
    names.append("speed of training, large vocabulary")
    found = tried(*names)
    assert [outcome.status for outcome in found.values()] == ["pass"] * 5
    small, large = (found[name].figures["operations"] for name in (names[1], names[-1]))
    # Forward and twice back, with logits made again: 8 operations for each weight of 1,536 entries
    # more, for each of 16 completion tokens.
    assert large - small == 8 * (2048 - 512) * 128 * 16
    assert found["memory of training"].figures["used"] > 0
    assert all(0 < found[name].share < 1.5 for name in names[1:])


def test_a_planted_failure_is_told_and_the_exit_code_is_1(broken_positions, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "ALL_CHECKS", {**EXACT, "vLLM": lambda trial: skip()})
    report = tmp_path / "trial.json"
    result = CliRunner().invoke(app, ["doctor", "--trial", "--report", str(report)])
    assert result.exit_code == 1
    assert "forest in float32         fail" in result.stdout
    facts = json.loads(report.read_text())
    assert [check["status"] for check in facts["checks"]] == ["fail"] * 3 + ["skipped"]
    assert "2 times the own is allowed" in facts["checks"][0]["detail"]
    assert set(facts["machine"]) == {"versions", "libraries", "cpu", "memory", "gpus"}


def skip():
    raise checks.Skipped("nothing to try it with")


def test_a_wrong_prediction_of_memory_fails(monkeypatch):
    right = checks.training_memory

    def doubled(*given, **more):
        return {name: 3 * size for name, size in right(*given, **more).items()}

    monkeypatch.setattr(checks, "training_memory", doubled)
    outcome = tried("memory of training")["memory of training"]
    assert outcome.status == "fail"
    assert "half to 1.1 times that is allowed" in outcome.detail


def test_what_raises_fails_and_the_others_go_on():
    def broken(trial):
        raise OSError("no such\ndevice")

    outcomes = run_trial(trial(), checks={"broken": broken, "vLLM": ALL_CHECKS["vLLM"]})
    assert (outcomes[0].status, outcomes[0].detail) == ("fail", "OSError: no such device")
    if find_spec("vllm") is None:
        assert (outcomes[1].status, outcomes[1].detail[:23]) == (
            "skipped",
            "vLLM is not installed: ",
        )


def test_what_has_no_time_is_skipped(tmp_path, capsys):
    report = tmp_path / "trial.json"
    assert run_doctor_trial(minutes=0.0, report=report, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(report.read_text())
    assert {check["status"] for check in printed["checks"]} == {"skipped"}
    assert [check["name"] for check in printed["checks"]] == list(ALL_CHECKS)


def test_the_report_holds_each_check_before_the_next_begins(tmp_path):
    """The machine may be gone before the last."""
    report, seen = tmp_path / "trial.json", []

    def check(trial):
        seen.append(json.loads(report.read_text())["checks"] if report.exists() else [])
        return checks.Measurement(detail="fine")

    checked = dict.fromkeys(("one", "two", "three"), check)
    assert run_doctor_trial(minutes=1.0, report=report, as_json=True, checks=checked)
    assert [[one["name"] for one in found] for found in seen] == [[], ["one"], ["one", "two"]]


@pytest.mark.parametrize("width", [40, 100])
def test_rows_keep_to_the_width(width):
    lines = trial_row("forest in bfloat16", "pass", "41%", "one word after the other " * 6, width)
    assert max(map(len, lines)) <= max(width, 45)
    assert " ".join(" ".join(lines).split()).count("one word after the other") == 6


@pytest.mark.slow
@pytest.mark.usefixtures("small_cluster")
@pytest.mark.parametrize("name", ["weight transfer", "FSDP2", "FSDP2, tensor parallel"])
def test_other_processes_agree_with_this_one(name):
    outcome = tried(name)[name]
    assert outcome.status == "pass", outcome.detail


@pytest.mark.slow
@pytest.mark.usefixtures("small_cluster")
def test_a_step_that_ranks_take_wrongly_fails(monkeypatch):
    right = checks.LocalLearner

    def other(*args, **settings):
        learner = right(*args, **settings)
        with torch.no_grad():
            next(iter(learner.model.parameters())).mul_(1.5)
        return learner

    monkeypatch.setattr(checks, "LocalLearner", other)
    assert tried("FSDP2")["FSDP2"].status == "fail"
