"""Checks the tests of tasks, and the tasks' own solutions against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laurel.config.environments import EnvironmentsConfig
from laurel.data.tasks import TaskData
from laurel.environments.registry import create_environment
from laurel.errors import UserError
from laurel.run.tasks import leave_out
from laurel.types import RejectedTask, Task

NUM_REFERENCES = 200
"""The number of reference solutions that `laurel data check` runs."""


def check_tests(data: TaskData, config: EnvironmentsConfig) -> None:
    """Leave out tasks that their environment cannot grade, without starting an environment."""
    for name, tasks in (("train", data.train), ("validation", data.validation)):
        for environment in sorted({task.environment for task in tasks}):
            found = config.found(environment)
            if found is None:
                continue
            rejected = [
                RejectedTask(task=task, reason=reason)
                for task in tasks
                if task.environment == environment
                and (reason := found.kind.problem_of(found.section, task.metadata)) is not None
            ]
            if rejected:
                leave_out(rejected, tasks, data.reports[name], name=name, environment=environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The result of running rows' reference solutions against the rows' own tests."""

    found: int
    run: int = 0
    failed: tuple[str, ...] = ()
    """The place of each row whose solution failed, with how it failed."""
    problem: str | None = None
    """The reason why no reference solution was run; None if some were run."""


def run_references(tasks: Sequence[Task], config: EnvironmentsConfig) -> References | None:
    """Run the first reference solutions of tasks against their tests; None if there are none.

    They are those of the first task that has one and of the tasks of the same environment.
    """
    keys = {
        name: found.kind.solution
        for name in {task.environment for task in tasks}
        if (found := config.found(name)) is not None and found.kind.solution
    }
    with_solution = [
        task for task in tasks if task.metadata.get(keys.get(task.environment, "")) is not None
    ]
    with_solution = [
        task for task in with_solution if task.environment == with_solution[0].environment
    ]
    if not with_solution:
        return None
    try:
        environment = create_environment(with_solution[0].environment, config)
    except UserError as problem:  # this machine has no sandbox
        return References(found=len(with_solution), problem=str(problem))
    try:
        rejected = environment.validate(with_solution[:NUM_REFERENCES])
    finally:
        environment.shutdown()
    failed = tuple(f"{rejection.task.source}: {rejection.reason}" for rejection in rejected)
    return References(
        found=len(with_solution), run=min(len(with_solution), NUM_REFERENCES), failed=failed
    )
