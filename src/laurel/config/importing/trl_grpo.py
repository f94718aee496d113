"""TRL's GRPO trainer.

Facts: `trl/trainer/grpo_config.py`, `grpo_trainer.py` and `trl/scripts/grpo.py` of huggingface/trl
at f2cd57710 (2026-07-24, 1.10.0.dev0).
"""

from __future__ import annotations

from typing import Any

from laurel.config.importing.rules import Table, absent, same, together, unneeded
from laurel.config.importing.trl import COMMON_RULES
from laurel.config.importing.trl_names import COMMON_DEFAULTS, COMMON_REST, OTHER_NAMES
from laurel.config.importing.trl_rewards import rewards
from laurel.config.importing.trl_steps import generation_batch, global_batch
from laurel.config.importing.work import Work

ROOM_FOR_PROMPTS = 2048
"""Tokens left for prompts where TRL sets no limit."""

_DEFAULTS: dict[str, Any] = {
    **COMMON_DEFAULTS, "learning_rate": 1e-6, "num_generations": 8, "num_generations_eval": None,
    "max_completion_length": 512, "max_prompt_length": None, "generation_batch_size": None,
    "steps_per_generation": None, "num_iterations": 1, "temperature": 1.0, "top_p": 1.0,
    "top_k": 0, "use_vllm": False, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3,
    "vllm_tensor_parallel_size": 1, "vllm_max_model_length": None, "beta": 0.0,
    "use_bias_correction_kl": False, "epsilon": 0.2, "epsilon_high": None, "delta": None,
    "loss_type": "dapo", "importance_sampling_level": "token", "scale_rewards": "group",
    "reward_weights": None, "multi_objective_aggregation": "sum_then_normalize",
    "reward_funcs": None, "reward_model_name_or_path": None, "mask_truncated_completions": False,
    "shuffle_dataset": True, "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None, "chat_template_kwargs": None,
}  # fmt: skip


def _groups(work: Work) -> None:
    size = work.whole("num_generations")
    work.put("grpo.num_generations_per_prompt", size, by=("num_generations",))
    drawn = generation_batch(work)
    update = global_batch(work)
    keys = ("per_device_train_batch_size", "gradient_accumulation_steps", "generation_batch_size",
            "steps_per_generation", "num_generations")  # fmt: skip
    if drawn < update and update % drawn == 0:
        drawn = update  # drawn in parts there, all with the same weights
    if drawn % size or drawn % update:
        raise work.problem(
            "num_generations",
            f"{drawn} completions are drawn at a time and {update} make an optimizer step; the "
            f"first must be a multiple of {size} and of {update}; are --devices right?",
        )
    work.put("grpo.num_prompts_per_step", drawn // size, by=keys,
             how=f"{drawn} completions are drawn at a time")  # fmt: skip
    validates = str(work["eval_strategy"]).lower().rpartition(".")[2] != "no"
    if validates:
        number = work["num_generations_eval"] or size
        work.put("grpo.val_num_generations_per_prompt", number,
                 by=("num_generations_eval", "num_generations"))  # fmt: skip


def _lengths(work: Work) -> None:
    longest = work["max_completion_length"]
    work.put("policy.generation.max_new_tokens", longest, by=("max_completion_length",))
    prompt, model = work["max_prompt_length"], work["vllm_max_model_length"]
    total = "policy.max_total_sequence_length"
    if prompt is not None:
        work.put("data.max_input_seq_length", prompt, by=("max_prompt_length",),
                 how="longer prompts are left out, not cut")  # fmt: skip
    if model is not None:
        work.put(total, work.whole("vllm_max_model_length"), by=("vllm_max_model_length",))
    elif longest is not None:
        room = ROOM_FOR_PROMPTS if prompt is None else work.whole("max_prompt_length")
        how = f"{room} tokens for the prompt" + (" (TRL sets no limit)" if prompt is None else "")
        work.put(total, work.whole("max_completion_length") + room,
                 by=("max_completion_length", "max_prompt_length"), how=how)  # fmt: skip


def _sampling(work: Work) -> None:
    work.put("policy.generation.temperature", work["temperature"], by=("temperature",))
    work.put("policy.generation.top_p", work["top_p"], by=("top_p",))
    work.put("policy.generation.top_k", work["top_k"] or None, by=("top_k",), how="0 is null")
    if work["chat_template_kwargs"] is not None:
        work.put("policy.tokenizer.chat_template_kwargs", work["chat_template_kwargs"],
                 by=("chat_template_kwargs",))  # fmt: skip


_VLLM_KEYS = ("vllm_mode", "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size")


