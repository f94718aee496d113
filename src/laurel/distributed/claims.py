"""Which roles a run has, and what divides the slots of each."""

from __future__ import annotations

from collections.abc import Mapping

from laurel.config.grpo_training import GRPORun
from laurel.config.reward_training import RewardTrainingRun
from laurel.config.sft_training import SFTRun
from laurel.distributed.roles import Claim, RoleName, Slot

Run = RewardTrainingRun | SFTRun | GRPORun

PARALLEL_KEYS: Mapping[RoleName, str] = {
    "policy": "policy.dtensor_cfg",
    "generation": "policy.generation.vllm_cfg",
    "reward_model": "env.reward_model.dtensor_cfg",
}
"""What divides a role's slots into groups."""


def roles_of(config: Run) -> tuple[RoleName, ...]:
    """The roles of a run; the policy is always the first."""
    if not isinstance(config, GRPORun):
        return ("policy",)
    return ("policy", "generation", *(("reward_model",) if uses_reward_model(config) else ()))


def uses_reward_model(config: GRPORun) -> bool:
    """Whether any task may be judged by a reward model that this run loads and gives slots.

    It is enabled, or a data set names it; and no servers, judge or function stand in for it. One of
    several models is enough, and all that are loaded have the same slots.
    """
    if not config.env.reward_model.computes:
        return False
    blocks = [*config.data.train_sets(), *config.data.validation_sets()]
    waiting = [config.default_environment, *(block.env_name or "" for block in blocks)]
    named: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in named and name in config.env.composite:
            waiting += [part.env for part in config.env.composite[name].parts]
        named.add(name)
    return config.env.reward_model.enabled or "reward_model" in named


def claim_of(
    config: Run,
    name: RoleName,
    slots: tuple[Slot, ...],
    *,
    shares_with: RoleName | None = None,
    fraction: float = 1.0,
    is_placed: bool = True,
) -> Claim:
    """Slots for a role of the run, with what the configuration divides it by."""
    tp = pp = cp = 1
    if name == "generation" and isinstance(config, GRPORun):
        if draws_with_vllm(config):  # an engine of another kind has one slot
            vllm = config.policy.generation.vllm_cfg
            tp, pp = vllm.tensor_parallel_size, vllm.pipeline_parallel_size
    else:
        parallel = config.policy.dtensor_cfg
        if name == "reward_model" and isinstance(config, GRPORun):
            parallel = config.env.reward_model.dtensor_cfg
        tp, cp = parallel.tensor_parallel_size, parallel.context_parallel_size
    return Claim(
        name=name, slots=slots, keys=PARALLEL_KEYS[name], pp=pp, cp=cp, tp=tp,
        shares_with=shares_with, fraction=fraction, is_placed=is_placed,
    )  # fmt: skip


def draws_with_vllm(config: GRPORun) -> bool:
    """What `auto` means where nothing can be asked: vLLM, unless the run is for CPUs."""
    backend = config.policy.generation.backend
    return backend == "vllm" or (backend == "auto" and config.cluster.device != "cpu")
