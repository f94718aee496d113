"""What cannot be used gets one clear message and exit status 2, and leaves nothing behind."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runs import (
    LOADED,
    TINY,
    WarmCommand,
    environment,
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


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """For refusals that come after torch is loaded."""
    command = WarmCommand(tmp_path_factory.mktemp("warm"))
    yield command
    command.close()


def refused(directory, overrides, *, warm=None):
    """The message of a run that must be refused; checks all that every refusal has."""
    before = sorted(path for path in directory.rglob("*"))
    done = warm(["rm", *overrides]) if warm is not None else run(overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("error: ") == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "Warning" not in done.stdout + done.stderr
    assert sorted(path for path in directory.rglob("*")) == before, "it left something behind"
    return done.stderr


ROWS: dict[str, tuple[list[Any], list[str], str]] = {
    "malformed JSON": (
        [*GOOD_ROWS[:2], '{"context": [', *GOOD_ROWS[2:]],
        [PREFERENCES],
        r"rows\.jsonl:3: .*JSON",
    ),
    "missing key": (
        [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "a"}],
        ["data.dataset_name=BinaryPreferenceDataset"],
        r"rows\.jsonl:2: .*rejected",
    ),
    "nothing left": (
        [ranked("tie?", {"a": 1, "b": 1}), ranked("empty?", {"": 0, "b": 1}), *GOOD_ROWS[:0]],
        [PREFERENCES],
        r"nothing is left of 2 rows\. Left out: .*1 tie.*rows\.jsonl:1",
    ),
}


@pytest.mark.slow_parameters("nothing left")
@pytest.mark.parametrize("case", ROWS)
def test_rows(tmp_path, case):
    rows, changes, message = ROWS[case]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    said = refused(
        tmp_path, settings(tmp_path, *changes, "data.split_validation_size=0", rows=path)
    )
    assert re.search(message, said), said


KEYS: dict[str, tuple[list[str], str]] = {
    "unknown key": (["rm.max_num_epoch=3"], r"rm\.max_num_epoch.*max_num_epochs"),
    "wrong type": (["rm.seed=abc"], r"rm\.seed"),
    "no override": (["nonsense"], r"nonsense"),
    "unknown data set": (
        ["data.dataset_name=HelpSter3"],
        r"HelpSter3 is unknown\. Did you mean HelpSteer3\?",
    ),
    "unknown metric": (
        ["checkpointing.metric_name=val_lossy"],
        r"metric_name=val_lossy: .*It can measure: validation-default_loss, .*train_loss",
    ),
    "padded rows over two": (
        [
            "cluster.gpus_per_node=2",
            "policy.dtensor_cfg.context_parallel_size=2",
            "policy.sequence_packing.enabled=false",
        ],
        r"context_parallel_size=2: only token forests are divided; set it to 1",
    ),
    "no time": (["checkpointing.checkpoint_must_save_by=3h"], r"must_save_by='3h'.*DD:HH:MM:SS"),
    "no such directory": (
        ["~policy.scratch", "policy.model_name=./nowhere/model"],
        r"policy\.model_name=\./nowhere/model: there is no such directory, nor nowhere",
    ),
    "checkpoints in a file": (
        ["checkpointing.checkpoint_dir={rows}/saves"],
        r"cannot write checkpoints to .*train\.jsonl/saves.*Not a directory",
    ),
}


@pytest.mark.slow_parameters(
    "unknown key",
    "unknown data set",
    "unknown metric",
    "padded rows over two",
    "no time",
    "no such directory",
    "checkpoints in a file",
)
@pytest.mark.parametrize("case", KEYS)
def test_keys(tmp_path, case):
    changes, message = KEYS[case]
    rows = write_rows(tmp_path / "train.jsonl", pairs(12))
    overrides = settings(tmp_path, *(c.replace("{rows}", str(rows)) for c in changes), rows=rows)
    said = refused(tmp_path, overrides)
    assert re.search(message, said), said
    assert not imported_by(overrides) & {"torch", "transformers"}, "told before they are loaded"


def imported_by(overrides):
    """Modules that `laurel rm` imports until it refuses."""
    command = [sys.executable, "-X", "importtime", "-m", "laurel", "rm", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    modules = {line.rpartition("|")[2].strip() for line in lines}
    assert "laurel.cli.main" in modules
    return modules


def test_a_file_is_named_with_its_line(tmp_path):
    config = tmp_path / "rm.yaml"
    config.write_text("rm:\n  seed: 3\n  val_perriod: 4\n", encoding="utf-8")
    said = refused(tmp_path, ["--config", str(config)])
    assert re.search(r"rm\.yaml:3: rm\.val_perriod.*val_period", said), said
    config.write_text("rm:\n  seed: [3\n", encoding="utf-8")
    assert re.search(r"rm\.yaml:\d", refused(tmp_path, ["--config", str(config)]))
    said = refused(tmp_path, ["--config", str(tmp_path / "rn.yaml")])
    assert "rn.yaml" in said


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
    "no such model": (
        lambda d: ["policy.model_name=no-such/model"],
        r"no-such/model.* cannot be|"
        r"no-such/model: no tokenizer",
    ),
    "template without system": (
        no_system,
        r"train\.jsonl:\d+: .*roles \[system, user, assistant\].*not supported",
    ),
    "optimizer argument": (
        lambda d: [*language_model(d), "+policy.optimizer.kwargs.momentum=0.9"],
        r"refuses these kwargs .*momentum.* It takes: lr, betas",
    ),
    "all too long": (
        lambda d: [*language_model(d), "data.overlong=drop", "data.max_input_seq_length=4"],
        r"train: all 12 rows are longer than 4 tokens",
    ),
    "logs in a file": (
        lambda d: [*language_model(d), f"logger.log_dir={d}/train.jsonl/logs"],
        r"logger\.log_dir: .*Not a directory",
    ),
}


@pytest.mark.slow_parameters("no such model")
@pytest.mark.parametrize("case", MODELS)
def test_models(tmp_path, warm, case):
    make, message = MODELS[case]
    rows = write_rows(tmp_path / "train.jsonl", pairs(12))
    overrides = settings(tmp_path, *make(tmp_path), "data.split_validation_size=0", rows=rows)
    said = refused(tmp_path, [*LOADED, *overrides[len(TINY) :]], warm=warm)
    assert re.search(message, said), said


def test_a_language_model_becomes_a_reward_model(tmp_path):
    """The counterpart: the same directory with nothing wrong is trained."""
    rows = write_rows(tmp_path / "train.jsonl", pairs(12))
    overrides = settings(tmp_path, *language_model(tmp_path), rows=rows)
    done = train([*LOADED, *overrides[len(TINY) :]])
    assert done.outcome.ended == "finished"
    assert "the reward head is new and random" in done.text


def test_a_soft_label_that_the_loss_cannot_use(tmp_path, warm):
    rows = [{**row, "p": 0.8} for row in pairs(12)]
    path = write_rows(tmp_path / "train.jsonl", rows)
    changes = ["rm.loss.type=plackett_luce", "data.target_key=p"]
    said = refused(tmp_path, settings(tmp_path, *changes, rows=path), warm=warm)
    assert re.search(r"train\.jsonl:1: a soft label \(0\.8\)", said), said


def test_a_checkpoint_that_scores_otherwise_is_refused(tmp_path, warm):
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
    said = refused(tmp_path, [*LOADED, *overrides[len(TINY) :]], warm=warm)
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
