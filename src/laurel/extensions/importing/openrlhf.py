"""Translates OpenRLHF's train_rm, train_sft and train_ppo_ray (its estimators without a critic).

What is known of all their keys is in openrlhf.yaml. Facts: OpenRLHF/OpenRLHF at 3c3be6234
(2026-08-13, 0.11.0): openrlhf/cli/train_rm.py, train_sft.py, train_ppo_ray.py,
openrlhf/trainer/ppo_utils/experience_maker.py, length_penalty.py, models/loss.py, models/utils.py
and openrlhf/utils/deepspeed/deepspeed.py for schedules; the names before the dotted ones
(0.10.1.post2) at the parent of ed62d0e2 (2026-04-19).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

from laurel.config.schemas import Kind
from laurel.extensions.importing.rules import flag, real, whole
from laurel.extensions.importing.tables import TableImporter
from laurel.extensions.importing.translation import FAR, NO_CRITIC, Translation

_DECAYS = ("cosine_with_min_lr", "cosine", "linear", "constant", "constant_with_warmup")
_ESTIMATORS = ("group_norm", "dr_grpo", "rloo", "reinforce_baseline", "reinforce", "gae")


class OpenRLHFProgram(Translation):
    """The keys that OpenRLHF's three programs share."""

    def _model(self) -> None:
        self.require("MODEL.model_name_or_path", "policy.model_name")
        to = "policy.dtensor_cfg.activation_checkpointing"
        self.carry("MODEL.gradient_checkpointing_enable", to)

    def _learning_rate(self) -> None:
        if str(self["O.optim"]) != "adam":
            self.refuse("O.optim")
        adam = ("O.adam.lr", "O.adam.weight_decay", "O.adam.betas")
        self.optimizer("O.optim", *adam, eps="O.adam.eps")
        decay, key = str(self["O.lr_scheduler"]), "O.lr_scheduler"
        if decay not in _DECAYS:
            self.refuse(key)
        has_floor, is_constant = decay == "cosine_with_min_lr", decay == "constant"
        warmup = self.share(self.real("O.lr_warmup_ratio"), None)
        self.schedule(
            key,
            decay.partition("_")[0] if decay in _DECAYS else "constant",
            *((key, "O.min_lr_ratio") if has_floor else (key,)),
            warmup=0 if is_constant else warmup,
            warmup_by="" if is_constant else "O.lr_warmup_ratio",
            min_ratio=self.real("O.min_lr_ratio") if has_floor else 0.0,
        )
        self.carry("O.max_norm", "policy.max_grad_norm")

    def rows(self) -> None:
        """Set the sets of rows, which may be written as `json@directory`."""
        names = [name.strip() for name in (self.text("SETS") or "").split(",") if name.strip()]
        sets = [name.partition("@")[2] or name for name in names]
        if not sets:
            self.refuse("SETS")
        self.files("SETS", sets, "data.train_data_path", "data.train")
        if len(sets) > 1 and self.text("PROBS") is not None:
            self.refuse("PROBS")
        self.carry("SPLIT", "data.train_split")

    def _validation(self) -> None:
        if self.text("eval.dataset") is None:
            self.put("{run}.val_period", 0, "eval.dataset")
            self.put("{run}.val_at_end", False, "eval.dataset")
            return
        steps = self.whole("eval.steps")
        self.put("{run}.val_at_start", False)
        self.carry("eval.dataset", "data.val_data_path")
        self.carry("eval.split", "data.val_split")
        if steps > 0:
            self.put("{run}.val_period", steps, "eval.steps")
        else:
            self.put("{run}.val_period", 0, "eval.steps", how="at the end")
            if self.whole("train.max_epochs") > 1:
                self.refuse("eval.steps")

    def _rest(self) -> None:
        saves, to = self.whole("ckpt.save_steps"), "checkpointing.save_period"
        how = "only the end is saved" if saves < 0 else ""
        self.put(to, FAR if saves < 0 else saves, "ckpt.save_steps", how=how)
        self.carry("ckpt.max_num", "checkpointing.keep_top_k")
        self.carry("ckpt.output_dir", "checkpointing.checkpoint_dir")
        self.carry("train.seed", "{run}.seed")
        is_half = self["ds.param_dtype"] == "bf16"
        if not is_half:
            self.refuse("ds.param_dtype")
        self.put("policy.precision", "bfloat16", *(("ds.param_dtype",) if is_half else ()))
        self.carry("ds.ring_attn_size", "policy.dtensor_cfg.context_parallel_size")
        self.carry("ds.tensor_parallel_size", "policy.dtensor_cfg.tensor_parallel_size")
        if self.whole("LORA.rank"):
            alpha, both = self.real("LORA.alpha"), ("LORA.rank", "LORA.rank")
            self.adapters(*both, alpha, "LORA.alpha", dropout="LORA.dropout")
            self.adapted_layers("LORA.target_modules", self["LORA.target_modules"])
        switch, own = "data.apply_chat_template", "data.tokenizer_chat_template"
        to, text = "policy.tokenizer.chat_template", self.text(own)
        if self.flag(switch) and text is not None:
            self.put(to, text, switch, own)
        elif self.flag(switch):
            self.put(to, "default", switch)
        else:
            self.put(to, None, switch, how="texts are joined as they are")
            if self.text("data.input_template") is not None:
                self.refuse("data.input_template")
            else:
                self.skip("there is none", "data.input_template")
        self.carry("data.max_samples", "data.max_samples")
        has_key = self["logger.wandb.key"] not in (None, False, "")
        self.put("logger.wandb_enabled", has_key, "logger.wandb.key")
        if has_key:
            self.refuse("logger.wandb.key")
            self.carry("logger.wandb.project", "logger.wandb.project")
        if self.has("logger.wandb.org"):
            self.carry("logger.wandb.org", "logger.wandb.entity")
        if self.has("logger.wandb.run_name"):
            self.carry("logger.wandb.run_name", "logger.wandb.name")
        is_on = self.text("logger.tensorboard_dir") is not None
        how = "the directory is logger.log_dir" if is_on else ""
        self.put("logger.tensorboard_enabled", is_on, "logger.tensorboard_dir", how=how)


