"""Opens and checks the scorer that a `ScorerSpec` describes.

Errors that need no model and no server to be found are raised before either is touched.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh

from laurel import plugins
from laurel.config.data import DataConfig
from laurel.config.environments import ScorerSource
from laurel.config.policy import Precision, RewardModelConfig
from laurel.errors import (
    ConfigError,
    ModelError,
    UserError,
    WorkerError,
    key_of,
    setting_of,
    speaking,
)
from laurel.models.loading.pretrained import DTYPES
from laurel.models.loading.reward_model import (
    LoadedRewardModel,
    check_paths,
    load_contract,
    load_reward_model,
    understood,
)
from laurel.models.scoring import FILE_NAME, ScoringContract, ScoringRules
from laurel.models.spec import ModelSpec, ParallelShape
from laurel.observe.console import format_parameters, quiet_libraries
from laurel.observe.hub import check_not_missing
from laurel.plugins import ScorerServices, ScoreSource, ServerDialect
from laurel.protocols import Scorer, WorkerGroup
from laurel.rewards.blocking import BlockingScorer
from laurel.rewards.ensemble import EnsembleScorer, Member
from laurel.rewards.loop_scorer import LoopScorer
from laurel.rewards.preparing import WORKER, Preparers, Preparing
from laurel.rewards.remote.dialects import dialect_of
from laurel.rewards.remote.http import HttpScorer
from laurel.rewards.remote.replica import close_scorer
from laurel.rewards.remote.router import CanaryGroup, Router, RouterOptions
from laurel.rewards.remote.server_check import ServerCheck
from laurel.rewards.replicas import ROLE, GroupScorer, ScoringWorker, scoring_replicas
from laurel.rewards.scorer import (
    LocalScorer,
    ModelScorer,
    check_golden,
)
from laurel.rewards.spec import (
    MAX_LENGTH,
    ModelPlace,
    Say,
    ScorerSpec,
    check_files,
    find_model,
    find_reward_model,
    headless,
)
from laurel.workers.process import choose_device, threads_of_each
from laurel.workers.spawned import SpawnedGroup

_log = logging.getLogger(__name__)

MakeGroup = Callable[..., WorkerGroup]
"""Called with the class of the workers and the arguments of each besides its place."""
SECTION = "env.reward_model"
"""Configuration section that names servers, judges, functions and members."""
RENDERING_LIMIT = 300.0
"""Seconds after which a tokenizer process counts as hung and is replaced."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def make_worker_here(*made: Any) -> WorkerGroup:
    """Start a process on this machine that renders and tokenises."""
    return SpawnedGroup(WORKER, *made, cpu_threads=1, limit=RENDERING_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerPlacement:
    """Says where the processes of a scorer are made."""

    make_worker: MakeGroup = make_worker_here
    """Makes a worker group of one process that renders and tokenises."""
    make_group: Callable[[str, range | None], MakeGroup] | None = None
    """Returns what makes a worker group, given a member's name, or "", and ranks, or None for all.

    None keeps models in this process, and replicas in other processes of this machine.
    """
    make_server: Callable[[int], MakeGroup] | None = None
    """Returns what makes a worker group for a replica of a served model, given its number."""
    shape: ParallelShape = field(default_factory=ParallelShape)
    """Replicas of each model that `make_group` has room for, and the ranks of each."""
    is_one_group: bool = False
    """Whether all replicas are one group in the loop too, so that losing one loses all."""


HERE = ScorerPlacement()


def open_scorer(
    spec: ScorerSpec, *, say: Say, placement: ScorerPlacement = HERE
) -> ModelScorer | BlockingScorer:
    """Open the scorer of a spec; leaving its context, or `close`, ends it.

    A model must score as it did when it was saved. Servers are asked for a first score, so that a
    wrong address or key is reported at once.

    Args:
        say: Called with a line on all that was loaded, found and decided.

    Raises:
        UserError: A setting, a model, a server or a function cannot be used.
        WorkerError: A worker died, or failed for another reason.
        EngineError: An engine does not start.
    """
    return blocking(_open(spec, placement, say))


def blocking(scorer: Scorer) -> ModelScorer | BlockingScorer:
    """Wrap any scorer for callers without an event loop; it is closed with the wrapper."""
    return scorer if isinstance(scorer, ModelScorer | BlockingScorer) else BlockingScorer(scorer)


def open_local(model: ScorerSpec | str, *, say: Say) -> LocalScorer:
    """Load a model into this process, and check that it scores as it was saved.

    Args:
        model: What is loaded, and how; a directory or a name alone means every default.

    Raises:
        UserError: The model is not a reward model, or has changed since it was saved.
    """
    spec = ScorerSpec(model=ModelSpec(name=model)) if isinstance(model, str) else model
    with speaking(*spec.names):
        place, spec = _found(spec, say)
        return load_scorer(place, spec, say=say)


def _open(spec: ScorerSpec, placement: ScorerPlacement, say: Say, name: str = "") -> Scorer:
    with speaking(*spec.names):
        if spec.members:
            return _open_members(spec, placement, say)
        if spec.servers is not None:
            return _open_servers(spec, spec.servers, placement, say)
        if (source := spec.source) is not None:
            services = ScorerServices(
                where=key_of(f"{SECTION}.{source.name}"),
                device=spec.device,
                num_workers=spec.num_workers,
                is_elsewhere=placement is not HERE,
                say=say,
                server=source.server,
                source=source.within,
                make_server=placement.make_server,
            )
            return plugins.find(ScoreSource, source.name).make(source.section, services)
        return _open_model(spec, placement, say, name)


def _open_members(spec: ScorerSpec, placement: ScorerPlacement, say: Say) -> Scorer:
    # Keys are looked up first: a missing one is reported before a model is loaded.
    for member in spec.members:
        with speaking(*member.spec.names):
            if member.spec.servers is not None:
                api_key_of(member.spec.servers, SECTION)
            if (source := member.spec.source) and source.within is not None:
                api_key_of(source.within, SECTION)
    statistics: dict[str, tuple[float, float]] = {}
    for member in spec.members:
        mean, std = member.mean, member.std
        if mean is None or std is None:
            mean, std = read_statistics(member.spec)
            if mean is None or not std:
                with speaking(*member.spec.names):
                    raise ConfigError(
                        f"{setting_of(f'{SECTION}.normalize', 'stored')}: "
                        f"{member.spec.model.name} has no scoring.json with the mean and standard "
                        "deviation of its scores. Give its [mean, std], or normalize=none"
                    )
        statistics[member.name] = mean, std
    scorers: dict[str, Scorer] = {}
    with ExitStack() as opened:
        # What needs no loading is tried first: its errors come sooner.
        for member in sorted(spec.members, key=lambda one: one.spec.loads_model):
            scorer = _open(member.spec, placement, say, member.name)
            opened.callback(_run, partial(close_scorer, scorer))
            scorers[member.name] = scorer
        # All are open: the ensemble closes them from here on.
        opened.pop_all()
    members = []
    for one in spec.members:
        mean, std = statistics[one.name]
        members.append(
            Member(name=one.name, scorer=scorers[one.name], weight=one.weight, mean=mean, std=std)
        )
    return EnsembleScorer(
        members, combine=spec.combine, uncertainty_penalty=spec.uncertainty_penalty
    )


def read_statistics(spec: ScorerSpec) -> tuple[float | None, float | None]:
    """Return the mean and standard deviation saved with the model of a spec; None where unknown.

    Raises:
        UserError: There is no such model.
    """
    if spec.model.name is None:
        return None, None
    with speaking(*spec.names):
        rules = read_rules(find_model(spec.model.name))
    return (None, None) if rules is None else (rules.mean, rules.std)


def api_key_of(config: ScorerSource, where: str) -> str | None:
    """Return the API key in the environment variable that a section names, if it names one.

    Raises:
        ConfigError: There is no such variable.
    """
    name = config.api_key_env
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key:
        raise ConfigError(
            f"{setting_of(f'{where}.api_key_env', name)}: there is no such environment variable, "
            f"or it is empty; run with {name}=... in the environment"
        )
    return key


def _open_servers(
    spec: ScorerSpec, servers: ScorerSource, placement: ScorerPlacement, say: Say
) -> Scorer:
    api_key = api_key_of(servers, SECTION)
    contract = None
    if spec.model.name is not None:
        place = find_model(spec.model.name)
        contract = read_contract(place, _fitted(spec, place, say), say=say)
    preparers = None
    if contract is not None and spec.num_workers:
        preparers = Preparers(contract, spec.num_workers, placement.make_worker)
    try:
        dialect = dialect_of(
            servers.url_protocol,
            section=servers.settings_of(ServerDialect, servers.url_protocol)[1],
            contract=contract,
            model=servers.url_model,
            reward_key=servers.reward_key,
            preparers=preparers,
        )
        scorer = HttpScorer(
            servers.urls or (),
            dialect,
            api_key=api_key,
            preparers=preparers,
            options=RouterOptions(
                timeout=servers.seconds_of_score,
                attempt_timeout=servers.seconds_of_try,
                hedge=servers.hedge,
                version=servers.model_version,
                canary=CanaryGroup(),
            ),
        )
        return checked_servers(scorer, servers, contract=contract, where=SECTION, say=say)
    except BaseException:
        if preparers is not None:
            preparers.close()
        raise


def checked_servers(
    scorer: Router,
    config: ScorerSource,
    *,
    contract: ScoringContract | None,
    where: str,
    say: Say,
) -> Router:
    """Return the scorer once every server has shown that it can score."""
    check = ServerCheck(
        patience=config.connect_patience,
        limit=config.seconds_of_try,
        say=say,
        where=where,
        contract=contract,
        has_canary=scorer.options.canary is not None,
        version=scorer.options.version,
    )
    replicas = [health.replica for health in scorer.replica_health.values()]
    versions = _run(lambda: check.check_all(replicas))
    scorer.expect(next(filter(None, versions), ""))
    return scorer


T = TypeVar("T")


def _run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    # In a thread of its own, since the caller may be inside an event loop.
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(context.run, lambda: asyncio.run(work())).result()


C = TypeVar("C", bound=ModelScorer)


def _open_model(spec: ScorerSpec, placement: ScorerPlacement, say: Say, name: str) -> ModelScorer:
    if placement.make_group is None:
        if (ranks := spec.model.tensor_parallel_size) > 1:
            raise ConfigError(
                f"{setting_of('policy.dtensor_cfg.tensor_parallel_size', ranks)}: here the reward "
                "model is in one process; set it to 1, or use RewardModelEnvironment.remote(...)"
            )
        if spec.num_replicas > 1:
            placement = _processes_here(spec, placement)
    if placement.make_group is not None:
        return _open_replicas(spec, placement, placement.make_group, say, name)
    place, spec = _found(spec, say)
    if (engine := spec.engine) is not None:
        held: ModelScorer = engine.plugin.open_scorer(
            engine.section, replace(spec, found=place), say
        )
        return _with_workers(held, spec, placement)
    scorer = _with_workers(load_scorer(place, spec, say=say), spec, placement)
    # Merging concurrent requests pays on a GPU only.
    is_on_gpu = scorer.model.device.type != "cpu"
    if spec.in_loop and is_on_gpu and scorer.path == "forest":
        loop = LoopScorer(scorer)
        loop.preparers = scorer.preparers
        return loop
    return scorer


def _with_workers(scorer: C, spec: ScorerSpec, placement: ScorerPlacement) -> C:
    if spec.num_workers:
        try:
            scorer.preparers = Preparers(scorer.contract, spec.num_workers, placement.make_worker)
        except BaseException:
            scorer.close()
            raise
    return scorer


def _processes_here(spec: ScorerSpec, placement: ScorerPlacement) -> ScorerPlacement:
    # Each replica runs in a process of this machine, with its share of the cores and the GPUs.
    number = spec.num_replicas
    if not spec.in_loop:
        raise ConfigError(
            f"{setting_of(f'{SECTION}.num_replicas', number)}: without the reward loop there is "
            f"one model in this process; set {key_of(f'{SECTION}.use_reward_loop')}=true, or "
            "num_replicas=1"
        )
    threads = threads_of_each(number)
    num_gpus = torch.cuda.device_count() if spec.device != "cpu" else 0

    def make_group(_: str, ranks: range | None) -> MakeGroup:
        local_rank = ranks[0] % num_gpus if ranks and num_gpus else 0
        return partial(SpawnedGroup, ROLE, cpu_threads=threads, local_rank=local_rank)

    return replace(placement, make_group=make_group, shape=ParallelShape(dp_replicate=number))


def _open_replicas(
    spec: ScorerSpec,
    placement: ScorerPlacement,
    make_group: Callable[[str, range | None], MakeGroup],
    say: Say,
    name: str,
) -> ModelScorer:
    """Open a model in worker groups: one per replica if `spec.in_loop`, otherwise one for all."""
    shape = placement.shape
    spec = replace(spec, model=replace(spec.model, tensor_parallel_size=shape.tp))
    place, spec = _found(spec, say)
    load = partial(_load, place, spec)

    def open_group(ranks: range | None, shape: ParallelShape, tell: Say) -> GroupScorer:
        try:
            group = make_group(name, ranks)(ScoringWorker, load, shape=shape, device=spec.device)
        except WorkerError as error:
            cause = error.__cause__
            if isinstance(cause, UserError):  # every rank raises the same
                raise type(cause)(str(cause)) from error
            raise
        try:
            scorer = GroupScorer(
                group,
                batch_tokens=spec.batch_tokens,
                batch_timeout=spec.batch_timeout,
            )
        except BaseException:
            group.shutdown()
            raise
        for line in scorer.said:
            tell(line)
        return scorer

    if placement.is_one_group or not spec.in_loop:
        return _with_workers(open_group(None, shape, say), spec, placement)
    preparers: list[Preparing] = []

    def open_replica(index: int) -> GroupScorer:
        ranks = range(index * shape.tp, (index + 1) * shape.tp)
        tell = say if index == 0 and not preparers else _log.debug
        scorer = open_group(ranks, ParallelShape(tp=shape.tp), tell)
        scorer.preparers = preparers[0] if preparers else None
        return scorer

    role = f"{ROLE} {name}".rstrip()
    replicas = scoring_replicas(open_replica, shape.dp_replicate, role=role)
    loop = _with_workers(LoopScorer(replicas), spec, placement)
    if loop.preparers is not None:
        preparers.append(loop.preparers)
        for replica in replicas.replicas:
            replica.value.preparers = loop.preparers
    return loop


def _load(place: ModelPlace, spec: ScorerSpec, *, say: Say, mesh: DeviceMesh | None) -> LocalScorer:
    # Workers report errors in the terms of the spec, as this process does.
    with speaking(*spec.names):
        return load_scorer(place, spec, say=say, mesh=mesh)


def _found(spec: ScorerSpec, say: Say) -> tuple[ModelPlace, ScorerSpec]:
    """Find the model of a spec and check its files; return its place and the spec fitted to it."""
    name = spec.model.name
    if name is None:
        raise ConfigError(
            f"{key_of('policy.model_name')} is missing: name a reward model, as a directory (of a "
            "model, a checkpoint or a run with checkpoints) or on the Hugging Face hub"
        )
    place = spec.found or find_reward_model(name)
    for note in place.notes:
        say(note)
    check_files(place)
    return place, _fitted(spec, place, say)


def _fitted(spec: ScorerSpec, place: ModelPlace, say: Say) -> ScorerSpec:
    """Return the spec with the weights' own tokenizer, where the contract allows it."""
    rules = read_rules(place)
    wanted = spec.model.head.attributes
    if rules is not None and wanted and wanted != list(rules.attributes):
        raise ConfigError(
            f"{setting_of('policy.reward_model_cfg.attributes', wanted)}: {place.name} gives "
            f"{list(rules.attributes) or 'one score'}; leave the key out"
        )
    if rules is not None and spec.max_length not in (None, rules.max_length):
        key = key_of("policy.max_total_sequence_length")
        say(f"note    {key} is not used: scoring.json says {rules.max_length:,} tokens")
    tokenizer, directory = spec.model.tokenizer, Path(place.name)
    if tokenizer.name is not None:
        check_not_missing(str(tokenizer.name), key="policy.tokenizer.name")
    elif directory.is_dir() and not any((directory / f).is_file() for f in TOKENIZER_FILES):
        tokenizer = tokenizer.model_copy(update={"name": spec.tokenizer_from})
    return replace(spec, model=replace(spec.model, tokenizer=tokenizer))


def load_scorer(
    place: ModelPlace, spec: ScorerSpec, *, say: Say, mesh: DeviceMesh | None = None
) -> LocalScorer:
    """Load a model and check that it scores as it did when it was saved.

    Args:
        place: Where the model is, as `find_reward_model` returns it.
        mesh: Mesh to shard the model over; every rank calls this with the same arguments.

    Raises:
        UserError: The model is not a reward model, or has changed since it was saved.
    """
    rules = read_rules(place)
    max_length, truncation_side = _cut(spec, rules)
    quiet_libraries()
    # The threads and the random generators of this process stay as they are.
    loaded = load_reward_model(
        _model_of(place, spec, rules),
        seed=0,
        max_length=max_length,
        truncation_side=truncation_side,
        device=choose_device(spec.device),
        weights_dtype=DTYPES[spec.precision],
        mesh=mesh,
        keeps_bias=True,
    )
    if loaded.has_new_head:
        if loaded.strange_weights:
            raise ModelError(
                f"{place.name} has no reward head that is understood. Its weights hold, besides a "
                f"language model's: {', '.join(loaded.strange_weights[:8])}. {understood()}"
            )
        raise ModelError(headless(place.source))
    contract = loaded.contract
    if spec.aggregate is not None:
        steps = contract.rules.steps
        if steps is None:
            raise ConfigError(
                f"{setting_of('policy.reward_model_cfg.step_aggregate', spec.aggregate)}: "
                f"{place.name} is no process reward model, so there are no values of steps; leave "
                "it out"
            )
        # Golden scores are those of the steps, which do not change; the statistics do.
        loaded.contract = contract = contract.with_rules(
            steps=steps.model_copy(update={"aggregate": spec.aggregate}),
            **({} if steps.aggregate == spec.aggregate else {"mean": None, "std": None}),
        )
    _check(loaded, place, precision=spec.precision, has_contract=rules is not None, say=say)
    scorer = LocalScorer(loaded.model, contract, batch_tokens=spec.batch_tokens)
    scorer.source = place.name
    return scorer


def read_rules(place: ModelPlace) -> ScoringRules | None:
    """Read the scoring contract that was saved with a model; None where there is none."""
    directory = Path(place.name)
    return ScoringRules.read(directory) if (directory / FILE_NAME).is_file() else None


def read_contract(place: ModelPlace, spec: ScorerSpec, *, say: Say) -> ScoringContract:
    """Read the contract that a model scores by; its weights are not needed.

    Args:
        place: Where the model is, as `find_model` returns it.

    Raises:
        UserError: There is no usable tokenizer or template.
    """
    rules = read_rules(place)
    max_length, truncation_side = _cut(spec, rules)
    quiet_libraries()
    contract, notes = load_contract(
        _model_of(place, spec, rules), max_length=max_length, truncation_side=truncation_side
    )
    for note in notes:
        say(f"note    {note}")
    return contract


def _model_of(place: ModelPlace, spec: ScorerSpec, rules: ScoringRules | None) -> ModelSpec:
    """Return the spec that loads the reward model in `place`, with the head of its contract."""
    head = spec.model.head
    if rules is not None:
        weights = rules.attribute_weights
        head = RewardModelConfig(
            reward_model_type="regression" if rules.attributes else "bradley_terry",
            attributes=list(rules.attributes),
            attribute_weights=None if weights is None else list(weights),
        )
    if rules is not None and rules.steps is not None:
        head = RewardModelConfig(
            reward_model_type="process",
            step_separator=rules.steps.separator,
            step_aggregate=rules.steps.aggregate,
        )
    return replace(spec.model, name=place.name, precision=spec.precision, head=head)


def _cut(spec: ScorerSpec, rules: ScoringRules | None) -> tuple[int, Literal["left", "right"]]:
    # A contract decides on its own; the settings count only for a model without one.
    if rules is not None:
        return rules.max_length, rules.truncation_side
    return spec.max_length or MAX_LENGTH, DataConfig().truncation_side


def _check(
    loaded: LoadedRewardModel,
    place: ModelPlace,
    *,
    precision: Precision,
    has_contract: bool,
    say: Say,
) -> None:
    model, rules = loaded.model, loaded.contract.rules
    difference = check_paths(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    path = f"token forest (self-check: {difference:.1e})" if model.path == "forest" else "padded"
    say(
        f"model   {type(model.classifier).__name__} from {place.shown}: "
        f"{format_parameters(parameters)} parameters, {precision} on {model.device.type}, {path}"
    )
    for note in loaded.notes:
        say(f"note    {note}")
    if rules.golden:
        try:
            worst = check_golden(model, loaded.contract)
        except UserError as error:
            raise type(error)(
                f"{place.name} does not score as it did when it was saved: {error}. "
                "Use the files and the library versions it was saved with, or, where the change is "
                "meant, remove `golden` from its scoring.json"
            ) from error
        say(f"checked golden scores agree (max difference {worst:.1e})")
    else:
        missing = "its scoring.json has no" if has_contract else "it has no scoring.json, so no"
        say(f"note    {missing} golden scores could be checked")
    say_rules(rules, say)


def say_rules(rules: ScoringRules, say: Say) -> None:
    """Say what a model's contract makes of conversations."""
    say(f"lengths conversations of more than {rules.max_length:,} tokens {rules.overlong}")
    if rules.attributes:
        say(f"values  {', '.join(rules.attributes)}")
    if rules.steps is not None:
        say(
            f"values  one for each step (steps are separated by {rules.steps.separator!r}); the "
            f"score is their {rules.steps.aggregate}"
        )
