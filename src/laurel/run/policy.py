"""Loads and checks a policy for fine-tuning and GRPO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from laurel.config.policy import PolicyConfig
from laurel.data.report import TextReport
from laurel.errors import ModelError
from laurel.planning.memory import GIB
from laurel.run.context import R, RunContext, describe_data, describe_output
from laurel.run.model import (
    TrainedModel,
    describe_model,
    load_trained_model,
    model_spec,
    teacher_spec,
)
from laurel.sandbox.limits import available_memory

if TYPE_CHECKING:
    import torch

    from laurel.training.learner_group import ModelFacts


def load_policy_to_train(
    context: RunContext[R],
    *,
    seed: int,
    texts: Iterable[str],
    temperature: float = 1.0,
    needs_reference: bool = False,
    teacher: str | None = None,
    samples_from_copy: bool = False,
    with_entropy: bool = False,
) -> TrainedModel:
    """Load the policy with its optimizer, after checking that it fits into memory.

    Args:
        seed: The seed of adapters, a model from scratch and dropout.
        texts: The texts on which a tokenizer from scratch is trained.
        temperature: The temperature at which completions are sampled.
        needs_reference: Whether a frozen copy of the policy before training is kept.
        samples_from_copy: Whether the generator keeps a copy of the weights.
    """
    with context.console.status("loading torch"):
        from laurel.models.loading.policy import load_policy
    policy, resume_from = context.config.policy, context.resume_from
    load = partial(
        load_policy,
        model_spec(policy),
        seed=seed,
        max_length=policy.max_total_sequence_length,
        texts=tuple(texts) if policy.scratch is not None else (),
        temperature=temperature,
    )
    resumed = partial(load, resume_from=resume_from) if resume_from else load
    check_room = partial(
        check_memory,
        policy,
        needs_reference=needs_reference,
        samples_from_copy=samples_from_copy,
        teacher=teacher,
    )
    load_teacher = None
    if teacher is not None:
        load_teacher = partial(
            load_policy,
            teacher_spec(policy, teacher),
            seed=seed,
            max_length=policy.max_total_sequence_length,
            temperature=temperature,
        )
    return load_trained_model(
        context,
        load=resumed,
        seed=seed,
        check_room=check_room,
        load_reference=load if needs_reference else None,
        load_teacher=load_teacher,
        with_entropy=with_entropy,
    )


def describe_policy(
    context: RunContext[R], facts: ModelFacts, reports: Mapping[str, TextReport], run_dir: Path
) -> None:
    """Print the facts of the data and the policy that were loaded, and the output directories."""
    describe_data(reports, run_dir, context.console)
    describe_model("policy", facts, context)
    describe_output(context, run_dir)


# The check that a policy fits beside what is loaded already, before it is loaded.


def check_memory(
    policy: PolicyConfig,
    device: torch.device,
    *,
    needs_reference: bool,
    samples_from_copy: bool,
    teacher: str | None = None,
) -> None:
    """Check that a policy's weights, gradients and optimizer state fit into the free memory.

    Activations come on top: a policy that passes may still be too large for its batches.

    Raises:
        ModelError: They do not fit; the message has the sizes, and settings that need less.
    """
    if policy.scratch is not None:
        return
    from laurel.models.loading.pretrained import count_parameters

    num_parameters = count_parameters(model_spec(policy))
    has_adapters = policy.dtensor_cfg.lora_cfg.enabled
    copies = {"weights": 1}
    if not has_adapters:
        copies |= {"gradients": 1, "optimizer": 2}
        copies |= {"reference": 1} if needs_reference else {}
    copies |= {"generator's copy": 1} if samples_from_copy else {}
    needed = {what: 4 * count * num_parameters for what, count in copies.items()}
    if teacher is not None:
        needed["teacher"] = 4 * count_parameters(teacher_spec(policy, teacher))
    free = _free_bytes(device)
    if free is None or sum(needed.values()) <= free:
        return
    parts = ", ".join(f"{what} {size / GIB:.1f}" for what, size in needed.items())
    advice = "a smaller policy or reward model"
    if not has_adapters:
        advice += "; policy.dtensor_cfg.lora_cfg.enabled=true, which trains adapters only"
        if needs_reference:
            advice += "; loss_fn.reference_policy_kl_penalty=0, which needs no reference"
    if teacher is not None:
        advice += "; a smaller teacher (loss_fn.distillation.model_name)"
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
    return available_memory()
