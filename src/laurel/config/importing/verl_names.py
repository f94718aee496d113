"""verl's defaults, the keys without a counterpart, and older names; sources as in `verl.py`."""

from __future__ import annotations

from typing import Any

from laurel.config.importing.rules import Rule, absent, unneeded

ACTOR = "actor_rollout_ref.actor."
ROLLOUT = "actor_rollout_ref.rollout."
MODEL = "actor_rollout_ref.model."
REF = "actor_rollout_ref.ref."

DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024, "data.gen_batch_size": None, "data.max_prompt_length": 512,
    "data.max_response_length": 512, "data.truncation": "error",
    "data.filter_overlong_prompts": False, "data.shuffle": True, "data.seed": None,
    "data.train_max_samples": -1, "data.val_max_samples": -1,
    "trainer.total_epochs": 30, "trainer.total_training_steps": None, "trainer.save_freq": -1,
    "trainer.test_freq": -1, "trainer.val_before_train": True, "trainer.logger":
    ["console", "wandb"], "trainer.project_name": "verl_examples", "trainer.experiment_name":
    "gsm8k", "trainer.nnodes": 1, "trainer.n_gpus_per_node": 8, "trainer.resume_mode": "auto",
    "trainer.max_actor_ckpt_to_keep": None, "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True, "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl", "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.kl_ctrl.type": "fixed", "algorithm.filter_groups.enable": False,
    "algorithm.filter_groups.max_num_gen_batches": 0,
    "algorithm.rollout_correction.rollout_is": None,
    "algorithm.rollout_correction.rollout_is_threshold": 2.0,
    "reward.custom_reward_function.path": None,
    "reward.custom_reward_function.name": "compute_score", "reward.reward_model.enable": False,
    "reward.reward_model.model_path": None, "reward.reward_manager.name": "naive",
    "reward.reward_model.rollout.prompt_length": 2048,
    "reward.reward_model.rollout.response_length": 2048,
    "reward.num_workers": 8,
    **{ACTOR + key: value for key, value in {
        "ppo_mini_batch_size": 256, "ppo_epochs": 1, "clip_ratio": 0.2, "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "loss_agg_mode": "token-mean",
        "loss_scale_factor": None, "policy_loss.loss_mode": "vanilla", "use_kl_loss": False,
        "kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl", "grad_clip": 1.0,
        "use_dynamic_bsz": False, "ppo_max_token_len_per_gpu": 16384, "optim.optimizer": "AdamW",
        "optim.lr": 1e-6, "optim.weight_decay": 0.01, "optim.betas": [0.9, 0.999],
        "optim.lr_scheduler_type": "constant", "optim.warmup_style": None,
        "optim.lr_warmup_steps": -1, "optim.lr_warmup_steps_ratio": 0.0,
        "optim.min_lr_ratio": 0.0, "ulysses_sequence_parallel_size": 1,
        "fsdp_config.param_offload": False, "fsdp_config.optimizer_offload": False,
    }.items()},
    **{ROLLOUT + key: value for key, value in {
        "n": 1, "temperature": 1.0, "top_p": 1, "top_k": -1, "name": None,
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1,
        "gpu_memory_utilization": 0.5, "enforce_eager": False, "max_model_len": None,
        "val_kwargs.do_sample": False, "val_kwargs.temperature": 0, "val_kwargs.top_p": 1.0,
        "val_kwargs.top_k": -1, "val_kwargs.n": 1,
    }.items()},
    **{MODEL + key: value for key, value in {
        "trust_remote_code": False, "tokenizer_path": None, "enable_gradient_checkpointing": True,
        "lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear", "exclude_modules": None,
    }.items()},
}  # fmt: skip

