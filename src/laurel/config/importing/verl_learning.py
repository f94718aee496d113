"""verl: batches, lengths, the optimizer and the loss; sources as in `verl.py`."""

from __future__ import annotations

from laurel.config.importing.optimizing import (
    NO_CRITIC,
    put_adam,
    put_estimator_of_lone_completions,
    put_schedule,
    share_of,
)
from laurel.config.importing.verl_names import ACTOR, ROLLOUT
from laurel.config.importing.work import Work


def batches(work: Work) -> None:
    """Prompts and completions of a step, and how many make an update."""
    prompts, size = work.whole("data.train_batch_size"), work.whole(ROLLOUT + "n")
    mini = work.whole(ACTOR + "ppo_mini_batch_size")
    work.put("grpo.num_prompts_per_step", prompts, by=("data.train_batch_size",))
    work.put("grpo.num_generations_per_prompt", size, by=(ROLLOUT + "n",))
    if mini > prompts:
        raise work.problem(ACTOR + "ppo_mini_batch_size",
                           f"it is more than data.train_batch_size={prompts}")  # fmt: skip
    if prompts % mini:
        raise work.problem(ACTOR + "ppo_mini_batch_size",
                           f"data.train_batch_size={prompts} is no multiple of it")  # fmt: skip
    work.put("policy.train_global_batch_size", mini * size,
             by=(ACTOR + "ppo_mini_batch_size", ROLLOUT + "n"),
             how=f"{mini} prompts x {size} completions")  # fmt: skip
    generated = work["data.gen_batch_size"]
    if generated is not None:
        work.put("grpo.batch_multiplier", work.whole("data.gen_batch_size") / prompts,
                 by=("data.gen_batch_size",))  # fmt: skip


def lengths(work: Work) -> None:
    """Longest prompt, answer and both."""
    prompt, answer = work.whole("data.max_prompt_length"), work.whole("data.max_response_length")
    keys = ("data.max_prompt_length", "data.max_response_length")
    work.put("policy.max_total_sequence_length", prompt + answer, by=keys)
    work.put("data.max_input_seq_length", prompt, by=keys[:1])
    work.put("policy.generation.max_new_tokens", answer, by=keys[1:])
    how = str(work["data.truncation"])
    if work.flag("data.filter_overlong_prompts") or how == "error":
        for key in work.said_of(("data.truncation", "data.filter_overlong_prompts")):
            work.unneeded(key, "longer prompts are left out and counted")
    else:
        work.refuse("data.truncation", "longer prompts are left out and counted, not cut")


def length(work: Work) -> None:
    """When the run ends."""
    if work["trainer.total_training_steps"] is not None:
        work.put("{run}.max_num_steps", work.whole("trainer.total_training_steps"),
                 by=("trainer.total_training_steps",))  # fmt: skip
    work.put("{run}.max_num_epochs", work["trainer.total_epochs"], by=("trainer.total_epochs",))


def _total_updates(work: Work) -> int | None:
    """Optimizer steps of the run, where they are known."""
    steps = work["trainer.total_training_steps"]
    if steps is None:
        return None
    if work.run == "sft":
        return work.whole("trainer.total_training_steps")
    each = work.whole("data.train_batch_size") // work.whole(ACTOR + "ppo_mini_batch_size")
    return work.whole("trainer.total_training_steps") * each * work.whole(ACTOR + "ppo_epochs")


def optimizer(work: Work, optim: str = ACTOR + "optim.") -> None:
    """The optimizer, its schedule, the norm of gradients; `optim` is what its keys begin with."""
    name = optim + "optimizer"
    refused = str(work[name]) != "AdamW"
    if refused:
        work.refuse(name, "AdamW is used; name another class of torch.optim in policy.optimizer")
    put_adam(work, lr=optim + "lr", weight_decay=optim + "weight_decay", betas=(optim + "betas",),
             name_by=() if refused else (name,))  # fmt: skip
    kind = str(work[optim + "warmup_style"] or work[optim + "lr_scheduler_type"])
    decay = optim + ("warmup_style" if work[optim + "warmup_style"] else "lr_scheduler_type")
    if kind not in ("constant", "cosine"):
        work.refuse(decay, "of constant and cosine is made a schedule; write policy.scheduler")
        kind = "constant"
    ratio, steps = optim + "lr_warmup_steps_ratio", optim + "lr_warmup_steps"
    total = _total_updates(work)
    warmup: int | None
    if work.whole(steps) > 0:  # 0 leaves it to the share, as -1 does
        warmup, by = work.whole(steps), (steps,)
        if work.is_said(ratio):
            work.unneeded(ratio, "lr_warmup_steps comes before it")
    else:
        warmup, by = share_of(work, float(work.number(ratio)), total, rounded=int), (ratio,)
    floor = optim + "min_lr_ratio"
    min_ratio = float(work[floor] or 0.0) if kind == "cosine" else 0.0
    put_schedule(work, decay=decay, kind=kind, by=(decay, floor) if min_ratio else (decay,),
                 warmup_steps=warmup, warmup_by=by, min_ratio=min_ratio, total=total)  # fmt: skip
    if work.is_said(optim + "num_cycles") and work[optim + "num_cycles"] != 0.5:
        work.refuse(optim + "num_cycles", "half a cycle of the cosine is made; write "
                    "policy.scheduler")  # fmt: skip
    norm, own = ACTOR + "grad_clip", optim + "clip_grad"
    is_own = own in work.defaults or (work.is_said(own) and not work.is_said(norm))
    key = own if is_own else norm
    work.put("policy.max_grad_norm", work[key] or None, by=(key,))


