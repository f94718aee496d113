"""OpenRLHF's PPO trainer and its estimators without a critic.

Facts: `openrlhf/cli/train_ppo_ray.py`, `trainer/ppo_utils/experience_maker.py`,
`trainer/ppo_utils/length_penalty.py`, `models/loss.py`, `models/utils.py` of OpenRLHF/OpenRLHF at
3c3be6234 (2026-08-13, 0.11.0).
"""

from __future__ import annotations

from laurel.config.importing.openrlhf import (
    COMMON_REST,
    COMMON_RULES,
    optimizer_rules,
    rows,
    validation,
)
from laurel.config.importing.openrlhf_names import (
    COMMON_DEFAULTS,
    OPTIMIZER_DEFAULTS,
    PPO_NAMES,
)
from laurel.config.importing.openrlhf_rewards import filtering, pair_of, rewards, shaping
from laurel.config.importing.optimizing import NO_CRITIC, put_estimator_of_lone_completions
from laurel.config.importing.rules import Table, absent, same, together, unneeded
from laurel.config.importing.work import Work


def _model(work: Work) -> None:
    key = "actor.model_name_or_path"
    if work.text(key) is None:
        work.refuse(key, "not said: set policy.model_name")
    else:
        work.put("policy.model_name", work[key], by=(key,))


def _batches(work: Work) -> None:
    prompts, size = work.whole("rollout.batch_size"), work.whole("rollout.n_samples_per_prompt")
    samples, update = prompts * size, work.whole("train.batch_size")
    work.put("grpo.num_prompts_per_step", prompts, by=("rollout.batch_size",))
    work.put("grpo.num_generations_per_prompt", size, by=("rollout.n_samples_per_prompt",))
    if update > samples:
        work.put("policy.train_global_batch_size", samples, by=())
        work.refuse("train.batch_size", f"a step has only {prompts} x {size} = {samples} samples, "
                    "which are learned from at once")  # fmt: skip
        return
    if samples % update:
        raise work.problem(
            "train.batch_size",
            f"rollout.batch_size x rollout.n_samples_per_prompt = {prompts} x {size} = {samples} "
            "is no multiple of it",
        )
    work.put("policy.train_global_batch_size", update, by=("train.batch_size",),
             how=f"samples: {samples // update} updates for each step's {samples}")  # fmt: skip


def _lengths(work: Work) -> None:
    prompt, answer = work["prompt_max_len"], work["generate_max_len"]
    if prompt is not None or answer is not None:  # before 0.10
        if prompt is None or answer is None:
            raise work.problem("prompt_max_len", "generate_max_len belongs to it")
        by = ("prompt_max_len", "generate_max_len")
        total = work.whole("prompt_max_len") + work.whole("generate_max_len")
        work.put("policy.max_total_sequence_length", total, by=by)
        work.put("data.max_input_seq_length", prompt, by=by[:1])
        work.put("policy.generation.max_new_tokens", answer, by=by[1:])
        return
    work.put("policy.max_total_sequence_length", work.whole("data.max_len"), by=("data.max_len",))
    work.put("policy.generation.max_new_tokens", work["rollout.max_new_tokens"],
             by=("rollout.max_new_tokens",))  # fmt: skip


_ESTIMATORS = ("group_norm", "dr_grpo", "rloo", "reinforce_baseline", "reinforce", "gae")


