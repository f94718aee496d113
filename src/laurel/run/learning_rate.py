"""Chooses the learning rate of a reward model where `policy.optimizer.kwargs.lr` is `auto`."""

from __future__ import annotations

from dataclasses import replace

from laurel.config.reward_model import RewardTrainingRun
from laurel.config.yaml_tree import plain_values
from laurel.errors import ModelError
from laurel.observe.console import format_parameters
from laurel.run.context import RunContext
from laurel.run.model import settings_of
from laurel.run.specs import RATE, RATE_OF_SMALL, SMALL_MODEL, is_small, model_spec

KEY = "policy.optimizer.kwargs.lr"


def resolve_rate(context: RunContext[RewardTrainingRun]) -> RunContext[RewardTrainingRun]:
    """Return the context with a number where the learning rate is `auto`, and print the number.

    A run that is resumed keeps the rate that its checkpoint has.
    """
    optimizer = context.config.policy.optimizer
    if optimizer.kwargs.get("lr") != "auto":
        return context
    rate, why = _kept(context), "as the run began"
    if rate is None:
        rate, why = _chosen(context.config)
    context.console.print(f"note    {KEY}=auto: {rate:g}, {why}", soft_wrap=True)
    optimizer = optimizer.model_copy(update={"kwargs": {**optimizer.kwargs, "lr": rate}})
    policy = context.config.policy.model_copy(update={"optimizer": optimizer})
    return replace(context, config=context.config.model_copy(update={"policy": policy}))


def _kept(context: RunContext[RewardTrainingRun]) -> float | None:
    if context.resume_from is None:
        return None
    before = plain_values(settings_of(context.resume_from, RewardTrainingRun))
    kept = before.get("policy", {}).get("optimizer", {}).get("kwargs", {}).get("lr")
    return RATE if kept is None else float(kept)  # the only default of older versions


def _chosen(config: RewardTrainingRun) -> tuple[float, str]:
    from laurel.models.loading.pretrained import count_parameters

    policy = config.policy
    if policy.scratch is not None or policy.model_name is None:
        return RATE, "the default of larger models; a new one bears 1e-3"
    try:
        number = count_parameters(model_spec(policy))
    except ModelError:  # loading says it
        number = 0
    if not number:
        return RATE, "as for larger models: the size of this one is not known before it is loaded"
    limit = f"{SMALL_MODEL / 1e6:.0f} million"
    if is_small(number):
        return RATE_OF_SMALL, f"as the model has {format_parameters(number)}, fewer than {limit}"
    return RATE, f"as the model has {format_parameters(number)}, {limit} or more"