def _engine(work: Work) -> None:
    if not work.flag("use_vllm"):
        work.put("policy.generation.backend", "transformers", by=("use_vllm",))
        for key in work.said_of(_VLLM_KEYS):
            work.unneeded(key, "use_vllm is off")
        return
    work.put("policy.generation.backend", "vllm", by=("use_vllm",))
    work.put("policy.generation.vllm_cfg.gpu_memory_utilization",
             work["vllm_gpu_memory_utilization"], by=("vllm_gpu_memory_utilization",))  # fmt: skip
    work.put("policy.generation.vllm_cfg.tensor_parallel_size",
             work["vllm_tensor_parallel_size"], by=("vllm_tensor_parallel_size",))  # fmt: skip
    if work["vllm_mode"] == "colocate":
        work.put("policy.generation.colocated.enabled", True, by=("vllm_mode",))
    else:
        work.refuse("vllm_mode", "Laurel starts the engine itself, on the policy's devices; on its "
                    "own: "
                    "policy.generation.colocated.enabled=false and .resources")  # fmt: skip


def _clips(work: Work) -> None:
    low = float(work.number("epsilon"))
    has_high = work["epsilon_high"] is not None
    high = float(work.number("epsilon_high")) if has_high else low
    high_by = ("epsilon_high",) if has_high else ("epsilon",)
    if work["loss_type"] == "cispo":
        if high <= 1.0:
            work.refuse(high_by[0], f"for CISPO it is the largest ratio, and {high:g} would lower "
                        "every ratio; Laurel's default range is used")  # fmt: skip
            return
        work.put("loss_fn.ratio_clip_max", round(high - 1.0, 12), by=high_by,
                 how="the largest ratio is 1 plus this")  # fmt: skip
        work.put("loss_fn.ratio_clip_min", 1.0, by=("loss_type",))
        if has_high and work.is_said("epsilon"):
            work.unneeded("epsilon", "CISPO has no lower end there")
    else:
        work.put("loss_fn.ratio_clip_min", low, by=("epsilon",))
        work.put("loss_fn.ratio_clip_max", high, by=high_by)
    if work["delta"] is None:
        return
    delta = float(work.number("delta"))
    if work["loss_type"] == "cispo" or delta < 1.0 + high:
        work.refuse("delta", "a limit on ratios below 1 + epsilon_high, or with CISPO, is another "
                    "loss; loss_fn.ratio_clip_c is the other")  # fmt: skip
    else:
        work.put("loss_fn.ratio_clip_c", delta, by=("delta",))


_LOSSES = {
    "grpo": ("ppo", "sequences"),
    "bnpo": ("ppo", "tokens"),
    "dr_grpo": ("ppo", "max_length"),
    "dapo": ("ppo", "tokens"),
    "cispo": ("cispo", "tokens"),
}


def _loss(work: Work) -> None:
    name = str(work["loss_type"])
    kind, normalizer = _LOSSES.get(name, ("ppo", "tokens"))
    work.put("loss_fn.loss_type", kind, by=("loss_type",))
    work.put("loss_fn.normalizer", normalizer, by=("loss_type",))
    by_sequence = str(work["importance_sampling_level"]) == "sequence"
    if by_sequence and kind == "cispo":
        work.refuse("importance_sampling_level", "CISPO weighs tokens here")
        by_sequence = False
    else:
        work.put("loss_fn.sequence_level_importance_ratios", by_sequence,
                 by=("importance_sampling_level",))  # fmt: skip
    work.put("loss_fn.token_level_loss", normalizer == "tokens" and not by_sequence,
             by=("loss_type", "importance_sampling_level"))  # fmt: skip
    if name not in _LOSSES:
        work.refuse("loss_type", f"the clipped ratio is used; those carried: {', '.join(_LOSSES)}")
    elif name == "bnpo":
        work.note("loss_type", "over all tokens of a step, not of each micro-batch")


def _divergence(work: Work) -> None:
    beta = work.number("beta")
    work.put("loss_fn.reference_policy_kl_penalty", float(beta), by=("beta",))
    if not beta:
        if work.is_said("use_bias_correction_kl"):
            work.unneeded("use_bias_correction_kl", "beta is 0")
        return
    work.put("loss_fn.reference_policy_kl_type", "k3", by=("beta",))
    work.put("loss_fn.kl_input_clamp_value", None, by=("beta",))
    work.put("loss_fn.kl_output_clamp_value", None, by=("beta",))
    if work.flag("use_bias_correction_kl"):
        work.unneeded("use_bias_correction_kl", "it is always so here")
    elif work.is_said("use_bias_correction_kl"):
        work.refuse("use_bias_correction_kl", "the gradient of the divergence is complete here, as "
                    "with true there")  # fmt: skip
    else:
        work.note("beta", "the gradient is as with use_bias_correction_kl there")


