"""verl's keys of `sft_trainer`, its fine-tuning.

Facts: verl-project/verl at 1dda039b9 (2026-08-22, 0.10.0.dev):
`verl/trainer/config/sft_trainer_engine.yaml` with `model/hf_model.yaml`, `engine/fsdp.yaml` and
`optim/fsdp.yaml`; `verl/trainer/sft_trainer.py`, `verl/utils/dataset/multiturn_sft_dataset.py`,
`verl/workers/utils/losses.py`. The older `fsdp_sft_trainer` has other keys and defaults.
"""

from __future__ import annotations

from laurel.config.importing.optimizing import LORA, OPTIMIZER_TARGETS
from laurel.config.importing.rules import Table, absent, same, together, unneeded
from laurel.config.importing.verl_learning import length, optimizer
from laurel.config.importing.verl_names import model_rest
from laurel.config.importing.verl_running import adapters, budget, files, model, offload, trainer
from laurel.config.importing.work import Work

_MODEL, _OPTIM, _ENGINE = "model.", "optim.", "engine."


def _rows(work: Work) -> None:
    """Where conversations come from."""
    files(work)
    work.put("data.chat_key", work["data.messages_key"], by=("data.messages_key",))
    work.put("sft.only_unmask_final", False, by=(), how="every turn of the assistant is learned")
    most = "data.val_max_samples"
    if work[most] not in (None, -1):
        work.refuse(most, "cut the file, or set sft.val_batches")
    elif work.is_said(most):
        work.unneeded(most, "all rows are used")


def _batches(work: Work) -> None:
    """Conversations of a step, and of a pass."""
    whole, part = "data.train_batch_size", "data.micro_batch_size_per_gpu"
    work.put("policy.train_global_batch_size", work.whole(whole), by=(whole,))
    work.put("sft.val_global_batch_size", work.whole(whole), by=(whole,))
    if not work.flag("data.use_dynamic_bsz"):
        work.put("policy.train_micro_batch_size", work.whole(part), by=(part,))
    elif work.is_said(part):
        work.unneeded(part, "data.max_token_len_per_gpu says it")
    budget(work, "data.use_dynamic_bsz", "data.max_token_len_per_gpu")


def _longest(work: Work) -> None:
    """Longest conversation, and what becomes of longer ones."""
    work.put("policy.max_total_sequence_length", work.whole("data.max_length"),
             by=("data.max_length",))  # fmt: skip
    how, pads = "data.truncation", str(work["data.pad_mode"])
    if work[how] == "error":
        if work.is_said(how):
            work.unneeded(how, "of longer ones the end is cut off, and they are counted")
    elif work[how] == "left" and pads == "right":
        work.refuse(how, "the end is cut off here, not the beginning")
    elif work.is_said(how):
        work.unneeded(how, "the end is cut off, as there")
    if work.is_said("data.pad_mode"):
        work.unneeded("data.pad_mode", "nothing is padded here")


def _template(work: Work) -> None:
    """What chat templates are told besides."""
    key, thinks = "data.apply_chat_template_kwargs", "data.enable_thinking_default"
    told = dict(work[key] or {})
    by = [key]
    if isinstance(work[thinks], bool):
        told["enable_thinking"] = work[thinks]
        by.append(thinks)
    elif work.is_said(thinks):
        work.unneeded(thinks, "the template decides")
    if told or work.is_said(key):
        work.put("policy.tokenizer.chat_template_kwargs", told, by=by)


