"""Translates verl's main_ppo (for its estimators without a critic) and sft_trainer.

What is known of all their keys is in verl.yaml. Facts: verl-project/verl at 1dda039b9 (2026-08-22,
0.10.0.dev): verl/trainer/config/_generated_ppo_trainer.yaml, legacy_reward_impl.yaml,
sft_trainer_engine.yaml with model/hf_model.yaml, engine/fsdp.yaml and optim/fsdp.yaml;
verl/trainer/ppo/core_algos.py, verl/experimental/reward_loop/reward_manager,
verl/trainer/sft_trainer.py, verl/utils/dataset/multiturn_sft_dataset.py,
verl/workers/utils/losses.py; and volcengine/verl at b178a3cd5 (2026-01-29, 0.8.0.dev) for the names
of that time. The older fsdp_sft_trainer has other keys and defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from laurel.config.schemas import Kind
from laurel.extensions.importing.rules import flag, real, whole
from laurel.extensions.importing.tables import TableImporter
from laurel.extensions.importing.translation import FAR, NO_CRITIC, Translation

_ESTIMATORS = (
    *("grpo", "grpo_vectorized", "gdpo", "rloo", "rloo_vectorized"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    *("gpg", "opo", "remax", "grpo_passk"),
)
_LOSSES = {"vanilla": "ppo", "gspo": "ppo", "cispo": "cispo", "gpg": "reinforce"}
_LOSSES |= {"geo_mean": "gmpo", "sapo": "sapo", "dppo_tv": "dppo", "dppo_kl": "dppo"}
_LOSS_KEYS = {"gmpo": "gmpo.clip_{}", "dppo": "dppo.{}"}  # `low` and `high`
_DIVERGENCES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_MEANS = {"token-mean": "tokens", "seq-mean-token-mean": "sequences"}
_MEANS |= {"seq-mean-token-sum-norm": "max_length"}
_PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_PRECISIONS |= {"half": "float16", "float": "float32"}
_LOGGERS = ("wandb", "tensorboard", "mlflow")
_MANAGERS = ("naive", "dapo", "gdpo", "remote", "batch", "prime")
"""Names of verl's managers that call the function with the same arguments, at no limited rate."""
_RATE_LIMITED = ("rate_limited", "limited")
_LIMITS = ("max_concurrent", "timeout", "max_rpm", "max_tpm", "estimated_tokens_per_request")
_GPUS_OF_A_NODE = 8


def _named(file: str, name: object) -> str:
    """Return the import path of an object that verl names by `pkg://`, `file://` or a file."""
    if file.startswith("pkg://"):
        file = file.removeprefix("pkg://").replace("/", ".")
    return f"{file.removeprefix('file://')}:{name}"


