"""How TRL counts: rows of a step, completions of a generation, optimizer steps of a run."""

from __future__ import annotations

import math

from laurel.config.importing.work import Work


def global_batch(work: Work) -> int:
    """Rows of one optimizer step, over all processes."""
    return (
        work.whole("per_device_train_batch_size")
        * (work.devices or 1)
        * work.whole("gradient_accumulation_steps")
    )


def generation_batch(work: Work) -> int:
    """GRPO: completions that are drawn at a time."""
    per_step = work.whole("per_device_train_batch_size") * (work.devices or 1)
    if work["generation_batch_size"] is not None:
        size = work.whole("generation_batch_size")
        if work["steps_per_generation"] is not None:
            raise work.problem(
                "generation_batch_size", "steps_per_generation is set, too; keep one"
            )
        if size % per_step:
            raise work.problem(
                "generation_batch_size",
                f"it must be a multiple of {per_step}, the completions of a forward pass on all "
                "processes; are --devices right?",
            )
        return size
    if work["steps_per_generation"] is not None:
        return per_step * work.whole("steps_per_generation")
    return global_batch(work)


def updates_per_step(work: Work) -> int:
    """Optimizer steps of one step of ours: 1 but for GRPO that learns from rollouts repeatedly."""
    if work.run != "grpo":
        return 1
    drawn = max(generation_batch(work), global_batch(work))
    return work.whole("num_iterations") * (drawn // global_batch(work))


def steps_of(work: Work, key: str) -> int | None:
    """A number of optimizer steps, or a share of them, in steps of ours; None: not known."""
    value = work.number(key)
    if 0 < value < 1:
        total = total_steps(work)
        if total is None:
            return None
        value = math.ceil(value * total)
    return max(1, math.ceil(value / updates_per_step(work)))


def total_steps(work: Work) -> int | None:
    """Optimizer steps of the run, where they are known."""
    limit = work.whole("max_steps")
    return limit if limit > 0 else work.total_steps
