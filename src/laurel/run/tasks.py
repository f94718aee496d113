"""Prepares tasks for rollouts: starts environments, checks answers, drops overlong prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from laurel.config.environments import (
    CompositeEnvironmentConfig,
    CompositePart,
    EnvironmentsConfig,
    FoundEnvironment,
    SourceConfig,
)
from laurel.config.grpo_run import GRPORun
from laurel.data.reading import encoded
from laurel.data.report import no_rows_left
from laurel.data.tasks import TaskData, TaskNeeds, environments_named
from laurel.environments.registry import OTHER_NAMES, create_environments
from laurel.errors import ConfigError, DataError
from laurel.observe.user_code import ForkGuard
from laurel.run.context import RunContext
from laurel.run.request import model_server, uses_reward_model
from laurel.types import RejectedTask

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.data.report import TaskReport
    from laurel.models.chat import ChatFormat
    from laurel.protocols import Environment, WorkerGroup
    from laurel.rewards.open import ScorerPlacement
    from laurel.run.allocation import Allocation
    from laurel.types import Task, TokenIds, ToolSchemas
    from laurel.workers.reservations import ClusterNodes

S = TypeVar("S", bound=SourceConfig)

NUM_CHECKED = 2000
"""The number of tasks whose known answers are checked before a run, which takes up to a minute."""


def asked_environments(config: EnvironmentsConfig, *named: str) -> dict[str, FoundEnvironment]:
    """Return the environments of plug-ins that a run may ask, by name.

    They have settings, are among the `named`, are parts of composites, or grade for these.
    """
    asked, found = [*config.configured(), *named], dict[str, FoundEnvironment]()
    asked += [part.env for composite in config.composite.values() for part in composite.parts]
    for name in asked:  # which gets longer
        name = OTHER_NAMES.get(name, name)
        if name not in found and (one := config.found(name)) is not None:
            found[name] = one
            judge = one.kind.graded_by(one.section)
            asked += [] if judge is None else [judge]
    return found


def with_asked_environments(config: GRPORun) -> GRPORun:
    """Return the configuration with the defaults of the environments that the run may ask."""
    named = environments_named(config.data.sets(), config.default_environment)
    update = {
        name: found.section
        for name, found in asked_environments(config.env, *named).items()
        if found.where == f"env.{name}" and found.section is not None and name not in config.env
    }
    return config.model_copy(update={"env": config.env.model_copy(update=update)})


def check_environments(config: GRPORun, *named: str) -> None:
    """Check that the environments that a run may ask fit its settings.

    Raises:
        ConfigError: One does not.
    """
    for found in asked_environments(config.env, *named).values():
        try:
            found.kind.check(found.section, config, found.where)
        except ValueError as error:
            raise ConfigError(str(error)) from error


def needs_of(config: EnvironmentsConfig, *named: str) -> TaskNeeds:
    """Return which of the `asked_environments` need a known answer or tests in each task."""
    answers, tests, composites = set[str](), set[str](), dict(config.composite)
    keys_of_tests: dict[str, str] = {}
    for name, found in asked_environments(config, *named).items():
        keys_of_tests |= dict.fromkeys(found.kind.tests, name)
        needs = found.kind.needs(found.section)
        answers |= {name} if "answers" in needs else set()
        tests |= {name} if "tests" in needs else set()
        if (judge := found.kind.graded_by(found.section)) is not None:
            composites[name] = CompositeEnvironmentConfig(parts=[CompositePart(env=judge)])
    for alias, meant in OTHER_NAMES.items():
        answers |= {alias} if meant in answers else set()
    for _ in composites:  # composites of composites
        for name, composite in composites.items():
            if answers & {part.env for part in composite.parts}:
                answers.add(name)
            # A gate above 0 decides alone where its part gives only 0.
            adding = [part.env for part in composite.parts if part.gate is None and part.weight]
            shut = {part.env for part in composite.parts if part.gate is not None and part.gate > 0}
            if tests & shut or (adding and tests.issuperset(adding)):
                tests.add(name)
    return TaskNeeds(
        answers=frozenset(answers), tests=frozenset(tests), keys_of_tests=keys_of_tests
    )


def environments_of(data: TaskData, context: RunContext[GRPORun]) -> dict[str, Environment]:
    """Start the environments that the tasks name; return them by name."""
    config, allocation = context.config, context.allocation
    say = partial(context.console.print, markup=False, highlight=False, soft_wrap=True)
    names = sorted({task.environment for task in (*data.train, *data.validation)})
    opening = None if allocation is None else scorer_placement(config, allocation)
    with context.console.status("starting the environments"):
        environments = create_environments(
            names,
            dated(config.env, context.day),
            device=config.cluster.device,
            opening=opening,
            nodes=nodes_of(allocation),
            say=say,
            max_turns=config.grpo.max_rollout_turns,
        )
    for environment in environments.values():
        context.stack.callback(environment.shutdown)
    return environments


def dated(config: EnvironmentsConfig, day: date) -> EnvironmentsConfig:
    """Return the section with a day for every template that prints one and is given none.

    Models of environments are loaded anew whenever a run is resumed or a replica is lost, and their
    scores would differ from day to day.
    """

    def given(source: S) -> S:
        return source.model_copy(update={"tokenizer": source.tokenizer.on(day)})

    model = given(config.reward_model)
    if config.reward_model.models is not None:
        models = list(map(given, config.reward_model.models))
        model = model.model_copy(update={"models": models})
    return config.model_copy(update={"reward_model": model})


def check_answers(data: TaskData, environments: dict[str, Environment], console: Console) -> None:
    """Leave out, and report, tasks whose own answer or tests their environment rejects.

    Of each environment's tasks, the first `NUM_CHECKED` of a set are checked.
    """
    for name, tasks in (("train", data.train), ("validation", data.validation)):
        for env_name, environment in environments.items():
            own = [task for task in tasks if task.environment == env_name][:NUM_CHECKED]
            if not own:
                continue
            status = console.status(f"checking the known answers and tests of {name}")
            with status, ForkGuard():
                rejected = environment.validate(own)
            leave_out(rejected, tasks, data.reports[name], name=name, environment=env_name)


def leave_out(
    rejected: Sequence[RejectedTask],
    tasks: list[Task],
    report: TaskReport,
    *,
    name: str,
    environment: str,
) -> None:
    """Remove rejected tasks from a data set, and count them in its report.

    `name` is the set, and `environment` the one that rejected them, for messages.

    Raises:
        DataError: No task is left.
    """
    bad = {rejection.task.id for rejection in rejected}
    for rejection in rejected:
        report.drop("answer refused", rejection.task.source, kind=rejection.reason)
    tasks[:] = [task for task in tasks if task.id not in bad]
    report.describe(tasks)
    if rejected and not tasks:
        raise DataError(
            f"{name}: the environment {environment!r} accepts none of the known answers or tests; "
            f"the first: {rejected[0].task.source}: {rejected[0].reason}"
        )


def fit_prompts(
    data: TaskData, chat: ChatFormat, config: GRPORun, tools_of: Callable[[str], ToolSchemas]
) -> None:
    """Leave out tasks whose prompts leave no room for an answer, and count them in the report.

    So are those that the template refuses, if `data.on_bad_row` is `skip`. `tools_of` returns the
    functions that the environment of a name shows to the policy.
    """
    room = config.policy.max_total_sequence_length - 1
    longest = min(config.data.max_input_seq_length or room, room)
    key = "policy.max_total_sequence_length" if longest == room else "data.max_input_seq_length"

    def encode(some: Sequence[Task]) -> list[TokenIds]:
        return chat.prompts_ids(
            [task.prompt for task in some],
            sources=[task.source for task in some],
            tools=[tools_of(task.environment) for task in some],
        )

    def fits(task: Task) -> bool:
        report, skips = data.reports["train"], config.data.on_bad_row
        for _, ids in encoded([task], encode, report=report, on_bad_row=skips):
            if len(ids) <= longest:
                return True
            report.drop("over-long", task.source)
        report.num_read += 1  # the next try is another row
        return False

    for name, tasks in (("train", data.train), ("validation", data.validation)):
        if not tasks:
            continue
        report, skips = data.reports[name], config.data.on_bad_row
        report.note_control_tokens(
            ((task.source, [task.prompt]) for task in tasks), chat.control_token_in
        )
        rows = [
            (task, len(ids))
            for task, ids in encoded(tasks, encode, report=report, on_bad_row=skips)
        ]
        if not rows:
            raise DataError(no_rows_left(report))
        kept = [task for task, length in rows if length <= longest]
        long = {task.source for task, length in rows if length > longest}
        for source in sorted(long):  # a row may make several tasks
            report.drop("over-long", source)
        if not kept:
            raise DataError(
                f"{name}: all {len(rows)} prompts are longer than {longest} tokens (the shortest "
                f"has {min(length for _, length in rows)}); raise {key}"
            )
        report.describe(kept)
        report.set_lengths([length for _, length in rows if length <= longest])
        tasks[:] = kept
    if data.endless is not None:
        data.endless.fits = fits


# The nodes that run the programs of the policy: this machine, or every node of a cluster.


def nodes_of(allocation: Allocation | None) -> ClusterNodes | None:
    """Return the cluster nodes that run programs; None if this machine runs them.

    Nothing is started.
    """
    if allocation is None:
        return None
    from laurel.workers.ray_group import NodeGroup, is_on_the_only_node, nodes_to_work_on
    from laurel.workers.reservations import ClusterNodes

    return ClusterNodes(nodes_to_work_on, NodeGroup, is_on_the_only_node)


# The scorers of a run on a cluster: models in slots, renderers spread over the nodes.


def scorer_placement(config: GRPORun, allocation: Allocation) -> ScorerPlacement:
    """Return where a run on a cluster places the models and processes of its environments.

    Each replica of a model gets slots of the reward-model role. Several models get replicas on all
    of these slots, with an equal part of each.
    """
    from laurel.rewards.open import RENDERING_LIMIT, ScorerPlacement
    from laurel.rewards.preparing import WORKER
    from laurel.rewards.replicas import ROLE

    make_worker = partial(allocation.group_of_one, WORKER, limit=RENDERING_LIMIT)
    if not uses_reward_model(config):  # a row of the data may name one without slots
        return ScorerPlacement(
            make_worker=make_worker, make_server=_server_slots(config, allocation)
        )
    share = 1 / len(config.env.reward_model.loaded)

    def make_group(name: str, ranks: range | None) -> Callable[..., WorkerGroup]:
        role = f"{ROLE} {name}".rstrip()
        return partial(allocation.group, "reward_model", name=role, share=share, ranks=ranks)

    return ScorerPlacement(
        make_worker=make_worker, make_group=make_group, shape=allocation.shape_of("reward_model")
    )


def _server_slots(
    config: GRPORun, allocation: Allocation
) -> Callable[[int], Callable[..., WorkerGroup]]:
    """Return what places the replicas of a served model, by their numbers.

    They go round the groups of slots of the reward-model role; several in a group share it.
    """
    from laurel.workers.ray_group import RayGroup, own_address

    def make(index: int) -> Callable[..., WorkerGroup]:
        section = model_server(config)
        assert section is not None
        each = section.tensor_parallel_size
        groups = allocation.num_slots("reward_model") // each
        first = index % groups * each
        slots = allocation.slots(
            "reward_model",
            f"model server {index}",
            range(first, first + each),
            share=1 / -(-section.replicas // groups),
        )
        # Not one of the run's groups: it ends with the servers, which would start it again.
        return partial(RayGroup, slots.joined(each), near=own_address())

    return make