class OpenRLHFTrainer(OpenRLHFProgram):
    """The keys that the training of reward models and fine-tuning share."""

    def translate(self) -> None:
        """Translate the keys of reward models and of fine-tuning."""
        self._model()
        self.carry("train.max_epochs", "{run}.max_num_epochs")
        self.carry("train.batch_size", "policy.train_global_batch_size")
        self.carry("train.micro_batch_size", "policy.train_micro_batch_size")
        self._learning_rate()
        self._validation()
        self.carry("data.max_len", "policy.max_total_sequence_length", whole)
        self._own()
        self._rest()

    def _own(self) -> None:
        """Translate the keys that only one of the two programs has."""


class OpenRLHFRewardModel(OpenRLHFTrainer):
    """The program `train_rm`."""

    def _own(self) -> None:
        how = "cut on the right, as there; left keeps the answer"
        self.put("data.truncation_side", "right", "data.max_len", how=how)
        self.rows()
        if self.text("data.prompt_key") is not None:
            self.carry("data.prompt_key", "data.prompt_key")
            self.put("data.dataset_name", "BinaryPreferenceDataset", "data.prompt_key")
        self.carry("data.chosen_key", "data.chosen_key")
        self.carry("data.rejected_key", "data.rejected_key")
        how = "sigmoid and its other form are the same"
        self.put("rm.loss.type", "bradley_terry", "model.loss_type", how=how)
        self.carry("model.margin_loss_enable", "rm.loss.use_margin", flag)
        if self.flag("model.margin_loss_enable"):
            self.put("data.margin_key", "margin", "model.margin_loss_enable")


class OpenRLHFSFT(OpenRLHFTrainer):
    """The program `train_sft`."""

    def _own(self) -> None:
        self.rows()
        self.carry("data.input_key", "data.input_key")
        if self.text("data.output_key") is not None:
            self.carry("data.output_key", "data.output_key")
        self.put("data.split_validation_size", 0.0)


