"""What does not fit in a configuration of GRPO is told; its data section reaches the sets."""

from __future__ import annotations

import pytest

from laurel.config.data import TaskDataConfig
from laurel.config.grpo import GRPORun
from laurel.config.load import load_config
from laurel.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["policy.generation.max_new_tokens=513"], "more than policy.max_total_sequence_length"),
        (
            ["policy.generation.vllm_cfg.max_model_len=500"],
            r"max_model_len=500 is less than policy\.max_total_sequence_length=512",
        ),
        (["grpo.num_prompts_per_step=33"], "no multiple of policy.train_global_batch_size"),
        (
            ["loss_fn.truncated_importance_sampling_ratio=2"],
            "do nothing without truncated_importance_sampling_type",
        ),
        (
            [
                "loss_fn.truncated_importance_sampling_type=tis",
                "loss_fn.truncated_importance_sampling_ratio=2",
            ],
            "truncated_importance_sampling_ratio=2.0 needs use_importance_sampling_correction",
        ),
        (
            [
                "loss_fn.use_importance_sampling_correction=true",
                "loss_fn.truncated_importance_sampling_type=tis",
                "loss_fn.truncated_importance_sampling_ratio=2",
                "loss_fn.truncated_importance_sampling_ratio_min=2.5",
            ],
            r"ratio_min=2\.5 must be below truncated_importance_sampling_ratio=2\.0",
        ),
        (
            ["grpo.adv_estimator.reward_weights=[1.0,2.0]"],
            r"reward_weights is read by adv_estimator\.name=gdpo, not by grpo",
        ),
        (
            ["grpo.adv_estimator.minus_baseline=false"],
            r"minus_baseline=false is read by adv_estimator\.name=reinforce_plus_plus, not by grpo",
        ),
        (
            ["grpo.adv_estimator.leave_one_out_std=true", "grpo.use_leave_one_out_baseline=false"],
            r"leave_one_out_std=true is read where .*use_leave_one_out_baseline=true, or leave it",
        ),
        (
            [
                "grpo.adv_estimator.leave_one_out_std=true",
                "grpo.adv_estimator.name=reinforce_plus_plus",
            ],
            "leave_one_out_std=true is read where",
        ),
        (
            ["grpo.stop_at_validation_metric=accuracy"],
            "stop_at_validation_metric and stop_at_validation_threshold belong together",
        ),
        (["grpo.stop_at_validation_threshold=0.5"], "belong together"),
        (["env.code.max_attempts=3", "grpo.max_rollout_turns=2"], "set that to 3, or ask for"),
    ],
)
def test_what_does_not_fit_is_told(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(GRPORun, None, overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["grpo.adv_estimator.reward_weights=[1.0,2.0]", "grpo.adv_estimator.name=gdpo"],
        ["grpo.adv_estimator.leave_one_out_std=true"],
        [
            "grpo.adv_estimator.leave_one_out_std=true",
            "grpo.use_leave_one_out_baseline=false",
            "grpo.adv_estimator.use_leave_one_out_baseline=true",
        ],
        ["grpo.adv_estimator.minus_baseline=false", "grpo.adv_estimator.name=reinforce_plus_plus"],
    ],
)
def test_what_an_estimator_reads_is_taken(overrides: list[str]) -> None:
    assert load_config(GRPORun, None, overrides).warnings == ()


# --------------------------------------------------------------------------------- the data section


def test_a_split_alone_is_a_validation_set() -> None:
    data = TaskDataConfig(dataset_name="GSM8K", val_split="test")
    assert [block.split for block in data.validation_sets()] == ["test"]
    assert data.train_sets()[0].split is None


def test_blocks_win_over_defaults_and_those_over_flat_keys() -> None:
    data = TaskDataConfig.model_validate(
        {
            "prompt_file": "flat.txt",
            "env_name": "flat",
            "default": {"prompt_file": "default.txt", "input_key": "question"},
            "train": [{"data_path": "a.jsonl"}, {"data_path": "b.jsonl", "prompt_file": "own.txt"}],
            "validation": [],
        }
    )
    first, second = data.train_sets()
    assert (first.prompt_file, first.input_key, first.env_name) == (
        "default.txt",
        "question",
        "flat",
    )
    assert second.prompt_file == "own.txt"
    assert data.validation_sets() == []
