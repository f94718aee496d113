"""verl: the model, data, drawing, saving and the cluster; sources as in `verl.py`."""

from __future__ import annotations

from laurel.config.importing.optimizing import LORA, put_lora_modules
from laurel.config.importing.verl_names import ACTOR, MODEL, ROLLOUT
from laurel.config.importing.work import Work

FAR = 1_000_000
"""Steps or epochs that no run reaches."""


def rollout(work: Work) -> None:
    """How completions are drawn, in training and validation."""
    ours = "policy.generation."
    for key in ("temperature", "top_p"):
        work.put(ours + key, work[ROLLOUT + key], by=(ROLLOUT + key,))
    work.put(ours + "top_k", _top_k(work, ROLLOUT + "top_k"), by=(ROLLOUT + "top_k",))
    engine = str(work[ROLLOUT + "name"] or "vllm")
    if engine in ("vllm", "hf"):
        name = {"vllm": "vllm", "hf": "transformers"}[engine]
        work.put(ours + "backend", name, by=(ROLLOUT + "name",))
    else:
        work.refuse(ROLLOUT + "name", "Laurel draws with vLLM or transformers: "
                    "policy.generation.backend=auto")  # fmt: skip
    vllm = ours + "vllm_cfg."
    for theirs, here in (
        ("tensor_model_parallel_size", "tensor_parallel_size"),
        ("pipeline_model_parallel_size", "pipeline_parallel_size"),
        ("gpu_memory_utilization", "gpu_memory_utilization"),
        ("enforce_eager", "enforce_eager"),
        ("max_model_len", "max_model_len"),
    ):
        if engine == "vllm":
            work.put(vllm + here, work[ROLLOUT + theirs], by=(ROLLOUT + theirs,))
    check = ROLLOUT + "val_kwargs."
    draws = work.flag(check + "do_sample")
    temperature = work[check + "temperature"] if draws else 0
    by = tuple(k for k in (check + "do_sample", check + "temperature") if work.is_said(k))
    work.put(ours + "val_temperature", temperature, by=by or (check + "temperature",),
             how="without do_sample 0")  # fmt: skip
    work.put(ours + "val_top_p", work[check + "top_p"], by=(check + "top_p",))
    work.put(ours + "val_top_k", _top_k(work, check + "top_k"), by=(check + "top_k",))
    if draws and _top_k(work, check + "top_k") is None and _top_k(work, ROLLOUT + "top_k"):
        work.refuse(check + "top_k", "null is that of training here: no way to draw from all")
    work.put("grpo.val_num_generations_per_prompt", work[check + "n"], by=(check + "n",))


def _top_k(work: Work, key: str) -> int | None:
    return None if work[key] in (None, 0, -1) else work.whole(key)


def adapters(work: Work, place: str = MODEL) -> None:
    """LoRA; `place` is what its keys begin with."""
    rank, alpha = place + "lora_rank", place + "lora_alpha"
    modules, left_out = place + "target_modules", place + "exclude_modules"
    if not work.whole(rank):
        for key in work.said_of((rank, alpha, modules, left_out)):
            work.unneeded(key, "lora_rank is 0: no adapters")
        return
    work.put(LORA + "enabled", True, by=(rank,))
    work.put(LORA + "dim", work.whole(rank), by=(rank,))
    work.put(LORA + "alpha", float(work.number(alpha)), by=(alpha,))
    put_lora_modules(work, modules, work[modules])
    if work[left_out]:
        names = [work[left_out]] if isinstance(work[left_out], str) else work[left_out]
        work.put(LORA + "exclude_modules", names, by=(left_out,))


def files(work: Work) -> None:
    """The files of rows, one or several."""
    for theirs, path, block in (
        ("data.train_files", "data.train_data_path", "data.train"),
        ("data.val_files", "data.val_data_path", "data.validation"),
    ):
        files = work[theirs]
        several = [files] if isinstance(files, str) else list(files or [])
        if not work.is_said(theirs):
            if theirs == "data.train_files":
                work.refuse(theirs, "not said: set data.train_data_path")
        elif len(several) == 1:
            work.put(path, several[0], by=(theirs,))
        elif several:
            work.put(block, [{"data_path": one} for one in several], by=(theirs,))
    work.put("data.split_validation_size", 0.0, by=())
    most = work["data.train_max_samples"]
    work.put("data.max_samples", None if most in (None, -1) else most,
             by=("data.train_max_samples",), how="-1 is null")  # fmt: skip


def data(work: Work) -> None:
    """Where tasks come from."""
    files(work)
    work.put(
        "data.dataset_name",
        "DAPOMath17K",
        by=(),
        how="the reader of rows with a prompt of messages and reward_model.ground_truth",
    )
    if work["data.val_max_samples"] not in (None, -1):
        work.put("grpo.max_val_samples", work["data.val_max_samples"], by=("data.val_max_samples",))
    else:
        work.put("grpo.max_val_samples", FAR, by=("data.val_max_samples",), how="all")
    if work["data.seed"] is not None:
        work.put("grpo.seed", work["data.seed"], by=("data.seed",))


