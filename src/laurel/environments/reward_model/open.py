"""From the settings of a reward-model environment to whatever gives its scores."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from laurel.config.environments import (
    AskingConfig,
    EnsemblePart,
    RewardModelEnvironmentConfig,
    ScorerSource,
)
from laurel.config.policy import TokenizerConfig
from laurel.errors import (
    ConfigError,
    Terms,
    UserError,
    WorkerError,
    key_of,
    setting_of,
    speaking,
    spoken_in,
    terms_in_use,
)
from laurel.models.parallel.mesh import ParallelShape
from laurel.models.scoring import ScoringContract, ScoringRules
from laurel.models.spec import ModelSpec
from laurel.protocols import Scorer, WorkerGroup
from laurel.rewards.ensemble import EnsembleScorer, Member
from laurel.rewards.function import FunctionScorer
from laurel.rewards.judge import JudgeScorer
from laurel.rewards.loop_scorer import LoopScorer
from laurel.rewards.open import (
    ModelPlace,
    Say,
    ScorerSpec,
    check_not_missing,
    find_model,
    find_whole,
    load_scorer,
    read_contract,
    read_rules,
)
from laurel.rewards.preparing import WORKER, Preparers, Preparing
from laurel.rewards.remote.http import HttpScorer
from laurel.rewards.remote.replica import close_scorer
from laurel.rewards.remote.router import CanaryGroup, Router, RouterOptions
from laurel.rewards.remote.server_check import ServerCheck
from laurel.rewards.replicas import ROLE, GroupScorer, ScoringWorker, scoring_replicas
from laurel.rewards.scorer import ContractScorer, LocalScorer
from laurel.sandbox.limits import available_cores
from laurel.workers.spawned import SpawnedGroup


def open_environment_scorer(
    config: RewardModelEnvironmentConfig,
    *,
    device: Device,
    say: Say,
    opening: ScorerFactory | None = None,
) -> Scorer:
    """What the settings say gives the scores: one model, servers, a judge, a function, or several.

    Servers are asked for a first score, so that a wrong address or key is told at once.

    Args:
        config: The settings.
        device: Where models go that are loaded here.
        say: Told what was loaded, found and decided.
        opening: How models and processes are opened; None: here.

    Raises:
        UserError: A setting, a model, a server or a function that cannot be used. What can be told
            without loading or asking is told before.
    """
    opening = opening or local_scorer_factory(device=device, say=say)
    if config.models is None:
        check_keys(config, where=WHERE)
        return _open(config, where=WHERE, opening=opening, say=say)
    return _open_ensemble(config, config.models, opening=opening, say=say)


def statistics_of(
    config: RewardModelEnvironmentConfig, scorer: Scorer | None = None
) -> tuple[float | None, float | None]:
    """Mean and standard deviation that a model was saved with which servers hold; None: not known.

    Args:
        config: The settings.
        scorer: Given to the environment, in which case they say nothing of it.
    """
    if scorer is not None or config.urls is None:
        return None, None
    rules = rules_of(config)
    return (rules.mean, rules.std) if rules is not None else (None, None)


def merges(scorer: Scorer) -> bool:
    """Whether completions of a prompt may come one by one and nothing is computed twice for it."""
    if isinstance(scorer, EnsembleScorer):
        return all(merges(member.scorer) for member in scorer.members)
    return isinstance(scorer, LoopScorer) or not isinstance(scorer, ContractScorer)


def check_keys(config: ScorerSource, *, where: str) -> None:
    """Refuse to begin without the API keys that will be needed.

    Raises:
        ConfigError: Which variable is not set.
    """
    _key(config, where)
    if config.judge is not None:
        _key(config.judge, f"{where}.judge")


def _key(config: AskingConfig, where: str) -> str | None:
    name = config.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(
            f"{setting_of(f'{where}.api_key_env', name)}: there is no such environment variable, "
            "or it is empty; "
            f"run with {name}=... in the environment"
        )
    return key


# ------------------------------------------------------------------------------ one of each kind


def _open(
    config: RewardModelEnvironmentConfig,
    *,
    where: str,
    opening: ScorerFactory,
    say: Say,
    name: str = "",
) -> Scorer:
    if config.urls is not None:
        return _open_servers(
            config, config.urls, where=where, make_worker=opening.make_worker, say=say
        )
    if config.judge is not None:
        judge = JudgeScorer(
            config.judge, api_key=_key(config.judge, f"{where}.judge"), where=f"{where}.judge"
        )
        return _checked(judge, config.judge, contract=None, where=f"{where}.judge", say=say)
    if config.function is not None:
        return FunctionScorer(
            config.function, num_workers=config.num_workers, where=f"{where}.function"
        )
    return opening.open_model(config, name)


def _open_servers(
    config: RewardModelEnvironmentConfig,
    urls: list[str],
    *,
    where: str,
    make_worker: MakeGroup,
    say: Say,
) -> Scorer:
    contract = (
        read_contract_of(config, say=say) if config.checkpoint_path or config.model_name else None
    )
    preparers = None
    if contract is not None and config.num_workers:
        preparers = Preparers(contract, config.num_workers, make_worker)
    scorer = HttpScorer(
        urls,
        protocol=config.url_protocol,
        api_key=_key(config, where),
        contract=contract,
        model=config.url_model,
        reward_key=config.reward_key,
        preparers=preparers,
        options=RouterOptions(
            timeout=config.request_timeout,
            attempt_timeout=config.attempt_timeout,
            hedge=config.hedge,
            version=config.model_version,
            canary=CanaryGroup(),
        ),
    )
    try:
        return _checked(scorer, config, contract=contract, where=where, say=say)
    except BaseException:
        if preparers is not None:
            preparers.close()
        raise


def _checked(
    scorer: Router,
    config: AskingConfig,
    *,
    contract: ScoringContract | None,
    where: str,
    say: Say,
) -> Router:
    """The scorer, once every server has shown that it can score."""
    check = ServerCheck(
        patience=config.connect_patience,
        limit=config.attempt_timeout,
        say=say,
        where=where,
        contract=contract,
        has_canary=scorer.options.canary is not None,
        version=scorer.options.version,
    )
    replicas = [health.replica for health in scorer.replica_health.values()]
    _run(lambda: check.check_all(replicas))
    return scorer


def _run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine to its end, whether or not the caller has an event loop."""
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(context.run, lambda: asyncio.run(work())).result()