OTHER_NAMES = {
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "custom_reward_function.name": "reward.custom_reward_function.name",
    "custom_reward_function.reward_kwargs": "reward.custom_reward_function.reward_kwargs",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.use_reward_loop": "use_reward_loop",
    "reward_model.launch_reward_fn_async": "launch_reward_fn_async",
    **{f"reward_model.{key}": f"reward.reward_kwargs.{key}" for key in (
        "overlong_buffer.enable", "overlong_buffer.len", "overlong_buffer.penalty_factor",
        "overlong_buffer.log")},
    **{f"reward_model.reward_kwargs.{old}": f"reward.reward_kwargs.{new}" for old, new in (
        ("max_resp_len", "max_resp_len"),
        *((f"overlong_buffer_cfg.{key}", f"overlong_buffer.{key}")
          for key in ("enable", "len", "penalty_factor", "log")))},
    **{f"reward.reward_kwargs.overlong_buffer_cfg.{key}": f"reward.reward_kwargs.overlong_buffer."
       f"{key}" for key in ("enable", "len", "penalty_factor", "log")},
    "reward_model.max_length": "reward.reward_model.rollout.max_model_len",
    ACTOR + "fsdp_config.ulysses_sequence_parallel_size": ACTOR + "ulysses_sequence_parallel_size",
    ACTOR + "tis_ratio_cap": ACTOR + "tis_imp_ratio_cap",
    ACTOR + "entropy_coef": ACTOR + "entropy_coeff",
    "trainer.val_only_mode": "trainer.val_only",
}  # fmt: skip

TOLD_BY = frozenset({"algorithm.adv_estimator", ACTOR + "ppo_mini_batch_size",
                     ACTOR + "optim.lr", MODEL + "path", ROLLOUT + "n",
                     ROLLOUT + "name"})  # fmt: skip

_ENGINE = (
    "dtype", "ignore_eos", "cudagraph_capture_sizes", "free_cache_engine", "data_parallel_size",
    "expert_parallel_size", "max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill",
    "enable_prefix_caching", "logprobs_mode", "scheduling_policy", "load_format",
    "layered_summon", "log_prob_micro_batch_size", "log_prob_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu", "disable_log_stats",
    "multi_stage_wake_up", "prompt_length", "response_length", "mode", "nnodes", "n_gpus_per_node",
    "calculate_log_probs", "skip_tokenizer_init", "full_determinism", "seed",
)  # fmt: skip
_ACTOR_MEANS = (
    "strategy", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_torch_compile",
    "use_remove_padding", "use_fused_kernels", "use_prefix_grouper",
    "entropy_from_logits_with_chunking",
    "entropy_from_logits_chunk_size", "entropy_checkpointing", "pad_to_length", "rollout_n",
    "calculate_entropy", "calculate_sum_pi_squared", "data_loader_seed", "shuffle",
    "loss_remove_token_mean", "fsdp_config.*", "checkpoint.*", "optim.*", "profiler.*",
    "_target_", "optim.total_training_steps", "optim.zero_indexed_step", "optim.optimizer_impl",
)  # fmt: skip


def model_rest(place: str) -> tuple[Rule, ...]:
    """The keys of a model that have no counterpart; `place` is what they begin with."""
    return (
        unneeded("only speed or memory; nothing is padded here",
                 *(place + key for key in ("use_remove_padding", "use_liger", "use_fused_kernels",
                                           "fused_kernel_options.*", "tiled_mlp.*", "use_shm",
                                           "enable_activation_offload"))),
        absent("policy.hf_config_overrides changes a model's configuration",
               place + "override_config", place + "override_config.*", off=(None,)),
        absent("a .jinja file or the template: policy.tokenizer.chat_template",
               place + "custom_chat_template"),
        absent("start from weights of which the adapters are part", place + "lora_adapter_path"),
        absent("code that comes with a model: policy.trust_remote_code", place + "external_lib"),
        absent("no multi-token prediction", place + "mtp.enable", off=(None, False)),
        unneeded("off, or of backends that are not here", place + "mtp.*", place + "lora.*",
                 place + "hf_config_path", place + "_target_"),
    )  # fmt: skip


