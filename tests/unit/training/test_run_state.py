"""What a checkpoint remembers of its run, and what a refused step leaves behind."""

import json
from dataclasses import replace
from operator import itemgetter
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest

from laurel.errors import CheckpointError
from laurel.training import state
from laurel.training.state import (
    TRAINING_DATA,
    VALIDATION_DATA,
    RewardRunState,
    another_run,
    check_same_rows,
    read_run_dir,
    samples_fingerprint,
    write_bad_step,
)
from laurel.training.stopping import Position
from laurel.types import Message, Preference, PreferenceSample, TokenGroup, group_of


def test_figures_belong_to_the_step_they_were_measured_at():
    """Else the next weights, or ones that gave no finite figure, would rank by another's figure."""
    validated = Position(step=5).validated({"validation-default_loss": 0.3})
    assert validated == Position(step=5, validated_at=5, metrics={"validation-default_loss": 0.3})
    stepped = validated.stepped(bad_steps=0, metrics={"train_loss": 0.4})
    assert stepped == Position(step=6, validated_at=5, metrics={"train_loss": 0.4})
    both = stepped.validated({"validation-default_accuracy": 0.5})
    assert both.metrics == {"train_loss": 0.4, "validation-default_accuracy": 0.5}
    assert both.stepped(bad_steps=1, metrics={}).metrics == {}


def test_the_figures_before_training_stay_beside_those_after_it():
    started = Position().validated({"validation_accuracy": 0.1})
    later = started.stepped(bad_steps=0, metrics={}).validated({"validation_accuracy": 0.7})
    assert later.before == {"validation_accuracy": 0.1}


def sample(**changes):
    group = group_of([Message("user", "q")], ["a", "b"], group_id="g")
    judged = {"ranks_G": (0, 1), "source": "rows.jsonl:7", **changes}
    trunk, branches = judged.pop("trunk", [1, 2]), judged.pop("branches", [[3], [4, 5]])
    return PreferenceSample(
        preference=Preference(group=group, **judged),
        tokens=TokenGroup(
            id="g",
            trunk_ids=np.array(trunk, dtype=np.int32),
            branches_ids_G=tuple(np.array(ids, dtype=np.int32) for ids in branches),
        ),
    )


@pytest.mark.parametrize(
    "change",
    [
        {"ranks_G": (1, 0)},
        {"ranks_G": (0, 0)},
        {"margin": 0.5},
        {"target": 0.9},
        {"attributes_GK": ((1.0,), (2.0,))},
        {"trunk": [1, 3]},
        {"branches": [[3], [4, 6]]},
        {"branches": [[3, 4], [5]]},
        {"trunk": [1], "branches": [[2, 3], [4, 5]]},
    ],
)
def test_a_fingerprint_changes_with_all_that_is_learned_from(change):
    assert samples_fingerprint([sample(**change)]) != samples_fingerprint([sample()])


def test_a_fingerprint_knows_the_order_and_not_the_place():
    one, other = sample(), sample(margin=1.0)
    assert samples_fingerprint([one, other]) != samples_fingerprint([other, one])
    assert samples_fingerprint([one]) != samples_fingerprint([one, one])
    assert samples_fingerprint([sample(source="elsewhere:1")]) == samples_fingerprint([one])


def test_of_many_differences_the_weightiest_are_told_and_the_rest_counted(tmp_path):
    names = [
        "rm.seed",
        "data.shuffle",
        "policy.precision",
        "policy.model_name",
        "policy.optimizer.kwargs.lr",
        "policy.train_global_batch_size",
        "rm.loss.type",
    ]
    said = str(another_run(tmp_path, [(name, 1, 2) for name in names]))
    assert said.count(": 1 then, 2 now") == 4
    order = ["(policy.model_name: ", "policy.optimizer.kwargs.lr: ", "data.shuffle: "]
    assert [said.index(name) for name in order] == sorted(said.index(name) for name in order)
    assert f"and 3 more; {tmp_path / 'config.yaml'} has what was set then)" in said


@pytest.mark.parametrize("name", [TRAINING_DATA, VALIDATION_DATA])
def test_the_rows_count_where_they_are_known(tmp_path, name):
    write_run(tmp_path, {name: "abc"})
    check_same_rows(tmp_path, {})
    check_same_rows(tmp_path, {name: "abc"})
    with pytest.raises(CheckpointError, match=f"{name}: 'abc' then, 'xyz' now"):
        check_same_rows(tmp_path, {name: "xyz"})
    write_run(tmp_path, {})  # of an earlier version
    check_same_rows(tmp_path, {name: "xyz"})


def test_a_directory_that_cannot_be_resumed(tmp_path):
    with pytest.raises(CheckpointError, match="save_optimizer=false"):
        check_same_rows(tmp_path, {})
    for text in ("[]", '{"identity": []}'):
        write_run(tmp_path, {})
        (tmp_path / "training" / "run.json").write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=r"run\.json cannot be read"):
            check_same_rows(tmp_path, {TRAINING_DATA: "abc"})


def write_run(checkpoint, identity, run_dir=""):
    (checkpoint / "training").mkdir(exist_ok=True)
    text = json.dumps({"run_dir": run_dir, "identity": identity})
    (checkpoint / "training" / "run.json").write_text(text, encoding="utf-8")


def test_the_log_directory_of_the_run_if_it_is_still_there(tmp_path):
    assert read_run_dir(tmp_path) is None
    (tmp_path / "exp_003").mkdir()
    write_run(tmp_path, {}, str(tmp_path / "exp_003"))
    assert read_run_dir(tmp_path) == tmp_path / "exp_003"
    (tmp_path / "exp_003").rmdir()
    assert read_run_dir(tmp_path) is None


def test_the_rows_of_a_refused_step_are_kept_to_look_at(tmp_path):
    half = group_of([], ["\ud800 lone", "b"], group_id="g")
    other = replace(sample(), preference=replace(sample().preference, source="r:8", group=half))
    path = write_bad_step(tmp_path, 12, [sample(), other], "the loss is nan")
    assert path == tmp_path / "bad_steps" / "step_12.jsonl"
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert first == {
        "reason": "the loss is nan",
        "source": "rows.jsonl:7",
        "ranks": [0, 1],
        "lengths": [3, 4],
        "prompt": [["user", "q"]],
        "completions": [[["assistant", "a"]], [["assistant", "b"]]],
    }
    assert second["source"] == "r:8"
    assert second["completions"][0][0][1] == "\ud800 lone"


@pytest.mark.parametrize(("hurries", "num_groups"), [(False, 64), (True, 8)])
def test_a_run_whose_validation_was_broken_off_scores_few_groups(monkeypatch, hurries, num_groups):
    monkeypatch.setattr(state, "golden_by", lambda *_: ())
    monkeypatch.setattr(state, "reward_values", lambda _, tokens, __: np.ones((2 * len(tokens), 1)))
    contract = SimpleNamespace(scalar=itemgetter(0), with_rules=lambda **rules: rules)
    made = RewardRunState(
        MagicMock(),
        MagicMock(),
        MagicMock(contract=contract),
        train=[sample()] * 70,
        validation=[],
        batcher=MagicMock(),
    )
    made.hurries = hurries
    assert made._signed_contract(1)["num_reference"] == 2 * num_groups
