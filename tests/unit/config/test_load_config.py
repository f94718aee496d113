"""The loader as a whole: files written for NeMo RL, the examples, the defaults, the import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from laurel.config.data import DatasetConfig
from laurel.config.grpo import GRPORun
from laurel.config.load import LoadedConfig, load_config, to_yaml
from laurel.config.policy import NamedCall
from laurel.config.reward_model import RewardTrainingRun
from laurel.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples" / "configs"

# Every key that NeMo RL's own file for reward models has, in its order, when reward models came
# to its GRPO (September 2025). Values are its defaults where a test below looks at them.
NEMO_BASE = """
rm:
  max_num_epochs: 1
  max_num_steps: -1
  val_period: 16
  val_batches: -1
  val_global_batch_size: 32
  val_micro_batch_size: 1
  val_at_start: false
  seed: 42

checkpointing:
  enabled: true
  checkpoint_dir: "results/rm"
  metric_name: "val_loss"
  higher_is_better: false
  keep_top_k: 3
  save_period: ${rm.val_period}
  checkpoint_must_save_by: null

policy:
  model_name: "meta-llama/Llama-3.2-1B-Instruct"
  tokenizer:
    name: ${policy.model_name}
    chat_template: "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
  train_global_batch_size: 128
  train_micro_batch_size: 1
  max_total_sequence_length: 8192
  precision: "bfloat16"
  activation_checkpointing_enabled: false
  reward_model_cfg:
    enabled: true
    reward_model_type: "bradley_terry"
  dtensor_cfg:
    enabled: true
    cpu_offload: false
    sequence_parallel: false
    activation_checkpointing: false
    tensor_parallel_size: 1
    context_parallel_size: 1
    custom_parallel_plan: null
  dynamic_batching:
    enabled: false
  sequence_packing:
    enabled: false
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  max_grad_norm: 1.0
  optimizer:
    name: "torch.optim.AdamW"
    kwargs:
      lr: 2.0e-6
      weight_decay: 0.1
      betas: [0.9, 0.98]
      eps: 1e-5
      foreach: False
      fused: False
  megatron_cfg:
    enabled: false
    empty_unused_memory_level: 1
    activation_checkpointing: false
    tensor_model_parallel_size: 2
    pipeline_model_parallel_size: 2
    context_parallel_size: 1
    pipeline_dtype: ${policy.precision}
    sequence_parallel: false
    optimizer: {optimizer: "adam", lr: 2.0e-6, min_lr: 1.9999e-6, bf16: false}
    scheduler: {lr_warmup_iters: 50, lr_decay_iters: '${rm.no_such_key}'}
    distributed_data_parallel_config: {grad_reduce_in_fp32: false, overlap_grad_reduce: true}

data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  shuffle: true
  dataset_name: "HelpSteer3"

logger:
  log_dir: "logs"
  wandb_enabled: true
  tensorboard_enabled: true
  mlflow_enabled: false
  monitor_gpus: true
  wandb:
    project: "rm-dev"
    name: "rm-dev-${data.dataset_name}"
  tensorboard:
    log_dir: "tb_logs-rm-dev-${data.dataset_name}"
  mlflow:
    experiment_name: "rm-dev"
    run_name: "rm-dev-${data.dataset_name}"
  gpu_monitoring:
    collection_interval: 10
    flush_interval: 10

cluster:
  gpus_per_node: 1
  num_nodes: 1
"""

# What later versions (2026) changed and added, as a child of the file above.
NEMO_HEAD = """
defaults: base.yaml
rm:
  val_at_end: false
checkpointing:
  metric_name: "val:validation-default_loss"
  save_optimizer: true
  model_save_format: "safetensors"
