"""The loader on real schemas: the defaults, the import, keys that are gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from laurel.config.grpo import GRPORun
from laurel.config.load import load_config
from laurel.config.reward_model import RewardTrainingRun
from laurel.errors import ConfigError


def test_the_loader_is_light() -> None:
    heavy = "torch transformers datasets numpy pandas pyarrow typer rich"
    program = (
        "import sys, laurel.config.load, laurel.config.reward_model\n"
        f"print([name for name in {heavy.split()} if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.scratch.hidden_size=50", "hidden_size is 50, which num_heads=4 does not divide"),
        ("policy.scratch.num_kv_heads=3", "num_heads is 4, which num_kv_heads=3 does not divide"),
        ("policy.scratch.num_kv_heads=0", "num_kv_heads: must be a whole number of at least 1"),
    ],
)
def test_a_small_model_that_cannot_be_made_is_told_by_the_schema(
    override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(RewardTrainingRun, None, [override])


def test_a_key_that_is_gone_is_told_unless_an_older_file_leaves_it_null(tmp_path: Path) -> None:
    older = tmp_path / "older.yaml"
    older.write_text("env: {code: {sandbox: {url: null, num_workers: 8}}}\n", encoding="utf-8")
    loaded = load_config(GRPORun, older)
    assert "env.code.sandbox.url" in loaded.warnings[0]
    older.write_text("env: {code: {sandbox: {url: 'http://127.0.0.1:9'}}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no such key any more .*Laurel's own sandbox"):
        load_config(GRPORun, older)


def test_a_choice_that_is_gone_is_told_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match=r"no ipc any more \(use auto or broadcast"):
        load_config(GRPORun, None, ["policy.generation.weight_transfer=ipc"])
