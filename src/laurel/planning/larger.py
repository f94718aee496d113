"""Finds the largest micro-batches of a policy that fit its devices."""

from __future__ import annotations

from dataclasses import replace

from laurel.planning.memory import MemoryPhase, Shapes, estimate
from laurel.planning.plan import Plan
from laurel.planning.request import ClusterRequest


def larger_micro_batch(
    request: ClusterRequest, plan: Plan, shapes: Shapes, *, device_memory: int
) -> tuple[Plan, MemoryPhase] | None:
    """Return the plan with the policy's largest micro-batches that fit, and its training memory.

    Their tokens are doubled as long as a tenth of the device stays free. Each micro-batch rounds
    all weights and adds up all gradients, so that fewer and larger ones take less time.

    Args:
        device_memory: The bytes of a device.

    Returns:
        None if no larger ones fit, or if they would make no fewer passes.
    """
    found: tuple[Plan, MemoryPhase] | None = None
    batch = plan.batch("policy")
    while batch.num_micro_batches > 1:
        batch = replace(batch, tokens=2 * batch.tokens)
        batches = tuple(
            batch if one.role == "policy" and not one.is_validation else one for one in plan.batches
        )
        larger = replace(plan, batches=batches)
        phases = estimate(request, larger, shapes, device_memory=device_memory)
        training = next((phase for phase in phases if phase.name == "training"), None)
        if training is None or not training.fits(int(0.9 * device_memory)):
            break
        found = larger, training
    return found
