"""Programs of the policy as plug-ins: the environment, and the forms of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

from laurel.extensions.code.settings import FORMS_OF_TESTS, CodeEnvironmentConfig
from laurel.plugins import EnvironmentKind, EnvironmentServices, TaskForm

if TYPE_CHECKING:
    from laurel.data.task_formats import Reader, TaskParts
    from laurel.protocols import Environment


class Code(EnvironmentKind):
    """Programs of the policy, run in a sandbox."""

    section = CodeEnvironmentConfig
    tests = FORMS_OF_TESTS
    solution = "reference_solution"

    def check(self, section: CodeEnvironmentConfig, run: Any, where: str) -> None:
        """Check that there are as many turns as attempts."""
        attempts, turns = section.max_attempts, run.grpo.max_rollout_turns
        if attempts > turns:
            raise ValueError(
                f"{where}.max_attempts={attempts} takes as many turns, and there are "
                f"grpo.max_rollout_turns={turns}; set that to {attempts}, or ask for fewer attempts"
            )

    def make(self, section: CodeEnvironmentConfig, services: EnvironmentServices) -> Environment:
        """Return the environment."""
        from laurel.extensions.code.environment import CodeEnvironment

        return CodeEnvironment(
            section,
            nodes=services.nodes,
            timeout_seconds=services.timeout_seconds,
            max_observation_chars=services.max_observation_chars,
        )

    def needs(self, section: CodeEnvironmentConfig) -> Collection[Literal["answers", "tests"]]:
        """Return that tasks have tests."""
        return ["tests"]

    def problem_of(self, section: CodeEnvironmentConfig, metadata: Mapping[str, Any]) -> str | None:
        """Return why the tests of a task cannot be run; None if they can, or if it has none."""
        from laurel.extensions.code.tests import problem_of

        return problem_of(metadata, section)


_NOT_AS_THEY_ARE = frozenset(
    {
        "canonical_solution",
        "challenge_test_list",
        "code",
        "entry_point",
        "input_output",
        "metadata",
        "private_test_cases",
        "public_test_cases",
        "raw_tags",
        "reward_model",
        "skill_types",
        "solutions",
        "starter_code",
        "test",
        "test_imports",
        "test_list",
        "test_setup_code",
    }
)


class HumanEval(TaskForm):
    """Heads of functions to go on from, with a function that asserts (Chen et al., 2021)."""

    hub = "openai/openai_humaneval"
    has_tests = True
    otherwise = _NOT_AS_THEY_ARE

    def make(self, section: None, name: str) -> Reader:
        """Return the reader."""
        from laurel.extensions.code.formats import humaneval

        return _alone(humaneval)


class MBPP(TaskForm):
    """Sentences, with asserts (Austin et al., 2021)."""

    hub = "google-research-datasets/mbpp"
    has_tests = True
    otherwise = _NOT_AS_THEY_ARE

    def make(self, section: None, name: str) -> Reader:
        """Return the reader."""
        from laurel.extensions.code.formats import mbpp

        return _alone(mbpp)


class CodeTasks(TaskForm):
    """Rows with tests: the environment's own keys, or those of APPS, TACO, LiveCodeBench, verl."""

    processor = "code_data_processor"
    has_tests = True
    otherwise = _NOT_AS_THEY_ARE

    def make(self, section: None, name: str) -> Reader:
        """Return the reader."""
        from laurel.extensions.code.formats import code_task

        return _alone(code_task)


def _alone(read: Callable[[Mapping[str, Any]], TaskParts]) -> Reader:
    return lambda row, settings: read(row)