def _estimator(work: Work) -> None:
    key, no_std = "algo.advantage.estimator", "algo.advantage.no_std_norm"
    name, keeps_scale = str(work[key]), work.flag(no_std)
    if name not in _ESTIMATORS:
        raise work.problem(key, f"it must be one of {', '.join(_ESTIMATORS)}")
    is_lone = work.whole("rollout.n_samples_per_prompt") == 1
    if is_lone and (name != "reinforce" or keeps_scale):
        if work.is_said(no_std):
            work.refuse(no_std, "advantages over the batch are divided by their deviation")
        put_estimator_of_lone_completions(work, key, size_key="rollout.n_samples_per_prompt")
        return
    ours = "grpo.adv_estimator."
    work.put("grpo.use_leave_one_out_baseline", name == "rloo", by=(key,))
    is_batch = name.startswith("reinforce") and not keeps_scale
    work.put(ours + "name", "reinforce_plus_plus" if is_batch else "grpo", by=(key,))
    if name in ("group_norm", "gae"):
        work.put(ours + "scale", "group", by=(key,))
        work.put(ours + "std_eps", 1e-9, by=())
    elif not is_batch:
        work.put(ours + "scale", "none", by=(key,))
    if is_batch:
        work.put(ours + "minus_baseline", name == "reinforce_baseline", by=(key,))
        work.note(key, "each completion counts once for the deviation here, each token there")
    if work.is_said(no_std):
        if name.startswith("reinforce"):
            work.put(ours + "scale", "none" if keeps_scale else None, by=(no_std,))
        else:
            work.unneeded(no_std, f"{name} is not normalised over the batch")
    if name == "gae":
        work.refuse(key, f"{NO_CRITIC}: group_norm, which is GRPO, is written instead")
    elif name == "reinforce" and keeps_scale:
        work.refuse(key, "advantages without baseline and without normalisation are not here: the "
                    "group's mean is subtracted")  # fmt: skip
    if not work.flag("train.async_enable") and work.is_said("train.async_queue_size"):
        work.unneeded("train.async_queue_size", "train.async_enable is off")


def _loss(work: Work) -> None:
    key = "actor.policy_loss_type"
    by_sequence = work[key] == "gspo"
    if not by_sequence and work[key] != "ppo":
        raise work.problem(key, "it must be ppo or gspo")
    work.put("loss_fn.sequence_level_importance_ratios", by_sequence, by=(key,))
    work.put("loss_fn.token_level_loss", not by_sequence, by=(key,))
    pair = work["actor.eps_clip_low_high"]
    if pair is None:
        for end in ("min", "max"):
            work.put(f"loss_fn.ratio_clip_{end}", work["actor.eps_clip"], by=("actor.eps_clip",))
    else:
        low, high = pair_of(work, "actor.eps_clip_low_high")
        work.put("loss_fn.ratio_clip_min", low, by=("actor.eps_clip_low_high",))
        work.put("loss_fn.ratio_clip_max", high, by=("actor.eps_clip_low_high",))
        if work.is_said("actor.eps_clip"):
            work.unneeded("actor.eps_clip", "actor.eps_clip_low_high comes before it")
    work.put("loss_fn.ratio_clip_c", work["actor.dual_clip"], by=("actor.dual_clip",))


def _divergence(work: Work) -> None:
    weight, kind, in_loss = "algo.kl.init_coef", "algo.kl.estimator", "algo.kl.use_loss"
    coefficient = max(0.0, float(work.number(weight)))
    work.put("loss_fn.reference_policy_kl_penalty", coefficient, by=(weight,))
    if not coefficient:
        for key in work.said_of((kind, in_loss)):
            work.unneeded(key, "algo.kl.init_coef is 0")
        return
    work.put("loss_fn.reference_policy_kl_type", work[kind], by=(kind,))
    work.put("loss_fn.use_kl_in_reward", not work.flag(in_loss), by=(in_loss,))
    work.put("loss_fn.kl_input_clamp_value", None, by=())
    if not work.flag(in_loss):
        work.note(weight, "subtracted before rewards are compared here, token by token after it "
                  "there")  # fmt: skip