SFT = Table(
    rules=(
        together((_MODEL + "path",), ("policy.model_name",), "as it is", model, _MODEL),
        same(_MODEL + "trust_remote_code", "policy.trust_remote_code"),
        same(_MODEL + "tokenizer_path", "policy.tokenizer.name"),
        same(_MODEL + "enable_gradient_checkpointing",
             "policy.dtensor_cfg.activation_checkpointing"),
        together([_MODEL + k for k in ("lora_rank", "lora_alpha", "target_modules",
                                       "exclude_modules")],
                 [LORA + k for k in ("enabled", "dim", "alpha", "target_modules",
                                     "match_all_linear", "exclude_modules")],
                 "rank 0 is off", adapters, _MODEL),
        together(("data.train_files", "data.val_files", "data.train_max_samples",
                  "data.val_max_samples", "data.messages_key"),
                 ("data.train_data_path", "data.train", "data.val_data_path", "data.validation",
                  "data.split_validation_size", "data.max_samples", "data.chat_key",
                  "sft.only_unmask_final"),
                 "every turn of the assistant is learned, as there", _rows),
        together(("data.train_batch_size", "data.micro_batch_size_per_gpu", "data.use_dynamic_bsz",
                  "data.max_token_len_per_gpu"),
                 ("policy.train_global_batch_size", "sft.val_global_batch_size",
                  "policy.train_micro_batch_size", "policy.sequence_packing.train_mb_tokens"),
                 "the loss is the mean over the tokens of the whole batch, as there", _batches),
        together(("data.max_length", "data.truncation", "data.pad_mode"),
                 ("policy.max_total_sequence_length",),
                 "of longer ones the end is cut off; `error` ends the run there", _longest),
        together(("data.apply_chat_template_kwargs", "data.enable_thinking_default"),
                 ("policy.tokenizer.chat_template_kwargs",),
                 "true and false are `enable_thinking`", _template),
        together(("trainer.total_epochs", "trainer.total_training_steps"),
                 ("{run}.max_num_epochs", "{run}.max_num_steps"), "whichever ends first", length),
        together([_OPTIM + k for k in (
                      "optimizer", "lr", "weight_decay", "betas", "lr_scheduler_type",
                      "warmup_style", "lr_warmup_steps", "lr_warmup_steps_ratio", "min_lr_ratio",
                      "num_cycles", "clip_grad")],
                 (*OPTIMIZER_TARGETS, "policy.scheduler", "policy.max_grad_norm"),
                 "shares of the run need `total_training_steps` or `--total-steps`", optimizer,
                 _OPTIM),
        same(_ENGINE + "ulysses_sequence_parallel_size",
             "policy.dtensor_cfg.context_parallel_size"),
        together((_ENGINE + "param_offload", _ENGINE + "optimizer_offload"),
                 ("policy.dtensor_cfg.cpu_offload",), "both, or none", offload, _ENGINE),
        together([f"trainer.{k}" for k in (
                      "default_local_dir", "save_freq", "test_freq", "max_ckpt_to_keep", "logger",
                      "project_name", "experiment_name", "resume_mode", "nnodes",
                      "n_gpus_per_node")],
                 ("checkpointing.checkpoint_dir", "checkpointing.save_period", "{run}.val_period",
                  "{run}.val_at_end", "checkpointing.metric_name", "checkpointing.keep_top_k",
                  "{run}.val_at_start", "logger.wandb_enabled", "logger.tensorboard_enabled",
                  "logger.mlflow_enabled", "logger.wandb.project", "logger.wandb.name",
                  "logger.mlflow.experiment_name", "logger.mlflow.run_name",
                  "checkpointing.resume", "cluster.num_nodes", "cluster.gpus_per_node"),
                 "-1: only the end, or never; processes of torchrun before n_gpus_per_node",
                 trainer, "trainer.max_ckpt_to_keep"),
        *model_rest(_MODEL),
        absent("backends are PyTorch's own here", _ENGINE + "strategy", "defaults.engine",
               "defaults.optim", off=(None, "fsdp", "fsdp2")),
        absent("policy.dtensor_cfg.cpu_offload=true", _ENGINE + "offload_policy"),
        absent("weights are not quantised here", _ENGINE + "qat.enable"),
        absent("arguments of the optimizer: policy.optimizer.kwargs",
               _OPTIM + "override_optimizer_config", _OPTIM + "override_optimizer_config.*"),
        absent("data.dataset_name may be the import path of a class of your own",
               "data.custom_cls.path", "data.custom_cls.name"),
        absent("tools of a row are not rendered", "data.tools_key", off=(None, "tools")),
        absent("one setting for all rows: policy.tokenizer.chat_template_kwargs",
               "data.enable_thinking_key", off=(None, "enable_thinking")),
        absent("the first rows are taken (data.max_samples), not drawn", "data.shuffle"),
        absent("start from its weights (policy.model_name)", "trainer.resume_from_path"),
        absent("after the run: laurel export", "trainer.default_hdfs_dir"),
        absent("another file: import that one, or add what it changes", "--config-name",
               "--config-path", "--config-dir"),
        absent("arguments that the script passes on", "$@"),
        unneeded("a conversation is rendered as a whole here, turn by turn there",
                 "data.ignore_input_ids_mismatch"),
        unneeded("texts only", "data.image_key", "data.video_key", "data.image_patch_size"),
        unneeded("nothing there reads it: the order of rows has no seed of its own",
                 "trainer.seed", "data.seed"),
        unneeded("it says how the work is done, not what is learned", "data.num_workers",
                 "data.use_shm", "data.balance_dp_token", "trainer.balance_batch",
                 "trainer.device", "trainer.profile_interval", "trainer.*", "checkpoint.*",
                 "profiler.*", _ENGINE + "*", _OPTIM + "optimizer_impl", _OPTIM + "*",
                 "hydra.*", "defaults"),
    ),
    defaults={
        "data.train_batch_size": 256, "data.micro_batch_size_per_gpu": 4,
        "data.use_dynamic_bsz": True, "data.max_token_len_per_gpu": 8192,
        "data.train_max_samples": -1, "data.val_max_samples": -1, "data.messages_key": "messages",
        "data.max_length": 1024, "data.truncation": "error", "data.pad_mode": "no_padding",
        "trainer.total_epochs": 4, "trainer.total_training_steps": None, "trainer.save_freq": -1,
        "trainer.test_freq": -1, "trainer.logger": ["console", "wandb"],
        "trainer.project_name": "gsm8k-sft", "trainer.experiment_name": "test",
        "trainer.max_ckpt_to_keep": None, "trainer.nnodes": 1, "trainer.n_gpus_per_node": 1,
        "trainer.resume_mode": "auto",
        "model.trust_remote_code": False, "model.tokenizer_path": None,
        "model.enable_gradient_checkpointing": True, "model.lora_rank": 0,
        "model.lora_alpha": 16, "model.target_modules": "all-linear",
        "model.exclude_modules": None,
        "optim.optimizer": "AdamW", "optim.lr": 1e-3, "optim.weight_decay": 0.01,
        "optim.betas": [0.9, 0.999], "optim.lr_scheduler_type": "constant",
        "optim.warmup_style": None, "optim.lr_warmup_steps": -1,
        "optim.lr_warmup_steps_ratio": 0.0, "optim.min_lr_ratio": 0.0, "optim.clip_grad": 1.0,
        "engine.ulysses_sequence_parallel_size": 1, "engine.param_offload": False,
        "engine.optimizer_offload": False,
    },
    told_by=frozenset({"model.path", "optim.lr", "data.messages_key",
                       "data.micro_batch_size_per_gpu", "data.max_token_len_per_gpu",
                       "data.max_length", "engine.strategy"}),
    other_names={"engine": "defaults.engine", "optim": "defaults.optim"},
)  # fmt: skip