_ESTIMATORS = ("grpo", "grpo_vectorized", "gdpo", "rloo", "rloo_vectorized", "reinforce_plus_plus",
               "reinforce_plus_plus_baseline")  # fmt: skip


def estimator(work: Work) -> None:
    """How rewards become advantages."""
    key, scaled = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    name = str(work[key]).lower()
    ours = "grpo.adv_estimator."
    if work.whole(ROLLOUT + "n") == 1 and name != "reinforce_plus_plus":
        put_estimator_of_lone_completions(work, key, size_key=ROLLOUT + "n")
        return
    if name not in _ESTIMATORS:
        work.put(ours + "name", "grpo", by=())
        work.put("grpo.use_leave_one_out_baseline", False, by=())
        critic = f"{NO_CRITIC}: " if name == "gae" else ""
        work.refuse(
            key, f"{critic}grpo is written instead; those carried: {', '.join(_ESTIMATORS)}"
        )
        return
    family = name.removesuffix("_vectorized").removesuffix("_baseline")
    work.put(ours + "name", "grpo" if family == "rloo" else family, by=(key,))
    work.put("grpo.use_leave_one_out_baseline", family == "rloo", by=(key,))
    if family == "grpo":
        work.put(ours + "scale", "group" if work.flag(scaled) else "none", by=(scaled,))
    elif family == "rloo":
        work.put(ours + "scale", "none", by=(key,))
    elif family == "reinforce_plus_plus":
        work.put(ours + "minus_baseline", name.endswith("_baseline"), by=(key,))
        work.note(key, "each completion counts once for the deviation here, each token there")


_KINDS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}


def divergence(work: Work) -> None:
    """What holds the policy near the reference."""
    in_loss, in_reward = work.flag(ACTOR + "use_kl_loss"), work.flag("algorithm.use_kl_in_reward")
    loss_keys = tuple(ACTOR + key for key in ("use_kl_loss", "kl_loss_coef", "kl_loss_type"))
    control = "algorithm.kl_ctrl."
    reward_keys = ("algorithm.use_kl_in_reward", control + "kl_coef", "algorithm.kl_penalty")
    penalty = "loss_fn.reference_policy_kl_penalty"
    keys = loss_keys if in_loss else reward_keys
    for key in work.said_of((*loss_keys, *reward_keys)):
        is_switch = key in (loss_keys[0], reward_keys[0])
        if not (in_loss or in_reward) and is_switch:
            continue
        if key not in keys or not (in_loss or in_reward):
            work.unneeded(key, "it is off")
    if not in_loss and not in_reward:
        work.put(penalty, 0.0, by=(loss_keys[0], reward_keys[0]))
        return
    if in_loss and in_reward:
        work.refuse(reward_keys[0], "the divergence is in the loss or in the reward here, not in "
                    "both: it is in the loss")  # fmt: skip
    said = str(work[keys[2]])
    work.put(penalty, float(work.number(keys[1])), by=(keys[0], keys[1]))
    work.put("loss_fn.use_kl_in_reward", not in_loss, by=(keys[0],))
    if said.removesuffix("+") not in _KINDS:
        work.refuse(keys[2], f"k3 is used; those carried: {', '.join(_KINDS)}")
        return
    kind = _KINDS[said.removesuffix("+")]
    work.put("loss_fn.reference_policy_kl_type", kind, by=(keys[2],))
    if kind != "k3":
        work.put("loss_fn.kl_input_clamp_value", None, by=())
        work.put("loss_fn.kl_output_clamp_value", None, by=())
    if work[control + "type"] == "adaptive" and not in_loss:
        work.refuse(control + "type", "the weight of the divergence stays as it is")


