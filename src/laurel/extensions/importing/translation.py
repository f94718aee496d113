"""Translates what several systems have in common: optimizers, schedules, adapters, loggers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from laurel.extensions.importing.rules import Read, Work, real, whole

FIRST_FACTOR = 1e-8
"""The factor of the learning rate at which a warm-up begins.

Other systems begin at 0, which torch's LinearLR does not accept.
"""

FAR = 1_000_000
"""A number of epochs or steps that no run reaches."""

NO_CRITIC = "Laurel learns without a critic"

_NEEDS = (
    "it depends on the number of optimizer steps, which is not in the configuration; give "
    "--total-steps"
)


class Translation(Work):
    """An import with the translations that several systems share."""

    def require(self, key: str, to: str, read: Read | None = None) -> None:
        """Set a key of Laurel that has no default, or refuse the source's if it says nothing."""
        if self.text(key) is None:
            self.refuse(key)
        else:
            self.carry(key, to, read)

    def files(self, key: str, paths: Sequence[Any], to_one: str, to_several: str) -> None:
        """Set the one set of rows that the source names in `key`, or the list of several."""
        if len(paths) == 1:
            self.put(to_one, paths[0], key)
        elif paths:
            self.put(to_several, [{"data_path": path} for path in paths], key)

    def optimizer(
        self, name: str, lr: str, weight_decay: str, *betas: str, eps: str | None = None
    ) -> None:
        """Set AdamW from the source's keys; each argument names the key of that value.

        `betas` is one key that holds a pair, or two keys. If `name`, which chooses the optimizer,
        was refused as unsupported, it is not listed as carried over.
        """
        to = "policy.optimizer.kwargs."
        by_name = () if self.is_refused(name) else (name,)
        self.put("policy.optimizer.name", "torch.optim.AdamW", *by_name)
        self.carry(lr, to + "lr", real)
        self.carry(weight_decay, to + "weight_decay", real)
        both = self.pair(betas[0]) if len(betas) == 1 else [self.real(key) for key in betas]
        self.put(to + "betas", both, *betas)
        if eps is None:
            self.put(to + "eps", 1e-8)
        else:
            self.carry(eps, to + "eps", real)

    def schedule(
        self,
        decay: str,
        kind: str,
        *by: str,
        warmup: int | None,
        warmup_by: str = "",
        min_ratio: float = 0.0,
        total: int | None = None,
    ) -> None:
        """Set the learning-rate schedule: a warm-up, then a constant rate or a decay.

        Args:
            decay: The source's key that names the schedule.
            kind: `constant`, `linear` or `cosine`.
            by: The source's keys that decide what follows the warm-up, `decay` if left out.
            warmup: The optimizer steps of the warm-up; None if the source gives a share of the run,
                whose length is unknown.
            warmup_by: The source's key that decides the warm-up.
            min_ratio: The learning rate at the end of the decay, as a share of the initial one.
            total: The optimizer steps of the run; None takes those given to the import.
        """
        total = total or self.total_steps
        if kind != "constant" and total is None:
            until = " (until then the learning rate stays constant after warm-up)"
            self.refuse(decay, _NEEDS + until)
            kind = "constant"
        if warmup is None:
            self.refuse(warmup_by, _NEEDS)
            warmup = 0
        if total is not None and total <= warmup and kind != "constant":
            raise self.problem(decay, f"{total} steps leave nothing after {warmup} of warm-up")
        rest = (total or 0) - warmup
        stages: list[dict[str, Any]] = []

        def stage(name: str, **kwargs: float) -> None:
            stages.append({"name": f"torch.optim.lr_scheduler.{name}", "kwargs": kwargs})

        if warmup > 0:
            stage("LinearLR", start_factor=FIRST_FACTOR, total_iters=warmup)
        if kind == "linear":
            stage("LinearLR", start_factor=1.0, end_factor=min_ratio, total_iters=rest)
        elif kind == "cosine":
            rate = self.values["policy.optimizer.kwargs.lr"].value
            stage("CosineAnnealingLR", T_max=rest, eta_min=min_ratio * rate)
        elif stages:
            stage("ConstantLR", factor=1.0, total_iters=1)
        keys = [*(by or (decay,)), *([warmup_by] if warmup or self.has(warmup_by) else [])]
        keys = [key for key in keys if not self.is_refused(key)]
        several = [*stages, {"milestones": [warmup]}]
        alone = stages[0] if stages else None
        self.put("policy.scheduler", several if len(stages) > 1 else alone, *keys)

    def share(
        self, ratio: float, total: int | None, rounded: Callable[[float], int] = math.ceil
    ) -> int | None:
        """Return the steps of a warm-up that is a share of the run; None if its length is unknown.

        `ratio` is the share, and `total` the length in steps, which the import's `total_steps`
        replaces if it is None.
        """
        total = total or self.total_steps
        return 0 if ratio == 0 else None if total is None else rounded(ratio * total)

    def adapters(
        self, switch: str, rank: str, alpha: float, *by: str, dropout: str = "", how: str = ""
    ) -> None:
        """Set the size of LoRA adapters; `switch` turns them on, and `by` decides `alpha`."""
        to = "policy.dtensor_cfg.lora_cfg."
        self.put(to + "enabled", True, switch)
        self.carry(rank, to + "dim", whole)
        self.put(to + "alpha", alpha, *by, how=how)
        self.carry(dropout, to + "dropout", real)

    def adapted_layers(self, key: str, value: Any) -> None:
        """Set which layers get LoRA adapters: all linear layers, or those that the source names."""
        if isinstance(value, list | tuple) and len(value) == 1:
            value = value[0]
        to = "policy.dtensor_cfg.lora_cfg."
        if value == "all-linear":
            self.put(to + "target_modules", [], key)
            return
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            raise self.problem(key, "it must be names of layers, or all-linear")
        self.put(to + "target_modules", list(names), key)

    def loggers(self, key: str, names: Sequence[Any], *, ours: Sequence[str], quiet: str) -> None:
        """Turn on those of the loggers `ours` that the source asks for in `key`.

        Others are refused, except those in `quiet`, which log nothing elsewhere.
        """
        for name in ours:
            self.put(f"logger.{name}_enabled", name in names, key)
        odd = [str(odd_name) for odd_name in names if odd_name not in (*ours, *quiet.split())]
        if odd:
            self.refuse(key, odd=", ".join(odd))

    def lone_completions(self, key: str, size: str) -> None:
        """Set an advantage estimator over the batch, because one completion is sampled per prompt.

        With one completion a group's mean would be its own reward, and every advantage 0. `key`
        names the source's estimator, which is reported as refused, and `size` the number of
        completions.
        """
        self.put("grpo.adv_estimator.name", "reinforce_plus_plus")
        self.put("grpo.adv_estimator.minus_baseline", False)
        self.put("grpo.adv_estimator.use_leave_one_out_baseline", False)
        critic = f"{NO_CRITIC}, and " if self.word(key) == "gae" else ""
        self.refuse(
            key,
            f"{critic}{self.table.full(size)}=1 makes no group to compare a completion with: "
            "reinforce_plus_plus without a baseline is written instead, which compares over the "
            "batch; GRPO needs several",
        )
