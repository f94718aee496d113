"""Reads out of a configuration what its run needs, and plans the slots of its roles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from laurel import plugins
from laurel.config.policy import ClusterConfig, PolicyConfig, ResourcesConfig
from laurel.errors import ConfigError, counted
from laurel.planning.plan import (
    AdapterRequest,
    BatchRequest,
    ClusterRequest,
    DrawingRequest,
    OwnSlots,
    Plan,
    RewardModelRequest,
    RoleRequest,
    ServedModelRequest,
    StepRequest,
    TrainingRequest,
    optimizer_states,
    plan_run,
)
from laurel.plugins import EngineNeeds
from laurel.training.stopping import NO_SET

if TYPE_CHECKING:
    from laurel.config.environments import ModelServerConfig, ScorerSource
    from laurel.config.grpo import GRPOConfig
    from laurel.config.grpo_run import GRPORun
    from laurel.config.reward_model import RewardTrainingConfig, RewardTrainingRun
    from laurel.config.schemas import Kind, Run
    from laurel.config.sft import SFTConfig, SFTRun
    from laurel.training.epochs import StepOrder

Backend = Literal["local", "ray"]

DEFAULT_SCORED_LENGTH = 8192
"""The assumed longest conversation, in tokens, of a reward model without `max_model_len`."""


def request_of(config: Run) -> ClusterRequest:
    """Return the resources that a run requests from its cluster, for the planner."""
    cluster, placement = config.cluster, config.cluster.placement
    request = ClusterRequest(
        num_nodes=cluster.num_nodes,
        slots_per_node=cluster.gpus_per_node,
        roles=(_policy(config),),
        training=_training(config),
        placement=None if placement is None else {k: v for k, v in placement.items() if v},
        labels=cluster.labels,
        device=cluster.device,
    )
    if config.command != "grpo":
        return request
    judge = _reward_model(config) if uses_reward_model(config) else _model_server(config)
    return replace(
        request,
        roles=(*request.roles, _generation(config), *([judge] if judge is not None else [])),
        training=replace(
            request.training,
            keeps_reference=config.loss_fn.reference_policy_kl_penalty > 0,
        ),
        drawing=_drawing(config),
        reward_models=tuple(
            RewardModelRequest(precision=judge.precision, compiles=judge.compile)
            for judge in config.env.reward_model.loaded
        ),
        served=None if uses_reward_model(config) else _served(config),
        step=StepRequest(
            num_prompts=config.grpo.num_prompts_per_step,
            per_prompt=config.grpo.num_generations_per_prompt,
            beside=_greedy(config),
            # The reference's, the teacher's, as if it were of the policy's size, and the old
            # policy's where several updates move away from it or its difference is bounded.
            logprob_passes=(config.loss_fn.reference_policy_kl_penalty > 0)
            + (config.loss_fn.distillation.model_name is not None)
            + (
                (config.updates_per_rollout > 1 and not config.loss_fn.force_on_policy_ratio)
                or config.grpo.seq_logprob_error_threshold is not None
            ),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedAllocation:
    """A plan of the slots of every role, before anything is reserved."""

    config: Run
    plan: Plan
    are_remote: bool


def plan_allocation(config: Run) -> PlannedAllocation:
    """Plan the slots of every role of a run without reserving or starting anything.

    Raises:
        ConfigError: The run does not fit; the message names every problem and the nearest setting.
    """
    plan = plan_to_run(request_of(config))
    # This can be planned, but is not implemented.
    parallel, key = config.policy.dtensor_cfg, "policy.dtensor_cfg"
    policy = plan.role("policy")
    if parallel.cpu_offload and policy is not None and policy.mesh.size == 1:
        raise ConfigError(
            f"{key}.cpu_offload=true: shares of a spread model can be kept on the host, and the "
            "policy has one rank; set it to false, or give it more slots (cluster.gpus_per_node)"
        )
    return PlannedAllocation(
        config=config, plan=plan, are_remote=backend_of(plan, config.cluster) == "ray"
    )


def plan_to_run(request: ClusterRequest) -> Plan:
    """Plan a run that is about to start.

    Raises:
        ConfigError: It does not fit; everything that does not is named, with the nearest setting
            that does.
    """
    plan = plan_run(request)
    if not plan.fits:
        conflicts = [conflict for conflict in plan.conflicts if conflict.is_fatal]
        lines = [f"  {conflict.problem}\n    fix  {conflict.fix}" for conflict in conflicts]
        raise ConfigError("\n".join(["the run does not fit its cluster", *lines]))
    return plan


def backend_of(plan: Plan, config: ClusterConfig) -> Backend:
    """Decide whether a run needs Ray: by `cluster.backend`, or for `auto` by the plan.

    Raises:
        ConfigError: It is to run in this process, and has more ranks or slots than one.
    """
    ranks = {role.name: len(role.slots) for role in plan.roles}
    is_one = max(ranks.values()) == 1 and len({s for role in plan.roles for s in role.slots}) == 1
    if config.backend == "auto":
        return "local" if is_one and config.address is None else "ray"
    if config.backend == "local" and not is_one:
        said = ", ".join(f"{name} {count}" for name, count in ranks.items())
        raise ConfigError(
            f"cluster.backend=local is one process on one slot, and the plan has more ({said} "
            "slots); set cluster.backend=ray, or cluster.gpus_per_node=1 cluster.num_nodes=1 and "
            "no resources of the roles' own"
        )
    return config.backend


def uses_reward_model(config: GRPORun) -> bool:
    """Report whether a task may use a reward model that this run loads, so that it needs slots.

    The environment must be enabled, or a data set must name it; and no servers, judge or function
    may replace the model. One of several models is enough; all loaded models share the slots.
    """
    return bool(config.env.reward_model.loaded) and _names_reward_model(config)


def loaded_judges(config: GRPORun) -> dict[str, ScorerSource]:
    """Return the judges that the run loads into its own process, which no plan counts.

    The keys are their sections.
    """
    return {at: source for at, source in _scorer_sources(config) if source.loads_judge}


def model_server(config: GRPORun) -> ModelServerConfig | None:
    """Return the model that the run serves for a function; None if there is none."""
    return config.env.reward_model.server if _names_reward_model(config) else None


def _scorer_sources(config: GRPORun) -> list[tuple[str, ScorerSource]]:
    """Return the sources of scores of the reward model's environment, with their sections."""
    section, key = config.env.reward_model, "env.reward_model"
    if not _names_reward_model(config):
        return []
    if section.models is None:
        return [(key, section)]
    return [(f"{key}.models[{index}]", source) for index, source in enumerate(section.sources)]


