"""A reward model as a run wants it: with the replicas and the workers that it asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from laurel.config.environments import RewardModelEnvironmentConfig
from laurel.distributed.limits import available_cores
from laurel.distributed.spawned_group import SpawnedGroup
from laurel.environments.load_reward_model import (
    WHERE,
    Device,
    FoundRewardModel,
    MakeGroup,
    check_one_rank,
    found_reward_model,
    open_in_vllm,
    open_reward_model,
)
from laurel.errors import ConfigError
from laurel.models.parallel import ParallelShape
from laurel.protocols import WorkerGroup
from laurel.rewards.contract_scorer import ContractScorer
from laurel.rewards.group_scorer import GroupScorer
from laurel.rewards.load import Say
from laurel.rewards.local import LocalScorer
from laurel.rewards.loop_scorer import LoopScorer, OneModelDesk
from laurel.rewards.preparing import WORKER, Preparers
from laurel.rewards.scoring_crew import ROLE, ScoringCrew
from laurel.rewards.to_tokens import Preparing

_log = logging.getLogger(__name__)

RENDERING_LIMIT = 300.0
"""Seconds after which a process that renders hangs, and is replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How what scores is opened: beside this process, or on a cluster."""

    open_model: Callable[[RewardModelEnvironmentConfig, str], ContractScorer]
    """Called with the settings of a model, and its name where it is one of several."""
    make_worker: MakeGroup
    """Makes a group of one, for a process that renders and tokenises."""


def opening_here(*, device: Device, say: Say) -> Opening:
    """Models in this process or in processes of this machine."""
    return Opening(
        open_model=lambda config, _: open_to_judge(config, device=device, say=say),
        make_worker=make_worker_here,
    )


def make_worker_here(*made: Any) -> WorkerGroup:
    """A process of this machine that renders and tokenises."""
    return SpawnedGroup(WORKER, *made, cpu_threads=1, limit=RENDERING_LIMIT)


def open_to_judge(
    config: RewardModelEnvironmentConfig, *, device: Device, say: Say
) -> ContractScorer:
    """The scorer that the settings describe, on this machine, as a run wants it.

    With the loop, what comes together is computed together where that pays: on a GPU, and where
    there are several replicas, which are processes of their own.

    Raises:
        UserError: As `open_reward_model`.
    """
    check_one_rank(config)
    if config.uses_vllm:
        in_vllm = open_in_vllm(config, say=say)
        with_workers(in_vllm, config, make_worker_here)
        return in_vllm
    if config.num_replicas > 1:
        return _open_processes(config, device=device, say=say)
    scorer: ContractScorer = open_reward_model(config, device=device, say=say)
    with_workers(scorer, config, make_worker_here)
    is_on_gpu = isinstance(scorer, LocalScorer) and scorer.model.device.type != "cpu"
    shares = scorer.path == "forest" and config.sequence_packing.share_prompts
    if config.use_reward_loop and is_on_gpu and shares:
        loop = LoopScorer(OneModelDesk(scorer))
        loop.preparers = scorer.preparers
        return loop
    return scorer


def _open_processes(
    config: RewardModelEnvironmentConfig, *, device: Device, say: Say
) -> ContractScorer:
    if not config.use_reward_loop:
        raise ConfigError(
            f"{WHERE}.num_replicas={config.num_replicas}: without the reward loop there is one "
            f"model in this process; set {WHERE}.use_reward_loop=true, or num_replicas=1"
        )
    found = found_reward_model(config, tp=1, device=device, say=say)
    threads = max(1, available_cores() // config.num_replicas)
    num_gpus = torch.cuda.device_count() if device != "cpu" else 0

    def group_of(index: int) -> MakeGroup:
        return partial(
            SpawnedGroup, ROLE, cpu_threads=threads,
            local_rank=index % num_gpus if num_gpus else 0,
        )  # fmt: skip

    return open_crew(
        found, group_of, config.num_replicas, tp=1, make_worker=make_worker_here, say=say
    )


def open_crew(
    found: FoundRewardModel,
    group_of: Callable[[int], MakeGroup],
    num_replicas: int,
    *,
    tp: int,
    make_worker: MakeGroup,
    say: Say,
    role: str = ROLE,
) -> LoopScorer:
    """Replicas that work by themselves, each in a group of its own.

    Args:
        found: The model.
        group_of: What makes the group of the replica with this number.
        num_replicas: At least one.
        tp: Ranks of each.
        make_worker: See `Opening`.
        say: Told what the first one found and decided.
        role: What the replicas are, for messages.

    Raises:
        UserError: As `open_reward_model_group`.
        WorkerError: Likewise.
    """
    workers: list[Preparing] = []

    def make(index: int) -> GroupScorer:
        tell = say if index == 0 and not workers else _log.debug
        scorer = found.open(group_of(index), shape=ParallelShape(tp=tp), say=tell)
        scorer.preparers = workers[0] if workers else None
        return scorer

    crew = ScoringCrew(make, num_replicas, role=role)
    loop = LoopScorer(crew)
    try:
        with_workers(loop, found.config, make_worker)
    except BaseException:
        loop.close()
        raise
    if loop.preparers is not None:
        workers.append(loop.preparers)
        for replica in crew.replicas:
            replica.scorer.preparers = loop.preparers
    return loop


def with_workers(
    scorer: ContractScorer, config: RewardModelEnvironmentConfig, make_worker: MakeGroup
) -> None:
    """Let `num_workers` processes render and tokenise for a scorer.

    They are `scorer.preparers` then, for whoever closes the scorer to close.
    """
    if config.num_workers:
        scorer.preparers = Preparers(scorer.contract, config.num_workers, make_worker)
