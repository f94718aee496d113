"""OpenRLHF's keys: what its trainers share.

Facts: OpenRLHF/OpenRLHF at 3c3be6234 (2026-08-13, 0.11.0): `openrlhf/cli/train_rm.py`,
`train_sft.py`, `train_ppo_ray.py`; the names before the dotted ones (0.10.1.post2) at the parent of
ed62d0e2 (2026-04-19); `openrlhf/utils/deepspeed/deepspeed.py` for schedules.
"""

from __future__ import annotations

from laurel.config.importing.optimizing import (
    LORA,
    LORA_TARGETS,
    OPTIMIZER_TARGETS,
    put_adam,
    put_lora_modules,
    put_schedule,
    share_of,
)
from laurel.config.importing.rules import Rule, absent, same, together, unneeded
from laurel.config.importing.work import Work

FAR = 1_000_000
"""Steps that no run reaches."""

# --------------------------------------------------------------------------------------- converters


def optimizer(work: Work, prefix: str = "") -> None:
    """AdamW, from the keys that begin with `prefix`."""
    name = prefix + "optim"
    refused = str(work[name]) != "adam"
    if refused:
        work.refuse(name, "AdamW is used; name another class of torch.optim in policy.optimizer")
    put_adam(work, lr=prefix + "adam.lr", weight_decay=prefix + "adam.weight_decay",
             betas=(prefix + "adam.betas",), eps=prefix + "adam.eps",
             name_by=() if refused else (name,))  # fmt: skip


def schedule(work: Work, prefix: str = "") -> None:
    """The learning rate, from the keys that begin with `prefix`."""
    decay, share, floor = (prefix + key for key in OPTIMIZER_KEYS[-4:-1])
    known = {"cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear",
             "constant": "constant", "constant_with_warmup": "constant"}  # fmt: skip
    name = str(work[decay])
    if name not in known:
        work.refuse(decay, f"of {', '.join(known)} is made a schedule; write policy.scheduler")
    has_floor = name == "cosine_with_min_lr"
    min_ratio = float(work.number(floor)) if has_floor else 0.0
    steps = share_of(work, float(work.number(share)), None)
    warmup_by: tuple[str, ...] = (share,)
    if name == "constant":
        steps, warmup_by = 0, ()
    put_schedule(work, decay=decay, kind=known.get(name, "constant"),
                 by=(decay, floor) if has_floor else (decay,), warmup_steps=steps,
                 warmup_by=warmup_by, min_ratio=min_ratio)  # fmt: skip


OPTIMIZER_KEYS = ("optim", "adam.lr", "adam.betas", "adam.eps", "adam.weight_decay",
                  "lr_scheduler", "lr_warmup_ratio", "min_lr_ratio", "max_norm")  # fmt: skip


def optimizer_rules(prefix: str = "") -> tuple[Rule, ...]:
    """The rules of an optimizer whose keys begin with `prefix`."""
    keys = [prefix + key for key in OPTIMIZER_KEYS]
    return (
        together(keys[:5], OPTIMIZER_TARGETS, "AdamW; `muon` is not carried", optimizer, prefix),
        together(keys[5:8], ("policy.scheduler",),
                 "a share of the run: needs `--total-steps`", schedule, prefix),
        same(keys[8], "policy.max_grad_norm"),
        unneeded("only of Muon", f"{prefix}muon.*"),
    )  # fmt: skip


def _precision(work: Work) -> None:
    if work["ds.param_dtype"] != "bf16":
        work.refuse("ds.param_dtype", "float16 is not trained in here: bfloat16 is used")
    work.put("policy.precision", "bfloat16",
             by=("ds.param_dtype",) if work["ds.param_dtype"] == "bf16" else ())  # fmt: skip


def _adapters(work: Work) -> None:
    keys = ("ds.lora.alpha", "ds.lora.dropout", "ds.lora.target_modules")
    rank = work.whole("ds.lora.rank")
    if not rank:
        for key in work.said_of(("ds.lora.rank", *keys)):
            work.unneeded(key, "ds.lora.rank is 0: no adapters")
        return
    work.put(LORA + "enabled", True, by=("ds.lora.rank",))
    work.put(LORA + "dim", rank, by=("ds.lora.rank",))
    work.put(LORA + "alpha", float(work.number(keys[0])), by=keys[:1])
    work.put(LORA + "dropout", float(work.number(keys[1])), by=keys[1:2])
    put_lora_modules(work, keys[2], work[keys[2]])


