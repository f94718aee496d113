"""GRPO files written for NeMo RL load unchanged, and so do our examples."""

from __future__ import annotations

from pathlib import Path

import pytest

from laurel.config.data import TaskDataConfig, TaskSetConfig
from laurel.config.grpo import GRPORun
from laurel.config.load import LoadedConfig, load_config
from laurel.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples" / "configs"

# The keys of NeMo RL's grpo_math_1B.yaml (August 2026) and their defaults, written shorter; its
# Megatron, Dynamo and data-plane blocks are known by their names alone.
NEMO_MATH = """
grpo:
  num_prompts_per_step: 32
  num_generations_per_prompt: 16
  max_rollout_turns: 1
  max_num_epochs: 1
  max_num_steps: 1000000
  normalize_rewards: true
  use_leave_one_out_baseline: true
  val_period: 10
  val_start_at: -1
  val_at_start: false
  val_at_end: false
  overlong_filtering: false
  advantage_clip_low: null
  advantage_clip_high: null
  max_val_samples: 256
  val_num_generations_per_prompt: 1
  stop_at_validation_metric: null
  stop_at_validation_threshold: null
  val_batch_size: 256
  seed: 42
  use_dynamic_sampling: false
  dynamic_sampling_max_gen_batches: 10
  batch_multiplier: 1
  reward_shaping: {enabled: false, overlong_buffer_length: 128, overlong_buffer_penalty: 1,
    max_response_length: "${policy.max_total_sequence_length}", stop_properly_penalty_coef: null}
  adv_estimator: {name: grpo, normalize_rewards: "${grpo.normalize_rewards}",
    use_leave_one_out_baseline: "${grpo.use_leave_one_out_baseline}", minus_baseline: true}
  reward_scaling: {enabled: false, source_min: 0.0, source_max: 1.0, target_min: 0.0,
    target_max: 1.0}
  seq_logprob_error_threshold: null
  invalid_tool_call_advantage: null
  malformed_thinking_advantage: null
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
reward_penalties: {penalize_duplicated_reasoning: false, token_ids: null}
loss_fn:
  reference_policy_kl_penalty: 0.01
  reference_policy_kl_type: "k3"
  kl_input_clamp_value: 20.0
  kl_output_clamp_value: 10.0
  ratio_clip_min: 0.2
  ratio_clip_max: 0.2
  ratio_clip_c: null
  use_on_policy_kl_approximation: false
  use_importance_sampling_correction: false
  truncated_importance_sampling_type: null
  truncated_importance_sampling_ratio: null
  truncated_importance_sampling_ratio_min: null
  sequence_level_importance_ratios: false
  token_level_loss: true
  force_on_policy_ratio: false
  use_kl_in_reward: false
  use_cispo: false
  disable_ppo_ratio: false
  positive_example_nll_weight: 0.0
checkpointing: {enabled: true, checkpoint_dir: results/grpo, metric_name: "val:accuracy",
  higher_is_better: true, keep_top_k: 3, save_period: 10, checkpoint_must_save_by: null,
  model_save_format: safetensors, save_consolidated: false, save_optimizer: true}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  tokenizer: {name: "${policy.model_name}", chat_template_kwargs: null, use_fastokens: false}
  hf_config_overrides: {}
  train_global_batch_size: 512
  train_micro_batch_size: 4
  generation_batch_size: 32
  logprob_batch_size: 4
  max_total_sequence_length: 512
  precision: bfloat16
  logprob_chunk_size: null
  offload_optimizer_for_logprob: false
  dtensor_cfg: {_v2: true, enabled: true, cpu_offload: false, sequence_parallel: false,
    activation_checkpointing: false, tensor_parallel_size: 1, context_parallel_size: 1,
    custom_parallel_plan: null, automodel_kwargs: {}, lora_cfg: {enabled: false,
      target_modules: [], exclude_modules: [], match_all_linear: true, dim: 8, alpha: 32,
      dropout: 0.0, dropout_position: post, lora_A_init: xavier, use_triton: true}}
  megatron_cfg: {enabled: false}
  draft: {enabled: false}
  dynamic_batching: {enabled: false, sequence_length_round: 64,
    train_mb_tokens: "${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}",
    logprob_mb_tokens: "${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}"}
  sequence_packing: {enabled: true, algorithm: modified_first_fit_decreasing,
    microbatch_order: packer, sequence_length_round: 64,
    train_mb_tokens: "${mul:${policy.max_total_sequence_length},${policy.train_micro_batch_size}}",
    logprob_mb_tokens: "${mul:${policy.max_total_sequence_length},${policy.logprob_batch_size}}"}
  make_sequence_length_divisible_by: ${policy.dtensor_cfg.tensor_parallel_size}
  max_grad_norm: 1.0
  optimizer: {name: torch.optim.AdamW, kwargs: {lr: 5.0e-6, weight_decay: 0.01,
    betas: [0.9, 0.999], eps: 1e-8, foreach: False, fused: False}}
  scheduler:
    - {name: torch.optim.lr_scheduler.LinearLR, kwargs: {start_factor: 0.1, total_iters: 50}}
    - {name: torch.optim.lr_scheduler.ConstantLR, kwargs: {factor: 1.0, total_iters: 10000000000}}
    - {milestones: [50]}
  generation:
    port_range_low: 3000
    port_range_high: 4999
    backend: vllm
    max_new_tokens: ${policy.max_total_sequence_length}
    temperature: 1.0
    top_p: 1.0
    top_k: null
    val_temperature: ${.temperature}
    val_top_p: ${.top_p}
    val_top_k: ${.top_k}
    stop_token_ids: null
    stop_strings: null
    refit_transport: null
    real_quant_export_cpu_offload: true
    refit_cfg: {nixl: {device: cuda}}
    mcore_generation_config: {max_tokens: 16384}
    vllm_cfg: {async_engine: false, precision: "${policy.precision}", kv_cache_dtype: auto,
      logprobs_mode: processed_logprobs, tensor_parallel_size: 1, pipeline_parallel_size: 1,
      expert_parallel_size: 1, gpu_memory_utilization: 0.6,
      max_model_len: "${policy.max_total_sequence_length}", enforce_eager: false, use_tqdm: true,
      use_deep_gemm: false, num_last_layers_in_bf16: 0, num_first_layers_in_bf16: 0,
      enable_vllm_metrics_logger: true, vllm_metrics_logger_interval: 0.5,
      http_refit_api_key_env_var: null, reset_encoder_cache_after_weight_update: false,
      http_refit_server_port: null, zmq_refit_server_port: null}
    vllm_kwargs: {}
    colocated: {enabled: true, resources: {gpus_per_node: null, num_nodes: null}}
data:
  max_input_seq_length: ${policy.max_total_sequence_length}
  shuffle: true
  num_workers: 1
  use_multiple_dataloader: false
  train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05, seed: "${grpo.seed}"}
  validation: null
  default: {prompt_file: examples/prompts/cot.txt, system_prompt_file: null,
    processor: math_hf_data_processor, env_name: math}
env:
  math: {num_workers: 8, math_verify_impl: hf_math_verify}
logger: {log_dir: logs, num_val_samples_to_print: 0, wandb_enabled: false,
  tensorboard_enabled: false, mlflow_enabled: false, swanlab_enabled: false, monitor_gpus: true,
  wandb: {project: grpo-dev, name: one, log_nemo_gym_full_result_tables: false},
  swanlab: {project: grpo-dev, name: one}, tensorboard: {},
  mlflow: {experiment_name: grpo-dev, run_name: one, tracking_uri: "http://localhost:5000"},
  gpu_monitoring: {collection_interval: 10, flush_interval: 10}}
cluster: {gpus_per_node: 1, num_nodes: 1, master_port_range_low: 1400,
  master_port_range_high: 1999, segment_size: null}
data_plane: {enabled: false}
on_policy_distillation: null
"""