class VerlTrainer(Translation):
    """The keys that verl's two programs share."""

    kept = ""
    """The key of the number of checkpoints that are kept."""

    def _model(self) -> None:
        if self.has("M.path"):
            self.carry("M.path", "policy.model_name")
        else:
            self.refuse("M.path")
        self.carry("M.trust_remote_code", "policy.trust_remote_code")
        self.carry("M.tokenizer_path", "policy.tokenizer.name")
        to = "policy.dtensor_cfg.activation_checkpointing"
        self.carry("M.enable_gradient_checkpointing", to)
        if self.whole("M.lora_rank"):
            alpha = self.real("M.lora_alpha")
            self.adapters("M.lora_rank", "M.lora_rank", alpha, "M.lora_alpha")
            self.adapted_layers("M.target_modules", self["M.target_modules"])
            if excluded := self.names("M.exclude_modules"):
                to = "policy.dtensor_cfg.lora_cfg.exclude_modules"
                self.put(to, excluded, "M.exclude_modules")
        else:
            keys = ("M.lora_rank", "M.lora_alpha", "M.target_modules", "M.exclude_modules")
            self.skip("lora_rank is 0: no adapters", *keys)

    def _rows(self) -> None:
        train, val = self.names("data.train_files"), self.names("data.val_files")
        if self.has("data.train_files"):
            self.files("data.train_files", train, "data.train_data_path", "data.train")
        else:
            self.refuse("data.train_files")
        self.files("data.val_files", val, "data.val_data_path", "data.validation")
        self.put("data.split_validation_size", 0.0)
        most = self["data.train_max_samples"]
        most = None if most in (None, -1) else most
        self.put("data.max_samples", most, "data.train_max_samples", how="-1 is null")

    def _length(self) -> None:
        if self["trainer.total_training_steps"] is not None:
            self.carry("trainer.total_training_steps", "{run}.max_num_steps", whole)
        self.carry("trainer.total_epochs", "{run}.max_num_epochs")

    def learning_rate(self, updates: int | None) -> None:
        """Set the optimizer and its schedule; `updates` are the optimizer's steps of the run."""
        if str(self["O.optimizer"]) != "AdamW":
            self.refuse("O.optimizer")
        self.optimizer("O.optimizer", "O.lr", "O.weight_decay", "O.betas")
        decay = "O.warmup_style" if self["O.warmup_style"] else "O.lr_scheduler_type"
        kind = str(self[decay])
        if kind not in ("constant", "cosine"):
            self.refuse(decay)
            kind = "constant"
        warmup: int | None = self.whole("O.lr_warmup_steps")
        warmup_by = "O.lr_warmup_steps"
        if self.whole(warmup_by) > 0:
            self.skip("lr_warmup_steps comes before it", "O.lr_warmup_steps_ratio")
        else:  # 0 leaves it to the share, as -1 does
            warmup_by = "O.lr_warmup_steps_ratio"
            warmup = self.share(self.real(warmup_by), updates, int)
        floor = float(self["O.min_lr_ratio"] or 0.0) if kind == "cosine" else 0.0
        self.schedule(
            decay,
            kind,
            *((decay, "O.min_lr_ratio") if floor else ()),
            warmup=warmup,
            warmup_by=warmup_by,
            min_ratio=floor,
            total=updates,
        )
        if self.has("O.num_cycles") and self["O.num_cycles"] != 0.5:
            self.refuse("O.num_cycles")

    def _period(self, key: str) -> int:
        if self[key] != "after_each_epoch":
            return max(0, self.whole(key))
        self.refuse(key)
        return 0

    def _trainer(self) -> None:
        project, name = str(self["trainer.project_name"]), str(self["trainer.experiment_name"])
        both = ("trainer.project_name", "trainer.experiment_name")
        to = "checkpointing.checkpoint_dir"
        if self.has("trainer.default_local_dir"):
            self.carry("trainer.default_local_dir", to)
        else:
            self.put(to, f"checkpoints/{project}/{name}", *both)
        saves, tests = self._period("trainer.save_freq"), self._period("trainer.test_freq")
        self.put("checkpointing.save_period", saves or FAR, "trainer.save_freq")
        self.put("{run}.val_period", tests, "trainer.test_freq")
        # Fine-tuning there validates after its last step, whatever the period.
        at_end = bool(self["data.val_files"]) if self.run == "sft" else tests > 0
        self.put("{run}.val_at_end", at_end, "trainer.test_freq")
        if not self["data.val_files"] and tests > 0:
            self.refuse("data.val_files")
        self.put("checkpointing.metric_name", None, how="the most recent are kept")
        self.carry(self.kept, "checkpointing.keep_top_k")
        loggers = self.names("trainer.logger")
        self.loggers("trainer.logger", loggers, ours=_LOGGERS, quiet="console file")
        if self.has(both[0]):
            self.put("logger.wandb.project", project, both[0])
            self.put("logger.mlflow.experiment_name", project, both[0])
        if self.has(both[1]):
            self.put("logger.wandb.name", name, both[1])
            self.put("logger.mlflow.run_name", name, both[1])
        resumes = {"auto": "auto", "disable": "never"}.get(self["trainer.resume_mode"])
        if resumes:
            self.put("checkpointing.resume", resumes, "trainer.resume_mode")
        else:
            self.refuse("trainer.resume_mode")
        self.carry("trainer.nnodes", "cluster.num_nodes")
        if self.devices is None:
            self.carry("trainer.n_gpus_per_node", "cluster.gpus_per_node")
        else:
            origin = "the launcher's processes"
            self.put("cluster.gpus_per_node", self.devices, origin=origin)

    def _offload(self) -> None:
        self.carry("E.param_offload", "policy.dtensor_cfg.cpu_offload", flag)
        if self.flag("E.optimizer_offload") and not self.flag("E.param_offload"):
            self.refuse("E.optimizer_offload")

    def sized_batches(self, switch: str, tokens: str) -> bool:
        """Set the tokens of a micro-batch where the source's key `switch` is on."""
        if self.flag(switch):
            to = "policy.sequence_packing.train_mb_tokens"
            self.put(to, self.whole(tokens), switch, tokens)
        return self.flag(switch)