def _saving(work: Work) -> None:
    steps = work.whole("ckpt.save_steps")
    work.put("checkpointing.save_period", FAR if steps < 0 else steps, by=("ckpt.save_steps",),
             how="only the end is saved" if steps < 0 else "")  # fmt: skip
    work.put("checkpointing.keep_top_k", work["ckpt.max_num"], by=("ckpt.max_num",))
    work.put("checkpointing.checkpoint_dir", work["ckpt.output_dir"], by=("ckpt.output_dir",))
    if work.is_said("ckpt.path"):
        work.unneeded("ckpt.path", "checkpoints and the final model are in one directory")


def validation(work: Work) -> None:
    """Where rows to validate on are, and how often that is done."""
    steps = work.whole("eval.steps")
    if work.text("eval.dataset") is None:
        work.put("{run}.val_period", 0, by=("eval.dataset",))
        work.put("{run}.val_at_end", False, by=("eval.dataset",))
        for key in work.said_of(("eval.steps", "eval.split")):
            work.unneeded(key, "there is no eval.dataset")
        return
    work.put("{run}.val_at_start", False, by=())
    work.put("data.val_data_path", work["eval.dataset"], by=("eval.dataset",))
    if work.is_said("eval.split"):
        work.put("data.val_split", work["eval.split"], by=("eval.split",))
    if steps > 0:
        work.put("{run}.val_period", steps, by=("eval.steps",))
    else:
        work.put("{run}.val_period", 0, by=("eval.steps",), how="at the end")
        if work.whole("train.max_epochs") > 1:
            work.refuse("eval.steps", "there once an epoch, here at the end: set "
                        f"{work.run}.val_period")  # fmt: skip


def _loggers(work: Work) -> None:
    key = work["logger.wandb.key"]
    work.put("logger.wandb_enabled", key not in (None, False, ""), by=("logger.wandb.key",))
    if key not in (None, False, ""):
        work.refuse("logger.wandb.key", "keys are not written into files: wandb login, or the "
                    "variable WANDB_API_KEY; logger.wandb_enabled is set")  # fmt: skip
        work.put("logger.wandb.project", work["logger.wandb.project"], by=("logger.wandb.project",))
    elif work.is_said("logger.wandb.project"):
        work.unneeded("logger.wandb.project", "there is no logger.wandb.key")
    for theirs, ours in (("org", "entity"), ("run_name", "name")):
        if work.is_said(f"logger.wandb.{theirs}"):
            work.put(f"logger.wandb.{ours}", work[f"logger.wandb.{theirs}"],
                     by=(f"logger.wandb.{theirs}",))  # fmt: skip
    folder = work.text("logger.tensorboard_dir")
    work.put("logger.tensorboard_enabled", folder is not None, by=("logger.tensorboard_dir",),
             how="the directory is logger.log_dir" if folder else "")  # fmt: skip


def template(work: Work) -> None:
    """Whether conversations are rendered by the tokenizer's template, or texts joined."""
    said = "data.apply_chat_template"
    if work.flag(said):
        if work.is_said("data.input_template"):
            work.unneeded("data.input_template", f"{said} comes before it")
    elif work.text("data.input_template") is not None:
        work.refuse("data.input_template", "write it as a chat template "
                    "(policy.tokenizer.chat_template) or a data.prompt_file")  # fmt: skip
    elif work.is_said("data.input_template"):
        work.unneeded("data.input_template", "there is none")
    own = work.text("data.tokenizer_chat_template")
    if work.flag(said) and own is not None:
        keys = (said, "data.tokenizer_chat_template")
        work.put("policy.tokenizer.chat_template", own, by=keys)
    else:
        value, how = ("default", "") if work.flag(said) else (None, "texts are joined as they are")
        work.put("policy.tokenizer.chat_template", value, by=(said,), how=how)