# --------------------------------------------------------------------------------------- several


def _open_ensemble(
    config: RewardModelEnvironmentConfig,
    parts: list[EnsemblePart],
    *,
    opening: ScorerFactory,
    say: Say,
) -> Scorer:
    named = [(part, f"{WHERE}.models[{index}]") for index, part in enumerate(parts)]
    for part, where in named:
        check_keys(part, where=where)
    statistics = {part.name: _statistics(part, where) for part, where in named}
    found: dict[str, Scorer] = {}
    with ExitStack() as opened:
        # What takes no loading is tried first.
        for part, where in sorted(named, key=lambda one: one[0].loads_model):
            with speaking(_terms_of_part(where)):
                alone = _alone(part, config)
                scorer = _open(alone, where=where, opening=opening, say=say, name=part.name)
            opened.callback(_run, partial(close_scorer, scorer))
            found[part.name] = scorer
        opened.pop_all()
    return EnsembleScorer(
        [
            Member(
                name=part.name,
                scorer=found[part.name],
                weight=part.weight,
                mean=statistics[part.name][0],
                std=statistics[part.name][1],
            )
            for part in parts
        ],
        combine=config.combine,
        uncertainty_penalty=config.uncertainty_penalty,
    )


def _alone(part: EnsemblePart, whole: RewardModelEnvironmentConfig) -> RewardModelEnvironmentConfig:
    """A member's settings as those of an environment."""
    own = {name: getattr(part, name) for name in ScorerSource.model_fields}
    return RewardModelEnvironmentConfig(
        **own,
        num_workers=whole.num_workers if part.uses_workers else 0,
        use_reward_loop=whole.use_reward_loop,
        dtensor_cfg=whole.dtensor_cfg,
    )


def _terms_of_part(where: str) -> Terms:
    """Errors about the environment's section, for whoever wrote the section of a member."""
    return Terms({f"{WHERE}.{key}": f"{where}.{key}" for key in EnsemblePart.model_fields})


def _statistics(part: EnsemblePart, where: str) -> tuple[float, float]:
    """What a member's scores are normalised with.

    Raises:
        ConfigError: It has none.
    """
    if part.normalize == "none":
        return 0.0, 1.0
    if part.mean is not None and part.std is not None:
        return part.mean, part.std
    with speaking(_terms_of_part(where)):
        rules = rules_of(
            RewardModelEnvironmentConfig(
                model_name=part.model_name, checkpoint_path=part.checkpoint_path
            )
        )
    if rules is None or rules.mean is None or not rules.std:
        raise ConfigError(
            f"{where}.normalize=stored: {part.checkpoint_path or part.model_name} has no "
            "scoring.json with the mean and standard deviation of its scores. Give its mean and "
            "std, or normalize=none"
        )
    return rules.mean, rules.std


