"""TRL's keys: what all of its trainers share.

Facts: huggingface/trl at f2cd57710 (2026-07-24, 1.10.0.dev0): `trl/trainer/base_config.py`,
`reward_config.py`, `sft_config.py`, `model_config.py`, `trl/scripts/utils.py`, `scripts/grpo.py`;
`TrainingArguments` of transformers 5.23.0, from which its configurations inherit.
"""

from __future__ import annotations

import math
from typing import Any

from laurel.config.importing.optimizing import (
    LORA,
    LORA_TARGETS,
    OPTIMIZER_TARGETS,
    put_adam,
    put_lora_modules,
    put_schedule,
    share_of,
)
from laurel.config.importing.rules import Rule, same, together
from laurel.config.importing.trl_steps import (
    global_batch,
    steps_of,
    total_steps,
    updates_per_step,
)
from laurel.config.importing.work import Work

FAR = 1_000_000
"""Epochs or steps that no run reaches."""

# ------------------------------------------------------------------------------- length and batches


def _length(work: Work) -> None:
    limit = work.whole("max_steps")
    if limit > 0:
        steps = math.ceil(limit / updates_per_step(work))
        how = "" if updates_per_step(work) == 1 else (
            f"{limit} optimizer steps, {updates_per_step(work)} of them in each step here"
        )  # fmt: skip
        work.put("{run}.max_num_steps", steps, by=("max_steps",), how=how)
        work.put("{run}.max_num_epochs", FAR, by=("max_steps",))
        return
    work.put("{run}.max_num_epochs", math.ceil(work.number("num_train_epochs")),
             by=("num_train_epochs",))  # fmt: skip
    if work.number("num_train_epochs") % 1:
        work.refuse(
            "num_train_epochs",
            f"Laurel counts whole passes: rounded up; limit {work.run}.max_num_steps",
        )  # fmt: skip


def _batch(work: Work) -> None:
    size = global_batch(work)
    how = (
        f"{work.whole('per_device_train_batch_size')} x {work.devices or 1} processes x "
        f"{work.whole('gradient_accumulation_steps')} accumulation"
    )
    if work.devices is None:
        how += "; --devices says how many processes"
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps")
    work.put("policy.train_global_batch_size", size, by=keys, how=how)
    work.put("policy.train_micro_batch_size", work.whole("per_device_train_batch_size"),
             by=keys[:1])  # fmt: skip
    if work.devices is not None:
        work.put("cluster.gpus_per_node", work.devices, by=(), origin="--devices")


# ---------------------------------------------------------------------------------------- optimizer


def _optimizer(work: Work) -> None:
    name = str(work["optim"]).lower()
    if not name.startswith("adamw"):
        work.refuse("optim", "AdamW is used; name another class of torch.optim in policy.optimizer")
    elif any(word in name for word in ("bit", "paged", "anyprecision", "stable", "bnb")):
        work.refuse("optim", "its states are kept in full here: plain AdamW, and more memory")
    refused = "optim" in work.entries
    put_adam(work, lr="learning_rate", weight_decay="weight_decay",
             betas=("adam_beta1", "adam_beta2"), eps="adam_epsilon",
             name_by=() if refused else ("optim",))  # fmt: skip
    if work.number("weight_decay"):
        work.note("weight_decay", "here of every weight, there of none of norms and biases")


def _schedule(work: Work) -> None:
    kind = str(work["lr_scheduler_type"]).lower().removeprefix("schedulertype.")
    extra = work["lr_scheduler_kwargs"] or {}
    known = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear",
             "cosine": "cosine", "cosine_with_min_lr": "cosine"}  # fmt: skip
    by = [k for k in ("lr_scheduler_type", "lr_scheduler_kwargs") if k in work.said] or [
        "lr_scheduler_type"
    ]
    lr = work.number("learning_rate")
    min_ratio = 0.0
    if isinstance(extra, dict):
        min_ratio = extra.get("min_lr_rate", extra.get("min_lr", 0.0) / lr if lr else 0.0)
        odd = sorted(set(extra) - {"min_lr", "min_lr_rate"})
        if odd:
            work.refuse("lr_scheduler_kwargs", f"{', '.join(odd)}: write policy.scheduler")
    if kind not in known:
        ways = ", ".join(known)
        work.refuse("lr_scheduler_type", f"of {ways} is made a schedule; write policy.scheduler")
    warmup = work.number("warmup_steps")
    ratio = warmup if 0 < warmup < 1 else work.number("warmup_ratio")
    steps = share_of(work, ratio, total_steps(work)) if ratio and warmup < 1 else int(warmup)
    key = "warmup_ratio" if ratio and ratio != warmup else "warmup_steps"
    if kind == "constant":
        steps = 0
        for one in work.said_of(("warmup_steps", "warmup_ratio")):
            work.unneeded(one, "a constant schedule has no warm-up there")
    put_schedule(work, decay="lr_scheduler_type", kind=known.get(kind, "constant"), by=by,
                 warmup_steps=steps, warmup_by=(key,), min_ratio=float(min_ratio),
                 total=total_steps(work))  # fmt: skip


