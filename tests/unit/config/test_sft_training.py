"""The configuration of supervised fine-tuning."""

from __future__ import annotations

import re

import pytest

from laurel.config.grpo import GRPORun
from laurel.config.load import load_config
from laurel.config.sft import DemonstrationDataConfig, SFTRun
from laurel.errors import ConfigError


@pytest.mark.parametrize("schema", [SFTRun, GRPORun])
@pytest.mark.parametrize("key", ["prompt_key", "chosen_key", "rejected_key"])
def test_the_keys_of_pairs_are_refused_with_those_that_name_columns_here(schema, key, tmp_path):
    instead = f"{key}: unknown key; for sft and grpo: data.input_key, data.output_key"
    with pytest.raises(ConfigError, match=re.escape(instead)):
        load_config(schema, None, [f"data.{key}=Frage"])
    path = tmp_path / "run.yaml"
    path.write_text(f"data: {{train: {{data_path: x, {key}: Frage}}}}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(f"data.train.{instead}")):
        load_config(schema, path, [])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["policy.reward_model_cfg.enabled=true"], "laurel rm"),
        (["sft.val_perod=3"], "did you mean 'val_period'"),
    ],
)
def test_what_does_not_fit_is_told(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(SFTRun, None, overrides)


def test_flat_keys_and_defaults_reach_the_sets() -> None:
    flat = DemonstrationDataConfig(
        train_data_path="a.jsonl", val_data_path="b.jsonl", chat_key="talk", system_prompt="Hi."
    )
    for config, path in zip(
        (*flat.train_sets(), *flat.validation_sets()), ("a.jsonl", "b.jsonl"), strict=True
    ):
        assert (config.data_path, config.chat_key, config.system_prompt) == (path, "talk", "Hi.")
    blocks = DemonstrationDataConfig.model_validate(
        {
            "train": [{"data_path": "a.jsonl"}, {"data_path": "b.jsonl", "input_key": "ask"}],
            "validation": {},
            "default": {"input_key": "question", "prompt_file": "p.txt"},
        }
    )
    assert [config.input_key for config in blocks.train_sets()] == ["question", "ask"]
    assert all(config.prompt_file == "p.txt" for config in blocks.train_sets())
    assert blocks.validation_sets() == []