class OpenRLHFPPO(OpenRLHFProgram):
    """The program `train_ppo_ray`."""

    @cached_property
    def size(self) -> int:
        """The completions of a prompt."""
        return self.count("rollout.n_samples_per_prompt")

    @cached_property
    def _is_async(self) -> bool:
        return self.flag("train.async_enable")

    def translate(self) -> None:
        """Translate the keys of `train_ppo_ray`."""
        self._model()
        self._batches()
        to, answer = "policy.max_total_sequence_length", "policy.generation.max_new_tokens"
        both = ("prompt_max_len", "generate_max_len")  # which are those before 0.10
        if all(self[key] is None for key in both):
            self.carry("data.max_len", to, whole)
            self.carry("rollout.max_new_tokens", answer)
        elif any(self[key] is None for key in both):
            raise self.problem("prompt_max_len", "generate_max_len belongs to it")
        else:
            self.put(to, sum(map(self.whole, both)), *both)
            self.carry("prompt_max_len", "data.max_input_seq_length")
            self.carry("generate_max_len", answer)
        self.carry("rollout.temperature", "policy.generation.temperature")
        self.carry("rollout.top_p", "policy.generation.top_p")
        self._learning_rate()
        self._advantages()
        self._loss()
        self._correction()
        self._judges()
        self._shaping()
        self.carry("actor.num_nodes", "cluster.num_nodes", whole)
        self.carry("actor.num_gpus_per_node", "cluster.gpus_per_node", whole)
        self.put("policy.generation.backend", "vllm", "V.num_engines")
        colocated = "train.colocate_all"
        if self.flag(colocated):
            self.put("policy.generation.colocated.enabled", True, colocated)
        elif self.has(colocated, "V.num_engines"):
            self.refuse(colocated if self.has(colocated) else "V.num_engines")
        for name in ("tensor_parallel_size", "enforce_eager", "gpu_memory_utilization"):
            self.carry(f"V.{name}", f"policy.generation.vllm_cfg.{name}")
        self.rows()
        self.carry("data.input_key", "data.input_key")
        if self.text("data.label_key") is not None:
            self.carry("data.label_key", "data.output_key")
        self.put("data.split_validation_size", 0.0)
        self._validation()
        self.carry("eval.temperature", "policy.generation.val_temperature")
        self.carry("eval.n_samples_per_prompt", "grpo.val_num_generations_per_prompt")
        if self["actor.entropy_coef"]:
            self.refuse("actor.entropy_coef")
        self._rest()

    def _batches(self) -> None:
        prompts, update = self.count("rollout.batch_size"), self.count("train.batch_size")
        samples, to = prompts * self.size, "policy.train_global_batch_size"
        self.put("grpo.num_prompts_per_step", prompts, "rollout.batch_size")
        per_prompt = "rollout.n_samples_per_prompt"
        self.put("grpo.num_generations_per_prompt", self.size, per_prompt)
        product = f"{prompts} x {self.size} = {samples}"
        if update > samples:
            self.put(to, samples)
            self.refuse("train.batch_size", product=product)
        elif samples % update:
            text = f"rollout.batch_size x {per_prompt} = {product} is no multiple of it"
            raise self.problem("train.batch_size", text)
        else:
            how = f"samples: {samples // update} updates for each step's {samples}"
            self.put(to, update, "train.batch_size", how=how)
        self.carry("train.micro_batch_size", "policy.train_micro_batch_size")
        self.carry("train.num_episodes", "grpo.max_num_epochs")
        self.carry("train.max_epochs", "grpo.num_iterations")

    def _advantages(self) -> None:
        key, switch, to = "ADV.estimator", "ADV.no_std_norm", "grpo.adv_estimator."
        estimator, is_plain = str(self[key]), self.flag(switch)
        if estimator not in _ESTIMATORS:
            raise self.problem(key, f"it must be one of {', '.join(_ESTIMATORS)}")
        if self.size == 1 and (estimator != "reinforce" or is_plain):
            if self.has(switch):
                self.refuse(switch)
            self.lone_completions(key, "rollout.n_samples_per_prompt")
            return
        is_reinforce = estimator.startswith("reinforce")
        over_batch, by_group = is_reinforce and not is_plain, estimator in ("group_norm", "gae")
        self.put("grpo.adv_estimator.use_leave_one_out_baseline", estimator == "rloo", key)
        self.put(to + "name", "reinforce_plus_plus" if over_batch else "grpo", key)
        if by_group:
            self.put(to + "scale", "group", key)
            self.put(to + "std_eps", 1e-9)
        elif over_batch:
            self.put(to + "minus_baseline", estimator == "reinforce_baseline", key)
            self.note(key, "each completion counts once for the deviation here, each token there")
        else:
            self.put(to + "scale", "none", key)
        if is_reinforce and self.has(switch):
            self.put(to + "scale", "none" if is_plain else None, switch)
        else:
            self.skip(f"{estimator} is not normalised over the batch", switch)
        if estimator == "gae":
            self.refuse(key, f"{NO_CRITIC}: group_norm, which is GRPO, is written instead")
        elif estimator == "reinforce" and is_plain:
            self.refuse(key)

    def _loss(self) -> None:
        kind, both = self["actor.policy_loss_type"], "actor.eps_clip_low_high"
        if kind not in ("ppo", "gspo"):
            raise self.problem("actor.policy_loss_type", "it must be ppo or gspo")
        by_sequence, by = kind == "gspo", "actor.policy_loss_type"
        self.put("loss_fn.sequence_level_importance_ratios", by_sequence, by)
        self.put("loss_fn.token_level_loss", not by_sequence, by)
        if self[both] is None:
            self.carry("actor.eps_clip", "loss_fn.ratio_clip_min")
            self.carry("actor.eps_clip", "loss_fn.ratio_clip_max")
        else:
            self.put("loss_fn.ratio_clip_min", self.pair(both)[0], both)
            self.put("loss_fn.ratio_clip_max", self.pair(both)[1], both)
        self.carry("actor.dual_clip", "loss_fn.ratio_clip_c")
        weight, in_loss = max(0.0, self.real("KL.init_coef")), "KL.use_loss"
        self.put("loss_fn.reference_policy_kl_penalty", weight, "KL.init_coef")
        if weight:
            self.carry("KL.estimator", "loss_fn.reference_policy_kl_type")
            self.put("loss_fn.use_kl_in_reward", not self.flag(in_loss), in_loss)
            self.put("loss_fn.kl_input_clamp_value", None)
            if not self.flag(in_loss):
                why = "subtracted before rewards are compared here, token by token after it there"
                self.note("KL.init_coef", why)

    def _correction(self) -> None:
        switch, to = "ADV.is_correction_enable", "loss_fn.truncated_importance_sampling_"
        corrects = self.flag(switch)
        if self._is_async:
            by = ("train.async_enable", "train.async_queue_size")
            self.put("grpo.max_staleness", self.whole("train.async_queue_size"), *by)
        is_own = corrects or not self._is_async
        to_switch, is_on = "loss_fn.use_importance_sampling_correction", corrects or self._is_async
        self.put(to_switch, is_on, *((switch,) if is_own else ()))
        if not is_own:
            self.refuse(switch)
        if corrects:
            if self["actor.policy_loss_type"] == "gspo":
                self.refuse("ADV.is_correction_type")
            self.carry("ADV.is_correction_type", to + "type")
            low, high = self.pair("ADV.is_correction_threshold")
            self.put(to + "ratio", high, "ADV.is_correction_threshold")
            self.put(to + "ratio_min", low, "ADV.is_correction_threshold")

    def _judges(self) -> None:
        agent, url, model = (
            "train.agent_func_path",
            "reward.remote_url",
            "reward.model_name_or_path",
        )
        to, served, judge = "env.reward_model.", self.text(url), self.text(model)
        if self.text(agent) is not None:
            self.refuse(agent)
        elif served is not None and all(":" in address for address in served.split(",")):
            urls = [address.strip().removesuffix("/get_reward") for address in served.split(",")]
            self.put(to + "urls", urls, url)
            self.put(to + "url_protocol", "openrlhf", url)
            how = "its template renders, as there; name the reward model's if that is better"
            self.put(to + "model_name", self["MODEL.model_name_or_path"], url, how=how)
            self.put(to + "enabled", True, url)
        elif served is not None:
            self.refuse(url)
        elif judge is None:
            text = "not said: name what judges, data.env_name, env.*; until then env.math does"
            self.refuse(model, text)
        elif "," in judge:
            self.refuse(model)
        else:
            self.put(to + "model_name", judge, model)
            self.put(to + "enabled", True, model)
        if self.flag("reward.normalize_enable"):
            if judge is not None and served is None:
                self.put(to + "transform.normalize", "stored", "reward.normalize_enable")
            else:
                self.refuse("reward.normalize_enable")
        low, high = self.pair("reward.clip_range")
        how = "there, too, what is clipped has been compared"
        self.put("grpo.advantage_clip_low", low, "reward.clip_range", how=how)
        self.put("grpo.advantage_clip_high", high, "reward.clip_range")

    def _shaping(self) -> None:
        to, buffer = "grpo.reward_shaping.", "reward.overlong_buffer_len"
        longest = self["rollout.max_new_tokens"] or self["generate_max_len"]
        if self[buffer] is not None:
            self.put(to + "enabled", True, buffer)
            self.carry(buffer, to + "overlong_buffer_length", whole)
            self.carry("reward.overlong_penalty_factor", to + "overlong_buffer_penalty", real)
            if longest is not None:
                self.put(to + "max_response_length", longest, buffer)
        stop = "reward.stop_properly_penalty_coef"
        if self[stop] is not None and self.number(stop) < 0:
            self.refuse(stop)
        elif self[stop] is not None:
            self.put(to + "enabled", True, stop)
            self.carry(stop, to + "stop_properly_penalty_coef", real)
            if self[buffer] is not None:
                self.refuse(buffer)
        switch, between = "algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"
        self.carry(switch, "grpo.use_dynamic_sampling", flag)
        if self.flag(switch) and self.has(between):
            if self.pair(between) == [0.0, 1.0]:
                self.skip("of rewards 0 and 1, groups that differ are those inside", between)
            else:
                self.refuse(between)


class OpenRLHF(TableImporter):
    """OpenRLHF's reward models, fine-tuning and PPO family."""

    table = "openrlhf"
    title = "OpenRLHF"
    rules: ClassVar[Mapping[Kind, type[Translation]]] = {
        "rm": OpenRLHFRewardModel,
        "grpo": OpenRLHFPPO,
        "sft": OpenRLHFSFT,
    }