def _gradient_norm(work: Work) -> None:
    norm = work["max_grad_norm"]
    work.put("policy.max_grad_norm", norm or None, by=("max_grad_norm",))


def _precision(work: Work) -> None:
    if work.flag("fp16"):
        work.refuse("fp16", "float16 is not trained in here: bfloat16 is used")
        work.put("policy.precision", "bfloat16", by=())
        return
    is_half = work["bf16"] is None or work.flag("bf16")
    work.put("policy.precision", "bfloat16" if is_half else "float32", by=("bf16",))
    if work.is_said("fp16"):
        work.unneeded("fp16", "it is off")


# ---------------------------------------------------------------------------- validation and saving


def _validation(work: Work) -> None:
    strategy = str(work["eval_strategy"]).lower().removeprefix("intervalstrategy.")
    work.put("{run}.val_at_start", work.flag("eval_on_start"), by=("eval_on_start",))
    if strategy in ("no", "false"):
        work.put("{run}.val_period", 0, by=("eval_strategy",))
        work.put("{run}.val_at_end", False, by=("eval_strategy",))
        return
    if strategy != "steps":
        work.refuse("eval_strategy", f"{work.run}.val_period counts steps, not epochs: set it "
                    f"(it is left at Laurel's; validated at the end as well)")  # fmt: skip
        return
    key = "eval_steps" if work["eval_steps"] is not None else "logging_steps"
    period = steps_of(work, key)
    if period is None:
        work.refuse(key, f"a share of the run: give --total-steps, or {work.run}.val_period")
        return
    work.put("{run}.val_period", period, by=("eval_strategy", key))


def _saving(work: Work) -> None:
    strategy = str(work["save_strategy"]).lower().removeprefix("savestrategy.")
    strategy = strategy.removeprefix("intervalstrategy.")
    if strategy == "no":
        work.put("checkpointing.save_period", FAR, by=("save_strategy",),
                 how="only the end is saved")  # fmt: skip
    elif strategy == "steps":
        period = steps_of(work, "save_steps")
        if period is None:
            work.refuse("save_steps", "a share of the run: give --total-steps")
        else:
            work.put("checkpointing.save_period", period, by=("save_steps",))
            if work.is_said("save_strategy"):
                work.put("checkpointing.save_period", period, by=("save_strategy", "save_steps"))
    else:
        work.refuse("save_strategy", "checkpointing.save_period counts steps: set it")
    work.put("checkpointing.keep_top_k", work["save_total_limit"], by=("save_total_limit",))
    if work.is_said("save_only_model"):
        keeps = not work.flag("save_only_model")
        work.put("checkpointing.save_optimizer", keeps, by=("save_only_model",))


def _best(work: Work) -> None:
    if not work.flag("load_best_model_at_end"):
        work.put("checkpointing.metric_name", None, by=("load_best_model_at_end",),
                 how="the most recent are kept")  # fmt: skip
        for key in work.said_of(("metric_for_best_model", "greater_is_better")):
            work.unneeded(key, "load_best_model_at_end is off")
        return
    metric = work.text("metric_for_best_model") or "loss"
    ours = {"loss": "auto", "accuracy": "validation-default_accuracy"}
    name = ours.get(metric.removeprefix("eval_"))
    if name is None or work.run == "grpo" or (work.run == "sft" and name != "auto"):
        work.refuse("load_best_model_at_end",
                    f"no figure here is {metric}: set checkpointing.metric_name")  # fmt: skip
        return
    keys = ("load_best_model_at_end", "metric_for_best_model")
    work.put("checkpointing.metric_name", name, by=keys)
    if work["greater_is_better"] is not None:
        work.put("checkpointing.higher_is_better", work["greater_is_better"],
                 by=("greater_is_better",))  # fmt: skip


