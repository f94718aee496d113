"""TRL's common defaults, keys without a counterpart, and older names; sources as in `trl.py`."""

from __future__ import annotations

from typing import Any

from laurel.config.importing.rules import Rule, absent, unneeded

COMMON_DEFAULTS: dict[str, Any] = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "num_train_epochs": 3.0,
    "max_steps": -1, "lr_scheduler_type": "linear", "warmup_steps": 0, "warmup_ratio": 0.0,
    "optim": "adamw_torch_fused", "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "fp16": False, "bf16": None,
    "gradient_checkpointing": True, "eval_strategy": "no", "eval_steps": None, "logging_steps": 10,
    "eval_on_start": False, "save_strategy": "steps", "save_steps": 500, "save_total_limit": None,
    "save_only_model": False, "load_best_model_at_end": False, "metric_for_best_model": None,
    "greater_is_better": None, "seed": 42, "output_dir": "trainer_output", "report_to": "none",
    "run_name": None, "use_cpu": False, "trust_remote_code": False, "model_revision": "main",
    "use_peft": False, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
    "lora_target_modules": None, "use_rslora": False, "lora_modules_to_save": None,
    "dataset_train_split": "train", "dataset_test_split": "test", "dataset_config": None,
    "streaming": False, "test_split_size": None,
}  # fmt: skip

OTHER_NAMES = {
    "evaluation_strategy": "eval_strategy",
    "torch_dtype": "dtype",
    "use_mps_device": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "lora_task": "lora_task_type",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "max_seq_length": "max_length",
    "no_cuda": "use_cpu",
}
"""Spellings of older versions."""

NOT_HERE = "Laurel has nothing like it"
MACHINE = "it says how the work is done, not what is learned; `laurel plan` and cluster.* do that"

COMMON_REST: tuple[Rule, ...] = (
    unneeded("master weights are float32 here whatever the model was saved in", "dtype"),
    unneeded("Laurel's own attention computes each prompt once, without padding",
             "attn_implementation", "pad_to_multiple_of", "padding_free", "train_sampling_strategy",
             "group_by_length", "length_column_name"),
    unneeded("only speed or memory", "use_liger_kernel", "liger_kernel_config", "torch_compile",
             "torch_compile_backend", "torch_compile_mode", "tf32", "use_cache",
             "torch_empty_cache_steps", "gradient_checkpointing_kwargs", "auto_find_batch_size",
             "activation_checkpointing_kwargs", "per_device_eval_batch_size", "bf16_full_eval",
             "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object",
             "batch_eval_metrics", "activation_offloading", "average_tokens_across_devices",
             "half_precision_backend", "optim_target_modules", "fp16_full_eval", "fp16_opt_level",
             "fp16_backend"),
    unneeded("Laurel reads rows itself", "remove_unused_columns", "dataset_num_proc",
             "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
             "dataloader_prefetch_factor", "dataloader_multiprocessing_context",
             "dataloader_in_order", "dataset_streaming", "streaming", "label_names",
             "prediction_loss_only", "include_for_metrics", "ignore_data_skip",
             "dataset_batch_size",
             "include_inputs_for_metrics", "dispatch_batches", "split_batches",
             "include_tokens_per_second", "include_num_input_tokens_seen"),
    unneeded("every step is logged", "logging_strategy", "logging_first_step",
                 "logging_nan_inf_filter",
             "log_on_each_node", "log_level", "log_level_replica", "disable_tqdm", "logging_dir",
             "skip_memory_metrics"),
    unneeded("the command says what is done; a run goes on from its newest checkpoint",
             "do_train", "do_eval", "do_predict", "overwrite_output_dir", "enable_jit_checkpoint",
             "restore_callback_states_from_checkpoint", "save_on_each_node", "save_safetensors"),
    unneeded(MACHINE, "local_rank", "ddp_backend", "ddp_bucket_cap_mb", "ddp_broadcast_buffers",
             "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout", "ddp_timeout_delta",
             "ignore_bias_buffers", "_n_gpu", "accelerator_config", "use_ipex", "tpu_num_cores",
             "mp_parameters", "deepspeed_plugin", "distributed_state", "ray_scope", "xpu_backend",
             "tpu_metrics_debug", "past_index", "jit_mode_eval"),
    unneeded("a model is trained as its configuration says; dropout is 0 in the decoders of today "
             "(else policy.hf_config_overrides)", "disable_dropout"),
    absent("weights are spread by FSDP: cluster.gpus_per_node, cluster.num_nodes, "
           "policy.dtensor_cfg.*", "fsdp", "deepspeed", "parallelism_config"),
    unneeded("only with fsdp", "fsdp_config", "fsdp_min_num_params",
             "fsdp_transformer_layer_cls_to_wrap"),
    absent("the order of rows and the draws have one seed here", "data_seed"),
    absent("runs repeat on one machine without it; kernels are not forced", "full_determinism"),
    absent("the last batch of an epoch is used here", "dataloader_drop_last"),
    absent("weights are not quantised here: plain LoRA, and more memory", "load_in_4bit",
           "load_in_8bit", "quantization_config"),
    unneeded("weights are not quantised here", "bnb_4bit_quant_type", "use_bnb_nested_quant",
             "bnb_4bit_quant_storage", "bnb_4bit_compute_dtype"),
    absent("only plain LoRA of linear layers", "use_dora", "lora_target_parameters"),
    absent("policy.hf_config_overrides and policy.* hold what Laurel lets you change",
           "model_init_kwargs"),
    absent(NOT_HERE, "neftune_noise_alpha", "optim_args", "debug", "torchdynamo", "eval_delay",
           "label_smoothing_factor", "activation_checkpointing", "sortish_sampler"),
    unneeded("nothing is pushed while a run goes on: laurel export --push-to-hub", "hub_strategy",
             "hub_always_push", "hub_private_repo", "hub_revision", "hub_token", "hub_model_id"),
    absent("laurel export --model DIR --output DIR --push-to-hub NAME, after the run",
           "push_to_hub", "push_to_hub_organization"),
    absent("logger.wandb.project and logger.mlflow.experiment_name are named there", "project",
           "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id",
           off=(None, "huggingface", "trackio")),
    absent("its checkpoints cannot be gone on with: start from its weights (policy.model_name)",
           "resume_from_checkpoint"),
    absent("set these in the environment of the command", "env"),
    absent("another file: import that one and add what this line changes", "config"),
    absent("arguments that the script passes on", "$@"),
)  # fmt: skip