policy:
  tokenizer:
    chat_template_kwargs: null
  offload_optimizer_for_logprob: false
  hf_config_overrides: {}
  dtensor_cfg:
    _v2: true
    clear_cache_every_n_steps: null
    automodel_kwargs: {use_liger_kernel: false}
    lora_cfg:
      enabled: False
      target_modules: []
      exclude_modules: []
      match_all_linear: true
      dim: 8
      alpha: 32
      dropout: 0.0
      dropout_position: "post"
      lora_A_init: "xavier"
      use_triton: true
  dynamic_batching:
    enabled: False
    train_mb_tokens: ${mul:${policy.max_total_sequence_length}, ${policy.train_micro_batch_size}}
    sequence_length_round: 64
  scheduler:
    - name: "torch.optim.lr_scheduler.LinearLR"
      kwargs: {start_factor: 0.1, end_factor: 1.0, total_iters: 50}
    - name: "torch.optim.lr_scheduler.ConstantLR"
      kwargs: {factor: 1.0, total_iters: 10000000000}
    - milestones: [50]
data:
  dataset_name: null
  num_workers: 1
  use_multiple_dataloader: false
  train:
    dataset_name: PreferenceDataset
    data_path: train.jsonl
    split: null
  validation:
    data_path: val.jsonl
  default:
    dataset_name: PreferenceDataset
    prompt_file: null
    system_prompt_file: null
    processor: preference_preprocessor
    env_name: null
logger:
  swanlab_enabled: false
  swanlab: {project: "rm-dev", name: "x"}
  mlflow:
    tracking_uri: null
cluster:
  segment_size: null