NEMO_REWARD_MODEL = """
defaults: grpo_math_1B.yaml
data:
  default: {env_name: reward_model}
env:
  reward_model:
    enabled: true
    processor: math_hf_data_processor
    model_name: Skywork/Skywork-Reward-V2-Qwen3-0.6B
    tokenizer: {name: "${env.reward_model.model_name}"}
    precision: bfloat16
    batch_size: ${policy.train_micro_batch_size}
    checkpoint_path: null
    max_model_len: 2048
    offload_optimizer_for_logprob: false
    resources: {gpus_per_node: 1, num_nodes: 1}
    dtensor_cfg: {_v2: true, enabled: true, cpu_offload: false, sequence_parallel: false,
      activation_checkpointing: false, tensor_parallel_size: 1, context_parallel_size: 1,
      custom_parallel_plan: null}
    reward_model_cfg: {enabled: true, reward_model_type: bradley_terry}
    dynamic_batching: {enabled: false}
    sequence_packing: {enabled: false}
    max_grad_norm: null
cluster: {gpus_per_node: 2, num_nodes: 1}
"""

# How the data section was written when reward models came to GRPO (September 2025).
NEMO_FLAT_DATA = """
data:
  max_input_seq_length: 512
  prompt_file: examples/prompts/cot.txt
  system_prompt_file: null
  shuffle: true
  dataset_name: OpenMathInstruct-2
checkpointing: {metric_name: val_reward, higher_is_better: true}
"""