def rows(work: Work, name: str, probs: str) -> None:
    """Where rows come from: one set, or several without their probabilities."""
    said = work.text(name)
    if said is None:
        work.refuse(name, "not said: set data.train_data_path")
        return
    several = [part.strip() for part in said.split(",") if part.strip()]
    if len(several) > 1:
        work.put("data.train", [{"data_path": _path(one)} for one in several], by=(name,))
        if work.text(probs) is not None:
            work.refuse(probs, "all rows of all sets are used; repeat or cut files for shares")
        return
    work.put("data.train_data_path", _path(several[0]), by=(name,))
    if work.is_said(probs):
        work.unneeded(probs, "there is one set")


def _path(name: str) -> str:
    """Theirs may be `json@directory`: the builder, and where its files are."""
    return name.partition("@")[2] or name


SPREAD = "weights are spread by FSDP: cluster.gpus_per_node, cluster.num_nodes, `laurel plan`"

COMMON_RULES: tuple[Rule, ...] = (
    together(("ckpt.output_dir", "ckpt.path", "ckpt.save_steps", "ckpt.max_num"),
             ("checkpointing.checkpoint_dir", "checkpointing.save_period",
              "checkpointing.keep_top_k"), "-1 steps: only the end", _saving),
    same("train.seed", "{run}.seed"),
    together(("ds.param_dtype",), ("policy.precision",), "fp16 is not carried", _precision),
    same("ds.ring_attn_size", "policy.dtensor_cfg.context_parallel_size"),
    same("ds.tensor_parallel_size", "policy.dtensor_cfg.tensor_parallel_size"),
    together(("ds.lora.rank", "ds.lora.alpha", "ds.lora.dropout", "ds.lora.target_modules"),
             LORA_TARGETS, "rank 0 is off", _adapters),
    together(("data.apply_chat_template", "data.tokenizer_chat_template", "data.input_template"),
             ("policy.tokenizer.chat_template",),
             "without `apply_chat_template` null: texts are joined as they are", template),
    same("data.max_samples", "data.max_samples"),
    together(("logger.wandb.key", "logger.wandb.org", "logger.wandb.project",
              "logger.wandb.run_name", "logger.tensorboard_dir"),
             ("logger.wandb_enabled", "logger.wandb.project", "logger.wandb.entity",
              "logger.wandb.name", "logger.tensorboard_enabled"),
             "the key itself is never written", _loggers),
)  # fmt: skip

COMMON_REST: tuple[Rule, ...] = (
    unneeded(SPREAD, "ds.zero_stage", "ds.zpg", "ds.grad_accum_dtype", "ds.overlap_comm",
             "ds.deepcompile", "local_rank", "bf16"),
    absent("policy.dtensor_cfg.cpu_offload keeps parameters, too, on the host", "ds.adam_offload"),
    unneeded("Laurel's own attention packs without padding and computes each prompt once",
             "ds.packing_samples", "ds.attn_implementation", "ds.ring_attn_head_stride"),
    unneeded("only speed or memory", "ds.use_liger_kernel", "ds.experts_implementation",
             "train.dynamic_batch_enable", "train.max_tokens_per_gpu", "rollout.max_tokens_per_gpu",
             "rollout.micro_batch_size", "ds.enable_sleep", "vllm.enable_sleep"),
    unneeded("Laurel reads rows itself", "data.disable_fast_tokenizer",
             "data.dataloader_num_workers"),
    unneeded("checkpoints always hold plain weights and go on from the newest",
             "ckpt.save_hf", "ckpt.disable_ds", "ckpt.load_enable", "ds.use_universal_ckpt",
             "ckpt.max_mem"),
    unneeded("every step is logged", "logger.logging_steps"),
    absent("no group: logger.wandb.name, .project, .entity", "logger.wandb.group"),
    absent("runs repeat on one machine without it; kernels are not forced",
           "train.full_determinism_enable"),
    absent("weights are not quantised here: plain LoRA, and more memory", "ds.load_in_4bit"),
    absent("models come from Hugging Face, or a directory", "use_ms"),
    absent("arguments that the script passes on", "$@"),
)  # fmt: skip
