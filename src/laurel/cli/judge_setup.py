"""How a run on a cluster opens what scores: models in slots, renderers spread over the nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from laurel.cli.places import Places
from laurel.config.environments import RewardModelEnvironmentConfig
from laurel.config.grpo_training import GRPORun
from laurel.distributed.claims import uses_reward_model

if TYPE_CHECKING:
    from laurel.environments.open_reward_loop import Opening
    from laurel.protocols import WorkerGroup
    from laurel.rewards.contract_scorer import ContractScorer
    from laurel.rewards.load import Say


def opening_on(places: Places, config: GRPORun, say: Say) -> Opening:
    """How the environments of a run open their models and processes.

    Args:
        places: Those of the run, on a cluster.
        config: The run.
        say: Told what was loaded, found and decided.
    """
    from laurel.environments.open_reward_loop import RENDERING_LIMIT, Opening, opening_here
    from laurel.rewards.preparing import WORKER

    make_worker = partial(places.group_of_one, WORKER, limit=RENDERING_LIMIT)

    if not uses_reward_model(config):  # only rows of the data ask for one, and it has no slots
        here = opening_here(device=config.cluster.device, say=say)
        return Opening(open_model=here.open_model, make_worker=make_worker)

    def open_model(settings: RewardModelEnvironmentConfig, name: str) -> ContractScorer:
        return _open_in_slots(settings, name, places, config, make_worker, say)

    return Opening(open_model=open_model, make_worker=make_worker)


def _open_in_slots(
    settings: RewardModelEnvironmentConfig,
    name: str,
    places: Places,
    config: GRPORun,
    make_worker: Callable[..., WorkerGroup],
    say: Say,
) -> ContractScorer:
    """A reward model in the slots of its role: with the loop, each replica in a group of its own;
    without, all replicas in one group that scores whole batches.

    One of several models has replicas on all of these slots, and an equal part of each.
    """
    from laurel.environments.load_reward_model import found_reward_model
    from laurel.environments.open_reward_loop import open_crew, with_workers
    from laurel.rewards.scoring_crew import ROLE

    shape, role = places.shape_of("reward_model"), f"{ROLE} {name}".rstrip()
    group = partial(
        places.group, "reward_model", name=role, share=1 / len(config.env.reward_model.loaded)
    )
    found = found_reward_model(settings, tp=shape.tp, device=config.cluster.device, say=say)
    if not settings.use_reward_loop:
        scorer = found.open(group, shape=shape, say=say)
        with_workers(scorer, settings, make_worker)
        return scorer

    def group_of(index: int) -> Callable[..., WorkerGroup]:
        return partial(group, ranks=range(index * shape.tp, (index + 1) * shape.tp))

    return open_crew(
        found, group_of, shape.dp_replicate, tp=shape.tp, make_worker=make_worker, say=say,
        role=role,
    )  # fmt: skip
