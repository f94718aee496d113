"""Chooses the number of tokens of a micro-batch where `train_mb_tokens` is `auto`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from laurel.config.yaml_tree import plain_values
from laurel.planning.plan import plan_run
from laurel.run.context import R, RunContext
from laurel.run.model import saved_settings
from laurel.run.request import request_of

if TYPE_CHECKING:
    from laurel.config.schemas import Run
    from laurel.planning.memory import Shapes

KEY = "policy.sequence_packing.train_mb_tokens"


def resolve_micro_batches(context: RunContext[R]) -> RunContext[R]:
    """Return the context with a number where `train_mb_tokens` is `auto`, and print the number.

    How a batch is cut decides the rounding of its sums, so a run that is resumed keeps the number
    that its checkpoint has.
    """
    config = context.config
    if config.policy.sequence_packing.train_mb_tokens != "auto":
        return context
    tokens, why = _kept(context), "as the run began"
    if tokens is None:
        memory = None if context.allocation.are_remote else _device_memory(config)
        tokens, why = _chosen(config, memory)
    context.console.print(f"note    {KEY}=auto: {tokens:,} tokens, {why}", soft_wrap=True)
    return replace(context, config=with_tokens(config, tokens))


def with_tokens(config: R, tokens: int) -> R:
    """Return a run with a number of tokens of its micro-batches."""
    packing = config.policy.sequence_packing.model_copy(update={"train_mb_tokens": tokens})
    policy = config.policy.model_copy(update={"sequence_packing": packing})
    return cast(R, config.model_copy(update={"policy": policy}))


def largest_tokens(config: Run, shapes: Shapes, device_memory: int) -> int | None:
    """Return the tokens of the largest micro-batches that fit; None if the default ones do not."""
    from laurel.planning.memory import estimate, larger_micro_batch

    request = request_of(config)
    plan = plan_run(request)
    phases = estimate(request, plan, shapes, device_memory=device_memory)
    if not plan.fits or not all(phase.fits(device_memory) for phase in phases):
        return None
    found = larger_micro_batch(request, plan, shapes, device_memory=device_memory)
    return (plan if found is None else found[0]).batch("policy").tokens


def _kept(context: RunContext[R]) -> int | None:
    if context.resume_from is None:
        return None
    before = plain_values(saved_settings(context.resume_from, type(context.config)))
    kept = before.get("policy", {}).get("sequence_packing", {}).get("train_mb_tokens")
    policy = context.config.policy
    # A run that began with null goes on with what null meant.
    return kept if isinstance(kept, int) else policy.token_budget


def _chosen(config: Run, device_memory: int | None) -> tuple[int, str]:
    policy = config.policy
    default = policy.token_budget
    if not policy.sequence_packing.enabled:
        return default, "as null gives: policy.sequence_packing.enabled is false"
    if device_memory is None:
        return default, "as null gives: the memory of one GPU would decide, and the run has none"
    from laurel.run.shapes import read_shapes

    read = read_shapes(config)
    if read.unknown:
        role, reason = next(iter(read.unknown.items()))
        return default, f"as null gives: the size of the {role} is not known ({reason})"
    tokens = largest_tokens(_with_engine(config), read.shapes, device_memory)
    if tokens is None:
        return default, "as null gives: by the plan even these do not fit (laurel plan)"
    return tokens, "the largest that fit by the plan"


def _with_engine(config: Run) -> Run:
    """Return a run that names the engine which `auto` chooses on the GPU of this machine."""
    if config.command != "grpo":
        return config
    generation = config.policy.generation
    name = generation.engine_of(has_gpu=True, runs_here=True)
    generation = generation.model_copy(update={"backend": name})
    policy = config.policy.model_copy(update={"generation": generation})
    return config.model_copy(update={"policy": policy})


def _device_memory(config: Run) -> int | None:
    if config.cluster.device == "cpu":
        return None
    import torch

    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)
