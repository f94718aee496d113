"""Arguments of optimizers, told without torch."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys

import pytest
import torch

from laurel.config.load import load_config
from laurel.config.policy import arguments_of, check_arguments
from laurel.config.schemas import SCHEMAS, Kind
from laurel.errors import ConfigError

OPTIMIZERS = [
    name
    for name, one in vars(torch.optim).items()
    if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer) and name != "Optimizer"
]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_they_are_those_that_torch_takes(name: str) -> None:
    taken = inspect.signature(getattr(torch.optim, name)).parameters
    known = arguments_of(f"torch.optim.{name}")
    assert known is not None
    assert list(known) == list(taken)[1:]
    for key, default in known.items():
        assert default is None or default == taken[key].default


@pytest.mark.parametrize("path", ["bitsandbytes.optim.AdamW8bit", "torch.optim.AdmW", "AdamW", ""])
def test_of_others_nothing_is_known_and_nothing_refused(path: str) -> None:
    assert arguments_of(path) is None
    check_arguments(path, {"what": "ever"})


@pytest.mark.parametrize("kind", ["rm", "sft", "grpo"])
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("policy.optimizer.kwargs.lr=fast", "refuses these kwargs: lr is 'fast', not a number"),
        ("policy.optimizer.kwargs.lr=-1e-5", "lr is -1e-05, and must be 0 or more"),
        ("policy.optimizer.kwargs.lr=.nan", "lr is nan, and must be 0 or more"),
        (
            "policy.optimizer={name: torch.optim.SGD, kwargs: {lr: 1, momentum: -1}}",
            "momentum is -1",
        ),
        ("policy.optimizer.kwargs.eps=null", "refuses these kwargs: eps is None, not a number"),
        ("policy.optimizer.kwargs.learning_rate=1", "Did you mean lr? It takes: lr, betas, eps"),
        ("+policy.optimizer.kwargs.learning_rate=1", "Did you mean lr? It takes: lr, betas, eps"),
        ("++policy.optimizer.kwargs.weight_decy=1", "Did you mean weight_decay? It takes: lr"),
        ("policy.optimizer.kwargs.fused=true", "to add it: '+policy.optimizer.kwargs.fused=true'"),
        ("policy.optimizer={name: torch.optim.SGD, kwargs: {lr: a}}", "SGD refuses these kwargs"),
    ],
)
def test_what_an_optimizer_does_not_take_is_told(kind: Kind, override: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(SCHEMAS[kind], None, [override])
    assert told in str(refused.value)


def test_what_it_takes_is_passed_on() -> None:
    good = ["policy.optimizer.kwargs.lr=1e-3", "+policy.optimizer.kwargs.fused=null"]
    kwargs = load_config(SCHEMAS["rm"], None, good).config.policy.optimizer.kwargs
    assert kwargs["lr"] == 1e-3
    assert kwargs["fused"] is None


def test_torch_is_not_loaded_for_it() -> None:
    program = (
        "import sys; from laurel.config.policy import arguments_of; "
        "assert 'lr' in arguments_of('torch.optim.AdamW'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        (
            "cluster.device=cuda",
            "error: cluster.device=cuda: this machine has no GPU, or CUDA_VISI",
        ),
        ("policy.optimizer.kwargs.lr=-1", "lr is -1, and must be 0 or more"),
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