_MISMATCH = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
             "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min")  # fmt: skip


def _mismatch(work: Work) -> None:
    """What weights tokens because the engine's probabilities are not the learner's."""
    on, mode, high, low = _MISMATCH
    if not work.flag("use_vllm") or not work.flag(on):
        for key in work.said_of(_MISMATCH):
            work.unneeded(key, "only of vLLM" if not work.flag("use_vllm") else "it is off")
        return
    work.put("loss_fn.use_importance_sampling_correction", True, by=(on,))
    by_sequence = str(work["importance_sampling_level"]) == "sequence"
    kinds = {"token_truncate": "tis", "token_mask": "icepop", "sequence_truncate": "seq-tis",
             "sequence_mask": "icepop" if by_sequence else "seq-tis"}  # fmt: skip
    name = str(work[mode])
    if name not in kinds:
        raise work.problem(mode, f"it must be one of {', '.join(kinds)}")
    limit = "loss_fn.truncated_importance_sampling_ratio"
    if work[high] is None:
        work.refuse(mode, "weights without an upper limit are used as they are here")
        return
    work.put("loss_fn.truncated_importance_sampling_type", kinds[name], by=(mode,))
    work.put(limit, float(work.number(high)), by=(high,))
    work.put(f"{limit}_min", work[low], by=(low,))
    if by_sequence and name.startswith("token"):
        work.refuse(mode, "with sequence-level ratios the weight is that of the sequence here")
    elif name == "sequence_mask" and not by_sequence:
        work.refuse(mode, "a completion above the limit counts with the limit as its weight "
                    "(seq-tis) here; there it is left out")  # fmt: skip


def _scale(work: Work) -> None:
    said = work["scale_rewards"]
    name = {True: "group", False: "none", "True": "group", "False": "none"}.get(said, said)
    if name not in ("group", "batch", "none"):
        raise work.problem("scale_rewards", "it must be group, batch or none")
    if work["multi_objective_aggregation"] != "normalize_then_sum":
        work.put("grpo.adv_estimator.scale", name, by=("scale_rewards",))
    work.put("grpo.use_leave_one_out_baseline", False, by=("scale_rewards",))
    work.put("grpo.adv_estimator.std_eps", 1e-4, by=("scale_rewards",))


def _truncated(work: Work) -> None:
    work.put("grpo.overlong_filtering", work.flag("mask_truncated_completions"),
             by=("mask_truncated_completions",))  # fmt: skip
    if work.flag("mask_truncated_completions"):
        work.note(
            "mask_truncated_completions", "here they do not count in their group's mean either"
        )


