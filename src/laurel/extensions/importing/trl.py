"""Translates TRL's reward, grpo and sft. What is known of all their keys is in trl.yaml.

Facts: huggingface/trl at f2cd57710 (2026-07-24, 1.10.0.dev0): trl/trainer/base_config.py,
reward_config.py, sft_config.py, model_config.py, grpo_config.py, grpo_trainer.py,
trl/scripts/utils.py, scripts/grpo.py; TrainingArguments of transformers 5.23.0, from which its
configurations inherit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

from laurel.config.schemas import Kind
from laurel.extensions.importing.rules import flag, real, text, whole
from laurel.extensions.importing.tables import TableImporter
from laurel.extensions.importing.translation import FAR, Translation

_BUILDERS = ("json", "csv", "parquet", "arrow")
_LOGGERS = ("tensorboard", "wandb", "mlflow")
_DECAYS = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr")
_KEPT_SMALL = ("bit", "paged", "anyprecision", "stable", "bnb")


class TRLTrainer(Translation):
    """The keys that TRL's three programs share."""

    per_step = 1
    """The optimizer steps that one step here makes."""

    @cached_property
    def each(self) -> int:
        """The rows of a forward pass on all processes."""
        return self.count("per_device_train_batch_size") * (self.devices or 1)

    @cached_property
    def batch(self) -> int:
        """The rows of an optimizer step over all processes."""
        return self.each * self.count("gradient_accumulation_steps")

    @cached_property
    def limit(self) -> int | None:
        """The optimizer steps of the run."""
        steps = self.whole("max_steps")
        return steps if steps > 0 else self.total_steps

    @cached_property
    def _validates(self) -> bool:
        return self.word("eval_strategy").rpartition(".")[2] not in ("no", "false")

    def translate(self) -> None:
        """Translate the keys that the programs share."""
        self.require("model_name_or_path", "policy.model_name", text)
        revision = self.text("model_revision")
        self.put("policy.revision", None if revision == "main" else revision, "model_revision")
        self.carry("trust_remote_code", "policy.trust_remote_code")
        self._data()
        self._steps()
        self._learning_rate()
        self.put("policy.max_grad_norm", self["max_grad_norm"] or None, "max_grad_norm")
        if self.flag("fp16"):
            self.refuse("fp16")
            self.put("policy.precision", "bfloat16")
        else:
            is_half = self["bf16"] is None or self.flag("bf16")
            self.put("policy.precision", "bfloat16" if is_half else "float32", "bf16")
        self.carry("gradient_checkpointing", "policy.dtensor_cfg.activation_checkpointing")
        self.carry("eval_on_start", "{run}.val_at_start", flag)
        when = self.word("eval_strategy").removeprefix("intervalstrategy.")
        if when in ("no", "false"):
            self.put("{run}.val_period", 0, "eval_strategy")
            self.put("{run}.val_at_end", False, "eval_strategy")
        elif when != "steps":
            self.refuse("eval_strategy")
        else:
            key = "logging_steps" if self["eval_steps"] is None else "eval_steps"
            period = self.period(key)
            if period is None:
                self.refuse(key)
            else:
                self.put("{run}.val_period", period, "eval_strategy", key)
        self._checkpoints()
        loggers = self.names("report_to")
        loggers = list(_LOGGERS) if "all" in loggers else loggers
        self.loggers("report_to", loggers, ours=_LOGGERS, quiet="none")
        if self.text("run_name") is not None:
            self.carry("run_name", "logger.wandb.name", text)
            self.carry("run_name", "logger.mlflow.run_name", text)
        self.put("cluster.device", "cpu" if self.flag("use_cpu") else "auto", "use_cpu")
        self._adapters_of_peft()

    def _data(self) -> None:
        if self["datasets"]:
            self._mixture(self["datasets"])
        elif self.text("dataset_name") is None:
            self.refuse("dataset_name")
        else:
            self.carry("dataset_name", "data.train_data_path", text)
            self.carry("dataset_config", "data.subset", text)
            self.carry("dataset_train_split", "data.train_split")
            if self._validates:
                name = self.text("dataset_name")
                self.put("data.val_data_path", name, "dataset_name", "eval_strategy")
                self.carry("dataset_test_split", "data.val_split")
        share = float(self["test_split_size"] or 0.0) if self._validates else 0.0
        self.put("data.split_validation_size", share, "test_split_size")

    def _mixture(self, sets: list[Any]) -> None:
        if any(not isinstance(dataset, dict) or "path" not in dataset for dataset in sets):
            raise self.problem("datasets", "each set must be a mapping with a path")
        train, lost = [], []
        for dataset in sets:
            path, file = dataset["path"], dataset.get("data_files")
            is_file = path in _BUILDERS
            if isinstance(file, list) and len(file) == 1:
                file = file[0]
            if is_file and not isinstance(file, str):
                what = f"path={path} needs one data_files; give a set for each"
                raise self.problem("datasets", what)
            row = {"data_path": file if is_file else path}
            row |= {"subset": dataset["name"]} if dataset.get("name") is not None else {}
            row |= {} if is_file else {"split": dataset.get("split", "train")}
            train.append(row)
            names = ["columns", "data_dir", *(() if is_file else ("data_files",)), "fraction"]
            lost += [f"{name} of {path}" for name in names if dataset.get(name) is not None]
        self.put("data.train", train, "datasets")
        if lost:
            self.refuse("datasets", lost=", ".join(lost))

    def _steps(self) -> None:
        rows, rounds = "per_device_train_batch_size", "gradient_accumulation_steps"
        how = f"{self.whole(rows)} x {self.devices or 1} processes x {self.whole(rounds)}"
        how += " accumulation" + ("" if self.devices else "; --devices says how many processes")
        self.put("policy.train_global_batch_size", self.batch, rows, rounds, how=how)
        self.carry(rows, "policy.train_micro_batch_size", whole)
        if self.devices is not None:
            self.put("cluster.gpus_per_node", self.devices, origin="--devices")
        steps, epochs = self.whole("max_steps"), self.number("num_train_epochs")
        if steps > 0:
            how = f"{steps} optimizer steps, {self.per_step} of them in each step here"
            how = "" if self.per_step == 1 else how
            self.put("{run}.max_num_steps", math.ceil(steps / self.per_step), "max_steps", how=how)
            self.put("{run}.max_num_epochs", FAR, "max_steps")
        else:
            self.put("{run}.max_num_epochs", math.ceil(epochs), "num_train_epochs")
            if epochs % 1:
                self.refuse("num_train_epochs")

    def _learning_rate(self) -> None:
        optim = self.word("optim")
        if not optim.startswith("adamw"):
            self.refuse("optim")
        elif any(name in optim for name in _KEPT_SMALL):
            self.refuse("optim", "its states are kept in full here: plain AdamW, and more memory")
        betas = ("adam_beta1", "adam_beta2")
        self.optimizer("optim", "learning_rate", "weight_decay", *betas, eps="adam_epsilon")
        if self.number("weight_decay"):
            self.note("weight_decay", "here of every weight, there of none of norms and biases")
        decay = self.word("lr_scheduler_type").removeprefix("schedulertype.")
        extra, rate = self["lr_scheduler_kwargs"], self.number("learning_rate")
        extra = extra if isinstance(extra, dict) else {}
        floor = extra.get("min_lr_rate", extra.get("min_lr", 0.0) / rate if rate else 0.0)
        if odd := sorted(extra.keys() - {"min_lr", "min_lr_rate"}):
            self.refuse("lr_scheduler_kwargs", odd=", ".join(odd))
        if decay not in _DECAYS:
            self.refuse("lr_scheduler_type", known=", ".join(_DECAYS))
        warm = self.number("warmup_steps")
        ratio = warm if 0 < warm < 1 else self.number("warmup_ratio")
        by_ratio = bool(ratio) and ratio != warm
        warmup = self.share(ratio, self.limit) if ratio and warm < 1 else int(warm)
        if decay == "constant":
            warmup = 0
            why = "a constant schedule has no warm-up there"
            self.skip(why, "warmup_steps", "warmup_ratio")
        self.schedule(
            "lr_scheduler_type",
            decay.partition("_")[0] if decay in _DECAYS else "constant",
            *[key for key in ("lr_scheduler_type", "lr_scheduler_kwargs") if self.has(key)],
            warmup=warmup,
            warmup_by="warmup_ratio" if by_ratio else "warmup_steps",
            min_ratio=float(floor),
            total=self.limit,
        )

    def period(self, key: str) -> int | None:
        """Return a period in steps here; None if it is a share of a run of unknown length."""
        every = self.number(key)
        if 0 < every < 1:
            if self.limit is None:
                return None
            every = math.ceil(every * self.limit)
        return max(1, math.ceil(every / self.per_step))

    def _checkpoints(self) -> None:
        when = self.word("save_strategy").removeprefix("savestrategy.")
        when = when.removeprefix("intervalstrategy.")
        if when == "no":
            how = "only the end is saved"
            self.put("checkpointing.save_period", FAR, "save_strategy", how=how)
        elif when != "steps":
            self.refuse("save_strategy")
        elif (period := self.period("save_steps")) is None:
            self.refuse("save_steps")
        else:
            self.put("checkpointing.save_period", period, "save_steps")
            if self.has("save_strategy"):
                self.put("checkpointing.save_period", period, "save_strategy", "save_steps")
        self.carry("save_total_limit", "checkpointing.keep_top_k")
        if self.has("save_only_model"):
            keeps = not self.flag("save_only_model")
            self.put("checkpointing.save_optimizer", keeps, "save_only_model")
        metric, switch = self.text("metric_for_best_model") or "loss", "load_best_model_at_end"
        metrics = {"loss": "auto", "accuracy": "validation-default_accuracy"}
        best = metrics.get(metric.removeprefix("eval_"))
        to = "checkpointing.metric_name"
        if not self.flag(switch):
            self.put(to, None, switch, how="the most recent are kept")
            self.skip(f"{switch} is off", "metric_for_best_model", "greater_is_better")
        elif best is None or self.run == "grpo" or (self.run == "sft" and best != "auto"):
            self.refuse(switch, metric=metric)
        else:
            self.put(to, best, switch, "metric_for_best_model")
            if self["greater_is_better"] is not None:
                self.carry("greater_is_better", "checkpointing.higher_is_better")
        self.carry("output_dir", "checkpointing.checkpoint_dir")
        self.carry("seed", "{run}.seed")

    def _adapters_of_peft(self) -> None:
        if not self.flag("use_peft"):
            return
        alpha, by, how = self.real("lora_alpha"), ["lora_alpha"], ""
        if self.flag("use_rslora"):
            alpha, by = round(alpha * math.sqrt(self.whole("lora_r")), 6), [*by, "use_rslora"]
            how = "times the root of the rank: the scale is alpha / rank here"
        self.adapters("use_peft", "lora_r", alpha, *by, dropout="lora_dropout", how=how)
        layers = self["lora_target_modules"]
        self.adapted_layers("lora_target_modules", layers or ["q_proj", "v_proj"])
        if layers is None:
            self.refuse("lora_target_modules")
        saved = self.names("lora_modules_to_save")
        if others := [module for module in saved if not (self.run == "rm" and module == "score")]:
            self.refuse("lora_modules_to_save", others=", ".join(others))
        why = "the reward head is always trained and saved whole"
        self.skip(why, *([] if others else ["lora_modules_to_save"]))
        self.skip("the run decides it", "lora_task_type")
        self.skip("it is off", "use_rslora")

    def _length(self) -> None:
        longest = 8192 if self["max_length"] is None else self.whole("max_length")
        self.put("policy.max_total_sequence_length", longest, "max_length")
        if self["max_length"] is None:
            self.refuse("max_length")

    def _template(self) -> None:
        path = self.text("chat_template_path")
        if path is not None and path.endswith((".jinja", ".jinja2")):
            self.carry("chat_template_path", "policy.tokenizer.chat_template", text)
        elif path is not None:
            self.refuse("chat_template_path")
        self.carry("pad_token", "policy.tokenizer.pad_token")