def why_not_validated(config: Run, *, has_sets: bool) -> str:
    """Return why no metric of validation can rank a run's checkpoints; empty if one can."""
    kind, section = section_of(config)
    if not has_sets:
        return NO_SET
    if section.val_period > 0 or section.val_at_end:
        return ""
    return f"Validation is off: {kind}.val_period={section.val_period}, {kind}.val_at_end=false"


def section_of(config: Run) -> tuple[Kind, RewardTrainingConfig | SFTConfig | GRPOConfig]:
    """Return the section of a run that has the name of its command, with that name."""
    if config.command == "rm":
        return config.command, config.rm
    if config.command == "sft":
        return config.command, config.sft
    return config.command, config.grpo


def judge_notes(config: GRPORun, *, on_cluster: bool) -> list[str]:
    """Say which judges are beside the policy without being counted, or that they cannot be."""
    judges = loaded_judges(config)
    servers: list[str] = []
    if (served := model_server(config)) is not None:
        # Where a reward model is loaded, too, the plan has a place for that alone.
        what = "memory and their time are" if uses_reward_model(config) else "time is"
        servers = [
            f"{served.replicas} x {served.model_name}: the run starts its servers in slots of the "
            f"reward model; their {what} not estimated"
            + ("" if served.resources.are_own else _how_they_share(config))
        ]
    if on_cluster:
        refused = [f"the run is refused. {one.lacks_slot(at)}" for at, one in judges.items()]
        return [*servers, *refused]
    return [
        *servers,
        *(
            f"the judge {judge.model_name} is not counted in the plan: the run loads it beside the "
            "policy, and its memory and its time are not estimated"
            for judge in judges.values()
        ),
    ]


def _how_they_share(config: GRPORun) -> str:
    if not config.grpo.max_staleness:
        return ". On the policy's GPUs they sleep but for the scores"
    return (
        f". With grpo.max_staleness={config.grpo.max_staleness} they do not sleep, because "
        "completions are always being sampled: on the policy's GPUs their memory is theirs alone"
    )


def sampling_notes(config: GRPORun) -> list[str]:
    """Say that completions are sampled from less than the distribution that is learned."""
    generation = config.policy.generation
    cuts = [
        f"policy.generation.{key}={getattr(generation, key):g}"
        for key, is_cut in (
            ("top_p", generation.top_p < 1),
            ("top_k", generation.top_k is not None),
        )
        if is_cut
    ]
    if not cuts or generation.temperature == 0:
        return []
    return [
        f"{' and '.join(cuts)}: completions are sampled from the likeliest tokens alone, and their "
        "log-probabilities are those of the whole distribution, as the learner's are: ratios, "
        "importance weights and the divergence do not see the cut, and the gradient is biased by it"
    ]


