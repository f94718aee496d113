"""Checks the tests of programming tasks, and their own solutions against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laurel.config.environments import CodeEnvironmentConfig
from laurel.data.tasks import TaskData
from laurel.errors import UserError
from laurel.run.tasks import leave_out
from laurel.types import RejectedTask, Task

NUM_REFERENCES = 200
"""The number of reference solutions that `laurel data check` runs."""


def check_tests(data: TaskData, config: CodeEnvironmentConfig) -> None:
    """Leave out tasks whose tests are malformed, without starting an environment."""
    from laurel.environments.code.tests import problem_of

    for name, tasks in (("train", data.train), ("validation", data.validation)):
        rejected = [
            RejectedTask(task=task, reason=reason)
            for task in tasks
            if task.environment == "code"
            and (reason := problem_of(task.metadata, config)) is not None
        ]
        if rejected:
            leave_out(rejected, tasks, data.reports[name], name=name, environment="code")


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """The result of running rows' reference solutions against the rows' own tests."""

    found: int
    run: int = 0
    failed: tuple[str, ...] = ()
    """The place of each row whose solution failed, with how it failed."""
    problem: str | None = None
    """The reason why no reference solution was run; None if some were run."""


def run_references(tasks: Sequence[Task], config: CodeEnvironmentConfig) -> References | None:
    """Run the first reference solutions of tasks against their tests; None if there are none."""
    with_solution = [
        task
        for task in tasks
        if task.environment == "code" and task.metadata.get("reference_solution") is not None
    ]
    if not with_solution:
        return None
    from laurel.environments.code_environment import CodeEnvironment

    try:
        environment = CodeEnvironment(config)
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