"""


def load(path: Path, *overrides: str) -> LoadedConfig[RewardTrainingRun]:
    return load_config(RewardTrainingRun, path, overrides)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.yaml"
    path.write_text(NEMO_BASE)
    return path


@pytest.fixture
def head(base: Path) -> Path:
    path = base.with_name("head.yaml")
    path.write_text(NEMO_HEAD)
    return path


def test_a_file_of_nemo_rl_loads_unchanged(base: Path) -> None:
    loaded = load(base)
    config = loaded.config
    assert config.policy.tokenizer.name == "meta-llama/Llama-3.2-1B-Instruct"
    assert config.policy.tokenizer.chat_template is not None
    assert config.policy.tokenizer.chat_template.startswith("{{ bos_token }}{% for")
    assert config.policy.optimizer.kwargs == {
        "lr": 2e-6,
        "weight_decay": 0.1,
        "betas": [0.9, 0.98],
        "eps": 1e-5,
        "foreach": False,
        "fused": False,
    }
    assert config.policy.sequence_packing.enabled is False
    assert config.checkpointing.metric_name == "val_loss"
    assert config.checkpointing.save_period == 16
    assert config.data.max_input_seq_length == 8192
    assert config.logger.wandb.name == "rm-dev-HelpSteer3"
    assert config.logger.tensorboard.log_dir == "tb_logs-rm-dev-HelpSteer3"
    assert loaded.warnings == (
        "these keys mean nothing here and are ignored: policy.activation_checkpointing_enabled, "
        "policy.make_sequence_length_divisible_by, policy.megatron_cfg, logger.monitor_gpus, "
        "logger.gpu_monitoring",
    )


def test_a_file_of_nemo_rl_in_its_later_form_loads_unchanged(head: Path) -> None:
    loaded = load(head)
    config = loaded.config
    assert config.data.train_sets() == [
        DatasetConfig(dataset_name="PreferenceDataset", data_path="train.jsonl")
    ]
    assert config.data.validation_sets() == {
        "default": DatasetConfig(dataset_name="PreferenceDataset", data_path="val.jsonl")
    }
    assert config.policy.dynamic_batching.train_mb_tokens == 8192
    assert isinstance(config.policy.scheduler, list)
    assert config.policy.scheduler[0] == NamedCall(
        name="torch.optim.lr_scheduler.LinearLR",
        kwargs={"start_factor": 0.1, "end_factor": 1.0, "total_iters": 50},
    )
    assert config.policy.tokenizer.chat_template_kwargs == {}
    ignored = set(loaded.warnings[0].partition(": ")[2].split(", "))
    assert ignored >= {
        "checkpointing.model_save_format",
        "policy.offload_optimizer_for_logprob",
        "policy.dtensor_cfg._v2",
        "policy.dtensor_cfg.lora_cfg.lora_A_init",
        "policy.dynamic_batching.sequence_length_round",
        "data.num_workers",
        "data.use_multiple_dataloader",
        "data.default.processor",
        "data.default.env_name",
        "logger.swanlab",
        "logger.swanlab_enabled",
        "cluster.segment_size",
    }


def test_the_overrides_of_nemo_rls_documents(base: Path) -> None:
    config = load(
        base,
        "policy.model_name=Qwen/Qwen2.5-1.5B",
        "policy.optimizer.kwargs.lr=1e-5",
        "++policy.optimizer.kwargs.amsgrad=true",
        "data.dataset_name=PreferenceDataset",
        "data.train_data_path=/data/train.jsonl",
        "+data.val_data_paths={easy: /data/easy.jsonl, hard: /data/hard.jsonl}",
        "checkpointing.metric_name=validation-hard_loss",
        "~policy.megatron_cfg",
    ).config
    assert config.policy.tokenizer.name == "Qwen/Qwen2.5-1.5B"
    assert config.policy.optimizer.kwargs["lr"] == 1e-5
    assert config.policy.optimizer.kwargs["amsgrad"] is True
    assert list(config.data.validation_sets()) == ["easy", "hard"]


@pytest.mark.parametrize("which", ["base", "head"])
def test_what_is_loaded_can_be_written_and_loaded_again(
    which: str, base: Path, head: Path, tmp_path: Path
) -> None:
    config = load({"base": base, "head": head}[which]).config
    written = tmp_path / "config.yaml"
    written.write_text(to_yaml(config, describe=True))
    again = load(written)
    assert again.config == config
    assert again.config.data.train_sets() == config.data.train_sets()
    assert again.warnings == ()


def test_without_a_file_there_are_the_defaults() -> None:
    assert load_config(RewardTrainingRun).config == RewardTrainingRun()
    assert load_config(RewardTrainingRun).warnings == ()


def test_setting_one_key_leaves_the_runs_other_defaults() -> None:
    config = load_config(
        RewardTrainingRun, None, ["policy.model_name=x", "policy.optimizer.kwargs.lr=1e-4"]
    ).config
    assert config.policy.reward_model_cfg.enabled is True
    assert config.policy.optimizer.kwargs == {
        "lr": 1e-4,
        "weight_decay": 0.1,
        "betas": [0.9, 0.98],
        "eps": 1e-5,
    }


def test_a_file_need_not_say_that_a_reward_model_is_trained(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("policy: {model_name: x}\ndata: {train_data_path: rows.jsonl}\n")
    config = load(path).config
    assert config.policy.reward_model_cfg.enabled is True
    assert config.data.dataset_name is None  # the class is told from the rows of the user's file


def test_a_model_from_scratch() -> None:
    config = load_config(RewardTrainingRun, None, ["policy.scratch.hidden_size=64"]).config
    assert config.policy.scratch is not None
    assert config.policy.scratch.hidden_size == 64


def test_rules_of_the_schema_name_the_line(base: Path) -> None:
    opening = "  reward_model_cfg:\n    enabled: "
    text = base.read_text().replace(f"{opening}true", f"{opening}false")
    base.write_text(text)
    line = text.splitlines().index("  reward_model_cfg:") + 2
    with pytest.raises(ConfigError) as caught:
        load(base)
    said = str(caught.value)
    assert said.startswith(f"{base}:{line}: policy.reward_model_cfg.enabled must be true")


@pytest.mark.parametrize("name", ["rm.yaml", "rm_binary.yaml"])
def test_the_examples_load_and_keep_the_defaults_they_show(name: str) -> None:
    loaded = load(EXAMPLES / name)
    assert loaded.warnings == ()
    default = RewardTrainingRun().policy
    assert loaded.config.policy.optimizer == default.optimizer
    assert loaded.config.policy.model_name == default.model_name
    assert loaded.config.policy.tokenizer.chat_template == default.tokenizer.chat_template


def test_the_example_of_own_files_inherits() -> None:
    rm, binary = load(EXAMPLES / "rm.yaml").config, load(EXAMPLES / "rm_binary.yaml").config
    assert binary.policy == rm.policy
    assert binary.data.train_sets()[0].prompt_key == "question"
    assert binary.data.validation_sets()["default"].data_path == "data/validation.jsonl"


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