def load(folder: Path, **files: str) -> LoadedConfig[GRPORun]:
    """Loads the last of the files."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return load_config(GRPORun, folder / f"{list(files)[-1]}.yaml")


def test_a_math_file_for_nemo_loads_with_one_warning(tmp_path: Path) -> None:
    loaded = load(tmp_path, grpo_math_1B=NEMO_MATH)
    assert len(loaded.warnings) == 1
    ignored = set(loaded.warnings[0].partition(": ")[2].split(", "))
    assert {
        "grpo.async_grpo",
        "grpo.val_start_at",
        "reward_penalties",
        "data_plane",
        "policy.megatron_cfg",
        "policy.generation.vllm_cfg.async_engine",
        "env.math.math_verify_impl",
        "cluster.master_port_range_low",
    } <= ignored
    config = loaded.config
    assert config.default_environment == "math"
    assert config.updates_per_rollout == 1  # 32 x 16 = 512 completions in one optimizer step
    assert config.policy.generation.max_new_tokens == 512
    assert config.policy.generation.val_top_p == 1.0
    assert config.policy.sequence_packing.train_mb_tokens == 512 * 4
    assert config.policy.optimizer.kwargs["eps"] == 1e-8
    assert config.data.train_sets() == [
        TaskSetConfig(
            dataset_name="OpenMathInstruct-2",
            split_validation_size=0.05,
            seed=42,
            prompt_file="examples/prompts/cot.txt",
            processor="math_hf_data_processor",
            env_name="math",
        )
    ]
    assert config.data.validation_sets() == []


def test_a_reward_model_file_for_nemo_loads_with_one_warning(tmp_path: Path) -> None:
    loaded = load(tmp_path, grpo_math_1B=NEMO_MATH, grpo_rm_1B=NEMO_REWARD_MODEL)
    assert len(loaded.warnings) == 1
    assert "env.reward_model.max_grad_norm" in loaded.warnings[0]
    config = loaded.config
    reward_model = config.env.reward_model
    assert reward_model.tokenizer.name == "Skywork/Skywork-Reward-V2-Qwen3-0.6B"
    assert (reward_model.batch_size, reward_model.max_model_len) == (4, 2048)
    assert config.default_environment == "reward_model"
    assert config.data.train_sets()[0].env_name == "reward_model"


def test_the_older_form_of_data_loads(tmp_path: Path) -> None:
    config = load(tmp_path, old=NEMO_FLAT_DATA).config
    (train,) = config.data.train_sets()
    assert (train.dataset_name, train.prompt_file) == (
        "OpenMathInstruct-2",
        "examples/prompts/cot.txt",
    )
    assert config.data.validation_sets() == []
    assert config.data.split_validation_size == 0.05


@pytest.mark.parametrize("name", ["grpo_math_1B", "grpo_rm_1B"])
def test_our_examples_load_without_a_word(name: str) -> None:
    loaded = load_config(GRPORun, EXAMPLES / f"{name}.yaml")
    assert loaded.warnings == ()
    (train,) = loaded.config.data.train_sets()
    assert train.dataset_name == "OpenMathInstruct-2"
    assert train.prompt_file is not None
    assert (EXAMPLES.parents[1] / train.prompt_file).is_file()
    assert train.env_name == ("math" if name == "grpo_math_1B" else "reward_model")


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


def test_flat_keys_reach_the_set() -> None:
    data = TaskDataConfig(
        train_data_path="a.jsonl", val_data_path="b.jsonl", input_key="question", env_name="math"
    )
    (train,), (validation,) = data.train_sets(), data.validation_sets()
    assert (train.data_path, train.input_key, train.env_name) == ("a.jsonl", "question", "math")
    assert (validation.data_path, validation.input_key) == ("b.jsonl", "question")


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
