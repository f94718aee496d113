"""What TRL's GRPO judges with; sources as in `trl_grpo.py`."""

from __future__ import annotations

from typing import Any

from laurel.config.importing.work import Work

_FUNCTIONS = {"accuracy_reward": "math", "reasoning_accuracy_reward": "math"}


def rewards(work: Work) -> None:
    """What judges: a reward model, functions of TRL, or several of them."""
    model, functions = work.text("reward_model_name_or_path"), work["reward_funcs"] or []
    functions = [functions] if isinstance(functions, str) else list(functions)
    weights = work["reward_weights"] or [1.0] * (len(functions) + (model is not None))
    if len(weights) != len(functions) + (model is not None):
        raise work.problem("reward_weights", f"there are {len(functions) + (model is not None)} "
                           "rewards, the reward model first")  # fmt: skip
    parts: list[dict[str, Any]] = []
    if model is not None:
        work.put("env.reward_model.enabled", True, by=("reward_model_name_or_path",))
        work.put("env.reward_model.model_name", model, by=("reward_model_name_or_path",))
        parts.append({"env": "reward_model", "weight": float(weights[0])})
    lost = []
    for name, weight in zip(functions, weights[model is not None :], strict=True):
        if name in _FUNCTIONS:
            parts.append({"env": _FUNCTIONS[name], "weight": float(weight)})
        elif name == "get_soft_overlong_punishment":
            _soft_overlong(work, float(weight))
        else:
            lost.append(str(name))
    _combine(work, parts)
    if lost:
        work.refuse("reward_funcs", f"{', '.join(lost)}: rewrite it as a function of one answer, "
                    "env.reward_model.function.path (data_source, solution_str, ground_truth, "
                    "extra_info), or as an environment, env.custom")  # fmt: skip
    elif not parts:
        work.refuse(
            "reward_funcs",
            "not said: name what judges, data.env_name and env.*; until then env.math does",
        )


def _combine(work: Work, parts: list[dict[str, Any]]) -> None:
    """One environment, or several of which the weighted sum counts."""
    by = [key for key in ("reward_model_name_or_path", "reward_funcs", "reward_weights")
          if work.is_said(key)]  # fmt: skip
    as_components = work["multi_objective_aggregation"] == "normalize_then_sum"
    if len(parts) > 1 or any(part["weight"] != 1.0 for part in parts):
        work.put("env.composite", {"imported": {"parts": parts, "as_components": as_components}},
                 by=by)  # fmt: skip
        work.put("data.env_name", "imported", by=by)
    elif parts:
        work.put("data.env_name", parts[0]["env"], by=by)
    if as_components and len(parts) > 1:
        work.put("grpo.adv_estimator.name", "gdpo", by=("multi_objective_aggregation",),
                 how="the weights are those of the parts")  # fmt: skip
        weights = [part["weight"] for part in sorted(parts, key=lambda part: part["env"])]
        if set(weights) != {1.0}:
            for part in parts:
                part["weight"] = 1.0
            work.put("env.composite", {"imported": {"parts": parts, "as_components": True}}, by=by)
            work.put("grpo.adv_estimator.reward_weights", weights, by=("reward_weights",),
                     how="in alphabetical order of the parts")  # fmt: skip
    elif as_components:
        work.unneeded("multi_objective_aggregation", "there is one reward")


def _soft_overlong(work: Work, weight: float) -> None:
    """`trl grpo` makes it with max_completion_len=1280 and soft_punish_cache=256."""
    shaping = "grpo.reward_shaping."
    for key, value in (
        ("enabled", True),
        ("max_response_length", 1280),
        ("overlong_buffer_length", 256),
        ("overlong_buffer_penalty", weight),
    ):
        work.put(shaping + key, value, by=("reward_funcs",))
