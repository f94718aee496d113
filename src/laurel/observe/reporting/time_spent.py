"""Where the time of a run went."""

from __future__ import annotations

import math

from laurel.observe.run_record import RunRecord

_PARTS = {
    "timing/train/generation": "generation, with its rewards",
    "timing/train/reward_calculation": "advantages",
    "timing/train/policy_and_reference_logprobs": "log-probabilities before the update",
    "timing/train/policy_training": "update",
    "timing/train/prepare_for_generation/transfer_and_update_weights": "weights to the generator",
    "timing/train/checkpointing": "checkpoints",
}


def timing_of(record: RunRecord) -> list[tuple[str, float, float]]:
    """Where the time of the steps went. Parts that lie within others are not listed twice."""
    parts = {label: record.total(name) for name, label in _PARTS.items()}
    steps = record.total("timing/train/total_step_time")
    validation = record.total("timing/validation/total_validation_time")
    if any(parts.values()):
        inside = sum(parts.values()) - parts["checkpoints"]
        parts["other"] = max(0.0, steps - inside)
    if parts.get("other", 0.0) == steps:
        parts = {"steps": steps, "checkpoints": parts["checkpoints"]}
    parts["validation"] = validation
    whole = math.fsum(parts.values())
    return [(label, value, value / whole) for label, value in parts.items() if value > 0]


def duration(seconds: float) -> str:
    """E.g. `42 s`, `3 min 5 s`, `2 h 10 min`."""
    if seconds < 59.5:
        return f"{seconds:.0f} s" if seconds >= 9.95 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
