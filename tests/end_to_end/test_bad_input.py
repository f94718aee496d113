"""What cannot be used gets one clear message and exit status 2, and leaves nothing behind."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from runs import (
    LOADED,
    TINY,
    laurel_here,
    pairs,
    ranked,
    run,
    save_model,
    settings,
    train,
    write_rows,
)

PREFERENCES = "data.dataset_name=PreferenceDataset"
GOOD_ROWS = [ranked(f"q {i}?", {f"good {i}": 0, f"bad {i}": 1}) for i in range(4)]


def refused(directory, overrides, *, python=()):
    """The message of a run that must be refused; checks all that every refusal has."""
    before = sorted(path for path in directory.rglob("*"))
    if python:
        done = run(overrides, program=(*python, "-m", "laurel", "rm"))
    else:
        done = laurel_here(["rm", *overrides])
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search("^error: ", done.stderr, re.MULTILINE)
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    assert sorted(path for path in directory.rglob("*")) == before, "it left something behind"
    return done.stderr


@pytest.mark.slow
def test_rows(tmp_path):
    """What else is wrong with rows: `tests/unit/data`."""
    path = write_rows(tmp_path / "rows.jsonl", [*GOOD_ROWS[:2], '{"context": [', *GOOD_ROWS[2:]])
    changes = (PREFERENCES, "data.split_validation_size=0")
    said = refused(tmp_path, settings(tmp_path, *changes, rows=path))
    assert re.search(r"rows\.jsonl:3: .*JSON", said), said


KEYS: dict[str, tuple[list[str], str]] = {
    "no override": (["nonsense"], r"nonsense"),
    "unknown metric": (
        ["checkpointing.metric_name=val_lossy"],
        r"metric_name=val_lossy: .*It can measure: validation-default_loss, .*train_loss",
    ),
    "no such directory": (
        ["~policy.scratch", "policy.model_name=./nowhere/model"],
        r"policy\.model_name=\./nowhere/model: there is no such directory, nor nowhere",
    ),
    "checkpoints in a file": (
        ["checkpointing.checkpoint_dir={rows}/saves"],
        r"cannot write checkpoints to .*train\.jsonl/saves.*Not a directory",
    ),
}


@pytest.mark.slow_parameters("unknown metric", "no such directory", "checkpoints in a file")
@pytest.mark.parametrize("case", KEYS)
def test_keys(tmp_path, case):
    changes, message = KEYS[case]
    rows = write_rows(tmp_path / "train.jsonl", pairs(12))
    overrides = settings(tmp_path, *(c.replace("{rows}", str(rows)) for c in changes), rows=rows)
    said = refused(tmp_path, overrides, python=("-X", "importtime"))
    assert re.search(message, said), said
    lines = [line for line in said.splitlines() if line.startswith("import time:")]
    modules = {line.rpartition("|")[2].strip() for line in lines}
    assert "laurel.cli.main" in modules
    assert not modules & {"torch", "transformers"}, "told before they are loaded"


def language_model(directory):
    return [f"policy.model_name={save_model(directory / 'model')}"]


def no_system(directory):
    """As Gemma's: a conversation that begins with a system message is an error."""
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    (directory / "no_system.jinja").write_text(template, encoding="utf-8")
    (directory / "system.txt").write_text("Be brief.", encoding="utf-8")
    return [
        *language_model(directory),
        f"data.system_prompt_file={directory}/system.txt",
        f"policy.tokenizer.chat_template={directory}/no_system.jinja",
    ]


MODELS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "template without system": (
        no_system,
        r"train\.jsonl:\d+: .*roles \[system, user, assistant\].*not supported",
    ),
    "all too long": (
        lambda d: [*language_model(d), "data.overlong=drop", "data.max_input_seq_length=4"],
        r"train: all 12 rows are longer than 4 tokens",
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(tmp_path, case):
    make, message = MODELS[case]
    rows = write_rows(tmp_path / "train.jsonl", pairs(12))
    overrides = settings(tmp_path, *make(tmp_path), "data.split_validation_size=0", rows=rows)
    said = refused(tmp_path, [*LOADED, *overrides[len(TINY) :]])
    assert re.search(message, said), said


def test_a_checkpoint_that_scores_otherwise_is_refused(tmp_path):
    """Whole by its hashes, but the golden scores are of another model."""
    done = train(settings(tmp_path, "rm.max_num_steps=2"))
    saved = done.outcome.latest
    assert saved is not None
    contract = json.loads((saved / "scoring.json").read_text(encoding="utf-8"))
    contract["golden"][0]["values_K"] = [42.0]
    model = shutil.copytree(saved, tmp_path / "model")
    (model / "scoring.json").write_text(json.dumps(contract), encoding="utf-8")
    (model / "MANIFEST.json").unlink()
    overrides = settings(tmp_path, f"policy.model_name={model}", "checkpointing.enabled=false")
    said = refused(tmp_path, [*LOADED, *overrides[len(TINY) :]])
    assert re.search(r"golden conversation scores \S+ here and scored 42", said), said


def test_a_foreign_directory_is_refused_and_left_alone(tmp_path):
    foreign = tmp_path / "saves" / "step_5"
    foreign.mkdir(parents=True)
    (foreign / "pytorch_model.bin").write_bytes(b"not ours")
    overrides = settings(tmp_path)
    (tmp_path / "saves" / ".lock").touch()
    said = refused(tmp_path, overrides)
    assert "saves holds no whole checkpoint to go on from" in said
    assert (foreign / "pytorch_model.bin").read_bytes() == b"not ours"