# --------------------------------------------------------------------------------------------------
# From the settings of a reward-model environment to its scorer, errors first.

WHERE = "env.reward_model"
"""What the section is called in messages."""
Device = Literal["auto", "cpu", "cuda"]
MakeGroup = Callable[..., WorkerGroup]
"""Called with the class of the workers, and what each is made with besides its place."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
IN_THE_SECTION = Terms(
    {"policy": WHERE, "policy.max_total_sequence_length": f"{WHERE}.max_model_len"}
)
"""Errors about a model, for whoever wrote the section of the environment."""


def open_reward_model(
    config: RewardModelEnvironmentConfig, *, device: Device, say: Say
) -> LocalScorer:
    """The scorer that the settings describe, in this process.

    Args:
        config: The settings.
        device: Where the model goes.
        say: Told what was loaded, found and decided.

    Raises:
        UserError: A setting or a model that cannot be used. What can be told without loading the
            model is told before.
    """
    check_one_rank(config)
    with _in_its_words(config):
        place, spec = _found(config, tp=1, device=device, say=say)
        return load_scorer(place, spec, say=say)


def open_in_vllm(config: RewardModelEnvironmentConfig, *, say: Say) -> ContractScorer:
    """The scorer that the settings describe, in vLLM's processes on this machine.

    Raises:
        UserError: As `open_reward_model`; or vLLM is not installed.
        EngineError: vLLM does not start.
    """
    from laurel.generation.vllm.pooling import PoolingOptions
    from laurel.generation.vllm.settings import check_has_vllm
    from laurel.rewards.vllm import load_vllm_scorer

    assert config.generation is not None
    settings = config.generation.vllm_cfg
    check_has_vllm(f"{WHERE}.generation.backend=vllm")
    pooling = PoolingOptions(
        tensor_parallel_size=settings.tensor_parallel_size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        may_sleep=True,
    )
    with _in_its_words(config):
        place, spec = _found(config, tp=1, device="auto", say=say)
        return load_vllm_scorer(place, spec, say=say, pooling=pooling)


def check_one_rank(config: RewardModelEnvironmentConfig) -> None:
    """Refuse a model of several ranks.

    Raises:
        ConfigError: It asks for them.
    """
    if config.dtensor_cfg.tensor_parallel_size > 1:
        raise ConfigError(
            f"{key_of('env.reward_model.dtensor_cfg.tensor_parallel_size')}="
            f"{config.dtensor_cfg.tensor_parallel_size}: here the reward model is in one process; "
            "set it to 1, or use RewardModelEnvironment.remote(...)"
        )


def open_reward_model_group(
    config: RewardModelEnvironmentConfig,
    make_group: MakeGroup,
    *,
    shape: ParallelShape,
    device: Device,
    say: Say,
) -> GroupScorer:
    """The scorer that the settings describe, in processes of their own; `close` ends them.

    Args:
        config: The settings; `shape` says how many ranks compute one replica.
        make_group: Called once, with the class of the workers and what they are made with.
        shape: `dp_replicate` replicas of `tp` ranks each.
        device: Where the model goes.
        say: Told what was loaded, found and decided.

    Raises:
        UserError: As `open_reward_model`; what can be told without the group is told before.
        WorkerError: A worker died, or failed for another reason.
    """
    found = found_reward_model(config, tp=shape.tp, device=device, say=say)
    return found.open(make_group, shape=shape, say=say)


def found_reward_model(
    config: RewardModelEnvironmentConfig, *, tp: int, device: Device, say: Say
) -> ResolvedModel:
    """The model that the settings mean now, its files checked; nothing is loaded.

    Raises:
        UserError: See `open_reward_model`.
    """
    with _in_its_words(config):
        place, spec = _found(config, tp=tp, device=device, say=say)
    return ResolvedModel(config, place, spec)


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that can be opened any number of times, and is the same each time."""

    config: RewardModelEnvironmentConfig
    place: ModelPlace
    spec: ScorerSpec

    def open(self, make_group: MakeGroup, *, shape: ParallelShape, say: Say) -> GroupScorer:
        """The scorer in processes of its own; see `open_reward_model_group`."""
        with _in_its_words(self.config):
            # The workers say what is wrong in the words that it is said in here.
            load = partial(spoken_in, terms_in_use(), load_scorer, self.place, self.spec)
            try:
                group = make_group(ScoringWorker, load, shape=shape, device=self.spec.device)
            except WorkerError as error:
                cause = error.__cause__
                if isinstance(cause, UserError):  # every rank says the same
                    raise type(cause)(str(cause)) from error
                raise
        try:
            scorer = GroupScorer(
                group,
                batch_tokens=self.spec.batch_tokens,
                batch_size=self.spec.batch_size,
                batch_timeout=self.config.batch_timeout,
            )
        except BaseException:
            group.shutdown()
            raise
        for line in scorer.said:
            say(line)
        return scorer


