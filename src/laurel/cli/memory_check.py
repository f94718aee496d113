"""Whether a policy fits beside what is loaded already, told before it is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from laurel.cli.machine import GIB, memory
from laurel.config.schema import PolicyConfig
from laurel.errors import ModelError

if TYPE_CHECKING:
    import torch


def check_memory(
    policy: PolicyConfig, device: torch.device, *, needs_reference: bool, draws_from_copy: bool
) -> None:
    """Refuse a policy whose weights, gradients and optimizer alone are more than there is.

    Activations come on top: what passes here may still be too large for its batches.

    Args:
        policy: The policy section.
        device: Where it goes.
        needs_reference: A frozen copy is kept, where there are no adapters.
        draws_from_copy: The generator keeps a copy, too.

    Raises:
        ModelError: With what takes how much, and what would take less.
    """
    if policy.scratch is not None:
        return
    from laurel.models.shapes import count_parameters

    num_parameters = count_parameters(policy, str(policy.model_name))
    has_adapters = policy.dtensor_cfg.lora_cfg.enabled
    copies = {"weights": 1}
    if not has_adapters:
        copies |= {"gradients": 1, "optimizer": 2}
        copies |= {"reference": 1} if needs_reference else {}
    copies |= {"generator's copy": 1} if draws_from_copy else {}
    needed = {what: 4 * count * num_parameters for what, count in copies.items()}
    free = _free_bytes(device)
    if free is None or sum(needed.values()) <= free:
        return
    parts = ", ".join(f"{what} {size / GIB:.1f}" for what, size in needed.items())
    advice = "a smaller policy or reward model"
    if not has_adapters:
        advice += "; policy.dtensor_cfg.lora_cfg.enabled=true, which trains adapters only"
        if needs_reference:
            advice += "; loss_fn.reference_policy_kl_penalty=0, which needs no reference"
    raise ModelError(
        f"policy.model_name={policy.model_name} has {num_parameters / 1e9:.2f}G parameters: to "
        f"train it takes {sum(needed.values()) / GIB:.1f} GiB ({parts}) besides activations, and "
        f"{free / GIB:.1f} GiB of {device.type} memory are free beside what is loaded already. "
        f"What would fit: {advice}."
    )


def _free_bytes(device: torch.device) -> int | None:
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    facts = memory().facts
    assert isinstance(facts, dict)
    limits = [facts[name] for name in ("available", "limit") if facts.get(name) is not None]
    return min(limits, default=None)
