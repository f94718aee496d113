"""What an actor with a reward model needs: a GPU of its own, or a group of ranks beside it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from laurel.config.environments import RewardModelEnvironmentConfig
from laurel.environments.interface import settings_of
from laurel.environments.load_reward_model import WHERE, Device, open_reward_model_group
from laurel.errors import ConfigError
from laurel.models.parallel import ParallelShape
from laurel.protocols import Scorer
from laurel.rewards.group_scorer import GroupScorer
from laurel.rewards.load import Say

if TYPE_CHECKING:
    from laurel.environments.reward_model_environment import RewardModelEnvironment

Given = RewardModelEnvironmentConfig | Mapping[str, Any]
ROLE = "reward_model"


def gpus_of_actor(
    config: Given,
    *,
    scorer: Scorer | None = None,
    device: Device = "auto",
    say: Say | None = None,
) -> float:
    """GPUs of the actor itself; see `RewardModelEnvironment` for the arguments.

    Raises:
        ConfigError: The settings are wrong.
    """
    settings = settings_of(RewardModelEnvironmentConfig, config, where=WHERE)
    is_elsewhere = scorer is not None or not settings.computes or _has_ranks(settings)
    return float(device != "cpu" and not is_elsewhere)


def make_in_actor(
    made: type[RewardModelEnvironment],
    config: Given,
    *,
    scorer: Scorer | None = None,
    device: Device = "auto",
    say: Say | None = None,
) -> RewardModelEnvironment:
    """The environment; where its settings ask for several ranks, its model is in those.

    Raises:
        UserError: A setting, or a model, that cannot be used.
    """
    settings = settings_of(RewardModelEnvironmentConfig, config, where=WHERE)
    if scorer is None and _has_ranks(settings):
        tell = say or logging.getLogger(__name__).info
        scorer = _open_beside(settings, device=device, say=tell)
    try:
        return made(settings, scorer=scorer, device=device, say=say)
    except BaseException:
        if isinstance(scorer, GroupScorer):
            scorer.close()
        raise


def _has_ranks(config: RewardModelEnvironmentConfig) -> bool:
    """Whether its model is in actors beside this one."""
    return config.loads_model and not config.uses_vllm and ranks_of(config).num_ranks > 1


def ranks_of(config: RewardModelEnvironmentConfig) -> ParallelShape:
    """Replicas and the ranks of each: those of one, if `resources` does not say how many in all.

    Raises:
        ConfigError: The slots cannot be divided into replicas.
    """
    tp, resources = config.dtensor_cfg.tensor_parallel_size, config.resources
    if resources.gpus_per_node is None:
        return ParallelShape(tp=tp, dp_replicate=resources.num_nodes or 1)
    slots = resources.gpus_per_node * (resources.num_nodes or 1)
    if slots % tp:
        raise ConfigError(
            f"{WHERE}.dtensor_cfg.tensor_parallel_size={tp} does not divide the {slots} slots of "
            f"{WHERE}.resources"
        )
    return ParallelShape(tp=tp, dp_replicate=slots // tp)


def _open_beside(config: RewardModelEnvironmentConfig, *, device: Device, say: Say) -> GroupScorer:
    """The scorer, over actors of this one's cluster; they end with this process at the latest."""
    from laurel.distributed.ray_actor import GroupBeside, has_gpus
    from laurel.distributed.reservations import Resources

    shape = ranks_of(config)
    each = Resources(gpus=1 if device != "cpu" and has_gpus() else 0)
    make_group = partial(GroupBeside, ROLE, each, shape.dp_replicate, shape.tp)
    return open_reward_model_group(config, make_group, shape=shape, device=device, say=say)
