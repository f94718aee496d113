"""From training with adapters to scores that a program without Laurel gives."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from laurel.rewards.open import open_local
from laurel.types import Message, group_of
from runs import LOADED, TINY, laurel_here, pairs, save_model, settings, train, write_rows

ANSWERS = ("this is kind", "one more rude word, and then one more of them", "no")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The checkpoints of a run with LoRA on a language model."""
    directory = tmp_path_factory.mktemp("lora")
    rows = write_rows(directory / "train.jsonl", pairs(40))
    base = save_model(directory / "base")
    scratch = set(TINY) - set(LOADED)
    train(
        [
            *(change for change in settings(directory, rows=rows) if change not in scratch),
            "policy.dtensor_cfg.lora_cfg.enabled=true",
            "checkpointing.save_period=2",
            f"policy.model_name={base}",
        ]
    )
    return directory / "saves"


def export(*arguments):
    return laurel_here(["export", *arguments])


@pytest.mark.slow
def test_lora_to_plain_transformers(trained, tmp_path):
    assert (trained / "best" / "adapter").is_dir()
    done = export("--model", str(trained), "--output", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "plain transformers gives the same scores" in done.stderr
    assert not (tmp_path / "out" / "adapter").exists()
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "- adapters: LoRA of rank" in text
    assert "if the longer answer won" in text
    # The program of its card, in a process that cannot import Laurel.
    code, *_ = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    asked = [
        [{"role": "user", "content": "what is one?"}, {"role": "assistant", "content": answer}]
        for answer in ANSWERS
    ]
    code += f"\nimport json, sys\nprint(json.dumps(scores({asked!r}).tolist()))"
    code += "\nassert 'laurel' not in sys.modules"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "out",
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = json.loads(found.stdout.splitlines()[-1])
    group = group_of([Message("user", "what is one?")], ANSWERS, group_id="a")
    (ours,) = open_local(str(trained), say=lambda said: None).score_now([group])
    assert theirs == pytest.approx([score.value for score in ours], abs=1e-5)
    assert len(set(theirs)) == len(ANSWERS)


@pytest.mark.slow
def test_the_mean_of_two_steps_with_lora_is_that_of_their_merged_weights(trained, tmp_path):
    steps = sorted(trained.glob("step_*"), key=lambda path: int(path.name[len("step_") :]))[-2:]
    assert all((one / "adapter").is_dir() for one in steps)
    out = tmp_path / "out"
    done = export("--average", *map(str, steps), "--output", str(out), "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert not (out / "adapter").exists()
    found = load_file(out / "model.safetensors")
    first, second = (load_file(one / "model.safetensors") for one in steps)
    assert not any("lora" in name for name in found)
    assert any("proj" in name and not torch.equal(first[name], second[name]) for name in found)
    for name, value in found.items():
        assert torch.equal(value, ((first[name].double() + second[name].double()) / 2).float())


@pytest.mark.slow
def test_errors_are_one_message_and_exit_code_2(trained, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    for arguments, words in (
        (["--model", str(trained), "--output", str(tmp_path / "full")], "not empty"),
        (["--model", str(trained), "--step", "99", "--output", str(tmp_path / "out")], "step_99"),
        (["--output", str(tmp_path / "out")], "add --model"),
    ):
        done = export(*arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
