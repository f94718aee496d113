"""Converts optimizers, learning-rate schedules and adapters for several systems."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from laurel.config.importing.rules import Work

FIRST_FACTOR = 1e-8
"""The factor of the learning rate at which a warm-up begins.

Other systems begin at 0, which torch's LinearLR does not accept.
"""

NO_CRITIC = "Laurel learns without a critic"

_SCHEDULERS = "torch.optim.lr_scheduler."

OPTIMIZER_TARGETS = (
    "policy.optimizer.name",
    "policy.optimizer.kwargs.lr",
    "policy.optimizer.kwargs.weight_decay",
    "policy.optimizer.kwargs.betas",
    "policy.optimizer.kwargs.eps",
)


def put_adam(
    work: Work,
    *,
    lr: str,
    weight_decay: str,
    betas: Sequence[str],
    eps: str | None = None,
    name_by: Sequence[str] = (),
) -> None:
    """Set AdamW from the source's keys; each argument names the key of that value.

    `betas` is one key that holds a pair, or two keys. `name_by` are the keys that choose the
    optimizer.
    """
    work.put("policy.optimizer.name", "torch.optim.AdamW", by=name_by)
    work.put("policy.optimizer.kwargs.lr", float(work.number(lr)), by=(lr,))
    work.put(
        "policy.optimizer.kwargs.weight_decay", float(work.number(weight_decay)), by=(weight_decay,)
    )
    is_pair = len(betas) == 1
    values = work.pair(betas[0]) if is_pair else [float(work.number(key)) for key in betas]
    work.put("policy.optimizer.kwargs.betas", list(values), by=betas)
    value = 1e-8 if eps is None else float(work.number(eps))
    work.put("policy.optimizer.kwargs.eps", value, by=() if eps is None else (eps,))


def put_schedule(
    work: Work,
    *,
    decay: str,
    kind: str,
    by: Sequence[str],
    warmup_steps: int | None,
    warmup_by: Sequence[str],
    min_ratio: float = 0.0,
    total: int | None = None,
) -> None:
    """Set the learning-rate schedule: a warm-up, then a constant rate or a decay.

    Args:
        work: The import, whose values are set.
        decay: The source's key that names the schedule.
        kind: `constant`, `linear` or `cosine`.
        by: The source's keys that decide what follows the warm-up.
        warmup_steps: The optimizer steps of the warm-up; None if the source gives a share of the
            run, whose length is unknown.
        warmup_by: The source's keys that decide the warm-up.
        min_ratio: The learning rate at the end of the decay, as a share of the initial one.
        total: The optimizer steps of the run; None takes those given to the import.
    """
    total = total or work.total_steps
    needs = (
        "it depends on the number of optimizer steps, which is not in the configuration; give "
        "--total-steps"
    )
    if kind != "constant" and total is None:
        work.refuse(decay, f"{needs} (until then the learning rate stays constant after warm-up)")
        kind = "constant"
    if warmup_steps is None:
        for key in warmup_by:
            work.refuse(key, needs)
        warmup_steps = 0
    if total is not None and total <= warmup_steps and kind != "constant":
        raise work.problem(decay, f"{total} steps leave nothing after {warmup_steps} of warm-up")
    stages: list[dict[str, Any]] = []
    if warmup_steps > 0:
        kwargs: dict[str, Any] = {"start_factor": FIRST_FACTOR, "total_iters": warmup_steps}
        stages.append({"name": _SCHEDULERS + "LinearLR", "kwargs": kwargs})
    rest = (total or 0) - warmup_steps
    if kind == "linear":
        kwargs = {"start_factor": 1.0, "end_factor": min_ratio, "total_iters": rest}
        stages.append({"name": _SCHEDULERS + "LinearLR", "kwargs": kwargs})
    elif kind == "cosine":
        lr = work.values["policy.optimizer.kwargs.lr"].value
        kwargs = {"T_max": rest, "eta_min": min_ratio * lr}
        stages.append({"name": _SCHEDULERS + "CosineAnnealingLR", "kwargs": kwargs})
    elif stages:
        kwargs = {"factor": 1.0, "total_iters": 1}
        stages.append({"name": _SCHEDULERS + "ConstantLR", "kwargs": kwargs})
    warmup_by = [key for key in warmup_by if warmup_steps or work.is_said(key)]
    keys = [key for key in (*by, *warmup_by) if key not in _refused(work)]
    if len(stages) < 2:
        work.put("policy.scheduler", stages[0] if stages else None, by=keys)
    else:
        milestones = {"milestones": [warmup_steps]}
        work.put("policy.scheduler", [*stages, milestones], by=keys)


def share_of(
    work: Work, ratio: float, total: int | None, rounded: Callable[[float], int] = math.ceil
) -> int | None:
    """Return the steps of a warm-up that is a share of the run; None if the length is unknown.

    `ratio` is the share, and `total` the length in steps, which the import's `total_steps` replaces
    if it is None.
    """
    total = total or work.total_steps
    if ratio == 0:
        return 0
    return None if total is None else rounded(ratio * total)


def _refused(work: Work) -> set[str]:
    return {key for key, entry in work.entries.items() if entry.status == "not carried"}


LORA = "policy.dtensor_cfg.lora_cfg."


def put_lora_modules(work: Work, key: str, value: Any) -> None:
    """Set which layers get LoRA adapters: all linear layers, or those that the source names."""
    if isinstance(value, list | tuple) and len(value) == 1:
        value = value[0]
    if value == "all-linear":
        work.put(LORA + "match_all_linear", True, by=(key,))
        return
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
        raise work.problem(key, "it must be names of layers, or all-linear")
    work.put(LORA + "match_all_linear", False, by=(key,))
    work.put(LORA + "target_modules", list(names), by=(key,))


def put_estimator_of_lone_completions(work: Work, key: str, *, size_key: str) -> None:
    """Set an advantage estimator over the batch, because one completion is sampled per prompt.

    With one completion a group's mean would be its own reward, and every advantage 0. `key` names
    the source's estimator, which is reported as refused, and `size_key` the number of completions.
    """
    work.put("grpo.adv_estimator.name", "reinforce_plus_plus", by=())
    work.put("grpo.adv_estimator.minus_baseline", False, by=())
    work.put("grpo.use_leave_one_out_baseline", False, by=())
    critic = f"{NO_CRITIC}, and " if str(work[key]).lower() == "gae" else ""
    work.refuse(
        key,
        f"{critic}{size_key}=1 makes no group to compare a completion with: reinforce_plus_plus "
        "without a baseline is written instead, which compares over the batch; GRPO needs several",
    )


def put_adam_of(work: Work, *, name: str, **keys: Any) -> None:
    """Set AdamW as `put_adam` does, for a source whose key `name` chooses the optimizer.

    If that key was refused as unsupported, it is not listed as carried over. `keys` are the
    arguments of `put_adam`.
    """
    put_adam(work, name_by=() if name in _refused(work) else (name,), **keys)


RULES: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "adam": (put_adam_of, OPTIMIZER_TARGETS),
    "schedule": (put_schedule, ("policy.scheduler",)),
    "lora_modules": (put_lora_modules, (LORA + "match_all_linear", LORA + "target_modules")),
    "lone_completions": (
        put_estimator_of_lone_completions,
        (
            "grpo.adv_estimator.name",
            "grpo.adv_estimator.minus_baseline",
            "grpo.use_leave_one_out_baseline",
        ),
    ),
}
"""The conversions that table rows can call, by name, each with the keys that it may set."""