class VerlSFT(VerlTrainer):
    """The program `sft_trainer`."""

    kept = "trainer.max_ckpt_to_keep"

    def translate(self) -> None:
        """Translate the keys of `sft_trainer`."""
        self._model()
        self._rows()
        self.carry("data.messages_key", "data.chat_key")
        self.put("sft.val_at_start", False)
        how = "every turn of the assistant is learned"
        self.put("sft.only_unmask_final", False, how=how)
        if self["data.val_max_samples"] not in (None, -1):
            self.refuse("data.val_max_samples")
        self.carry("data.train_batch_size", "policy.train_global_batch_size", whole)
        self.carry("data.train_batch_size", "sft.val_global_batch_size", whole)
        rows = "data.micro_batch_size_per_gpu"
        if self.sized_batches("data.use_dynamic_bsz", "data.max_token_len_per_gpu"):
            self.skip("data.max_token_len_per_gpu says it", rows)
        else:
            self.carry(rows, "policy.train_micro_batch_size", whole)
        self.carry("data.max_length", "policy.max_total_sequence_length", whole)
        cut = self["data.truncation"]
        if cut == "left" and str(self["data.pad_mode"]) == "right":
            self.refuse("data.truncation")
        elif cut == "error":
            why = "of longer ones the end is cut off, and they are counted"
            self.skip(why, "data.truncation")
        key, thinking = "data.apply_chat_template_kwargs", "data.enable_thinking_default"
        kwargs = self[key] or {}
        if not isinstance(kwargs, dict):
            raise self.problem(key, "it must be a mapping")
        thinks = isinstance(self[thinking], bool)
        if thinks:
            kwargs = {**kwargs, "enable_thinking": self[thinking]}
        if kwargs or self.has(key):
            to = "policy.tokenizer.chat_template_kwargs"
            self.put(to, kwargs, key, *((thinking,) if thinks else ()))
        self._length()
        steps = "trainer.total_training_steps"
        self.learning_rate(None if self[steps] is None else self.whole(steps))
        self.put("policy.max_grad_norm", self["O.clip_grad"] or None, "O.clip_grad")
        to = "policy.dtensor_cfg.context_parallel_size"
        self.carry("E.ulysses_sequence_parallel_size", to)
        self._offload()
        self._trainer()