_AGGREGATIONS = {"token-mean": "tokens", "seq-mean-token-mean": "sequences",
                 "seq-mean-token-sum-norm": "max_length"}  # fmt: skip


def loss(work: Work) -> None:
    """The loss of a token, and how tokens are put together."""
    mode, aggregation = ACTOR + "policy_loss.loss_mode", ACTOR + "loss_agg_mode"
    name, kept = str(work[mode]), str(work[aggregation])
    kinds = {"vanilla": "ppo", "gspo": "ppo", "cispo": "cispo", "gpg": "reinforce"}
    if name not in kinds:
        work.refuse(mode, f"the clipped ratio is used; those carried: {', '.join(kinds)}")
    kind = kinds.get(name, "ppo")
    work.put("loss_fn.loss_type", kind, by=(mode,) if name in kinds else ())
    work.put("loss_fn.sequence_level_importance_ratios", name == "gspo",
             by=(mode,) if name in kinds else ())  # fmt: skip
    normalizer = _AGGREGATIONS.get(kept, "max_length")
    if kept not in _AGGREGATIONS:
        work.refuse(aggregation, "a sum has no counterpart: max_length, a constant times it, is "
                    "written; the clipping of gradients sees the difference")  # fmt: skip
    if name == "gspo":
        normalizer = "sequences"
    work.put("loss_fn.normalizer", normalizer, by=(aggregation,) if kept in _AGGREGATIONS else ())
    work.put("loss_fn.token_level_loss", normalizer == "tokens", by=())
    if work[ACTOR + "loss_scale_factor"] is not None and normalizer == "max_length":
        work.refuse(ACTOR + "loss_scale_factor", "policy.generation.max_new_tokens divides")
    both = work[ACTOR + "clip_ratio"]
    for end, key in (("min", "clip_ratio_low"), ("max", "clip_ratio_high")):
        own = ACTOR + key if work.is_said(ACTOR + key) else ACTOR + "clip_ratio"
        # The file that sets clip_ratio alone still has the other two from its defaults.
        value = work[ACTOR + key] if work[ACTOR + key] is not None else both
        work.put(f"loss_fn.ratio_clip_{end}", value, by=(own,) if own != ACTOR + "clip_ratio" else (
            ACTOR + key,))  # fmt: skip
    dual = ACTOR + "clip_ratio_c"
    if name in ("vanilla",) or name not in kinds:
        work.put("loss_fn.ratio_clip_c", work[dual], by=(dual,))
    elif work.is_said(dual):
        work.unneeded(dual, f"{name} has no dual clipping")
    if work.is_said(ACTOR + "clip_ratio"):
        _both_clips(work)


def _both_clips(work: Work) -> None:
    key = ACTOR + "clip_ratio"
    if work.number(key) == 0.2 or work.is_said(ACTOR + "clip_ratio_low", ACTOR + "clip_ratio_high"):
        work.unneeded(key, "clip_ratio_low and clip_ratio_high come before it")
        return
    work.refuse(
        key,
        "clip_ratio_low and clip_ratio_high, 0.2 by default, come before it in verl, "
        "so that it has no effect there either; set loss_fn.ratio_clip_* if you meant it",
    )


def correction(work: Work) -> None:
    """Weights for what another engine drew."""
    said = "algorithm.rollout_correction."
    level, limit = work[said + "rollout_is"], work[said + "rollout_is_threshold"]
    cap = ACTOR + "tis_imp_ratio_cap"
    ours = "loss_fn.truncated_importance_sampling_"
    use = "loss_fn.use_importance_sampling_correction"
    older = work[cap] not in (None, -1) and work.number(cap) > 0
    if level in (None, "null") and not older:
        for key in work.said_of((said + "rollout_is", said + "rollout_is_threshold", cap)):
            work.unneeded(key, "it is off")
        return
    if older:
        work.put(use, True, by=(cap,))
        work.put(ours + "type", "tis", by=(cap,))
        work.put(ours + "ratio", float(work.number(cap)), by=(cap,))
        return
    work.put(use, True, by=(said + "rollout_is",))
    keys = (said + "rollout_is", said + "rollout_is_threshold")
    text = str(limit)
    if "_" in text and not isinstance(limit, int | float):
        low, _, high = text.partition("_")
        work.put(ours + "type", "icepop", by=keys)
        work.put(ours + "ratio_min", float(low), by=keys[1:])
        work.put(ours + "ratio", float(high), by=keys[1:])
        if level == "sequence":
            work.refuse(keys[0], "weights outside are 0 token by token here")
        return
    work.put(ours + "type", "tis" if level == "token" else "seq-tis", by=keys[:1])
    work.put(ours + "ratio", float(text), by=keys[1:])
