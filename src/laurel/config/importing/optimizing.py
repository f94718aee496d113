"""Conversions that several systems need: optimizers, schedules of the learning rate, adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from laurel.config.importing.rules import Work

FIRST_FACTOR = 1e-8
"""Where a warm-up begins; torch's LinearLR cannot begin at 0, where the others do."""

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
    """Configure AdamW with the values of these keys; `betas` is one key of a pair, or two keys."""
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
    """A warm-up, and what follows it.

    Args:
        work: The import.
        decay: The key that names the schedule.
        kind: `constant`, `linear` or `cosine`.
        by: The keys that decide what follows the warm-up.
        warmup_steps: Optimizer steps of the warm-up; None where they are a share of a run whose
            length nobody said.
        warmup_by: The keys that decide that.
        min_ratio: Where the decay ends, as a share of the learning rate.
        total: Optimizer steps of the run; else those that the import was given.
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
    """Steps of a warm-up that is a share of the run; None where its length is open."""
    total = total or work.total_steps
    if ratio == 0:
        return 0
    return None if total is None else rounded(ratio * total)


def _refused(work: Work) -> set[str]:
    return {key for key, entry in work.entries.items() if entry.status == "not carried"}


LORA = "policy.dtensor_cfg.lora_cfg."
LORA_TARGETS = tuple(
    LORA + key
    for key in (
        "enabled",
        "dim",
        "alpha",
        "dropout",
        "target_modules",
        "match_all_linear",
        "exclude_modules",
    )
)


def put_lora_modules(work: Work, key: str, value: Any) -> None:
    """Which layers get adapters: all, or those that are named."""
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
    """Compare over the batch where one completion is sampled per prompt, and note it for `key`.

    A group's mean would be the completion itself: every advantage would be 0. `key` names the
    source's estimator, `size_key` the number of completions.
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
    """Configure AdamW as `put_adam` does, with `name` as the key that names the optimizer.

    A key that was refused is not reported as carried over. `keys` are those of `put_adam`.
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
"""Conversions that rows of a table call by name, and the keys of ours that they may set."""
