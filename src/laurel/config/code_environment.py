"""The `env.code` section: programs that are run, and judged by tests."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from laurel.config.sandbox import SandboxConfig
from laurel.config.section import Section

_SANDBOX = SandboxConfig()

Comparison = Literal["laurel", "apps", "taco", "livecodebench", "verl"]
"""Whose way to compare what a program gives with what is expected."""


class CodeEnvironmentConfig(Section):
    """Programs of the policy, run in a sandbox: judged by a task's tests, or as its tool."""

    num_workers: int = Field(default=8, ge=1)
    """Programs at a time on each machine: in a run on Ray on every node of the cluster, else here.
    At most one per core, and as many as fit into memory."""
    terminate_on_evaluation: bool = True
    """Where code is a tool: whether a conversation is over once code whose last statement is an
    expression has run. false: this environment never ends it."""
    terminate_without_code: bool = False
    """Where code is a tool: whether a message without any is the last one, the answer. For a
    composite that this conducts, in which another environment judges the answer."""
    stop_strings: list[str] | None = Field(default_factory=lambda: ["</code>"])
    """Where a turn of the policy ends besides its end; null where all tasks have tests."""
    reward: Literal["all_or_nothing", "fraction", "weighted"] = "all_or_nothing"
    """Of a task with tests: 1 where all pass and else 0; the share that pass; or the share of their
    `test_weights` in the task's metadata."""
    max_attempts: int = Field(default=1, ge=1)
    """Answers to a task with tests. After each that fails, but the last, the policy is told how,
    without expected values; the reward is that of its last one. A run is refused where
    `grpo.max_rollout_turns` is lower."""
    strict_types: bool = True
    """Of tests that call a function and are compared as `laurel`: True is not 1, 1 is not 1.0, a
    list is not a tuple. A task's metadata may say otherwise."""
    float_tolerance: float = Field(default=0.0, ge=0)
    """Largest relative or absolute difference between numbers of which one is a float; of values
    and of printed numbers that are compared as `laurel`. A task's metadata may say otherwise."""
    comparison: Comparison | None = None
    """How printed text and values are compared with what is expected: as the grader of that
    benchmark does, oddities included, or `laurel`: exactly, but for `strict_types` and
    `float_tolerance`. Null: as the task's metadata says, which is the benchmark's own grader for
    rows of one (`CodeTasks`), and else `laurel`."""
    max_observation_chars: int = Field(default=4096, ge=64)
    """Longest result that the policy is shown; of a longer one the middle is left out."""
    deadline_seconds: float = Field(default=540.0, gt=0)
    """After so long in one call, programs that have not begun are failures. Less than
    `env.timeout_seconds`, after which all that were asked with them would be."""
    sandbox: SandboxConfig = _SANDBOX
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

    @model_validator(mode="after")
    def _workers_are_said_once(self) -> CodeEnvironmentConfig:
        if self.sandbox.num_workers not in (_SANDBOX.num_workers, self.num_workers):
            raise ValueError(
                f"sandbox.num_workers={self.sandbox.num_workers} is said by num_workers="
                f"{self.num_workers} here: leave it out"
            )
        return self

    @property
    def placed_sandbox(self) -> SandboxConfig:
        """The sandbox with the number of workers of this environment."""
        return self.sandbox.model_copy(update={"num_workers": self.num_workers})