class VerlPPO(VerlTrainer):
    """The program `main_ppo`."""

    kept = "trainer.max_actor_ckpt_to_keep"

    @cached_property
    def mini_batches(self) -> int:
        """The mini-batches of a step."""
        prompts, key = self.count("data.train_batch_size"), "A.ppo_mini_batch_size"
        mini = self.count(key)
        if mini > prompts:
            raise self.problem(key, f"it is more than data.train_batch_size={prompts}")
        if prompts % mini:
            raise self.problem(key, f"data.train_batch_size={prompts} is no multiple of it")
        return prompts // mini

    @cached_property
    def function(self) -> str | None:
        """The file of a function that judges."""
        return self.text("F.path")

    @cached_property
    def judges(self) -> bool:
        """Whether a reward model judges."""
        return self.flag("RM.enable") and self.function is None

    def translate(self) -> None:
        """Translate the keys of `main_ppo`."""
        self._model()
        self._rows()
        how = "the reader of rows with a prompt of messages and reward_model.ground_truth"
        self.put("data.dataset_name", "DAPOMath17K", how=how)
        if self["data.val_max_samples"] not in (None, -1):
            self.carry("data.val_max_samples", "grpo.max_val_samples")
        else:
            self.put("grpo.max_val_samples", FAR, "data.val_max_samples", how="all")
        if self["data.seed"] is not None:
            self.carry("data.seed", "grpo.seed")
        self.carry("data.shuffle", "data.shuffle")
        self.carry("data.apply_chat_template_kwargs", "policy.tokenizer.chat_template_kwargs")
        self._batches()
        self._length()
        updates = self["trainer.total_training_steps"]
        if updates is not None:
            updates = self.whole("trainer.total_training_steps")
            updates *= self.mini_batches * self.whole("A.ppo_epochs")
        self.learning_rate(updates)
        is_newer = self.has("O.clip_grad") and not self.has("A.grad_clip")
        norm = "O.clip_grad" if is_newer else "A.grad_clip"
        self.put("policy.max_grad_norm", self[norm] or None, norm)
        self._advantages()
        self._loss()
        self._divergence()
        self._correction()
        self._generation()
        to = "policy.dtensor_cfg.context_parallel_size"
        self.carry("A.ulysses_sequence_parallel_size", to)
        self._offload()
        self.sized_batches("A.use_dynamic_bsz", "A.ppo_max_token_len_per_gpu")
        self._judging()
        to = "env.reward_model."
        if self.judges:
            size = "RM.rollout.tensor_model_parallel_size"
            self.carry(size, to + "dtensor_cfg.tensor_parallel_size", whole)
            precision = str(self["RM.rollout.dtype"])
            precision = _PRECISIONS.get(precision, precision)
            if precision in _PRECISIONS.values():
                self.put(to + "precision", precision, "RM.rollout.dtype")
            elif self.has("RM.rollout.dtype"):
                self.refuse("RM.rollout.dtype")
            self.carry("RM.trust_remote_code", to + "trust_remote_code", flag)
        waits = self.has("use_reward_loop") and not self.flag("use_reward_loop")
        if self.judges or self.function is not None:
            self._processes(to + "num_workers")
            if waits:
                self.put(to + "use_reward_loop", False, "use_reward_loop")
        self._shaping()
        self._trainer()
        self._pools()
        self._teacher()
        at_start = self.flag("trainer.val_before_train") and bool(self["data.val_files"])
        self.put("grpo.val_at_start", at_start, "trainer.val_before_train")

    def _batches(self) -> None:
        prompts, size = self.count("data.train_batch_size"), self.count("R.n")
        self.put("grpo.num_prompts_per_step", prompts, "data.train_batch_size")
        self.put("grpo.num_generations_per_prompt", size, "R.n")
        mini, to = prompts // self.mini_batches, "policy.train_global_batch_size"
        how = f"{mini} prompts x {size} completions"
        self.put(to, mini * size, "A.ppo_mini_batch_size", "R.n", how=how)
        if self["data.gen_batch_size"] is not None:
            more = self.whole("data.gen_batch_size") / prompts
            self.put("grpo.batch_multiplier", more, "data.gen_batch_size")
        self.carry("A.ppo_epochs", "grpo.num_iterations")
        both = ("data.max_prompt_length", "data.max_response_length")
        self.put("policy.max_total_sequence_length", sum(map(self.whole, both)), *both)
        self.carry(both[0], "data.max_input_seq_length", whole)
        self.carry(both[1], "policy.generation.max_new_tokens", whole)
        cut, leaves_out = "data.truncation", "data.filter_overlong_prompts"
        if self.flag(leaves_out) or str(self[cut]) == "error":
            self.skip("longer prompts are left out and counted", cut, leaves_out)
        else:
            self.refuse(cut)

    def _advantages(self) -> None:
        key, to = "ALGO.adv_estimator", "grpo.adv_estimator."
        estimator = self.word(key)
        family = estimator.removesuffix("_vectorized").removesuffix("_baseline")
        if self.whole("R.n") == 1 and estimator not in ("reinforce_plus_plus", "remax"):
            self.lone_completions(key, "R.n")
            return
        is_known = estimator in _ESTIMATORS
        by = (key,) if is_known else ()
        ours = {"rloo": "grpo", "grpo_passk": "pass_at_k"}.get(family, family)
        self.put(to + "name", ours if is_known else "grpo", *by)
        self.put(
            "grpo.adv_estimator.use_leave_one_out_baseline", is_known and family == "rloo", *by
        )
        if not is_known:
            critic = f"{NO_CRITIC}: " if estimator == "gae" else ""
            self.refuse(key, critic=critic, carried=", ".join(_ESTIMATORS))
        elif family in ("grpo", "grpo_passk"):
            switch = "ALGO.norm_adv_by_std_in_grpo"
            self.put(to + "scale", "group" if self.flag(switch) else "none", switch)
        elif family == "rloo":
            self.put(to + "scale", "none", key)
        elif family == "gdpo":
            self._components()
        elif family == "gpg":
            self.note(key, "as published: groups of equal rewards do not count, rewards of 0 there")
        elif family == "reinforce_plus_plus":
            self.put(to + "minus_baseline", estimator.endswith("_baseline"), key)
            self.note(key, "each completion counts once for the deviation here, each token there")

    def _components(self) -> None:
        keys, weights = "ALGO.gdpo_reward_keys", "ALGO.gdpo_reward_weights"
        names = self.names(keys)
        value = self[weights]
        if value is not None and (not isinstance(value, list) or len(value) != len(names)):
            raise self.problem(weights, f"a weight for each of {keys} is expected")
        if names:
            each = dict(zip(names, map(float, value or [1.0] * len(names)), strict=True))
            by = (keys,) if value is None else (keys, weights)
            self.put("grpo.adv_estimator.reward_weights", each, *by)

    def _loss(self) -> None:
        key, mean_by = "A.policy_loss.loss_mode", "A.loss_agg_mode"
        mode = str(self[key])
        is_known = mode in _LOSSES
        mean = _MEANS.get(str(self[mean_by]))
        if not is_known:
            self.refuse(key, carried=", ".join(_LOSSES))
        by = (key,) if is_known else ()
        kind = _LOSSES.get(mode, "ppo")
        self.put("loss_fn.loss_type", kind, *by)
        self.put("loss_fn.sequence_level_importance_ratios", mode == "gspo", *by)
        if mean is None:
            self.refuse(mean_by)
        has_own_mean = mode in ("gspo", "geo_mean", "sapo")
        normalizer = "sequences" if has_own_mean else mean or "max_length"
        self.put("loss_fn.normalizer", normalizer, *((mean_by,) if mean else ()))
        self.put("loss_fn.token_level_loss", normalizer == "tokens")
        if self["A.loss_scale_factor"] is not None and normalizer == "max_length":
            self.refuse("A.loss_scale_factor")
        # The file that sets clip_ratio alone still has the other two from its defaults.
        for name, to in (("low", "min"), ("high", "max")):
            by_end = f"A.clip_ratio_{name}"
            if kind in ("reinforce", "sapo"):
                self.skip(f"{mode} clips no ratio", by_end)
                continue
            end = self["A.clip_ratio"] if self[by_end] is None else self[by_end]
            own = _LOSS_KEYS.get(kind, "").format(name)
            self.put(f"loss_fn.{own or f'ratio_clip_{to}'}", end, by_end)
        if kind == "sapo":
            for name in ("positive", "negative"):
                self.carry(f"A.tau_{name[:3]}", f"loss_fn.sapo.tau_{name}", real)
        if kind == "dppo":
            self.put("loss_fn.dppo.divergence", mode.removeprefix("dppo_"), key)
        if mode == "vanilla" or not is_known:
            self.carry("A.clip_ratio_c", "loss_fn.ratio_clip_c")
        elif kind == "dppo":
            self.carry("A.clip_ratio_c", "loss_fn.dppo.max_ratio", real)
        else:
            self.skip(f"{mode} has no dual clipping", "A.clip_ratio_c")
        has_ends = self.has("A.clip_ratio_low", "A.clip_ratio_high")
        if self.has("A.clip_ratio") and not has_ends and self.number("A.clip_ratio") != 0.2:
            self.refuse("A.clip_ratio")

    def _divergence(self) -> None:
        in_loss, in_reward = "A.use_kl_loss", "ALGO.use_kl_in_reward"
        to, weight = "loss_fn.reference_policy_kl_penalty", "ALGO.kl_ctrl.kl_coef"
        switch, kind = in_reward, "ALGO.kl_penalty"
        if self.flag(in_loss):
            switch, weight, kind = in_loss, "A.kl_loss_coef", "A.kl_loss_type"
            if self.flag(in_reward):
                self.refuse(in_reward)
        elif not self.flag(in_reward):
            self.put(to, 0.0, in_loss, in_reward)
            return
        self.put(to, self.real(weight), switch, weight)
        if not self.real(weight):
            self.skip("the weight of the divergence is 0", kind)
            return
        self.put("loss_fn.use_kl_in_reward", not self.flag(in_loss), switch)
        kl = _DIVERGENCES.get(str(self[kind]).removesuffix("+"))
        if kl is None:
            self.refuse(kind, kinds=", ".join(_DIVERGENCES))
        else:
            self.put("loss_fn.reference_policy_kl_type", kl, kind)
        if kl in ("k1", "k2"):
            self.put("loss_fn.kl_input_clamp_value", None)
            self.put("loss_fn.kl_output_clamp_value", None)
        is_adaptive = self["ALGO.kl_ctrl.type"] == "adaptive"
        if is_adaptive and switch == in_reward and kl is not None:
            self.refuse("ALGO.kl_ctrl.type")

    def _correction(self) -> None:
        older, newer, limit = "A.tis_imp_ratio_cap", "IS.rollout_is", "IS.rollout_is_threshold"
        to, on = (
            "loss_fn.truncated_importance_sampling_",
            "loss_fn.use_importance_sampling_correction",
        )
        if self[older] not in (None, -1) and self.number(older) > 0:
            self.put(on, True, older)
            self.put(to + "type", "tis", older)
            self.carry(older, to + "ratio", real)
        elif self[newer] not in (None, "null"):
            self.put(on, True, newer)
            low, is_range, high = str(self[limit]).partition("_")
            if is_range:
                self.put(to + "type", "icepop", newer, limit)
                self.put(to + "ratio_min", float(low), limit)
                self.put(to + "ratio", float(high), limit)
                if self[newer] == "sequence":
                    self.refuse(newer)
            else:
                self.put(to + "type", "tis" if self[newer] == "token" else "seq-tis", newer)
                self.put(to + "ratio", float(low), limit)
        else:
            self.skip("it is off", older, newer, limit)

    def _top_k(self, key: str) -> int | None:
        return None if self[key] in (None, 0, -1) else self.whole(key)

    def _generation(self) -> None:
        to, engine = "policy.generation.", str(self["R.name"] or "vllm")
        self.carry("R.temperature", to + "temperature")
        self.carry("R.top_p", to + "top_p")
        self.put(to + "top_k", self._top_k("R.top_k"), "R.top_k")
        if engine not in ("vllm", "hf"):
            self.refuse("R.name")
        else:
            self.put(to + "backend", "vllm" if engine == "vllm" else "transformers", "R.name")
        if engine == "vllm":
            self.carry("R.tensor_model_parallel_size", to + "vllm_cfg.tensor_parallel_size")
            self.carry("R.pipeline_model_parallel_size", to + "vllm_cfg.pipeline_parallel_size")
            for name in ("gpu_memory_utilization", "enforce_eager", "max_model_len"):
                self.carry(f"R.{name}", f"{to}vllm_cfg.{name}")
        samples, heat = "R.val_kwargs.do_sample", "R.val_kwargs.temperature"
        by = [key for key in (samples, heat) if self.has(key)] or [heat]
        value = self[heat] if self.flag(samples) else 0
        self.put(to + "val_temperature", value, *by, how="without do_sample 0")
        self.carry("R.val_kwargs.top_p", to + "val_top_p")
        top_k = self._top_k("R.val_kwargs.top_k")
        self.put(to + "val_top_k", top_k, "R.val_kwargs.top_k")
        if self.flag(samples) and top_k is None and self._top_k("R.top_k"):
            self.refuse("R.val_kwargs.top_k")
        self.carry("R.val_kwargs.n", "grpo.val_num_generations_per_prompt")

    def _judging(self) -> None:
        to, enables = "env.reward_model.", self.flag("RM.enable")
        if self.function is not None:
            if enables:
                self._server(to + "server.")
            call, by = {"path": _named(self.function, self["F.name"])}, ["F.path", "F.name"]
            if self["F.reward_kwargs"]:
                call |= {"kwargs": self["F.reward_kwargs"]}
                by.append("F.reward_kwargs")
            managed, deciding = self._manager()
            if (most := managed.pop("max_concurrent", None)) is not None:
                self.put(to + "max_concurrent", most, "MAN.name", "reward.max_concurrent")
            how = "called with the same arguments"
            self.put(to + "function", call | managed, *by, *deciding, how=how)
            self.put(to + "enabled", True, "F.path")
            self.put("data.env_name", "reward_model")
        elif enables:
            self.put(to + "enabled", True, "RM.enable")
            self.put("data.env_name", "reward_model")
            if self.text("RM.model_path") is None:
                text = "reward.reward_model.enable is true: which model?"
                raise self.problem("RM.model_path", text)
            self.carry("RM.model_path", to + "model_name")
            both = ("RM.rollout.prompt_length", "RM.rollout.response_length")
            if self["RM.rollout.max_model_len"] is not None:
                self.carry("RM.rollout.max_model_len", to + "max_model_len", whole)
            elif self.has(*both):
                self.put(to + "max_model_len", sum(map(self.whole, both)), *both)
        else:
            self.put("data.env_name", "math", how="for verl's scores of mathematics by data_source")
            self.refuse("F.path")
            self.skip("it is off", "RM.model_path", "RM.enable")
            if self.has_own_manager:
                self.refuse("MAN.module.path")
            elif self["MAN.name"] not in (*_MANAGERS, *_RATE_LIMITED):
                self.refuse("MAN.name")

    def _server(self, to: str) -> None:
        """Set the model that the run serves for the function, in the pool that verl gives it."""
        if self.text("RM.model_path") is None:
            raise self.problem("RM.model_path", "reward.reward_model.enable is true: which model?")
        self.carry("RM.model_path", to + "model_name")
        size = "RM.rollout.tensor_model_parallel_size"
        each = 2 if self[size] is None else self.count(size)
        self.put(to + "tensor_parallel_size", each, size, "RM.enable")
        pool = "RM.enable_resource_pool"
        if self.flag(pool) and self.has("RM.n_gpus_per_node"):
            gpus, by = self.count("RM.n_gpus_per_node"), [pool, "RM.n_gpus_per_node"]
            nodes = self.whole("RM.nnodes") if self.has("RM.nnodes") else 1
            if nodes > 1:
                by.append("RM.nnodes")
                self.put(to + "resources.num_nodes", nodes, "RM.nnodes")
            of_node = max(1, gpus // each)
            how = f"{nodes} x {gpus} GPUs, {each} for each replica"
            self.put(to + "replicas", nodes * of_node, *by, how=how)
            self.put(to + "resources.gpus_per_node", of_node * each, *by)
        else:  # they are beside the policy, on all of its GPUs
            by = ["trainer.nnodes", "trainer.n_gpus_per_node"]
            gpus = self.whole(by[0]) * self.count(by[1])
            how = f"{gpus} GPUs of the policy, {each} for each replica"
            self.put(to + "replicas", max(1, gpus // each), *by, how=how)
        if self["RM.rollout.name"] not in (None, "vllm"):
            self.refuse("RM.rollout.name")
        options = {
            "RM.rollout.gpu_memory_utilization": "gpu-memory-utilization",
            "RM.rollout.max_model_len": "max-model-len",
            "RM.rollout.dtype": "dtype",
        }
        set_options = {key: name for key, name in options.items() if self[key] is not None}
        arguments = [f"--{name}={self[key]}" for key, name in set_options.items()]
        if self.flag("RM.trust_remote_code"):
            set_options["RM.trust_remote_code"] = "trust-remote-code"
            arguments.append("--trust-remote-code")
        if arguments:
            self.put(to + "arguments", arguments, *set_options)

    @property
    def has_own_manager(self) -> bool:
        """Whether a class of the user's own makes the calls of the function."""
        return self["MAN.source"] == "importlib" and self.text("MAN.module.path") is not None

    def _processes(self, to: str) -> None:
        """Set the processes that call the function or render conversations."""
        key = "reward.num_workers"
        if self.function is not None and self.has_own_manager:
            self.skip("a manager calls the function in one process here", key)
        elif self.has(key) or (self.function is not None and self["MAN.name"] == "remote"):
            number = 8 if self[key] is None else self.whole(key)
            self.put(to, number, key, *(["MAN.name"] * self.has("MAN.name")))

    def _manager(self) -> tuple[dict[str, Any], list[str]]:
        """Return the keys of the function that say what makes its calls, and what decides them."""
        if self.has_own_manager:
            path, own = self.text("MAN.module.path"), "reward."
            name = "MAN.name" if self.has("MAN.name") else "MAN.module.name"
            tokenizer = "M.tokenizer_path" if self.text("M.tokenizer_path") else "M.path"
            handled = tuple(map(self.table.full, ("F.", "MAN.", "RM.", "reward.num_workers")))
            read = [k for k in self.said if k.startswith(own) and not k.startswith(handled)]
            config: dict[str, Any] = {}
            for key in read:
                *above, last = key.replace(".overlong_buffer.", ".overlong_buffer_cfg.").split(".")
                level = config
                for part in above:
                    level = level.setdefault(part, {})
                level[last] = self[key]
            settings = {"path": _named(str(path), self[name]), "tokenizer": self[tokenizer]}
            verl = settings | ({"config": config} if config else {})
            by = [self.table.full(key) for key in ("MAN.source", "MAN.module.path", name)]
            return {"manager": "verl", "verl": verl}, [*by, *read]
        limits = [f"reward.{name}" for name in _LIMITS]
        if self["MAN.name"] in _RATE_LIMITED:
            calls: dict[str, Any] = {"max_concurrent": self.count("reward.max_concurrent")}
            calls |= {"timeout": self.real("reward.timeout")}
            each = "reward.estimated_tokens_per_request"
            tokens_of_call = 2000 if self[each] is None else self.number(each)
            if tokens_of_call <= 0:
                raise self.problem(each, "it must be above 0")
            rates = [
                self.number(f"reward.{name}") / by
                for name, by in (("max_rpm", 1), ("max_tpm", tokens_of_call))
                if self[f"reward.{name}"] is not None
            ]
            if not rates:  # it limits no rate
                return calls, ["MAN.name", *limits[:2]]
            calls |= {"manager": "rate_limited", "rate_limited": {"max_rpm": min(rates)}}
            return calls, ["MAN.name", *limits]
        self.skip("only reward_manager.name=rate_limited reads it in verl", *limits)
        if self["MAN.name"] not in _MANAGERS:
            self.refuse("MAN.name")
        return {}, []

    @property
    def samples_ahead(self) -> bool:
        """Whether the program samples a batch while it learns from the one before."""
        return "one_step_off_policy" in self.program

    def _pools(self) -> None:
        """Set the cluster: the policy's pool, and those that generation and judge add to it."""
        policy = ("trainer.nnodes", "trainer.n_gpus_per_node")
        pools = [policy]
        if self.samples_ahead:
            how = "one_step_off_policy samples one step ahead"
            if self["IS.bypass_mode"] is not False:  # null: its default, which is on
                how += (
                    "; its bypass_mode takes the generator's probabilities for the old policy's, "
                    "which are computed here, and the difference is corrected by weights"
                )
                self.skip(how, "IS.bypass_mode")
            self.put("grpo.max_staleness", 1, origin=how)
            self.put("loss_fn.use_importance_sampling_correction", True, origin=how)
            self.put("policy.generation.colocated.enabled", False, origin=how)
            pools.append(("rollout.nnodes", "rollout.n_gpus_per_node"))
        if self.judges and self.flag("RM.enable_resource_pool"):
            pools.append(("RM.nnodes", "RM.n_gpus_per_node"))
        if len(pools) == 1:
            return
        nodes = [max(1, self.whole(key)) for key, _ in pools]
        gpus = [self.count(key) for _, key in pools]
        is_one = set(nodes) == {1} and sum(gpus) <= _GPUS_OF_A_NODE
        how = f"pools of {' + '.join(f'{n} x {g}' for n, g in zip(nodes, gpus, strict=True))}"
        if not is_one and self.samples_ahead and gpus[0] != gpus[1]:
            for key in pools[1]:
                self.refuse(key)
            return
        self.put("cluster.num_nodes", 1 if is_one else sum(nodes), *(k for k, _ in pools), how=how)
        total = sum(gpus) if is_one else max(gpus)
        self.put("cluster.gpus_per_node", total, *(k for _, k in pools), how=how)
        for pool, number, each in list(zip(pools, nodes, gpus, strict=True))[1:]:
            is_judge = pool[0].startswith("RM.")
            to = "env.reward_model." if is_judge else "policy.generation.colocated."
            switch = ("RM.enable_resource_pool",) if is_judge else ()
            self.put(to + "resources.num_nodes", number, *switch, pool[0])
            self.put(to + "resources.gpus_per_node", each, *switch, pool[1])

    def _teacher(self) -> None:
        """Set the teacher whose log-probabilities are the advantages of tokens.

        verl's other ways differentiate an estimate of the divergence itself.
        """
        loss, to = "distillation.distillation_loss.", "loss_fn.distillation."
        teacher = "distillation.teacher_models.teacher_model.model_path"
        ways = (loss + "use_policy_gradient", loss + "loss_mode")
        is_ours = self.flag(ways[0]) and self[ways[1]] == "k1" and self.text(teacher) is not None
        if not (self.flag("distillation.enabled") and is_ours):
            return
        self.put(to + "model_name", self.text(teacher), teacher, "distillation.enabled", *ways)
        beside = loss + "use_task_rewards"
        has_rewards = self[beside] is None or self.flag(beside)
        self.put(to + "rewards", has_rewards, beside)
        weight = loss + "distillation_loss_coef"
        if not has_rewards:
            self.skip("only with use_task_rewards", weight)
        elif self.has(weight):
            self.carry(weight, to + "weight", real)
        clamp = loss + "loss_max_clamp"
        self.put(to + "clamp_value", None if self[clamp] is None else self.real(clamp), clamp)
        floor = loss + "log_prob_min_clamp"
        if self[floor] is not None:
            self.refuse(floor, "log-probabilities are not cut, only their difference: clamp_value")

    def _shaping(self) -> None:
        to, longest = "grpo.reward_shaping.", "reward.reward_kwargs.max_resp_len"
        overlong = ("OVER.enable", "OVER.len", "OVER.penalty_factor", longest)
        if self.function is None:
            limits = [f"reward.{name}" for name in _LIMITS]
            self.skip("it is of a function, and none is named", *limits)
        if self.judges:
            self.skip("verl asks a reward model without a manager", *overlong, "MAN.name")
        elif self.has_own_manager:
            pass  # its class may read them
        elif self["MAN.name"] != "dapo":
            self.skip("only reward_manager.name=dapo reads it in verl", *overlong)
        elif self.flag("OVER.enable"):
            self.put(to + "enabled", True, "OVER.enable", *(["MAN.name"] * self.has("MAN.name")))
            self.put(to + "overlong_buffer_length", self.whole("OVER.len"), "OVER.len")
            self.carry("OVER.penalty_factor", to + "overlong_buffer_penalty", real)
            longest = "data.max_response_length" if self[longest] is None else longest
            self.carry(longest, to + "max_response_length", whole)
        self.carry("ALGO.filter_groups.enable", "grpo.use_dynamic_sampling", flag)
        if self.flag("ALGO.filter_groups.enable"):
            to, most = (
                "grpo.dynamic_sampling_max_gen_batches",
                "ALGO.filter_groups.max_num_gen_batches",
            )
            limit = max(0, self.whole(most)) or FAR
            self.put(to, limit, most, how="0 is no limit")
            why = "groups are kept whose rewards differ; of 0 and 1 the same"
            self.skip(why, "ALGO.filter_groups.metric")


class Verl(TableImporter):
    """verl's trainers of PPO's family and of fine-tuning."""

    table = "verl"
    title = "verl"
    rules: ClassVar[Mapping[Kind, type[Translation]]] = {"grpo": VerlPPO, "sft": VerlSFT}