def _loggers(work: Work) -> None:
    value = work["report_to"]
    names = [value] if isinstance(value, str) else list(value or [])
    if "all" in names:
        names = ["tensorboard", "wandb", "mlflow"]
    ours = ("tensorboard", "wandb", "mlflow")
    for name in ours:
        work.put(f"logger.{name}_enabled", name in names, by=("report_to",))
    odd = [name for name in names if name not in (*ours, "none")]
    if odd:
        work.refuse("report_to", f"{', '.join(map(str, odd))}: Laurel logs to {', '.join(ours)}")
    if work.text("run_name") is not None:
        work.put("logger.wandb.name", work.text("run_name"), by=("run_name",))
        work.put("logger.mlflow.run_name", work.text("run_name"), by=("run_name",))


# ------------------------------------------------------------------------------- model and adapters


def _model(work: Work) -> None:
    name = work.text("model_name_or_path")
    if name is None:
        work.refuse("model_name_or_path", "not said: set policy.model_name")
    else:
        work.put("policy.model_name", name, by=("model_name_or_path",))
    revision = work.text("model_revision")
    work.put("policy.revision", None if revision == "main" else revision, by=("model_revision",))


def _adapters(work: Work) -> None:
    if not work.flag("use_peft"):
        for key in work.said_of(_LORA_KEYS):
            work.unneeded(key, "use_peft is off")
        return
    work.put(LORA + "enabled", True, by=("use_peft",))
    rank = work.whole("lora_r")
    work.put(LORA + "dim", rank, by=("lora_r",))
    alpha = float(work.number("lora_alpha"))
    if work.flag("use_rslora"):
        scaled = round(alpha * math.sqrt(rank), 6)
        work.put(LORA + "alpha", scaled, by=("lora_alpha", "use_rslora"),
                 how="times the root of the rank: the scale is alpha / rank here")  # fmt: skip
    else:
        work.put(LORA + "alpha", alpha, by=("lora_alpha",))
        if work.is_said("use_rslora"):
            work.unneeded("use_rslora", "it is off")
    work.put(LORA + "dropout", float(work.number("lora_dropout")), by=("lora_dropout",))
    modules = work["lora_target_modules"]
    put_lora_modules(work, "lora_target_modules", modules or ["q_proj", "v_proj"])
    if modules is None:
        work.refuse("lora_target_modules",
                    "not said: peft chooses by architecture; q_proj and v_proj, its choice for "
                    "Llama and Qwen2, are written")  # fmt: skip
    saved = work["lora_modules_to_save"] or []
    saved = [saved] if isinstance(saved, str) else saved
    others = [name for name in saved if not (work.run == "rm" and name == "score")]
    if others:
        work.refuse("lora_modules_to_save", f"{', '.join(others)}: only the reward head is trained "
                    "whole beside adapters")  # fmt: skip
    elif work.is_said("lora_modules_to_save"):
        work.unneeded("lora_modules_to_save", "the reward head is always trained and saved whole")
    if work.is_said("lora_task_type"):
        work.unneeded("lora_task_type", "told from the run")


_LORA_KEYS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora",
              "lora_modules_to_save", "lora_task_type")  # fmt: skip


# --------------------------------------------------------------------------------------------- data


def _data(work: Work) -> None:
    split = str(work["eval_strategy"]).lower()
    validates = split.rpartition(".")[2] not in ("no", "false")
    if work["datasets"]:
        _mixture(work)
    elif work.text("dataset_name") is not None:
        name = work.text("dataset_name")
        work.put("data.train_data_path", name, by=("dataset_name",))
        work.put("data.subset", work.text("dataset_config"), by=("dataset_config",))
        work.put("data.train_split", work["dataset_train_split"], by=("dataset_train_split",))
        if validates:
            work.put("data.val_data_path", name, by=("dataset_name", "eval_strategy"))
            work.put("data.val_split", work["dataset_test_split"], by=("dataset_test_split",))
    else:
        work.refuse("dataset_name", "not said: set data.train_data_path")
    share = work["test_split_size"] if validates else None
    work.put("data.split_validation_size", float(share or 0.0), by=("test_split_size",))


