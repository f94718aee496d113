"""`policy.model_name` is found as `--model` is: a directory, a run with checkpoints, a hub name."""

from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from laurel.config.load import load_config
from laurel.config.sft import SFTRun
from laurel.errors import ModelError
from laurel.models.checkpoint.store import CheckpointStore
from laurel.run.model import describe_model, found_name, resolve_model
from laurel.training.learner_group import ModelFacts
from saved_steps import save_step


def write_run(root, metrics):
    """Checkpoints that hold no more than is needed to be found."""

    def write(directory):
        (directory / "config.json").write_text("{}", encoding="utf-8")

    with CheckpointStore(root, metric_name="loss", higher_is_better=False) as store:
        for step, metric in metrics.items():
            save_step(store, step, write, metric=metric)
    return root


def settings(*overrides):
    return load_config(SFTRun, None, overrides).config


def test_a_run_means_its_best_checkpoint_and_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(Path("results/sft"), {1: 0.5, 2: 0.9})
    write_run(Path("results/plain"), {1: None, 2: None})
    notes: list[str] = []
    assert found_name("results/sft", say=notes.append) == "results/sft/step_1"
    assert notes == ["results/sft holds checkpoints; the best is step_1"]
    assert found_name("results/plain", say=notes.append) == "results/plain/step_2"
    config = settings("policy.model_name=results/sft")
    found = resolve_model(config, Console(quiet=True))
    assert found.policy.model_name == "results/sft/step_1"
    assert found.sft == config.sft


def test_every_other_name_stays_as_it_is_written(tmp_path, monkeypatch):
    """It is part of what a run is known by when it goes on."""
    monkeypatch.chdir(tmp_path)
    write_run(Path("results/sft"), {1: 0.5, 2: 0.9})
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    for name in (
        "results/sft/best",
        "results/sft/step_2",
        "model",
        "./model",
        str(tmp_path / "model"),
    ):
        assert found_name(name, say=lambda _: None) == name


def test_what_holds_no_model_is_refused_with_what_it_holds(tmp_path):
    (tmp_path / "logs").mkdir()
    with pytest.raises(ModelError, match=r"neither a model .* nor checkpoints .*holds: logs"):
        resolve_model(settings(f"policy.model_name={tmp_path}"), Console(quiet=True))
    with pytest.raises(ModelError, match=r"nowhere: there is no such directory"):
        resolve_model(settings(f"policy.model_name={tmp_path}/nowhere"), Console(quiet=True))
    made_here = settings(f"policy.model_name={tmp_path}/nowhere", "policy.scratch={}")
    assert resolve_model(made_here, Console(quiet=True)) is made_here
    # A run that goes on needs no model but its checkpoint.
    saved = write_run(tmp_path / "saved", {1: 0.5})
    goes_on = settings(
        f"policy.model_name={tmp_path}/gone", f"checkpointing.checkpoint_dir={saved}"
    )
    assert resolve_model(goes_on, Console(quiet=True)) is goes_on


@pytest.mark.parametrize(
    ("device", "asked", "is_noted"),
    [
        ("cpu", (), True),
        ("cpu", ("policy.precision=bfloat16",), False),
        ("cpu", ("policy.precision=float32",), False),
        ("cuda", (), False),
    ],
)
def test_the_precision_of_gpus_is_noted_on_a_cpu_unless_it_was_chosen(device, asked, is_noted):
    facts = ModelFacts(
        class_name="Tiny",
        base_model="model",
        num_parameters=1,
        num_trained=1,
        device=device,
        path="padded",
        self_check=0.0,
        notes=(),
        weights_dtype="float32",
        tokenizer=None,
    )
    stream = StringIO()
    context = SimpleNamespace(
        console=Console(file=stream, width=300),
        config=settings(*asked),
        allocation=None,
    )
    describe_model("policy", facts, context)
    assert ("policy.precision=bfloat16 is the default, for GPUs" in stream.getvalue()) == is_noted
