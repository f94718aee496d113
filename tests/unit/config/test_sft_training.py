"""The configuration of supervised fine-tuning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laurel.config.grpo import GRPORun
from laurel.config.load import load_config
from laurel.config.sft import DemonstrationDataConfig, SFTRun
from laurel.errors import ConfigError

EXAMPLE = Path(__file__).parents[3] / "examples" / "configs" / "sft.yaml"


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


# The keys of NeMo RL's own file for fine-tuning (August 2026), without its Megatron block's.
NEMO = """
sft:
  max_num_epochs: 1
  max_num_steps: 60
  val_period: 10
  val_batches: 8
  val_global_batch_size: 32
  val_micro_batch_size: 1
  val_at_start: true
  val_at_end: false
  seed: 42
  only_unmask_final: false
checkpointing: {enabled: true, checkpoint_dir: results/sft, metric_name: "val:val_loss",
  higher_is_better: false, keep_top_k: 3, save_period: 10, checkpoint_must_save_by: null,
  save_optimizer: true}
policy:
  model_name: meta-llama/Llama-3.2-1B
  tokenizer: {name: "${policy.model_name}", chat_template: "{{ messages }}",
    chat_template_kwargs: null}
  train_global_batch_size: 32
  train_micro_batch_size: 1
  max_total_sequence_length: 1024
  precision: bfloat16
  offload_optimizer_for_logprob: false
  dtensor_cfg: {_v2: true, enabled: true, env_vars: {}, cpu_offload: false,
    sequence_parallel: false, activation_checkpointing: false, tensor_parallel_size: 1,
    context_parallel_size: 1, dp_replicate_size: 1, custom_parallel_plan: null,
    automodel_kwargs: {}, lora_cfg: {enabled: false, target_modules: [], exclude_modules: [],
      match_all_linear: true, dim: 8, alpha: 32, dropout: 0.0, dropout_position: post,
      lora_A_init: xavier, use_triton: true}}
  dynamic_batching: {enabled: false, sequence_length_round: 64,
    train_mb_tokens: "${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}"}
  sequence_packing: {enabled: false, algorithm: modified_first_fit_decreasing,
    sequence_length_round: 64, microbatch_order: packer}
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  max_grad_norm: 1.0
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.1, betas: [0.9, 0.98],
    eps: 1.0e-5, foreach: false, fused: false}}
  megatron_cfg: {enabled: false}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  add_bos: true
  add_eos: true
  add_generation_prompt: false
  shuffle: true
  num_workers: 1
  train: {dataset_name: squad, split: train}
  validation: {dataset_name: squad, split: validation}
  default: {prompt_file: null, system_prompt_file: null, processor: sft_processor}
logger: {log_dir: logs, wandb_enabled: true, tensorboard_enabled: true, mlflow_enabled: false,
  swanlab_enabled: false, monitor_gpus: true, wandb: {project: sft-dev, name: sft-dev-squad},
  swanlab: {project: sft-dev}, tensorboard: {log_dir: tb_logs},
  mlflow: {experiment_name: sft-dev, run_name: one}, gpu_monitoring: {collection_interval: 10}}
cluster: {gpus_per_node: 1, num_nodes: 1, segment_size: null}
"""


def test_a_file_for_nemo_loads_with_one_warning(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(NEMO, encoding="utf-8")
    loaded = load_config(SFTRun, path)
    assert len(loaded.warnings) == 1
    assert "policy.megatron_cfg" in loaded.warnings[0]
    config = loaded.config
    assert (config.sft.max_num_steps, config.sft.val_batches) == (60, 8)
    assert config.policy.dynamic_batching.train_mb_tokens == 1024
    (train,) = config.data.train_sets()
    (validation,) = config.data.validation_sets()
    assert (train.dataset_name, train.split) == ("squad", "train")
    assert validation.split == "validation"


def test_the_example_loads_without_a_word() -> None:
    loaded = load_config(SFTRun, EXAMPLE)
    assert loaded.warnings == ()
    assert loaded.config.checkpointing.checkpoint_dir == "results/sft"


def test_defaults_fit_fine_tuning() -> None:
    config = SFTRun()
    assert config.policy.train_global_batch_size == 32
    assert config.policy.optimizer.kwargs["lr"] == 5e-6
    assert not config.policy.reward_model_cfg.enabled
    assert config.data.validation_sets() == []


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