def _correction(work: Work) -> None:
    on, kind, limits = (
        f"algo.advantage.is_correction_{k}" for k in ("enable", "type", "threshold")
    )
    use = "loss_fn.use_importance_sampling_correction"
    is_async = work.flag("train.async_enable")
    if is_async:
        work.put("grpo.max_staleness", work.whole("train.async_queue_size"),
                 by=("train.async_enable", "train.async_queue_size"))  # fmt: skip
    work.put(use, work.flag(on) or is_async, by=(on,) if work.flag(on) or not is_async else ())
    if is_async and not work.flag(on):
        work.refuse(on, "with grpo.max_staleness the correction is needed here, and is on")
    if not work.flag(on):
        for key in work.said_of((kind, limits)):
            work.unneeded(key, f"{on} is off")
        return
    if work["actor.policy_loss_type"] == "gspo":
        work.refuse(kind, "with GSPO the ratio is to the engine there; here weights of sequences "
                    "are cut to the range")  # fmt: skip
    truncated = "loss_fn.truncated_importance_sampling_"
    low, high = pair_of(work, limits)
    work.put(truncated + "type", work[kind], by=(kind,))
    work.put(truncated + "ratio", high, by=(limits,))
    work.put(truncated + "ratio_min", low, by=(limits,))


def _placement(work: Work) -> None:
    nodes, devices = "actor.num_nodes", "actor.num_gpus_per_node"
    work.put("cluster.num_nodes", work.whole(nodes), by=(nodes,))
    work.put("cluster.gpus_per_node", work.whole(devices), by=(devices,))
    colocates = work.flag("train.colocate_all")
    work.put("policy.generation.backend", "vllm", by=("vllm.num_engines",))
    if colocates:
        work.put("policy.generation.colocated.enabled", True, by=("train.colocate_all",))
    elif work.is_said("train.colocate_all", "vllm.num_engines"):
        key = "train.colocate_all" if work.is_said("train.colocate_all") else "vllm.num_engines"
        work.refuse(key, "engines of their own: policy.generation.colocated.enabled=false and "
                    ".resources, and a larger cluster.*; `laurel plan` says what fits")  # fmt: skip
    ours = "policy.generation.vllm_cfg."
    for theirs, here in (("tensor_parallel_size", "tensor_parallel_size"),
                         ("enforce_eager", "enforce_eager"),
                         ("gpu_memory_utilization", "gpu_memory_utilization")):  # fmt: skip
        work.put(ours + here, work[f"vllm.{theirs}"], by=(f"vllm.{theirs}",))


def _prompts(work: Work) -> None:
    rows(work, "data.prompt_dataset", "data.prompt_probs")
    if work.is_said("data.prompt_split"):
        work.put("data.train_split", work["data.prompt_split"], by=("data.prompt_split",))
    work.put("data.input_key", work["data.input_key"], by=("data.input_key",))
    if work.text("data.label_key") is not None:
        work.put("data.output_key", work["data.label_key"], by=("data.label_key",))
    work.put("data.split_validation_size", 0.0, by=())


def _entropy(work: Work) -> None:
    key = "actor.entropy_coef"
    if work[key]:
        work.refuse(key, "no bonus for entropy; it is measured (loss_fn.entropy)")
    elif work.is_said(key):
        work.unneeded(key, "entropy is always measured")