def read_contract_of(config: RewardModelEnvironmentConfig, *, say: Say) -> ScoringContract:
    """The contract of the model that the settings name, whose weights servers hold.

    Raises:
        UserError: See `open_reward_model`.
    """
    with _in_its_words(config):
        place = find_model(_model_of(config))
        rules = read_rules(place)
        _check_against(config, rules, place, say)
        return read_contract(place, _spec_of(config, place, tp=1, device="cpu"), say=say)


def rules_of(config: RewardModelEnvironmentConfig) -> ScoringRules | None:
    """The scoring contract that was saved with the model that the settings name, if one was.

    Raises:
        UserError: There is no such model.
    """
    if config.model_name is None and config.checkpoint_path is None:
        return None
    with _in_its_words(config):
        return read_rules(find_model(_model_of(config)))


def _model_of(config: RewardModelEnvironmentConfig) -> str:
    return config.checkpoint_path or config.model_name or ""


def _in_its_words(config: RewardModelEnvironmentConfig) -> AbstractContextManager[None]:
    """Errors in the words of the section, for as long as the model is opened."""
    model_key = "model_name" if config.checkpoint_path is None else "checkpoint_path"
    model_name = {"policy.model_name": f"{WHERE}.{model_key}"}
    return speaking(Terms({**IN_THE_SECTION.names, **model_name}))


def _found(
    config: RewardModelEnvironmentConfig, *, tp: int, device: Device, say: Say
) -> tuple[ModelPlace, ScorerSpec]:
    """The model, its files checked, and how it is to score."""
    _check_settings(config)
    place = find_whole(_model_of(config), say=say)
    rules = read_rules(place)
    _check_against(config, rules, place, say)
    return place, _spec_of(config, place, tp=tp, device=device)


def _spec_of(
    config: RewardModelEnvironmentConfig, place: ModelPlace, *, tp: int, device: Device
) -> ScorerSpec:
    """How the model is to score."""
    model = ModelSpec(
        trust_remote_code=config.trust_remote_code,
        safetensors_only=config.safetensors_only,
        tokenizer=_tokenizer(config, place),
        head=config.reward_model_cfg,
        reads_forests=config.sequence_packing.enabled,
        activation_checkpointing=config.dtensor_cfg.activation_checkpointing,
        tensor_parallel_size=tp,
        parallel_plan=config.dtensor_cfg.custom_parallel_plan,
    )
    return replace(
        _batches(config),
        max_length=config.max_model_len,
        precision=config.precision,
        device=device,
        model=model,
    )


def _check_settings(config: RewardModelEnvironmentConfig) -> None:
    """What the settings alone get wrong.

    Raises:
        ConfigError: The first thing found.
    """
    if config.model_name is None and config.checkpoint_path is None:
        raise ConfigError(
            f"{key_of('env.reward_model.model_name')} is missing: name a reward model, as a "
            "directory (of a "
            "model, a checkpoint or a run with checkpoints) or on the Hugging Face hub"
        )
    parallel = config.dtensor_cfg
    unknown = {
        "context_parallel_size": parallel.context_parallel_size > 1,
        "sequence_parallel": parallel.sequence_parallel,
        "cpu_offload": parallel.cpu_offload,
    }
    for key, is_set in unknown.items():
        if is_set:
            raise ConfigError(
                f"{key_of('env.reward_model.dtensor_cfg')}.{key}: a reward model that judges is "
                "spread by "
                "tensor_parallel_size alone; set it to its default"
            )
    if parallel.lora_cfg.enabled:
        raise ConfigError(
            f"{key_of('env.reward_model.dtensor_cfg')}.lora_cfg.enabled: a reward model is not "
            "trained here; "
            "checkpoints of Laurel hold merged weights, so name the checkpoint and leave this out"
        )


