"""Builds a GRPO run from its configuration; only this file knows all classes that it uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from laurel import plugins
from laurel.config.grpo_run import GRPORun
from laurel.data.reading import holds_out
from laurel.data.tasks import TaskData, environments_named, load_task_data
from laurel.environments.registry import environment_names, row_sources
from laurel.errors import ConfigError, DataError
from laurel.observe.console import say_on
from laurel.observe.loggers import check_available
from laurel.run.cards import facts_of_policy, settings_of_grpo
from laurel.run.context import (
    RunContext,
    checkpoint_parts,
    make_services,
    reward_model_metrics,
)
from laurel.run.generator import describe_generator, make_generator
from laurel.run.model import (
    describe_policy,
    found_teacher,
    load_policy_to_train,
    resolve_micro_batches,
    resolve_model,
)
from laurel.run.request import (
    batch_notes,
    judge_notes,
    loaded_judges,
    model_server,
    plan_allocation,
    sampling_notes,
    uses_reward_model,
    why_not_validated,
)
from laurel.run.tasks import (
    check_answers,
    check_environments,
    environments_of,
    fit_prompts,
    needs_of,
)
from laurel.training.stopping import Deadline, Position, Selection, policy_goal, select_policy_by

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.data.forest import Batcher
    from laurel.evaluation.benchmarks import BenchmarkSet
    from laurel.grpo.loop import GRPO, PolicyParts
    from laurel.grpo.shared_devices import SharedDevices
    from laurel.models.chat import ChatFormat
    from laurel.protocols import Environment, Generator
    from laurel.run.model import TrainedModel
    from laurel.training.loop import RunOutcome
    from laurel.types import RolloutGroup, SamplingParams


def train_policy(config: GRPORun, *, console: Console) -> RunOutcome:
    """Train a policy by GRPO (`laurel grpo`) from beginning to end, and return the outcome."""
    with ExitStack() as stack:
        training, position = assemble(config, stack, console=console)
        return training.run(position)


def assemble(config: GRPORun, stack: ExitStack, *, console: Console) -> tuple[GRPO, Position]:
    """Build a GRPO run that is ready to start, and return it with its starting position.

    Errors are reported in the order of their cost: first those that need nothing loaded, then those
    that need the data, the environments, and the policy.
    """
    policy_name = config.policy.model_name
    config = _resolve_teacher(resolve_model(config, console), policy_name, console)
    deadline = Deadline(config.checkpointing.checkpoint_must_save_by)
    selection = check_grpo_run(config)
    planned = plan_allocation(config)
    check_judges(config, on_cluster=planned.are_remote)
    check_engines(config, on_cluster=planned.are_remote)
    notes = judge_notes(config, on_cluster=planned.are_remote)
    for note in [*notes, *sampling_notes(config)]:
        console.print(f"note    {note}", soft_wrap=True)
    context = RunContext(config=config, console=console, stack=stack, deadline=deadline)
    context = context.with_store(selection)
    data = _load_data(config)
    benchmarks: list[BenchmarkSet] = []
    if named := config.env.reward_model.benchmarks:
        from laurel.evaluation.benchmarks import BenchmarkSet

        benchmarks = [BenchmarkSet.load(name, one) for name, one in named.items()]
    context = resolve_micro_batches(context.with_slots(planned))
    config = context.config
    environments = environments_of(data, context)
    check_gives_steps(config, data, environments)
    check_components(config, data, environments)
    check_answers(data, environments, console)
    # A resumed run has measured these at its beginning.
    facts = reward_model_metrics([] if context.resume_from else benchmarks, environments, console)
    training, position = _with_policy(context, data, environments)
    if facts:
        training.services.logger.log(facts, step=position.step)
    return training, position


def _resolve_teacher(config: GRPORun, policy_name: str | None, console: Console) -> GRPORun:
    """Return the configuration with the teacher's name resolved as that of the policy is.

    One that the configuration calls by the same name as the policy is not looked for again.
    """
    loss = config.loss_fn
    name = loss.distillation.model_name
    if name is None:
        return config
    say = say_on(console)
    if name == policy_name:
        name = config.policy.model_name
    else:
        name = found_teacher(name, say=lambda note: say(f"note    {note}"))
    found = loss.distillation.model_copy(update={"model_name": name})
    return config.model_copy(update={"loss_fn": loss.model_copy(update={"distillation": found})})


def _load_data(config: GRPORun) -> TaskData:
    named = environments_named(config.data.sets(), config.default_environment)
    check_environments(config, *named)
    return load_task_data(
        config.data,
        default_environment=config.default_environment,
        environments=environment_names(config.env),
        needs=needs_of(config.env, *named),
        sources=row_sources(config.env),
    )


def check_grpo_run(config: GRPORun) -> Selection:
    """Check the configuration before anything is loaded; return how the best checkpoint is chosen.

    Raises:
        UserError: A setting cannot be used; the first problem is reported.
    """
    check_available(config.logger)
    return policy_selection(config)


def policy_selection(config: GRPORun) -> Selection:
    """Return how the best checkpoint of a run is chosen.

    Raises:
        ConfigError: The run does not measure what chooses it, or what would end the run.
    """
    has_sets = bool(config.data.validation_sets()) or holds_out(config.data.train_sets())
    why_not = why_not_validated(config, has_sets=has_sets)
    measured: dict[str, Any] = {
        "has_validation": not why_not,
        "environments": config.env.names(),
        "why_not": why_not,
    }
    policy_goal(config.grpo, **measured)
    if not config.checkpointing.enabled:
        return Selection(key=None)
    return select_policy_by(
        config.checkpointing.metric_name,
        config.checkpointing.higher_is_better,
        sets=[name for name in config.data.validation_names() if name],
        **measured,
    )


def check_gives_steps(
    config: GRPORun, data: TaskData, environments: Mapping[str, Environment]
) -> None:
    """Check that the environments of the training tasks give rewards of steps if they are compared.

    Raises:
        ConfigError: An environment does not.
    """
    if not config.grpo.adv_estimator.per_step:
        return
    asked = {task.environment for task in data.train} or {config.default_environment}
    without = sorted(name for name in asked if not environments[name].spec.gives_steps)
    if without:
        raise ConfigError(
            f"grpo.adv_estimator.per_step=true: the environment {', '.join(without)} gives no "
            "rewards of steps. env.reward_model does with a process reward model as its "
            "model_name, without transform.subtract_reference; composites and several models do "
            "not. Use it for the training tasks, or leave per_step out"
        )


def check_components(
    config: GRPORun, data: TaskData, environments: Mapping[str, Environment]
) -> None:
    """Check that the environments of the training tasks give the components that GDPO compares.

    Those that do not say before their first reward are checked with the first batch.

    Raises:
        ConfigError: An environment gives none, or not those of `reward_weights`.
    """
    from laurel.grpo.advantages import component_weights

    estimator = config.grpo.adv_estimator
    if not plugins.find(plugins.Advantage, estimator.name).reads_components:
        return
    asked = {task.environment for task in data.train} or {config.default_environment}
    known = {name: environments[name].spec.components for name in sorted(asked)}
    stated = {name: names for name, names in known.items() if names is not None}
    for name, components in stated.items():
        try:
            component_weights([components], estimator)
        except ConfigError as error:
            raise ConfigError(f"the environment {name}: {error}") from error
    if stated:
        component_weights(stated.values(), estimator)


def check_judges(config: GRPORun, *, on_cluster: bool) -> None:
    """Check that a run has room for the judges that it loads, before anything is started.

    Args:
        on_cluster: Whether its workers are elsewhere.

    Raises:
        MissingDependencyError: The package of a judge's engine is not installed.
        ConfigError: A judge would have no slot, or would take the GPU that the policy needs.
    """
    if on_cluster and model_server(config) is not None and uses_reward_model(config):
        raise ConfigError(
            "env.reward_model.server: a run on a cluster has slots for one such model, and for no "
            "reward model beside it; serve one of them yourself, and name its HOST:PORT in "
            "function.router, or its address in urls"
        )
    for where, judge in loaded_judges(config).items():
        if on_cluster:
            raise ConfigError(judge.lacks_slot(where))
        if judge.engine is None:
            continue
        assert judge.generation is not None
        engine, section = judge.engine
        key = f"env.reward_model.generation.backend={judge.generation.backend}"
        engine.check_installed(key)
        from laurel.workers.process import choose_device

        if choose_device(config.cluster.device).type != "cpu":
            try:
                engine.check_room(section)
            except ValueError as error:
                raise ConfigError(f"{key}: {error}, or serve the judge and name urls") from error


def check_engines(config: GRPORun, *, on_cluster: bool) -> None:
    """Check that a run can use the engines that it names, before anything is started.

    Args:
        on_cluster: Whether its workers are elsewhere.

    Raises:
        MissingDependencyError: A package is needed on this machine, and is not installed.
        ConfigError: An engine of its own is to compute rewards on a cluster.
    """
    name, scoring = config.policy.generation.backend, config.env.reward_model.generation
    # An existing cluster may have the package in its environment although this one does not.
    if name in plugins.names("engines") and not config.cluster.address:
        plugins.find(plugins.Engine, name).check_installed(f"policy.generation.backend={name}")
    if scoring is not None and scoring.engine is not None and uses_reward_model(config):
        key = f"env.reward_model.generation.backend={scoring.backend}"
        if on_cluster:
            raise ConfigError(
                f"{key}: a run on a cluster has its reward model in slots of its own, where this "
                f"engine is not started. Start it with `laurel serve MODEL --engine "
                f"{scoring.backend}` and set env.reward_model.urls to its address; or leave "
                "generation out"
            )
        scoring.engine[0].check_installed(key)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyBundle:
    """A loaded policy with everything that sampling rollouts from it needs."""

    model: TrainedModel
    chat: ChatFormat
    parts: PolicyParts
    num_steps: int


def load_policy_bundle(
    context: RunContext[GRPORun],
    data: TaskData,
    environments: dict[str, Environment],
    texts: Sequence[str] = (),
    *,
    trains: bool,
) -> PolicyBundle:
    """Load the policy and its generator, and leave out prompts that are too long for it.

    `texts` are those on which the tokenizer of a model from scratch is trained. Unless it `trains`,
    neither reference nor teacher is loaded.
    """
    from laurel.models.chat import ChatFormat

    config = context.config
    texts = texts if config.policy.scratch is not None else ()
    devices = _shared_devices(context, environments)
    model = load_policy_to_train(
        context,
        seed=config.grpo.seed,
        texts=texts,
        temperature=config.policy.generation.temperature,
        needs_reference=trains and config.loss_fn.reference_policy_kl_penalty > 0,
        teacher=config.loss_fn.distillation.model_name if trains else None,
        samples_from_copy=config.grpo.max_staleness > 0,
        with_entropy=True,
    )
    chat = ChatFormat(
        model.facts.tokenizer,
        config.policy.tokenizer.chat_template_kwargs,
        generation_end_ids=model.facts.generation_end_ids,
    )
    for environment in environments.values():
        environment.use_tokenizer(chat.tokenizer)
    fit_prompts(data, chat, config, lambda name: environments[name].spec.tools)
    num_steps = grpo_total_steps(config, len(data.endless or data.train))
    generator = make_generator(context, model, chat, texts)
    context.stack.callback(generator.close)
    if devices is not None:
        devices.attach(generator)
    parts = _parts(context, data, environments, model, chat, generator, devices, num_steps)
    return PolicyBundle(model=model, chat=chat, parts=parts, num_steps=num_steps)


def _with_policy(
    context: RunContext[GRPORun], data: TaskData, environments: dict[str, Environment]
) -> tuple[GRPO, Position]:
    """Load the policy, and build everything that depends on it."""
    config, console, resume_from = context.config, context.console, context.resume_from
    if context.store is not None and resume_from is not None and context.allocation is not None:
        # A lost replica of generation is restarted from this checkpoint.
        context.store.pin(resume_from)
    found = load_policy_bundle(context, data, environments, task_texts(data), trains=True)
    from laurel.grpo.loop import GRPO, GRPOSettings
    from laurel.grpo.metrics import members_of
    from laurel.grpo.source import GRPORunState, fingerprint_of_tasks
    from laurel.observe.health import Alarms
    from laurel.training.loop import Schedule
    from laurel.training.state import TRAINING_DATA, VALIDATION_DATA

    model, parts = found.model, found.parts
    card = facts_of_policy(
        context,
        model.facts,
        data.reports,
        method="GRPO",
        settings=settings_of_grpo(config, environments),
    )
    rows = {
        TRAINING_DATA: fingerprint_of_tasks(data.train),
        VALIDATION_DATA: fingerprint_of_tasks(data.validation),
    }
    state = GRPORunState(
        parts.learner,
        checkpoint_parts(context, model.facts, card, day=context.day),
        rows,
        source=parts.source,
        environments=environments,
        alarms=Alarms(
            config.grpo.health, members=members_of(config.env), settings=config.model_dump()
        ),
    )
    position = state.restore(resume_from) if resume_from else Position()
    describe_policy(context, model.facts, data.reports, state.run_dir)
    _describe_step(config, found.chat, parts, console)
    size, tasks = config.grpo.num_prompts_per_step, data.train
    if data.endless is None:
        for note in batch_notes("grpo.num_prompts_per_step", size, len(tasks), unit="task"):
            console.print(f"note    {note}")
    has_validation = parts.validation is not None
    schedule = Schedule(
        section=config.grpo,
        saving=config.checkpointing,
        total_steps=found.num_steps,
        has_validation=has_validation,
        goal=policy_goal(
            config.grpo, has_validation=has_validation, environments=list(environments)
        ),
    )
    services = make_services(
        context,
        schedule=schedule,
        state=state,
        position=position,
        facts=model.facts,
        reports=data.reports,
        unit="completions",
    )
    policy = config.policy
    settings = GRPOSettings(
        grpo=config.grpo,
        loss=config.loss_fn,
        logging=config.logger,
        max_length=policy.max_total_sequence_length,
        longest_completion=policy.generation.max_new_tokens or policy.max_total_sequence_length,
        batch_size=policy.train_global_batch_size,
        updates_per_rollout=config.updates_per_rollout,
    )
    return GRPO(settings, services, parts), position


def _describe_step(config: GRPORun, chat: ChatFormat, parts: PolicyParts, console: Console) -> None:
    if not chat.asks_as_it_answers:
        console.print(
            "note    the generation prompt of the chat template differs from the start of the "
            "policy's answers: check the template"
        )
    console.print(
        f"step    {config.grpo.num_prompts_per_step} prompts x "
        f"{config.grpo.num_generations_per_prompt} completions, graded by "
        f"{', '.join(sorted(parts.environments))}; sampled by "
        f"{describe_generator(parts.generator)}"
    )


def task_texts(data: TaskData) -> list[str]:
    """Return every text of the training tasks, on which a tokenizer from scratch is trained."""
    return [message.content for task in data.train for message in task.prompt]


def grpo_total_steps(config: GRPORun, num_tasks: int) -> int:
    """Return the number of steps of the run: those of all epochs, or the limit if it is lower."""
    grpo = config.grpo
    return min(grpo.max_num_steps, max(1, grpo.num_epochs * num_tasks // grpo.num_prompts_per_step))


def _parts(
    context: RunContext[GRPORun],
    data: TaskData,
    environments: dict[str, Environment],
    model: TrainedModel,
    chat: ChatFormat,
    generator: Generator,
    devices: SharedDevices | None,
    num_steps: int,
) -> PolicyParts:
    from laurel.grpo.loop import PolicyParts
    from laurel.grpo.rollouts import RolloutLimits, Rollouts
    from laurel.grpo.source import RolloutSource, noise_floor
    from laurel.grpo.validation import PolicyValidation

    config, grpo, allocation = context.config, context.config.grpo, context.allocation
    scorers_take_turns = allocation is not None and allocation.take_turns("reward_model")

    # An environment that grades single completions can batch only concurrent calls.
    grades_single = any(one.spec.judges == "completion" for one in environments.values())
    limits = RolloutLimits(
        max_turns=grpo.max_rollout_turns,
        max_length=config.policy.max_total_sequence_length,
        environment_timeout=config.env.timeout_seconds,
        generation_timeout=config.policy.generation.timeout_seconds,
        max_failed_share=config.env.max_failed_share,
        num_threads=64 if grades_single else 16,
    )
    per_step = grpo.adv_estimator.per_step
    noise_floor_of = partial(noise_floor, environments, per_step=per_step)
    rollouts = Rollouts(
        generator,
        environments,
        chat,
        limits,
        seed=grpo.seed,
        per_step=per_step,
        tree=grpo.tree,
        devices=devices,
    )
    source = RolloutSource(
        rollouts,
        data.endless or data.train,
        grpo,
        sampling_of(config),
        # Rows without end are made in a random order.
        shuffle=config.data.shuffle and data.endless is None,
        total_steps=num_steps,
        noise=noise_floor_of,
    )
    context.stack.callback(source.close)
    validation = None
    if data.validation:
        validation = PolicyValidation(
            tasks=data.validation,
            config=grpo,
            sampling=sampling_of(config, is_validation=True),
            set_of=data.validation_set_of,
        )
    take_turns = _take_turns(context, generator)
    return PolicyParts(
        learner=model.learner,
        has_reference=config.loss_fn.reference_policy_kl_penalty > 0,
        has_teacher=config.loss_fn.distillation.model_name is not None,
        batcher=_batcher(context, model),
        generator=generator,
        source=source,
        environments=environments,
        noise_floor_of=noise_floor_of,
        validation=validation,
        generator_rests=take_turns or devices is not None,
        learner_rests=take_turns,
        # Servers that the run starts know themselves whether they are on a GPU of the policy's.
        scorers_rest=(scorers_take_turns or model_server(config) is not None)
        and grpo.max_staleness == 0
        and devices is None,
        devices=devices,
    )


def _shared_devices(
    context: RunContext[GRPORun], environments: Mapping[str, Environment]
) -> SharedDevices | None:
    """Put models to sleep whose devices the generator gets, and return these devices.

    They are those of models that the run serves, and only where the generator frees its memory for
    others, too: with slots of its own it does not, and with `max_staleness` it is never idle.
    """
    from laurel.grpo.grading import alone
    from laurel.grpo.shared_devices import SharedDevices

    allocation = context.allocation
    resting = [one for one in alone(environments.values()) if one.spec.rests]
    share = allocation is None or (
        allocation.take_turns("generation") and allocation.take_turns("reward_model")
    )
    if not resting or not share or context.config.grpo.max_staleness > 0:
        return None
    devices = SharedDevices(resting)
    context.stack.callback(devices.close)
    return devices


def _batcher(context: RunContext[GRPORun], model: TrainedModel) -> Batcher:
    from laurel.data.forest import Batcher

    config = context.config
    return Batcher(
        model.facts.path,
        config.policy.batch_limits,
        pad_id=model.facts.tokenizer.pad_token_id or 0,
        dp_size=model.learner.dp_size,
    )


def _take_turns(context: RunContext[GRPORun], generator: Generator) -> bool:
    """Report whether learner and generator share devices and free them for each other."""
    from laurel.generation.transformers.engine import TransformersEngine

    config, allocation = context.config, context.allocation
    if config.grpo.max_staleness > 0:
        return False
    if allocation is not None:
        return allocation.take_turns("generation")
    # In one process our own engine has nothing to free: its weights are the learner's.
    is_our_own = isinstance(generator, TransformersEngine)
    return config.policy.generation.colocated.enabled and not is_our_own


def sampling_of(config: GRPORun, *, is_validation: bool = False) -> SamplingParams:
    """Return the sampling parameters for training, or for validation with `is_validation`."""
    from laurel.types import SamplingParams

    generation = config.policy.generation
    temperature, top_p, top_k = generation.temperature, generation.top_p, generation.top_k
    if is_validation:
        if generation.val_temperature is not None:
            temperature = generation.val_temperature
        top_p = generation.val_top_p or top_p
        top_k = generation.val_top_k or top_k
    return SamplingParams(
        max_new_tokens=generation.max_new_tokens or config.policy.max_total_sequence_length,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        stop_strings=tuple(generation.stop_strings or ()),
        stop_token_ids=tuple(generation.stop_token_ids or ()),
    )


# The evaluation of a policy on validation tasks, without training or saving.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeasuredPolicy:
    """A policy's graded answers to the validation tasks, with their metrics."""

    groups: Sequence[RolloutGroup]
    """The sampled answers to each task, in the order of the tasks."""
    figures: Mapping[str, float]
    """The metrics by name, as `grpo.validation.validation_metrics` computes them."""

    @property
    def success_rate(self) -> float:
        """Return the mean reward of all samples, which in a math environment is the accuracy."""
        return self.figures["reward_mean"]


def measure_policy(config: GRPORun, *, console: Console) -> MeasuredPolicy:
    """Sample a policy's answers to the validation tasks of a configuration, and grade them.

    Each task gets `grpo.val_num_generations_per_prompt` completions, sampled as in validation.
    The environments that only training tasks need are not started.

    Raises:
        DataError: There are no validation tasks.
    """
    config = resolve_model(config, console)
    with ExitStack() as stack:
        context = RunContext(config=config, console=console, stack=stack)
        data = _load_data(config)
        if not data.validation:
            raise DataError("there is nothing to measure on: name tasks in data.val_data_path")
        texts = task_texts(data)
        data.train.clear()
        environments = environments_of(data, context)
        check_answers(data, environments, console)
        parts = load_policy_bundle(context, data, environments, texts, trains=False).parts
        from laurel.grpo.validation import validation_metrics

        assert parts.validation is not None
        with console.status(f"answering {len(data.validation):,} held-out tasks"):
            groups = parts.validation.play(parts.source)
        return MeasuredPolicy(groups=groups, figures=validation_metrics(groups, environments))