GRPO = Table(
    rules=(
        *COMMON_RULES,
        together(("num_generations", "num_generations_eval", "generation_batch_size",
                  "steps_per_generation"),
                 ("grpo.num_generations_per_prompt", "grpo.num_prompts_per_step",
                  "grpo.val_num_generations_per_prompt"),
                 "prompts = completions drawn at a time / num_generations", _groups),
        same("num_iterations", "grpo.num_iterations"),
        together(("max_completion_length", "max_prompt_length", "vllm_max_model_length"),
                 ("policy.generation.max_new_tokens", "data.max_input_seq_length",
                  "policy.max_total_sequence_length"),
                 f"total = prompt + completion; without a limit of prompts, {ROOM_FOR_PROMPTS} "
                 "tokens", _lengths),
        together(("temperature", "top_p", "top_k", "chat_template_kwargs"),
                 ("policy.generation.temperature", "policy.generation.top_p",
                  "policy.generation.top_k", "policy.tokenizer.chat_template_kwargs"),
                 "`top_k` 0 is null", _sampling),
        together(("use_vllm", *_VLLM_KEYS),
                 ("policy.generation.backend", "policy.generation.vllm_cfg.gpu_memory_utilization",
                  "policy.generation.vllm_cfg.tensor_parallel_size",
                  "policy.generation.colocated.enabled"), "off is `transformers`; "
                 "`vllm_mode: server` is not carried", _engine),
        together(("loss_type", "importance_sampling_level"),
                 ("loss_fn.loss_type", "loss_fn.normalizer", "loss_fn.token_level_loss",
                  "loss_fn.sequence_level_importance_ratios"),
                 "grpo: `sequences`; bnpo, dapo, cispo: `tokens`; dr_grpo: `max_length`", _loss),
        together(("epsilon", "epsilon_high", "delta"),
                 ("loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max", "loss_fn.ratio_clip_c"),
                 "CISPO: the largest ratio is `epsilon_high` there, 1 + `ratio_clip_max` here",
                 _clips),
        together(("beta", "use_bias_correction_kl"),
                 ("loss_fn.reference_policy_kl_penalty", "loss_fn.reference_policy_kl_type",
                  "loss_fn.kl_input_clamp_value", "loss_fn.kl_output_clamp_value"),
                 "always k3, never clamped; its gradient is complete here", _divergence),
        together(_MISMATCH, ("loss_fn.use_importance_sampling_correction",
                  "loss_fn.truncated_importance_sampling_type",
                  "loss_fn.truncated_importance_sampling_ratio",
                  "loss_fn.truncated_importance_sampling_ratio_min"),
                 "token_truncate: `tis`; token_mask: `icepop`; sequence_truncate: `seq-tis`; "
                 "sequence_mask: `icepop` with sequence-level ratios, else not carried", _mismatch),
        together(("reward_model_name_or_path", "reward_funcs", "reward_weights",
                  "multi_objective_aggregation"),
                 ("env.reward_model.enabled", "env.reward_model.model_name", "env.composite",
                  "data.env_name", "grpo.adv_estimator.name", "grpo.adv_estimator.reward_weights",
                  "grpo.reward_shaping.enabled", "grpo.reward_shaping.max_response_length",
                  "grpo.reward_shaping.overlong_buffer_length",
                  "grpo.reward_shaping.overlong_buffer_penalty"),
                 "accuracy_reward is `math`; several are a composite; your own functions are "
                 "not carried", rewards),
        together(("scale_rewards",),
                 ("grpo.adv_estimator.scale", "grpo.adv_estimator.std_eps",
                  "grpo.use_leave_one_out_baseline"),
                 "true is `group`, false `none`; the baseline is the mean of the whole group",
                 _scale),
        together(("mask_truncated_completions",), ("grpo.overlong_filtering",),
                 "cut-off completions do not count in their group's mean either", _truncated),
        same("shuffle_dataset", "data.shuffle"),
        absent("a probability below which tokens are never drawn: only top_p and top_k here",
               "min_p"),
        absent("only temperature, top_p and top_k shape what is drawn",
               "repetition_penalty", off=(None, 1)),
        absent("policy.generation.* holds what there is: stop_strings, stop_token_ids, ...",
               "generation_kwargs", "vllm_structured_outputs_regex"),
        absent("the reference stays as it was", "sync_ref_model"),
        unneeded("only with sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
        absent("no bonus for entropy; it is measured (loss_fn.entropy)", "entropy_coef",
               "use_adaptive_entropy"),
        unneeded("only with use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max",
                 "entropy_coef_delta", "entropy_target"),
        absent("all tokens are learned from", "top_entropy_quantile", off=(None, 1)),
        absent("loss_fn.truncated_importance_sampling_* leaves out what is too far off",
               "off_policy_mask_threshold"),
        absent("tools are an environment's here: env.custom, grpo.max_rollout_turns",
               "max_tool_calling_iterations"),
        unneeded("only of the losses sapo and vespo", "sapo_temperature_neg",
                 "sapo_temperature_pos", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg",
                 "vespo_lambda_neg"),
        absent("no auxiliary loss of mixtures of experts", "router_aux_loss_coef", off=(0, 0.001)),
        absent("log-probabilities are float32 here, the head's product is as policy.precision says",
               "cast_lm_head_to_fp32"),
        unneeded("completions are always written, with their rewards (logger.write_completions)",
                 "log_completions", "num_completions_to_print", "log_unique_prompts",
                 "wandb_log_unique_prompts", "log_multimodal"),
        absent("nothing is pushed while a run goes on", "log_completions_hub_repo"),
        unneeded("only of its own servers and engines", "vllm_server_base_url", "vllm_server_host",
                 "vllm_server_port", "vllm_server_timeout", "vllm_group_port", "vllm_model_impl",
                 "vllm_enable_sleep_mode", "cache_implementation", "ds3_gather_for_generation",
                 "use_transformers_continuous_batching", "use_transformers_paged",
                 "transformers_continuous_batching_config"),
        *COMMON_REST,
    ),
    defaults=_DEFAULTS,
    told_by=frozenset({"num_generations", "beta", "epsilon", "epsilon_high",
                 "max_completion_length",
                       "scale_rewards", "reward_funcs", "reward_weights", "use_vllm",
                       "num_iterations", "mask_truncated_completions",
                       "importance_sampling_level", "steps_per_generation",
                       "reward_model_name_or_path", "max_prompt_length", "temperature"}),
    other_names={**OTHER_NAMES, "vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max",
                 "vllm_max_model_len": "vllm_max_model_length",
                 "vllm_guided_decoding_regex": "vllm_structured_outputs_regex"},
)  # fmt: skip
