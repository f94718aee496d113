"""Benchmarks beside a run: what is said of them, and of the reward model that judges in GRPO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from laurel.config.benchmarks import BenchmarkSetConfig
from laurel.errors import ConfigError
from laurel.evaluation.benchmark_sets import BenchmarkSet
from laurel.observe.console import visible
from laurel.observe.counts import counted

if TYPE_CHECKING:
    from rich.console import Console

    from laurel.environments.reward_model_environment import RewardModelEnvironment
    from laurel.protocols import Environment
    from laurel.types import Score

CHUNK = 32
"""Groups that a judge is asked for at a time: a server must answer within one time limit."""


def describe_benchmark(name: str, benchmark: BenchmarkSet, console: Console) -> None:
    """Say what was read, and what its figures do not say."""
    _say(f"bench   {name}: {benchmark.described()}", console)
    for note in benchmark.notes():
        _say(f"note    {name}: {note}", console)


def judge_benchmarks(configs: Mapping[str, BenchmarkSetConfig]) -> list[BenchmarkSet]:
    """The rows of `env.reward_model.benchmarks`.

    Raises:
        DataError: Rows that cannot be used.
    """
    return [BenchmarkSet.load(name, config) for name, config in configs.items()]


def judge_figures(
    benchmarks: Sequence[BenchmarkSet], environments: Mapping[str, Environment], console: Console
) -> dict[str, float]:
    """How good the reward model is that judges, as `reward_model/<Name>_<figure>`.

    It does not change during the run, so this is measured once. Its bare scores are: what a run
    makes of them before they are rewards changes no order.

    Raises:
        ConfigError: No reward model judges here.
    """
    if not benchmarks:
        return {}
    judge = _judge_among(environments)
    if judge is None:
        raise ConfigError(
            "env.reward_model.benchmarks: no task of this run is judged by the environment "
            f"'reward_model' (they are judged by {', '.join(sorted(environments))}); leave them out"
        )
    figures: dict[str, float] = {}
    for benchmark in benchmarks:
        name = f"reward_model/{benchmark.name}"
        describe_benchmark(name, benchmark, console)
        scores: list[tuple[Score, ...]] = []
        groups = benchmark.groups
        with console.status(f"measuring the reward model on {benchmark.name}") as status:
            for first in range(0, len(groups), CHUNK):
                scores += judge.scores(groups[first : first + CHUNK])
                status.update(f"{name}: {len(scores):,} of {len(groups):,} rows")
        found = benchmark.figures(scores)
        shown = "  ".join(f"{key} {value:.4f}" for key, value in found.items())
        _say(f"judge   {benchmark.name}: {shown}", console)
        failures = [one.failure for of_row in scores for one in of_row if one.failure is not None]
        if failures:
            _say(
                f"warning: {name}: {counted(len(failures), 'completion')} without a score; the "
                f"first: {failures[0]}", console,
            )  # fmt: skip
        figures |= {f"{name}_{key}": value for key, value in found.items()}
    return figures


def _judge_among(environments: Mapping[str, Environment]) -> RewardModelEnvironment | None:
    """The one that is called `reward_model`, also where it is a part of a composite."""
    from laurel.environments.composite_environment import CompositeEnvironment
    from laurel.environments.reward_model_environment import RewardModelEnvironment

    for name, environment in environments.items():
        if name == "reward_model" and isinstance(environment, RewardModelEnvironment):
            return environment
        if isinstance(environment, CompositeEnvironment):
            found = _judge_among(environment.parts)
            if found is not None:
                return found
    return None


def _say(line: str, console: Console) -> None:
    console.print(Text(visible(line)), soft_wrap=True)
