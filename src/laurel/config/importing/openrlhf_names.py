"""OpenRLHF's defaults and its older names; sources as in `openrlhf.py`."""

from __future__ import annotations

from typing import Any

COMMON_DEFAULTS: dict[str, Any] = {
    "ckpt.output_dir": "./ckpt", "ckpt.save_steps": -1, "ckpt.max_num": 3, "eval.steps": -1,
    "train.seed": 42, "ds.param_dtype": "bf16", "ds.adam_offload": False, "ds.ring_attn_size": 1,
    "ds.tensor_parallel_size": 1, "ds.lora.rank": 0, "ds.lora.alpha": 16, "ds.lora.dropout": 0,
    "ds.lora.target_modules": "all-linear", "train.max_epochs": 1, "train.batch_size": 128,
    "train.micro_batch_size": 1, "data.input_template": None, "data.apply_chat_template": False,
    "data.tokenizer_chat_template": None, "logger.wandb.key": None, "logger.wandb.org": None,
    "logger.wandb.run_name": None, "logger.tensorboard_dir": None,
}  # fmt: skip

OPTIMIZER_DEFAULTS: dict[str, Any] = {
    "optim": "adam", "adam.betas": [0.9, 0.95], "adam.eps": 1e-8, "adam.weight_decay": 0.0,
    "lr_scheduler": "cosine_with_min_lr", "lr_warmup_ratio": 0.03, "min_lr_ratio": 0.1,
    "max_norm": 1.0,
}  # fmt: skip

COMMON_NAMES = {
    "save_path": "ckpt.output_dir", "save_steps": "ckpt.save_steps", "ckpt_path": "ckpt.path",
    "save_hf_ckpt": "ckpt.save_hf", "disable_ds_ckpt": "ckpt.disable_ds",
    "max_ckpt_num": "ckpt.max_num", "max_ckpt_mem": "ckpt.max_mem",
    "load_checkpoint": "ckpt.load_enable", "use_ds_universal_ckpt": "ds.use_universal_ckpt",
    "logging_steps": "logger.logging_steps", "eval_steps": "eval.steps", "seed": "train.seed",
    "full_determinism": "train.full_determinism_enable", "zero_stage": "ds.zero_stage",
    "param_dtype": "ds.param_dtype", "zpg": "ds.zpg", "adam_offload": "ds.adam_offload",
    "attn_implementation": "ds.attn_implementation", "grad_accum_dtype": "ds.grad_accum_dtype",
    "overlap_comm": "ds.overlap_comm", "deepcompile": "ds.deepcompile",
    "disable_fast_tokenizer": "data.disable_fast_tokenizer",
    "dataloader_num_workers": "data.dataloader_num_workers", "flash_attn": "ds.attn_implementation",
    "ds_tensor_parallel_size": "ds.tensor_parallel_size", "ring_attn_size": "ds.ring_attn_size",
    "ring_head_stride": "ds.ring_attn_head_stride", "load_in_4bit": "ds.load_in_4bit",
    "lora_rank": "ds.lora.rank", "lora_alpha": "ds.lora.alpha", "lora_dropout": "ds.lora.dropout",
    "target_modules": "ds.lora.target_modules", "max_epochs": "train.max_epochs",
    "micro_train_batch_size": "train.micro_batch_size", "train_batch_size": "train.batch_size",
    "packing_samples": "ds.packing_samples", "max_samples": "data.max_samples",
    "input_template": "data.input_template", "apply_chat_template": "data.apply_chat_template",
    "tokenizer_chat_template": "data.tokenizer_chat_template", "max_len": "data.max_len",
    "eval_dataset": "eval.dataset", "eval_split": "eval.split", "use_wandb": "logger.wandb.key",
    "wandb_org": "logger.wandb.org", "wandb_group": "logger.wandb.group",
    "wandb_project": "logger.wandb.project", "wandb_run_name": "logger.wandb.run_name",
    "use_tensorboard": "logger.tensorboard_dir", "value_head_prefix": "ds.value_head_prefix",
    "use_liger_kernel": "ds.use_liger_kernel", "input_key": "data.input_key",
}  # fmt: skip
"""Names before 0.10.2, of all trainers."""

MODEL_NAMES = {
    "pretrain": "model.model_name_or_path", "aux_loss_coef": "model.aux_loss_coef",
    "gradient_checkpointing": "model.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "model.gradient_checkpointing_reentrant",
    "compute_fp32_loss": "model.compute_fp32_loss_enable", "loss": "model.loss_type",
    "margin_loss": "model.margin_loss_enable", "learning_rate": "adam.lr",
    "l2": "adam.weight_decay",
    "adam_betas": "adam.betas", "dataset": "data.dataset", "dataset_probs": "data.dataset_probs",
    "dataset_split": "data.dataset_split", "train_split": "data.dataset_split",
    "prompt_key": "data.prompt_key", "chosen_key": "data.chosen_key",
    "rejected_key": "data.rejected_key", "pretrain_mode": "model.pretrain_mode_enable",
    "multiturn": "data.multiturn", "output_key": "data.output_key",
}  # fmt: skip
"""Those of reward models and fine-tuning."""