def step_order(
    config: RewardTrainingRun | SFTRun,
    num_rows: int,
    *,
    units: Sequence[Sequence[int]] | None = None,
) -> StepOrder:
    """Return the order in which rows are used: that of the file, or shuffled by the run's seed.

    `units` are rows that stay together; `StepOrder` describes them.
    """
    from laurel.training.epochs import StepOrder

    section = config.rm if config.command == "rm" else config.sft
    size = config.policy.train_global_batch_size
    return StepOrder(num_rows, size, shuffle=config.data.shuffle, seed=section.seed, units=units)


def batch_notes(key: str, size: int, num_rows: int, *, unit: str = "row") -> list[str]:
    """Say that a step takes more than there is to learn from, if it does."""
    if size <= num_rows:
        return []
    return [f"{key}={size} exceeds the data: there are {counted(num_rows, unit)} to train on"]


SMALL_CHANGE = 1e-4
"""The change of a weight over a whole run below which a model learns little: 8 steps of 2e-6, which
the defaults take for 1,000 rows, are far below it."""


def epoch_notes(policy: PolicyConfig, num_rows: int, num_steps: int) -> list[str]:
    """Say that a step takes more rows than there are, or a run is too short for its learning rate.

    A step of Adam changes a weight by about the learning rate at most, whatever the gradient is.
    """
    rate = policy.optimizer.kwargs.get("lr")
    change = num_steps * rate if rate and "Adam" in policy.optimizer.name else SMALL_CHANGE
    notes = batch_notes("policy.train_global_batch_size", policy.train_global_batch_size, num_rows)
    if change >= SMALL_CHANGE:
        return notes
    return [
        *notes,
        f"{counted(num_steps, 'step')} with a learning rate of {rate:g} change no weight by much "
        f"more than {change:.1g}, so the model learns little: raise policy.optimizer.kwargs.lr, "
        "lower policy.train_global_batch_size, or bring more rows",
    ]


def _names_reward_model(config: GRPORun) -> bool:
    from laurel.data.tasks import environments_named

    waiting = environments_named(config.data.sets(), config.default_environment)
    named: set[str] = set()
    while waiting:
        name = waiting.pop()
        # A part may be a composite itself, and several may have the same part.
        if name not in named and name in config.env.composite:
            waiting += [part.env for part in config.env.composite[name].parts]
        found = config.env.found(name)
        if found is not None:
            waiting.append(found.kind.graded_by(found.section) or "")
        named.add(name)
    return config.env.reward_model.enabled or "reward_model" in named


def _policy(config: Run) -> RoleRequest:
    policy, parallel = config.policy, config.policy.dtensor_cfg
    unit, sequences = "conversations", 1
    if config.command == "grpo":
        unit = "completions"
    elif config.command == "rm":
        unit, sequences = "groups", 2  # an item is a pair of conversations
    longest = sequences * policy.max_total_sequence_length
    packing, part_tokens, path_tokens = policy.sequence_packing, None, 0
    if packing.enabled:
        part_tokens = policy.batch_limits.forest_tokens
        group = longest
        if config.command == "grpo":
            group *= config.grpo.num_generations_per_prompt
        path_tokens = policy.max_total_sequence_length if group > part_tokens else 0
    batch = BatchRequest(
        unit=unit,
        size=policy.train_global_batch_size,
        longest=longest,
        tokens=_budget(config, longest),
        part_tokens=part_tokens,
        path_tokens=path_tokens,
        updates=config.updates_per_rollout if config.command == "grpo" else 1,
    )
    batches = [batch]
    if config.command != "grpo" and _validates(config):
        section = config.rm if config.command == "rm" else config.sft
        batches.append(replace(batch, size=section.val_global_batch_size, is_validation=True))
    return RoleRequest(
        name="policy",
        parallel_key="policy.dtensor_cfg",
        tp=parallel.tensor_parallel_size,
        cp=parallel.context_parallel_size,
        batches=tuple(batches),
    )


def _budget(config: Run, longest: int) -> int:
    """Return the tokens of one forward pass, which holds at least one whole item."""
    limits = config.policy.batch_limits
    return max(longest, limits.padded_tokens or longest * limits.padded_groups)


def _generation(config: GRPORun) -> RoleRequest:
    generation, longest = config.policy.generation, config.policy.max_total_sequence_length
    colocated, tokens = generation.colocated, generation.max_concurrent * longest
    key = "policy.generation.colocated.resources"
    name = _engine_of(config)
    parallel = generation.needs_of(name)
    return RoleRequest(
        name="generation",
        parallel_key=f"policy.generation.{name}_cfg",
        tp=parallel.tensor_parallel_size if parallel else 1,
        pp=parallel.pipeline_parallel_size if parallel else 1,
        own=None if colocated.enabled else _own_slots(key, colocated.resources),
        batches=_rollouts(config, longest, tokens),
    )