class TRLReward(TRLTrainer):
    """The program `trl reward`."""

    def translate(self) -> None:
        """Translate the keys of `trl reward`."""
        super().translate()
        self._length()
        if self["max_length"] is not None:
            how = "longer pairs are left out, as there"
            self.put("data.overlong", "drop", "max_length", how=how)
        self._template()
        center = self["center_rewards_coefficient"]
        to = "rm.loss.center_rewards_coefficient"
        self.put(to, 0.0 if center is None else center, "center_rewards_coefficient")


class TRLSFT(TRLTrainer):
    """The program `trl sft`."""

    def translate(self) -> None:
        """Translate the keys of `trl sft`."""
        super().translate()
        self._length()
        self._template()
        if self.flag("assistant_only_loss"):
            self.put("sft.only_unmask_final", False, "assistant_only_loss")
        else:
            self.refuse("assistant_only_loss")
        if self.flag("packing"):
            self.refuse("packing")


class TRLGRPO(TRLTrainer):
    """The program `trl grpo`: samples completions, and learns from them in several steps."""

    @cached_property
    def sampled(self) -> int:
        """The completions that are sampled at a time."""
        size, steps = "generation_batch_size", "steps_per_generation"
        if self[size] is None:
            return self.batch if self[steps] is None else self.each * self.count(steps)
        if self[steps] is not None:
            raise self.problem(size, f"{steps} is set, too; keep one")
        if self.count(size) % self.each:
            what = f"{self.each}, the completions of a forward pass on all processes"
            raise self.problem(size, f"it must be a multiple of {what}; are --devices right?")
        return self.count(size)

    @cached_property
    def _is_cispo(self) -> bool:
        return str(self["loss_type"]) == "cispo"

    @cached_property
    def _is_sapo(self) -> bool:
        return str(self["loss_type"]) == "sapo"

    @cached_property
    def _by_sequence(self) -> bool:
        return str(self["importance_sampling_level"]) == "sequence"

    def translate(self) -> None:
        """Translate the keys of `trl grpo`."""
        updates = max(self.sampled, self.batch) // self.batch
        self.per_step = self.count("num_iterations") * updates
        super().translate()
        self._groups()
        self._generation()
        self._loss()
        self._clipping()
        self._divergence()
        self._correction()
        self._rewards()
        scale, switch = self["scale_rewards"], "mask_truncated_completions"
        words = {"True": "group", "1": "group", "False": "none", "0": "none"}
        scale = words.get(str(scale), scale)
        if scale not in ("group", "batch", "none"):
            raise self.problem("scale_rewards", "it must be group, batch or none")
        if self["multi_objective_aggregation"] != "normalize_then_sum":
            self.put("grpo.adv_estimator.scale", scale, "scale_rewards")
        self.put("grpo.adv_estimator.use_leave_one_out_baseline", False, "scale_rewards")
        if scale != "none" or self["multi_objective_aggregation"] == "normalize_then_sum":
            self.put("grpo.adv_estimator.std_eps", 1e-4, "scale_rewards")
        self.carry(switch, "grpo.overlong_filtering", flag)
        if self.flag(switch):
            self.note(switch, "here they do not count in their group's mean either")
        self.carry("shuffle_dataset", "data.shuffle")

    def _groups(self) -> None:
        size = self.count("num_generations")
        # Fewer than make a step are sampled in parts there, all with the same weights.
        is_part = self.sampled < self.batch and self.batch % self.sampled == 0
        step = self.batch if is_part else self.sampled
        self.put("grpo.num_generations_per_prompt", size, "num_generations")
        how = f"{step} completions are sampled at a time"
        if step % size or step % self.batch:
            what = f"{how} and {self.batch} make an optimizer step; the first must be a multiple"
            what += f" of {size} and of {self.batch}; are --devices right?"
            raise self.problem("num_generations", what)
        sizes = ["per_device_train_batch_size", "gradient_accumulation_steps"]
        sizes += ["generation_batch_size", "steps_per_generation", "num_generations"]
        self.put("grpo.num_prompts_per_step", step // size, *sizes, how=how)
        if self._validates:
            value, by = self["num_generations_eval"] or size, ("num_generations_eval",)
            self.put("grpo.val_num_generations_per_prompt", value, *by, "num_generations")
        self.carry("num_iterations", "grpo.num_iterations")

    def _generation(self) -> None:
        prompt, answer = self["max_prompt_length"], self["max_completion_length"]
        room = 2048 if prompt is None else self.whole("max_prompt_length")
        self.carry("max_completion_length", "policy.generation.max_new_tokens")
        if prompt is not None:
            how = "longer prompts are left out, not cut"
            self.carry("max_prompt_length", "data.max_input_seq_length", how=how)
        to, by = "policy.max_total_sequence_length", ("max_completion_length", "max_prompt_length")
        if self["vllm_max_model_length"] is not None:
            self.carry("vllm_max_model_length", to, whole)
        elif answer is not None:
            how = " (TRL sets no limit)" if prompt is None else ""
            longest = self.whole("max_completion_length") + room
            self.put(to, longest, *by, how=f"{room} tokens for the prompt{how}")
        self.carry("temperature", "policy.generation.temperature")
        self.carry("top_p", "policy.generation.top_p")
        self.put("policy.generation.top_k", self["top_k"] or None, "top_k", how="0 is null")
        if self["chat_template_kwargs"] is not None:
            self.carry("chat_template_kwargs", "policy.tokenizer.chat_template_kwargs")
        engine = "vllm" if self.flag("use_vllm") else "transformers"
        self.put("policy.generation.backend", engine, "use_vllm")
        if engine == "vllm":
            to = "policy.generation.vllm_cfg."
            self.carry("vllm_gpu_memory_utilization", to + "gpu_memory_utilization")
            self.carry("vllm_tensor_parallel_size", to + "tensor_parallel_size")
            if self["vllm_mode"] == "colocate":
                self.put("policy.generation.colocated.enabled", True, "vllm_mode")
            else:
                self.refuse("vllm_mode")

    def _loss(self) -> None:
        loss, level = str(self["loss_type"]), "importance_sampling_level"
        means = {"grpo": "sequences", "sapo": "sequences", "dr_grpo": "max_length"}
        normalizer, weighs_tokens = means.get(loss, "tokens"), self._is_cispo or self._is_sapo
        self.put("loss_fn.loss_type", loss if weighs_tokens else "ppo", "loss_type")
        self.put("loss_fn.normalizer", normalizer, "loss_type")
        if self._by_sequence and weighs_tokens:
            self.refuse(level)
        else:
            self.put("loss_fn.sequence_level_importance_ratios", self._by_sequence, level)
        by_token = normalizer == "tokens" and (weighs_tokens or not self._by_sequence)
        self.put("loss_fn.token_level_loss", by_token, "loss_type", level)
        if loss not in ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"):
            self.refuse("loss_type")
        if loss == "bnpo":
            self.note("loss_type", "over all tokens of a step, not of each micro-batch")

    def _clipping(self) -> None:
        if self._is_sapo:
            for name in ("positive", "negative"):
                by = f"sapo_temperature_{name[:3]}"
                self.carry(by, f"loss_fn.sapo.tau_{name}", real)
            self.skip("SAPO clips no ratio", "epsilon", "epsilon_high", "delta")
            return
        high_by = "epsilon" if self["epsilon_high"] is None else "epsilon_high"
        low, high = self.real("epsilon"), self.real(high_by)
        delta = None if self["delta"] is None else self.real("delta")
        if not self._is_cispo:
            self.put("loss_fn.ratio_clip_min", low, "epsilon")
            self.put("loss_fn.ratio_clip_max", high, high_by)
        elif high <= 1.0:
            self.refuse(high_by, high=format(high, "g"))
            return
        else:
            how = "the largest ratio is 1 plus this"
            self.put("loss_fn.ratio_clip_max", round(high - 1.0, 12), high_by, how=how)
            self.put("loss_fn.ratio_clip_min", 1.0, "loss_type")
        if delta is not None and (self._is_cispo or delta < 1.0 + high):
            self.refuse("delta")
        elif delta is not None:
            self.put("loss_fn.ratio_clip_c", delta, "delta")

    def _divergence(self) -> None:
        switch = "use_bias_correction_kl"
        self.carry("beta", "loss_fn.reference_policy_kl_penalty", real)
        if not self.number("beta"):
            self.skip("beta is 0", switch)
            return
        self.put("loss_fn.reference_policy_kl_type", "k3", "beta")
        self.put("loss_fn.kl_input_clamp_value", None, "beta")
        self.put("loss_fn.kl_output_clamp_value", None, "beta")
        if self.flag(switch):
            return
        if self.has(switch):
            self.refuse(switch)
        else:
            self.note("beta", f"the gradient is as with {switch} there")

    def _correction(self) -> None:
        name = "vllm_importance_sampling_"
        key, to = name + "mode", "loss_fn.truncated_importance_sampling_"
        if not self.flag("use_vllm") or not self.flag(name + "correction"):
            keys = [name + part for part in ("correction", "mode", "clip_max", "clip_min")]
            self.skip("it is off" if self.flag("use_vllm") else "only of vLLM", *keys)
            return
        self.put("loss_fn.use_importance_sampling_correction", True, name + "correction")
        kinds = {"token_truncate": "tis", "token_mask": "icepop", "sequence_truncate": "seq-tis"}
        kinds["sequence_mask"] = "icepop" if self._by_sequence else "seq-tis"
        mode = str(self[key])
        if mode not in kinds:
            raise self.problem(key, f"it must be one of {', '.join(kinds)}")
        if self[name + "clip_max"] is None:
            self.refuse(key)
            return
        self.put(to + "type", kinds[mode], key)
        self.carry(name + "clip_max", to + "ratio", real)
        self.carry(name + "clip_min", to + "ratio_min")
        if self._by_sequence and mode.startswith("token"):
            self.refuse(key, "with sequence-level ratios the weight is that of the sequence here")
        if not self._by_sequence and mode == "sequence_mask":
            why = "a completion above the limit counts with the limit as its weight (seq-tis) here"
            self.refuse(key, f"{why}; there it is left out")

    def _rewards(self) -> None:
        model, functions = self.text("reward_model_name_or_path"), self.names("reward_funcs")
        judges = [*(["reward_model"] if model is not None else []), *functions]
        weights = self["reward_weights"] or [1.0] * len(judges)
        if len(weights) != len(judges):
            text = f"there are {len(judges)} rewards, the reward model first"
            raise self.problem("reward_weights", text)
        environments = {"accuracy_reward": "math", "reasoning_accuracy_reward": "math"}
        environments |= {"reward_model": "reward_model"} if model is not None else {}
        weighed = list(zip(judges, map(float, weights), strict=True))
        parts = [
            {"env": environments[name], "weight": weight}
            for name, weight in weighed
            if name in environments
        ]
        if model is not None:
            self.put("env.reward_model.enabled", True, "reward_model_name_or_path")
            self.put("env.reward_model.model_name", model, "reward_model_name_or_path")
        length = "get_soft_overlong_punishment"
        if length in functions:
            # `trl grpo` makes it with max_completion_len=1280 and soft_punish_cache=256.
            to = "grpo.reward_shaping."
            self.put(to + "enabled", True, "reward_funcs")
            self.put(to + "max_response_length", 1280, "reward_funcs")
            self.put(to + "overlong_buffer_length", 256, "reward_funcs")
            self.put(to + "overlong_buffer_penalty", dict(weighed)[length], "reward_funcs")
        self.judges(parts)
        if lost := [str(name) for name in functions if name not in environments and name != length]:
            self.refuse("reward_funcs", lost=", ".join(lost))
        elif not parts:
            text = "not said: name what judges, data.env_name and env.*; until then env.math does"
            self.refuse("reward_funcs", text)

    def judges(self, parts: list[dict[str, Any]]) -> None:
        """Set the one environment that judges, or a composite of several with their weights."""
        keys = ("reward_model_name_or_path", "reward_funcs", "reward_weights")
        by, apart = [key for key in keys if self.has(key)], "multi_objective_aggregation"
        is_apart = self[apart] == "normalize_then_sum"
        is_weighed = any(part["weight"] != 1.0 for part in parts)
        if len(parts) == 1 and not is_weighed:
            self.put("data.env_name", parts[0]["env"], *by)
        elif parts:
            alike = [{**part, "weight": 1.0} for part in parts]
            weighed = alike if is_apart and len(parts) > 1 else parts
            self.put("env.composite", {"imported": {"parts": weighed}}, *by)
            self.put("data.env_name", "imported", *by)
        if is_apart and len(parts) < 2:
            self.skip("there is one reward", apart)
        elif is_apart:
            how = "the weights are those of the parts"
            self.put("grpo.adv_estimator.name", "gdpo", apart, how=how)
            if is_weighed:
                by_name = sorted((part["env"], part["weight"]) for part in parts)
                weights = [weight for _, weight in by_name]
                to, how = "grpo.adv_estimator.reward_weights", "in alphabetical order of the parts"
                self.put(to, weights, "reward_weights", how=how)


class TRL(TableImporter):
    """TRL's RewardTrainer, SFTTrainer and GRPOTrainer."""

    table = "trl"
    title = "TRL"
    devices_of_option = True
    rules: ClassVar[Mapping[Kind, type[Translation]]] = {
        "rm": TRLReward,
        "grpo": TRLGRPO,
        "sft": TRLSFT,
    }
