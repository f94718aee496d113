"""Arguments of optimizers that the schema refuses; all others are for torch to refuse."""

from __future__ import annotations

import os
import subprocess
import sys

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
        ("policy.optimizer.kwargs.fused=true", "to add it: '+policy.optimizer.kwargs.fused=true'"),
    ],
)
def test_what_no_optimizer_takes_is_told(kind: Kind, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(SCHEMAS[kind], None, [override])
    assert told in str(refused.value)


def test_what_it_takes_is_passed_on() -> None:
    good = [
        "policy.optimizer.kwargs.lr=1e-3",
        "policy.optimizer.kwargs.eps=[1e-30, 1e-3]",
        "+policy.optimizer.kwargs.fused=null",
    ]
    kwargs = load_config(SCHEMAS["rm"], None, good).config.policy.optimizer.kwargs
    assert kwargs["lr"] == 1e-3
    assert kwargs["eps"] == [1e-30, 1e-3]
    assert kwargs["fused"] is None


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (
            "cluster.device=cuda",
            "error: cluster.device=cuda: this machine has no GPU, or CUDA_VISI",
        ),
        ("policy.optimizer.kwargs.lr=-1", "kwargs.lr is -1, and must be 0 or more"),
    ],
)
def test_neither_torch_nor_data_is_needed_to_refuse_a_setting(setting: str, told: str) -> None:
    program = (
        "import sys; from laurel.cli.main import main\n"
        f"sys.argv = ['laurel', 'rm', 'data.train_data_path=/nowhere.jsonl', '{setting}']\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 2\n"
        "assert 'torch' not in sys.modules"
    )
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=hidden, check=False
    )
    assert done.returncode == 0, done.stderr
    assert told in done.stderr