REST: tuple[Rule, ...] = (
    unneeded("Laurel settles how an engine draws; policy.generation.vllm_kwargs is for the rest",
             *(ROLLOUT + key for key in _ENGINE)),
    unneeded("only speed or memory; nothing is padded here, and each prompt is computed once",
             *(ACTOR + key for key in _ACTOR_MEANS), REF + "*"),
    *model_rest(MODEL),
    absent("no bonus for entropy; it is measured (loss_fn.entropy)", ACTOR + "entropy_coeff"),
    unneeded("only of losses that are not here", ACTOR + "tau_pos", ACTOR + "tau_neg",
             ACTOR + "policy_loss.*"),
    absent("texts only", ACTOR + "freeze_vision_tower"),
    unneeded("off, or of mixtures of experts", ACTOR + "router_replay.*", ACTOR + "qat.*"),
    absent("conversations of several turns are an environment's here: env.custom, "
           "grpo.max_rollout_turns", ROLLOUT + "multi_turn.enable", off=(None, False)),
    unneeded("only with multi_turn.enable", ROLLOUT + "multi_turn.*"),
    absent("policy.generation.vllm_kwargs", ROLLOUT + "engine_kwargs",
           ROLLOUT + "engine_kwargs.*"),
    absent("weights are not quantised here", ROLLOUT + "quantization"),
    absent("it is drawn as many as are needed: grpo.batch_multiplier",
                 ROLLOUT + "over_sample_rate"),
    absent("tokens are drawn, or (temperature 0) the likeliest taken", ROLLOUT + "do_sample",
           off=(None, True)),
    unneeded("its own processes and traces", ROLLOUT + "agent.*", ROLLOUT + "trace.*",
             ROLLOUT + "prometheus.*", ROLLOUT + "profiler.*", ROLLOUT + "checkpoint_engine.*",
             ROLLOUT + "disaggregation.*", ROLLOUT + "mtp.*", ROLLOUT + "qat.*", ROLLOUT + "*",
             "actor_rollout_ref.hybrid_engine", "actor_rollout_ref.nccl_timeout"),
    absent("backends are PyTorch's own here", ACTOR + "megatron.*", ACTOR + "veomni.*",
           off=(None,)),
    unneeded("Laurel reads rows itself", "data.return_raw_chat", "data.return_raw_input_ids",
             "data.return_full_prompt", "data.dataloader_num_workers", "data.use_shm",
             "data.filter_overlong_prompts_workers", "data.val_batch_size",
             "data.validation_shuffle", "data.reward_fn_key", "data.trust_remote_code",
             "data.return_multi_modal_inputs", "data.image_patch_size", "data.mm_processor_kwargs",
             "data.sampler.*", "data.datagen.*", "data.tool_config_path",
             "data.function_tool_path"),
    absent("policy.tokenizer.name", "data.tokenizer"),
    absent("the column `prompt` holds the messages", "data.prompt_key", off=(None, "prompt")),
    unneeded("texts only", "data.image_key", "data.video_key", "data.audio_key"),
    absent("data.dataset_name may be the import path of a class of your own",
           "data.custom_cls.path", "data.custom_cls.name"),
    unneeded("there is no critic", "critic.*", "trainer.critic_warmup",
             "trainer.max_critic_ckpt_to_keep", "algorithm.lam"),
    absent("rewards of a completion's end, not discounted", "algorithm.gamma", off=(None, 1)),
    unneeded("only of an adaptive weight", "algorithm.kl_ctrl.horizon",
             "algorithm.kl_ctrl.target_kl"),
    absent("every sample counts once", "algorithm.use_pf_ppo"),
    unneeded("only with algorithm.use_pf_ppo", "algorithm.pf_ppo.*"),
    absent("loss_fn.truncated_importance_sampling_type=icepop or seq-mask-tis leaves out",
           "algorithm.rollout_correction.rollout_rs", "algorithm.rollout_correction.bypass_mode",
           "algorithm.rollout_correction.rollout_is_batch_normalize"),
    unneeded("only with what is off", "algorithm.rollout_correction.*"),
    absent("laurel eval policy measures without training", "trainer.val_only"),
    absent("after the run: laurel export", "trainer.default_hdfs_dir"),
    absent("start from its weights (policy.model_name)", "trainer.resume_from_path"),
    absent("no distillation from a teacher", "distillation.enabled"),
    unneeded("it says how the work is done, not what is learned", "trainer.balance_batch",
             "trainer.device", "trainer.esi_redundant_time", "trainer.log_val_generations",
             "trainer.rollout_data_dir", "trainer.validation_data_dir",
             "trainer.del_local_ckpt_after_load", "trainer.ray_wait_register_center_timeout",
             "trainer.use_v1", "trainer.v1.*", "trainer.use_legacy_worker_impl", "trainer.*",
             "ray_kwargs.*", "ray_init.*", "global_profiler.*", "transfer_queue.*", "skip.*",
             "distillation.*", "hydra.*", "defaults", "model_engine", "use_reward_loop",
             "launch_reward_fn_async", "algorithm._target_"),
    absent("another file: import that one, or add what it changes", "--config-name",
           "--config-path", "--config-dir"),
    absent("arguments that the script passes on", "$@"),
)  # fmt: skip