def _mixture(work: Work) -> None:
    sets: list[dict[str, Any]] = []
    lost: list[str] = []
    for one in work["datasets"]:
        if not isinstance(one, dict) or "path" not in one:
            raise work.problem("datasets", "each set must be a mapping with a path")
        files, path = one.get("data_files"), one["path"]
        if isinstance(files, list) and len(files) == 1:
            files = files[0]
        is_builder = path in ("json", "csv", "parquet", "arrow")
        if is_builder and not isinstance(files, str):
            raise work.problem("datasets", f"path={path} needs one data_files; give a set for each")
        block = {"data_path": files if is_builder else path}
        if one.get("name") is not None:
            block["subset"] = one["name"]
        if not is_builder:
            block["split"] = one.get("split", "train")
        sets.append(block)
        dropped = {"columns", "fraction", "data_dir"} | (set() if is_builder else {"data_files"})
        lost += [f"{key} of {path}" for key in sorted(dropped) if one.get(key) is not None]
    work.put("data.train", sets, by=("datasets",))
    if lost:
        work.refuse("datasets", f"the sets are carried, but not {', '.join(lost)}: make a file")


# -------------------------------------------------------------------------------------------- table

COMMON_RULES: tuple[Rule, ...] = (
    together(("model_name_or_path", "model_revision"), ("policy.model_name", "policy.revision"),
             "`main` is null", _model),
    same("trust_remote_code", "policy.trust_remote_code"),
    together(("dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split",
              "datasets", "test_split_size"),
             ("data.train_data_path", "data.subset", "data.train_split", "data.val_data_path",
              "data.val_split", "data.train", "data.split_validation_size"),
             "`dataset_test_split` only where `eval_strategy` is not `no`", _data),
    together(("per_device_train_batch_size", "gradient_accumulation_steps"),
             ("policy.train_global_batch_size", "policy.train_micro_batch_size",
              "cluster.gpus_per_node"),
             "batch x processes (`--devices`) x accumulation", _batch),
    together(("num_train_epochs", "max_steps"), ("{run}.max_num_epochs", "{run}.max_num_steps"),
             "`max_steps` above 0 wins; GRPO: divided by the updates of a step", _length),
    together(("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim"),
             OPTIMIZER_TARGETS, "AdamW; norms and biases are decayed, too", _optimizer),
    together(("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
             ("policy.scheduler",), "linear and cosine need `max_steps` or `--total-steps`",
             _schedule),
    together(("max_grad_norm",), ("policy.max_grad_norm",), "0 is null", _gradient_norm),
    together(("bf16", "fp16"), ("policy.precision",), "neither is bf16; fp16 is not carried",
             _precision),
    same("gradient_checkpointing", "policy.dtensor_cfg.activation_checkpointing"),
    together(("eval_strategy", "eval_steps", "eval_on_start", "logging_steps"),
             ("{run}.val_period", "{run}.val_at_start", "{run}.val_at_end"),
             "`no` is 0; without `eval_steps` it is `logging_steps`", _validation),
    together(("save_strategy", "save_steps", "save_total_limit", "save_only_model"),
             ("checkpointing.save_period", "checkpointing.keep_top_k",
              "checkpointing.save_optimizer"), "the last step is always saved here", _saving),
    together(("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
             ("checkpointing.metric_name", "checkpointing.higher_is_better"),
             "off is null: the most recent; `eval_loss` is `auto`", _best),
    same("output_dir", "checkpointing.checkpoint_dir"),
    same("seed", "{run}.seed"),
    together(("report_to", "run_name"),
             ("logger.tensorboard_enabled", "logger.wandb_enabled", "logger.mlflow_enabled",
              "logger.wandb.name", "logger.mlflow.run_name"), "one switch for each", _loggers),
    together(("use_cpu",), ("cluster.device",), "true is `cpu`",
             lambda work: work.put("cluster.device", "cpu" if work.flag("use_cpu") else "auto",
                                   by=("use_cpu",))),
    together(("use_peft", *_LORA_KEYS), LORA_TARGETS,
             "the reward head is always trained; rsLoRA: alpha times the root of the rank",
             _adapters),
)  # fmt: skip