def _check_against(
    config: RewardModelEnvironmentConfig, rules: ScoringRules | None, place: ModelPlace, say: Say
) -> None:
    """Settings that the contract of the model, or its lack, contradicts or makes useless."""
    if config.transform.normalize == "stored" and (rules is None or not rules.std):
        raise ConfigError(
            f"{key_of('env.reward_model.transform.normalize')}=stored: {place.name} has no "
            "scoring.json with "
            "the mean and standard deviation of its scores. Choose running or none"
        )
    if rules is None:
        return
    wanted = config.reward_model_cfg.attributes
    if wanted and wanted != list(rules.attributes):
        raise ConfigError(
            f"{key_of('env.reward_model.reward_model_cfg.attributes')}={wanted}: {place.name} "
            "gives "
            f"{list(rules.attributes) or 'one score'}; leave the key out"
        )
    if config.max_model_len not in (None, rules.max_length):
        say(f"note    max_model_len is not used: scoring.json says {rules.max_length} tokens")


def _tokenizer(config: RewardModelEnvironmentConfig, place: ModelPlace) -> TokenizerConfig:
    """The tokenizer block, for the model that was found.

    Files usually repeat the model's name in it. Where that means the best checkpoint of a run, or
    where another directory's weights are used, the tokenizer is the one beside the weights.
    """
    given = config.tokenizer
    if given.name not in (None, config.model_name, config.checkpoint_path):
        check_not_missing(str(given.name), key="policy.tokenizer.name")
        return given
    directory = Path(place.name)
    has_own = not directory.is_dir() or any((directory / f).is_file() for f in TOKENIZER_FILES)
    name = None if has_own or config.checkpoint_path is None else config.model_name
    return given.model_copy(update={"name": name})


def _batches(config: RewardModelEnvironmentConfig) -> ScorerSpec:
    """How conversations are divided over forward passes."""
    for block in (config.sequence_packing, config.dynamic_batching):
        if block.enabled:
            return ScorerSpec(batch_tokens=block.train_mb_tokens or config.batch_tokens)
    return ScorerSpec(batch_size=config.batch_size)


# --------------------------------------------------------------------------------------------------
# A reward model as a run wants it: with the replicas and the workers that it asks for.

_log = logging.getLogger(__name__)

RENDERING_LIMIT = 300.0
"""Seconds after which a process that renders hangs, and is replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerFactory:
    """How what scores is opened: beside this process, or on a cluster."""

    open_model: Callable[[RewardModelEnvironmentConfig, str], ContractScorer]
    """Called with the settings of a model, and its name where it is one of several."""
    make_worker: MakeGroup
    """Makes a group of one, for a process that renders and tokenises."""


def local_scorer_factory(*, device: Device, say: Say) -> ScorerFactory:
    """Models in this process or in processes of this machine."""
    return ScorerFactory(
        open_model=lambda config, _: build_scorer(config, device=device, say=say),
        make_worker=make_worker_here,
    )


def make_worker_here(*made: Any) -> WorkerGroup:
    """A process of this machine that renders and tokenises."""
    return SpawnedGroup(WORKER, *made, cpu_threads=1, limit=RENDERING_LIMIT)


def build_scorer(
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
        loop = LoopScorer(scorer)
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
            SpawnedGroup,
            ROLE,
            cpu_threads=threads,
            local_rank=index % num_gpus if num_gpus else 0,
        )

    return open_crew(
        found, group_of, config.num_replicas, tp=1, make_worker=make_worker_here, say=say
    )


def open_crew(
    found: ResolvedModel,
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
        make_worker: See `ScorerFactory`.
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

    replicas = scoring_replicas(make, num_replicas, role=role)
    loop = LoopScorer(replicas)
    try:
        with_workers(loop, found.config, make_worker)
    except BaseException:
        loop.close()
        raise
    if loop.preparers is not None:
        workers.append(loop.preparers)
        for replica in replicas.replicas:
            replica.value.preparers = loop.preparers
    return loop


def with_workers(
    scorer: ContractScorer, config: RewardModelEnvironmentConfig, make_worker: MakeGroup
) -> None:
    """Let `num_workers` processes render and tokenise for a scorer.

    They are `scorer.preparers` then, for whoever closes the scorer to close.
    """
    if config.num_workers:
        scorer.preparers = Preparers(scorer.contract, config.num_workers, make_worker)
