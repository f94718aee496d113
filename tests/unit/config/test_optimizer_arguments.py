"""Arguments of optimizers that the schema refuses; all others are for torch to refuse."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from laurel.config.load import load_config
from laurel.config.schemas import SCHEMAS, Kind
from laurel.errors import ConfigError


@pytest.mark.parametrize("kind", ["rm", "sft", "grpo"])
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("policy.optimizer.kwargs.lr=-1e-5", "kwargs.lr is -1e-05, and must be 0 or more"),
        ("policy.optimizer.kwargs.lr=.nan", "kwargs.lr is nan, and must be 0 or more"),
        ("policy.optimizer.kwargs.eps=-1", "kwargs.eps is -1, and must be 0 or more"),
        (
            "policy.optimizer={name: some.Optimizer, kwargs: {weight_decay: -1}}",
            "kwargs.weight_decay is -1",
        ),
        (
            "policy.optimizer.kwargs.lr=fast",
            "policy.optimizer: kwargs.lr is 'fast', and must be a number, 0 or more",
        ),
        ("policy.optimizer.kwargs.weight_decay=true", "kwargs.weight_decay is True, and must be a"),
        ("policy.optimizer.kwargs.fused=true", "to add it: '+policy.optimizer.kwargs.fused=true'"),
    ],
)
def test_what_no_optimizer_takes_is_told(kind: Kind, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(SCHEMAS[kind], None, [override])
    assert told in str(refused.value)


@pytest.mark.parametrize("given", ["{kwargs: {lr: 1e-4}}", "{}"])
@pytest.mark.parametrize("is_file", [True, False])
def test_an_optimizer_without_a_name_changes_the_default(
    given: str, is_file: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"policy: {{optimizer: {given}}}\n" if is_file else "", encoding="utf-8")
    overrides = [] if is_file else [f"policy.optimizer={given}"]
    for kind in SCHEMAS:
        optimizer = load_config(SCHEMAS[kind], path, overrides).config.policy.optimizer
        default = SCHEMAS[kind]().policy.optimizer  # type: ignore[attr-defined]
        changed = {"lr": 1e-4} if "lr" in given else {}
        assert optimizer.name == default.name
        assert optimizer.kwargs == default.kwargs | changed


def test_a_file_may_change_what_its_parent_has_named(tmp_path: Path) -> None:
    sgd = "policy: {optimizer: {name: torch.optim.SGD, kwargs: {lr: 0.1, momentum: 0.9}}}\n"
    (tmp_path / "parent.yaml").write_text(sgd, encoding="utf-8")
    child = tmp_path / "child.yaml"
    child.write_text(
        "defaults: parent.yaml\npolicy: {optimizer: {kwargs: {lr: 0.2}}}\n", encoding="utf-8"
    )
    optimizer = load_config(SCHEMAS["rm"], child).config.policy.optimizer
    assert optimizer.name == "torch.optim.SGD"
    assert optimizer.kwargs == {"lr": 0.2, "momentum": 0.9}


def test_neither_torch_nor_data_is_needed_to_refuse_a_setting() -> None:
    program = (
        "import sys; from laurel.cli.main import main\n"
        "sys.argv = ['laurel', 'rm', 'data.train_data_path=/nowhere', 'cluster.device=cuda']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2\n"
        "assert 'torch' not in sys.modules"
    )
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=hidden, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "error: cluster.device=cuda: this machine has no GPU, or CUDA_VISI" in done.stderr
