"""The `sandbox` section: how programs that a model wrote are locked in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from laurel.config.section import Section


class SandboxConfig(Section):
    """Where programs run, and what each may use."""

    num_workers: int = Field(default=8, ge=1)
    """Programs at a time; at most one per core, and as many as fit into memory."""
    url: str | None = None
    """A server that locks programs in instead of this machine, spoken to as SandboxFusion is
    (`/run_code`). A program and the tests that call it are two processes of one run there."""
    api_key_env: str | None = None
    """Name of the environment variable that holds the server's API key; never the key itself."""
    min_tier: Literal["A", "B", "C", "D"] = "C"
    """Worst isolation that a run may start with; `laurel sandbox check` says which one this machine
    gives. A: namespaces, Landlock and seccomp; B: no namespaces; C: no Landlock; D: neither, so
    that a program can read and write what this account can."""
    allow_unsafe: bool = False
    """Run with nothing but limits of time and memory where nothing better can be had: any program
    that a model writes can then do whatever this account can. Never where there are secrets."""
    cgroup: str = "auto"
    """A control group around each worker's programs, in which the kernel counts the memory and the
    processes of all of them together. auto: where this account was given one (version 1 or 2) and
    it was seen to hold; off; or a directory of version 2 that was delegated for this, with memory
    and pids in its cgroup.subtree_control: a run does not start without it then."""
    cpu_seconds: float = Field(default=5.0, gt=0)
    """Computing time of one process of a program: the limit that is meant to be met."""
    wall_seconds: float = Field(default=10.0, gt=0)
    """Time by the clock; generous, since it passes faster where the machine is busy."""
    total_wall_seconds: float | None = Field(default=None, gt=0)
    """Time by the clock of all tests of a program together that are processes of their own (on
    stdin; asserts whose share is the reward); those that are left then have timed out. Null: three
    times `wall_seconds`. Default: tests of a right program take a fraction of a second each, and a
    sleeping one must not take a limit for each of its tests."""
    memory_mb: int = Field(default=512, ge=64)
    """Address space of one process."""
    disk_mb: int = Field(default=32, ge=1)
    """All files of a program together."""
    stdout_kb: int = Field(default=64, ge=1)
    """What it may print; more ends it. Where a test expects text, at least four times that; where
    it expects a value, at least 1024."""
    stderr_kb: int = Field(default=16, ge=1)
    """The same of stderr."""
    result_kb: int = Field(default=256, ge=1)
    """The values that it returns, together. At least four times what its tests expect."""
    backlog: int = Field(default=1024, ge=1)
    """Programs that may wait for their turn."""

    @model_validator(mode="after")
    def _wall_is_longer(self) -> SandboxConfig:
        if self.wall_seconds < self.cpu_seconds:
            raise ValueError(
                f"wall_seconds={self.wall_seconds:g} is less than cpu_seconds="
                f"{self.cpu_seconds:g}, which could then never be used up"
            )
        if self.api_key_env is not None and self.url is None:
            raise ValueError("api_key_env is for a server, and there is no url; leave it out")
        return self

    @property
    def seconds_of_all_tests(self) -> float:
        """What `total_wall_seconds` comes to."""
        return self.total_wall_seconds or 3 * self.wall_seconds