def trainer(work: Work, kept: str = "trainer.max_actor_ckpt_to_keep") -> None:
    """Saving, validation, logging and the cluster; `kept` is the key of how many are kept."""
    project, name = str(work["trainer.project_name"]), str(work["trainer.experiment_name"])
    folder = work["trainer.default_local_dir"]
    by: tuple[str, ...] = ("trainer.default_local_dir",)
    if not work.is_said(*by):
        folder, by = f"checkpoints/{project}/{name}", ("trainer.project_name",
                                                       "trainer.experiment_name")  # fmt: skip
    work.put("checkpointing.checkpoint_dir", folder, by=by)
    for key, ours in (
        ("save_freq", "checkpointing.save_period"),
        ("test_freq", "{run}.val_period"),
    ):
        steps = _period(work, f"trainer.{key}")
        never = FAR if key == "save_freq" else 0
        work.put(ours, steps if steps > 0 else never, by=(f"trainer.{key}",))
    has_rows, tests = bool(work["data.val_files"]), _period(work, "trainer.test_freq") > 0
    # Fine-tuning there validates after its last step, whatever the period.
    at_end = has_rows if work.run == "sft" else tests
    work.put("{run}.val_at_end", at_end, by=("trainer.test_freq",))
    if not has_rows and tests:
        work.refuse("data.val_files", "not said: set data.val_data_path, or there is no validation")
    work.put("checkpointing.metric_name", None, by=(), how="the most recent are kept")
    work.put("checkpointing.keep_top_k", work[kept], by=(kept,))
    first = "trainer.val_before_train"
    work.put("{run}.val_at_start", work.flag(first) and has_rows,
             by=(first,) if work.run == "grpo" else ())  # fmt: skip
    _loggers(work, project, name)
    mode = "trainer.resume_mode"
    modes = {"auto": "auto", "disable": "never"}
    if work[mode] in modes:
        work.put("checkpointing.resume", modes[work[mode]], by=(mode,))
    else:
        work.refuse(mode, "its checkpoints cannot be gone on with: start from its weights "
                    "(policy.model_name)")  # fmt: skip
    work.put("cluster.num_nodes", work["trainer.nnodes"], by=("trainer.nnodes",))
    if work.devices is None:
        work.put("cluster.gpus_per_node", work["trainer.n_gpus_per_node"],
                 by=("trainer.n_gpus_per_node",))  # fmt: skip
        return
    work.put("cluster.gpus_per_node", work.devices, by=(), origin="the launcher's processes")
    if work.is_said("trainer.n_gpus_per_node"):
        work.unneeded("trainer.n_gpus_per_node", "the launcher says how many processes there are")


def _period(work: Work, key: str) -> int:
    """Steps between; 0 where it is a word that has no number here."""
    if work[key] == "after_each_epoch":
        work.refuse(key, "periods are steps here: write how many an epoch has")
        return 0
    return work.whole(key)


def _loggers(work: Work, project: str, name: str) -> None:
    said = work["trainer.logger"]
    names = [said] if isinstance(said, str) else list(said or [])
    for one in ("wandb", "tensorboard", "mlflow"):
        work.put(f"logger.{one}_enabled", one in names, by=("trainer.logger",))
    odd = [one for one in names if one not in ("console", "wandb", "tensorboard", "mlflow", "file")]
    if odd:
        work.refuse("trainer.logger", f"{', '.join(map(str, odd))}: Laurel logs to wandb, "
                    "tensorboard and mlflow")  # fmt: skip
    for ours, value, key in (("wandb.project", project, "project_name"),
                             ("wandb.name", name, "experiment_name"),
                             ("mlflow.experiment_name", project, "project_name"),
                             ("mlflow.run_name", name, "experiment_name")):  # fmt: skip
        if work.is_said(f"trainer.{key}"):
            work.put(f"logger.{ours}", value, by=(f"trainer.{key}",))


def model(work: Work, place: str = MODEL) -> None:
    """Which model."""
    path = place + "path"
    if work.is_said(path):
        work.put("policy.model_name", work[path], by=(path,))
    else:
        work.refuse(path, "not said: set policy.model_name")


def offload(work: Work, place: str = ACTOR + "fsdp_config.") -> None:
    """What waits on the host."""
    keys = [place + key for key in ("param_offload", "optimizer_offload")]
    on = [key for key in keys if work.flag(key)]
    work.put("policy.dtensor_cfg.cpu_offload", keys[0] in on, by=keys[:1])
    if keys[1] in on and keys[0] not in on:
        work.refuse(keys[1], "policy.dtensor_cfg.cpu_offload offloads parameters, too")
    elif work.is_said(keys[1]):
        work.unneeded(keys[1], "with the parameters, or off")


def budget(
    work: Work,
    on: str = ACTOR + "use_dynamic_bsz",
    most: str = ACTOR + "ppo_max_token_len_per_gpu",
) -> None:
    """Tokens of a micro-batch."""
    if work.flag(on):
        work.put("policy.sequence_packing.train_mb_tokens", work.whole(most), by=(on, most))
    else:
        for key in work.said_of((on, most)):
            work.unneeded(key, "it is off; nothing is padded here anyway")
