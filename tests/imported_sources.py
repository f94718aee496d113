"""Configurations of other systems as people have them: what the tests of importing read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from laurel.extensions.importing.sources import ImportReport, ImportRequest, import_configuration

TRL_GRPO = """
# trl grpo --config this
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
attn_implementation: flash_attention_2
dataset_name: my-org/problems
output_dir: out/grpo
learning_rate: 2.0e-6
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
num_generations: 8
max_prompt_length: 512
max_completion_length: 1024
max_steps: 200
beta: 0.04
epsilon: 0.1
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: false
lr_scheduler_type: cosine
warmup_ratio: 0.1
use_vllm: true
reward_funcs: [accuracy_reward]
report_to: [wandb, trackio]
remove_unused_columns: false
hub_token: hf_not_to_be_seen
"""

TRL_REWARD_JSON = """
{"per_device_train_batch_size": 16, "num_train_epochs": 1.0, "max_length": 2048,
 "center_rewards_coefficient": 0.01, "optim": "adamw_torch_fused", "fp16_opt_level": "O1",
 "fsdp_config": {"min_num_params": 0}, "report_to": ["tensorboard"], "do_train": false,
 "accelerator_config": {"split_batches": false}, "eval_strategy": "epoch", "bf16": true}
"""

TRL_SFT = (
    "trl sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name my-org/chats \\\n"
    "  --assistant_only_loss --learning_rate=1e-5 --num_train_epochs 2\n"
)

OPENRLHF_RM = r"""
set -x
read -r -d '' training_commands <<EOF
openrlhf.cli.train_rm \
   --ckpt.output_dir ./out/rm \
   --train.batch_size 256 \
   --model.model_name_or_path my-org/sft-8b \
   --train.max_epochs 1 \
   --data.max_len 8192 \
   --ds.zero_stage 3 \
   --adam.lr 9e-6 \
   --adam.betas 0.9 0.98 \
   --data.dataset my-org/pairs \
   --data.apply_chat_template \
   --logger.wandb.key wk_not_to_be_seen \
   --ds.packing_samples
EOF
     # --logger.wandb.key [WANDB_TOKENS]
deepspeed --module $training_commands
"""

OPENRLHF_PPO_OLD = r"""
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \
  --pretrain my-org/sft-8b --remote_rm_url http://10.0.0.1:5000/get_reward,http://10.0.0.2:5000/get_reward \
  --rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 512 --max_epochs 1 \
  --prompt_max_len 1024 --generate_max_len 2048 --advantage_estimator group_norm \
  --use_kl_loss --kl_estimator k3 --init_kl_coef 1e-3 --actor_learning_rate 5e-7 \
  --eps_clip_low_high 0.2 0.27 --colocate_all_models --prompt_data my-org/prompts \
  --apply_chat_template --zero_stage 3
"""  # noqa: E501

VERL = r"""
set -xeuo pipefail
N=${N:-5}
MODEL=Qwen/Qwen2-7B-Instruct
DATA=(
    data.train_files=data/gsm8k/train.parquet
    data.val_files="['data/gsm8k/test.parquet','data/math/test.parquet']"
    data.train_batch_size=1024   # prompts
    data.max_prompt_length=512
    data.max_response_length=1024
)
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    "${DATA[@]}" \
    actor_rollout_ref.model.path=${MODEL} \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=$N \
    +custom_reward_function.path=rewards/mine.py \
    trainer.logger='["console","wandb"]' \
    trainer.experiment_name=$UNSET_ANYWHERE \
    trainer.total_epochs=15 "$@"
"""

VERL_SFT = """#!/bin/bash
save_path=$2
MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}
torchrun --standalone --nnodes=1 --nproc_per_node=4 \\
    -m verl.trainer.sft_trainer \\
    data.train_files=data/train.parquet \\
    data.val_files=data/test.parquet \\
    data.train_batch_size=64 \\
    data.max_length=2048 \\
    data.enable_thinking_default=False \\
    engine=fsdp \\
    optim.lr=1e-5 \\
    optim.lr_scheduler_type=cosine \\
    optim.lr_warmup_steps=10 \\
    optim.clip_grad=0.5 \\
    model.path="${MODEL}" \\
    model.lora_rank=16 \\
    trainer.default_local_dir="${save_path}" \\
    trainer.logger='["console","tensorboard"]' \\
    trainer.total_epochs=2 \\
    trainer.total_training_steps=100 \\
    trainer.test_freq=after_each_epoch
"""

NEMO_RL = """
grpo: {num_prompts_per_step: 8, num_generations_per_prompt: 4, val_start_at: -1,
  async_grpo: {enabled: true, max_trajectory_age_steps: 2, in_flight_weight_updates: true}}
loss_fn: {reference_policy_kl_penalty: 0.0, use_importance_sampling_correction: true}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 32
  tokenizer: {name: "${policy.model_name}"}
  megatron_cfg: {enabled: false, tensor_model_parallel_size: 2}
cluster: {gpus_per_node: 1}
"""


def imported(directory: Path, text: str, name: str = "source.yaml", **said: Any) -> ImportReport:
    """Import a text as if it stood in a file."""
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return import_configuration(ImportRequest(path=path, **said))


SOURCES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "trl-grpo": (TRL_GRPO, "grpo.yaml", {"devices": 4}),
    "trl-reward": (TRL_REWARD_JSON, "training_args.json", {"total_steps": 100}),
    "trl-sft": (TRL_SFT, "run.sh", {}),
    "openrlhf-rm": (OPENRLHF_RM, "train_rm.sh", {"total_steps": 400}),
    "openrlhf-ppo": (OPENRLHF_PPO_OLD, "train_ppo.sh", {}),
    "verl": (VERL, "run_grpo.sh", {}),
    "verl-sft": (VERL_SFT, "run_sft.sh", {}),
    "nemo-rl": (NEMO_RL, "grpo.yaml", {}),
}
"""By name: the text, the name of its file, and what is said besides."""
