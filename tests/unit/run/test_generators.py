"""How weights are to travel, and what lost replicas are made from again."""

import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.errors import ConfigError
from laurel.run.context import RunContext
from laurel.run.generator import _plugged_maker, transfer_of


@pytest.mark.parametrize(
    ("setting", "device", "take_turns", "expected"),
    [
        ("auto", "cpu", False, ("broadcast", "cpu", "quicker .*; gloo")),
        ("auto", "cuda", False, ("broadcast", "cuda", "quicker .*; NCCL")),
        ("auto", "cuda", True, ("ipc", "cuda", "take turns on the same GPUs")),
        ("ipc", "cuda", True, ("ipc", "cuda", "it is set")),
        ("broadcast", "cuda", True, ("broadcast", "cpu", "it is set; gloo")),
        ("broadcast", "cuda", False, ("broadcast", "cuda", "it is set; NCCL")),
        ("object_store", "cuda", False, ("object_store", "cpu", "it is set")),
    ],
)
def test_the_way_and_its_reason(setting, device, take_turns, expected):
    found = transfer_of(setting, device=device, take_turns=take_turns)
    name, where, reason = expected
    assert (found.name, found.device) == (name, where)
    assert re.search(reason, found.reason)


@pytest.mark.parametrize(("device", "take_turns"), [("cpu", True), ("cuda", False)])
def test_memory_of_a_gpu_that_only_one_uses_is_refused(device, take_turns):
    with pytest.raises(ConfigError, match="weight_transfer=ipc: engines and learner share no GPU"):
        transfer_of("ipc", device=device, take_turns=take_turns)


def test_vllm_starts_a_policy_from_nothing_again_from_what_lasts_as_long_as_the_run(tmp_path):
    """It had lain in the temporary folder of the driver, and had gone with the first start."""
    settings = [
        "policy.scratch.hidden_size=16",
        "policy.generation.backend=vllm",
        f"checkpointing.checkpoint_dir={tmp_path}",
    ]
    config = load_config(GRPORun, None, settings).config

    def export(directory, _):
        (directory / "config.json").write_text("{}", encoding="utf-8")

    model: Any = SimpleNamespace(learner=SimpleNamespace(export=export))
    chat: Any = SimpleNamespace(end_ids=[2])
    with ExitStack() as stack:
        context = RunContext(config=config, console=Console(), stack=stack)
        made = _plugged_maker("vllm", context, model, chat).start
        assert Path(made.directory).parent == tmp_path  # every node sees it
        assert (Path(made.directory) / "config.json").is_file()
    assert not list(tmp_path.iterdir())