PPO_NAMES = {
    **COMMON_NAMES, "pretrain": "actor.model_name_or_path",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "gradient_checkpointing_use_reentrant": "actor.gradient_checkpointing_reentrant",
    "actor_learning_rate": "actor.adam.lr", "l2": "actor.adam.weight_decay",
    "adam_betas": "actor.adam.betas", "lr_scheduler": "actor.lr_scheduler",
    "lr_warmup_ratio": "actor.lr_warmup_ratio", "max_norm": "actor.max_norm",
    "aux_loss_coef": "actor.aux_loss_coef", "rollout_batch_size": "rollout.batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt", "max_new_tokens":
    "rollout.max_new_tokens", "temperature": "rollout.temperature", "top_p": "rollout.top_p",
    "num_episodes": "train.num_episodes", "eps_clip": "actor.eps_clip", "eps_clip_low_high":
    "actor.eps_clip_low_high", "dual_clip": "actor.dual_clip", "policy_loss_type":
    "actor.policy_loss_type", "entropy_loss_coef": "actor.entropy_coef", "init_kl_coef":
    "algo.kl.init_coef", "kl_estimator": "algo.kl.estimator", "use_kl_loss": "algo.kl.use_loss",
    "kl_target": "algo.kl.target", "kl_horizon": "algo.kl.horizon", "advantage_estimator":
    "algo.advantage.estimator", "no_advantage_std_norm": "algo.advantage.no_std_norm", "gamma":
    "algo.advantage.gamma", "lambd": "algo.advantage.lambd", "enable_vllm_is_correction":
    "algo.advantage.is_correction_enable", "vllm_is_truncated_threshold":
    "algo.advantage.is_correction_threshold", "vllm_is_correction_type":
    "algo.advantage.is_correction_type", "async_train": "train.async_enable", "async_queue_size":
    "train.async_queue_size", "partial_rollout": "train.partial_rollout_enable", "remote_rm_url":
    "reward.remote_url", "reward_pretrain": "reward.model_name_or_path", "normalize_reward":
    "reward.normalize_enable", "reward_clip_range": "reward.clip_range", "overlong_buffer_len":
    "reward.overlong_buffer_len", "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef", "dynamic_filtering":
    "algo.dynamic_filtering_enable", "dynamic_filtering_reward_range":
    "algo.dynamic_filtering_range", "actor_num_nodes": "actor.num_nodes",
    "actor_num_gpus_per_node": "actor.num_gpus_per_node", "ref_num_nodes": "ref.num_nodes",
    "ref_num_gpus_per_node": "ref.num_gpus_per_node", "reward_num_nodes": "reward.num_nodes",
    "reward_num_gpus_per_node": "reward.num_gpus_per_node", "critic_num_nodes": "critic.num_nodes",
    "critic_num_gpus_per_node": "critic.num_gpus_per_node", "colocate_actor_ref":
    "train.colocate_actor_ref", "colocate_critic_reward": "train.colocate_critic_reward",
    "colocate_all_models": "train.colocate_all", "vllm_num_engines": "vllm.num_engines",
    "vllm_tensor_parallel_size": "vllm.tensor_parallel_size", "vllm_sync_backend":
    "vllm.sync_backend", "vllm_sync_with_ray": "vllm.sync_with_ray", "enable_prefix_caching":
    "vllm.enable_prefix_caching", "enforce_eager": "vllm.enforce_eager", "vllm_enable_sleep":
    "vllm.enable_sleep", "vllm_gpu_memory_utilization": "vllm.gpu_memory_utilization",
    "vllm_generate_batch_size": "rollout.vllm_generate_batch_size", "prompt_data":
    "data.prompt_dataset", "prompt_data_probs": "data.prompt_probs", "prompt_split":
    "data.prompt_split", "label_key": "data.label_key", "eval_temperature": "eval.temperature",
    "eval_n_samples_per_prompt": "eval.n_samples_per_prompt", "agent_func_path":
    "train.agent_func_path", "critic_pretrain": "critic.model_name_or_path",
    "critic_learning_rate": "critic.adam.lr", "value_clip": "critic.value_clip",
    "freezing_actor_steps": "critic.freezing_steps", "save_value_network":
    "critic.save_value_network", "enable_ema": "train.enable_ema", "ema_beta": "train.ema_beta",
    "micro_rollout_batch_size": "rollout.micro_batch_size", "deepspeed_enable_sleep":
    "ds.enable_sleep", "ref_reward_offload": "ref.offload", "use_dynamic_batch":
    "train.dynamic_batch_enable", "rollout_max_tokens_per_gpu": "rollout.max_tokens_per_gpu",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu", "best_metric_key":
    "ckpt.best_metric_key", "image_key": "data.image_key", "max_images_per_prompt":
    "data.max_images_per_prompt", "freeze_visual_encoder": "actor.freeze_visual_encoder",
}  # fmt: skip
"""Those of the PPO trainer."""
