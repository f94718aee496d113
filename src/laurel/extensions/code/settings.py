"""Defines `env.code`: programs that are run locked in, and graded by tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from laurel.config.yaml_tree import MAY_CHANGE, ONE_PER_CORE, Removed, Section, removed
from laurel.extensions.code.sandbox.comparison import Comparison

FORMS_OF_TESTS = ("test_code", "test_list", "stdio_tests", "call_tests")
"""The metadata keys of tests. A task has one of them; without any, code is a tool of the policy."""


class SandboxConfig(Section):
    """The sandbox of programs, and the limits of each program."""

    removed: ClassVar[Mapping[str, Removed]] = removed("SandboxConfig")

    min_tier: Annotated[Literal["A", "B", "C", "D", "none"], MAY_CHANGE] = "C"
    """Worst isolation for a run to start; `laurel sandbox check` shows this machine's. A:
    namespaces, Landlock and seccomp; B: no namespaces; C: no Landlock; D: neither, so that a
    program can read and write what this account can; none: limits of time and memory alone, so that
    it can do whatever this account can. Neither of the last two where there are secrets."""
    cgroup: Annotated[str, MAY_CHANGE] = "auto"
    """A control group that limits memory and processes of each worker's programs together. `auto`:
    if this account has a working one (version 1 or 2); `off`; or a delegated directory of version 2
    with memory and pids in its cgroup.subtree_control, which the run then requires."""
    cpu_seconds: float = Field(default=5.0, gt=0)
    """CPU time of one process of a program: the limit that programs usually meet."""
    wall_seconds: float = Field(default=10.0, gt=0)
    """Wall-clock time; generous, for a busy machine. All tests of a program that run as processes
    of their own (stdin, and asserts with a share of the reward) have three times this."""
    memory_mb: int = Field(default=512, ge=64)
    """Address space of one process."""
    disk_mb: int = Field(default=32, ge=1)
    """All files of a program together."""

    @model_validator(mode="after")
    def _wall_is_longer(self) -> SandboxConfig:
        if self.wall_seconds < self.cpu_seconds:
            raise ValueError(
                f"wall_seconds={self.wall_seconds:g} is less than cpu_seconds="
                f"{self.cpu_seconds:g}, which could then never be used up"
            )
        return self

    @property
    def seconds_of_all_tests(self) -> float:
        """Return the limit, in seconds, for all tests of a program together.

        Tests of a right program take a fraction of a second each, and a sleeping one must not take
        a limit for each of its tests.
        """
        return 3 * self.wall_seconds


class CodeEnvironmentConfig(Section):
    """Programs of the policy, run in a sandbox: scored by tests, or used as a tool."""

    removed: ClassVar[Mapping[str, Removed]] = removed("CodeEnvironmentConfig")

    num_workers: Annotated[int, MAY_CHANGE, ONE_PER_CORE] = Field(default=8, ge=1)
    """Programs at a time on each machine (on Ray: on every node). At most one per core, and as many
    as fit into memory."""
    terminate_on_evaluation: bool = True
    """With code as a tool: end a conversation once code whose last statement is an expression has
    run. false: this environment never ends it."""
    terminate_without_code: bool = False
    """With code as a tool: a message without code is the last one, the answer. For a composite that
    this conducts, in which another environment scores the answer."""
    stop_strings: list[str] | None = Field(default_factory=lambda: ["</code>"])
    """Strings that end a turn of the policy; null if all tasks have tests."""
    reward: Literal["all_or_nothing", "fraction", "weighted"] = "all_or_nothing"
    """Of a task with tests: 1 if all pass, otherwise 0; the share that pass; or the share of their
    `test_weights`."""
    max_attempts: int = Field(default=1, ge=1)
    """Answers to a task with tests. After a failed one, except the last, the policy sees how it
    failed, without expected values; the last one gets the reward. A run is refused where
    `grpo.max_rollout_turns` is lower."""
    strict_types: bool = True
    """In tests that call a function and that `laurel` compares: True is not 1, 1 is not 1.0, a list
    is not a tuple. A task's metadata may override it."""
    float_tolerance: float = Field(default=0.0, ge=0)
    """Largest relative or absolute difference between numbers of which one is a float, where
    `laurel` compares. A task's metadata may override it."""
    comparison: Comparison | None = None
    """How output and values are compared with the expected ones: like the grader of the named
    benchmark, or `laurel`: exactly, except `strict_types` and `float_tolerance`. Null: by the
    task's metadata (for `CodeTasks` the benchmark's own grader), otherwise `laurel`."""
    sandbox: SandboxConfig = SandboxConfig()
    """How programs are locked in, and what each may use."""

    @model_validator(mode="after")
    def _benchmarks_have_their_own_tolerance(self) -> CodeEnvironmentConfig:
        said = [key for key in ("strict_types", "float_tolerance") if key in self.model_fields_set]
        if self.comparison not in (None, "laurel") and said:
            raise ValueError(
                f"{said[0]} has no effect with comparison={self.comparison}, which compares as "
                "that benchmark's grader does: leave one of them out"
            )
        return self