GRPO = Table(
    rules=(
        together(("actor.model_name_or_path",), ("policy.model_name",), "as it is", _model),
        same("actor.gradient_checkpointing_enable", "policy.dtensor_cfg.activation_checkpointing"),
        together(("rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size"),
                 ("grpo.num_prompts_per_step", "grpo.num_generations_per_prompt",
                  "policy.train_global_batch_size"),
                 "rollouts count prompts, `train.batch_size` counts samples, as here", _batches),
        same("train.micro_batch_size", "policy.train_micro_batch_size"),
        same("train.num_episodes", "grpo.max_num_epochs"),
        same("train.max_epochs", "grpo.num_iterations", "passes over each batch of rollouts"),
        together(("data.max_len", "rollout.max_new_tokens", "prompt_max_len", "generate_max_len"),
                 ("policy.max_total_sequence_length", "policy.generation.max_new_tokens",
                  "data.max_input_seq_length"), "older: total = prompt + answer", _lengths),
        same("rollout.temperature", "policy.generation.temperature"),
        same("rollout.top_p", "policy.generation.top_p"),
        *optimizer_rules("actor."),
        together(("algo.advantage.estimator", "algo.advantage.no_std_norm"),
                 ("grpo.adv_estimator.name", "grpo.adv_estimator.scale",
                  "grpo.adv_estimator.std_eps", "grpo.adv_estimator.minus_baseline",
                  "grpo.use_leave_one_out_baseline"),
                 "group_norm: `grpo`; dr_grpo: scale `none`; rloo: leave-one-out, `none`; "
                 "reinforce(_baseline): `reinforce_plus_plus`; gae is not carried", _estimator),
        together(("actor.policy_loss_type", "actor.eps_clip", "actor.eps_clip_low_high",
                  "actor.dual_clip"),
                 ("loss_fn.sequence_level_importance_ratios", "loss_fn.token_level_loss",
                  "loss_fn.ratio_clip_min", "loss_fn.ratio_clip_max", "loss_fn.ratio_clip_c"),
                 "gspo: sequence-level ratios", _loss),
        together(("algo.kl.init_coef", "algo.kl.estimator", "algo.kl.use_loss"),
                 ("loss_fn.reference_policy_kl_penalty", "loss_fn.reference_policy_kl_type",
                  "loss_fn.use_kl_in_reward", "loss_fn.kl_input_clamp_value"),
                 "without `use_loss` it is in the reward", _divergence),
        together(("algo.advantage.is_correction_enable", "algo.advantage.is_correction_type",
                  "algo.advantage.is_correction_threshold", "train.async_enable",
                  "train.async_queue_size"),
                 ("loss_fn.use_importance_sampling_correction",
                  "loss_fn.truncated_importance_sampling_type",
                  "loss_fn.truncated_importance_sampling_ratio",
                  "loss_fn.truncated_importance_sampling_ratio_min", "grpo.max_staleness"),
                 "same types; asynchronous: `max_staleness` is the queue, and needs the correction",
                 _correction),
        together(("reward.model_name_or_path", "reward.remote_url", "train.agent_func_path",
                  "reward.normalize_enable", "reward.clip_range"),
                 ("env.reward_model.enabled", "env.reward_model.model_name",
                  "env.reward_model.urls", "env.reward_model.url_protocol",
                  "env.reward_model.transform.normalize", "grpo.advantage_clip_low",
                  "grpo.advantage_clip_high"),
                 "addresses are carried; functions and agents are not", rewards),
        together(("reward.overlong_buffer_len", "reward.overlong_penalty_factor",
                  "reward.stop_properly_penalty_coef"),
                 ("grpo.reward_shaping.enabled", "grpo.reward_shaping.overlong_buffer_length",
                  "grpo.reward_shaping.overlong_buffer_penalty",
                  "grpo.reward_shaping.max_response_length",
                  "grpo.reward_shaping.stop_properly_penalty_coef"),
                 "a coefficient below 0 is not carried", shaping),
        together(("algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"),
                 ("grpo.use_dynamic_sampling",), "only the range 0 to 1", filtering),
        together(("actor.num_nodes", "actor.num_gpus_per_node", "train.colocate_all",
                  "vllm.num_engines", "vllm.tensor_parallel_size", "vllm.enforce_eager",
                  "vllm.gpu_memory_utilization"),
                 ("cluster.num_nodes", "cluster.gpus_per_node", "policy.generation.backend",
                  "policy.generation.colocated.enabled",
                  "policy.generation.vllm_cfg.tensor_parallel_size",
                  "policy.generation.vllm_cfg.enforce_eager",
                  "policy.generation.vllm_cfg.gpu_memory_utilization"),
                 "the actor's slots are the cluster; engines of their own are not carried",
                 _placement),
        together(("data.prompt_dataset", "data.prompt_probs", "data.prompt_split",
                  "data.input_key", "data.label_key"),
                 ("data.train_data_path", "data.train", "data.train_split", "data.input_key",
                  "data.output_key", "data.split_validation_size"),
                 "several, with commas, are a list; probabilities are not carried", _prompts),
        together(("eval.dataset", "eval.split", "eval.steps"),
                 ("{run}.val_period", "{run}.val_at_start", "{run}.val_at_end",
                  "data.val_data_path", "data.val_split"), "-1: at the end", validation),
        same("eval.temperature", "policy.generation.val_temperature"),
        same("eval.n_samples_per_prompt", "grpo.val_num_generations_per_prompt"),
        together(("actor.entropy_coef",), (), "only 0", _entropy),
        absent("the weight of the divergence stays as it is", "algo.kl.target"),
        unneeded("only with algo.kl.target", "algo.kl.horizon"),
        absent("rewards of a completion's end, not discounted", "algo.advantage.gamma",
               off=(None, 1)),
        unneeded(NO_CRITIC, "algo.advantage.lambd", "critic.*"),
        absent("no auxiliary loss of mixtures of experts", "actor.aux_loss_coef"),
        unneeded("only how memory is used", "actor.gradient_checkpointing_reentrant",
                 "ref.offload", "reward.offload"),
        unneeded("the reference and the reward model share the policy's slots, or have "
                 "cluster.placement", "ref.num_nodes", "ref.num_gpus_per_node", "reward.num_nodes",
                 "reward.num_gpus_per_node", "train.colocate_actor_ref",
                 "train.colocate_critic_reward"),
        unneeded("Laurel moves weights into the engine itself, and keeps no cache over it",
                 "vllm.sync_backend", "vllm.sync_with_ray", "vllm.enable_prefix_caching"),
        absent("a completion is drawn with one version of the weights",
               "train.partial_rollout_enable"),
        absent("grpo.batch_multiplier draws more, with dynamic sampling",
               "rollout.vllm_generate_batch_size"),
        absent("no moving average of weights", "train.enable_ema"),
        unneeded("only with train.enable_ema", "train.ema_beta"),
        absent("checkpointing.metric_name", "ckpt.best_metric_key", off=(None, "", "none")),
        absent("texts only", "data.max_images_per_prompt", "actor.freeze_visual_encoder"),
        unneeded("texts only", "data.image_key"),
        absent("the head is called `score` here; heads of other names are read by laurel export",
               "ds.value_head_prefix", off=(None, "score")),
        unneeded("rewards alone are learned from", "ptx_coef", "actor_init_on_gpu", "perf"),
        *COMMON_RULES,
        *COMMON_REST,
    ),
    defaults={
        **COMMON_DEFAULTS, **{f"actor.{k}": v for k, v in OPTIMIZER_DEFAULTS.items()},
        "actor.adam.lr": 1e-6, "data.max_len": 2048, "rollout.max_new_tokens": None,
        "rollout.batch_size": 1024, "rollout.n_samples_per_prompt": 1, "rollout.top_p": 1.0,
        "rollout.temperature": 1.0, "train.num_episodes": 1, "actor.eps_clip": 0.2,
        "actor.eps_clip_low_high": None, "actor.dual_clip": None, "actor.policy_loss_type": "ppo",
        "actor.gradient_checkpointing_enable": False, "actor.num_nodes": 1,
        "actor.num_gpus_per_node": 8, "train.colocate_all": False, "vllm.tensor_parallel_size": 1,
        "vllm.enforce_eager": False, "vllm.gpu_memory_utilization": 0.95,
        "algo.advantage.estimator": "gae", "algo.advantage.no_std_norm": False,
        "algo.kl.init_coef": 0.01, "algo.kl.estimator": "k1", "algo.kl.use_loss": False,
        "algo.advantage.is_correction_enable": False, "algo.advantage.is_correction_type": "tis",
        "algo.advantage.is_correction_threshold": [0.5, 5.0], "train.async_enable": False,
        "train.async_queue_size": 1, "reward.clip_range": [-10, 10],
        "reward.overlong_penalty_factor": 1, "algo.dynamic_filtering_enable": False,
        "data.input_key": "input", "logger.wandb.project": "openrlhf_train_ppo",
    },
    told_by=frozenset({"actor.model_name_or_path", "algo.advantage.estimator",
                       "rollout.n_samples_per_prompt", "rollout.batch_size", "data.prompt_dataset",
                       "reward.remote_url", "reward.model_name_or_path", "algo.kl.init_coef"}),
    other_names=PPO_NAMES,
)  # fmt: skip