def _reward_model(config: GRPORun) -> RoleRequest:
    # Several reward models share the slots; the largest forward pass of any of them counts.
    judge = config.env.reward_model
    longest = tokens = 0
    for source in judge.loaded:
        length = source.max_model_len or DEFAULT_SCORED_LENGTH
        longest, tokens = max(longest, length), max(tokens, length, source.batch_tokens)
    key, resources = "env.reward_model.resources", judge.resources
    return RoleRequest(
        name="reward_model",
        parallel_key="env.reward_model.dtensor_cfg",
        tp=judge.dtensor_cfg.tensor_parallel_size,
        own=_own_slots(key, resources) if resources.are_own else None,
        batches=_rollouts(config, longest, tokens),
    )


def _model_server(config: GRPORun) -> RoleRequest | None:
    # Its replicas have the slots of a reward model; what they compute is not known.
    if (served := model_server(config)) is None:
        return None
    key, resources = "env.reward_model.server", served.resources
    return RoleRequest(
        name="reward_model",
        parallel_key=key,
        tp=served.tensor_parallel_size,
        own=_own_slots(f"{key}.resources", resources) if resources.are_own else None,
    )


def _served(config: GRPORun) -> ServedModelRequest | None:
    """Return what the model that the run serves takes."""
    if (section := model_server(config)) is None:
        return None
    engine = plugins.find(plugins.Engine, section.backend)
    assert isinstance(engine, plugins.EngineThatServes), "the section has checked it"
    needs = engine.served_needs(section)
    return ServedModelRequest(
        precision=needs.precision or "bfloat16",
        memory_share=needs.memory_share,
        replicas=section.replicas,
        sleeps=config.grpo.max_staleness == 0,
        arguments=tuple(section.arguments),
    )


def _greedy(config: GRPORun) -> int:
    """Return how many greedy completions each prompt gets besides."""
    return int(plugins.find(plugins.Advantage, config.grpo.adv_estimator.name).baseline == "greedy")


def _own_slots(key: str, resources: ResourcesConfig) -> OwnSlots:
    return OwnSlots(key=key, per_node=resources.gpus_per_node, nodes=resources.num_nodes)


def _rollouts(config: GRPORun, longest: int, tokens: int) -> tuple[BatchRequest, ...]:
    """Return the batches of generation, and those of the reward model that scores them."""
    grpo = config.grpo
    batch = BatchRequest(
        unit="completions",
        size=grpo.num_prompts_per_step * (grpo.num_generations_per_prompt + _greedy(config)),
        longest=longest,
        tokens=tokens,
    )
    if not _validates(config):
        return (batch,)
    tasks = min(grpo.val_batch_size, grpo.max_val_samples)
    size = tasks * grpo.val_num_generations_per_prompt
    return batch, replace(batch, size=size, is_validation=True)


def _validates(config: Run) -> bool:
    _, section = section_of(config)
    is_asked = section.val_period > 0 or section.val_at_start or section.val_at_end
    has_more = config.command == "rm" and bool(config.data.benchmark_sets())
    return is_asked and (bool(config.data.validation_sets()) or has_more)


def _training(config: Run) -> TrainingRequest:
    policy, parallel = config.policy, config.policy.dtensor_cfg
    lora = parallel.lora_cfg
    return TrainingRequest(
        precision=policy.precision,
        optimizer_states=optimizer_states(policy.optimizer.name),
        adapters=AdapterRequest(
            enabled=lora.enabled,
            dim=lora.dim,
            layers=frozenset(lora.target_modules),
            exclude=frozenset(lora.exclude_modules),
        ),
        has_logits=config.command != "rm",
        recomputes=parallel.activation_checkpointing,
        sequence_parallel=parallel.sequence_parallel,
        offloads=parallel.cpu_offload,
        compiles=policy.compile,
    )


def _drawing(config: GRPORun) -> DrawingRequest:
    policy = config.policy
    own = policy.generation.needs_of(_engine_of(config))
    engine = own or EngineNeeds()
    has_cache = config.grpo.max_rollout_turns > 1 and own is None
    way = policy.generation.weight_transfer
    return DrawingRequest(
        has_own_weights=own is not None,
        precision=engine.precision or policy.precision,
        longest=engine.max_length or policy.max_total_sequence_length,
        memory_share=engine.memory_share,
        runs_ahead=config.grpo.max_staleness > 0,
        through_host=way == "object_store"
        or (way == "broadcast" and policy.generation.colocated.enabled)
        or engine.through_host,
        conversation_bytes=policy.generation.conversation_bytes if has_cache else 0,
        has_static_slots=own is None and _has_static_slots(config),
    )


def _has_static_slots(config: GRPORun) -> bool:
    asked = config.policy.generation.transformers_cfg.static_slots
    return config.cluster.device != "cpu" if asked == "auto" else asked


def _engine_of(config: GRPORun) -> str:
    # The plan counts on a GPU for `auto`, unless the run is on CPUs.
    return config.policy.generation.engine_of(has_gpu=config.cluster.device != "cpu")
