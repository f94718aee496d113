"""Tiny runs of `laurel sft` and `laurel grpo`: rows, settings, and the commands in this process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from pyarrow import parquet
from rich.console import Console

from laurel.config.data import TaskDataConfig
from laurel.config.environments import EnvironmentsConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.load import load_config
from laurel.config.sft import SFTRun
from laurel.data.tasks import TaskData, load_task_data
from laurel.environments.registry import environment_names, row_sources
from laurel.models.tokenizer import CHATML
from laurel.observe.loggers import read_metrics
from laurel.run.grpo import train_policy
from laurel.run.sft import fine_tune
from runs import Finished, manifest_hashes, write_rows

CPU = ("cluster.cpu_threads=1", "cluster.device=cpu", "policy.precision=float32")

SCRATCH = (
    "policy.model_name=null",
    "policy.scratch.hidden_size=32",
    "policy.scratch.num_layers=1",
    "policy.scratch.num_heads=2",
    "policy.scratch.vocab_size=320",
)

TINY_GRPO = (
    *CPU,
    "policy.max_total_sequence_length=64",
    "policy.generation.backend=transformers",
    "policy.generation.max_new_tokens=8",
    "policy.train_global_batch_size=12",
    "policy.optimizer.kwargs.lr=3e-3",
    "grpo.num_prompts_per_step=3",
    "grpo.num_generations_per_prompt=4",
    "grpo.max_num_steps=4",
    "grpo.max_num_epochs=1",
    "grpo.val_period=2",
    "grpo.max_val_samples=4",
    "checkpointing.save_period=2",
    "checkpointing.keep_top_k=null",
    "data.dataset_name=ResponseDataset",
    "data.split_validation_size=0.25",
)

TINY_SFT = (
    *CPU,
    "policy.max_total_sequence_length=64",
    "policy.train_global_batch_size=16",
    "policy.train_micro_batch_size=16",
    "policy.optimizer.kwargs.lr=1e-2",
    "sft.val_at_start=false",
    "sft.val_period=0",
    "checkpointing.save_period=1000",
    "data.dataset_name=ResponseDataset",
)


MATCHES = ("data.env_name=matches", "+env.custom.matches.name=policy_fakes.Matches")
"""Judge in this process by looking for the known answer; see `policy_fakes`."""

FORGETS = CHATML.replace("['content'] }}", "['content'].lstrip('' if loop.last else '\\\\') }}")
"""A template that rewrites earlier turns, without the backslash with which answers begin."""


def rewritten_turns(directory: Path, branches: int = 0) -> tuple[str, ...]:
    """Two turns of the policy, each a sequence of its own, with rollouts that branch after one.

    Args:
        directory: Where the template is written.
        branches: How many of the completions branch off the others.
    """
    template = directory / "forgets.jinja"
    directory.mkdir(parents=True, exist_ok=True)
    template.write_text(FORGETS)
    branching: tuple[str, ...] = ()
    if branches:
        branching = (
            f"grpo.tree={{branches: {branches}, rounds: 1}}",
            "grpo.adv_estimator.name=tree",
        )
    return (
        "data.env_name=shouts",
        "+env.custom.shouts.name=policy_fakes.Shouts",
        "grpo.max_rollout_turns=2",
        f"policy.tokenizer.chat_template={template}",
        *branching,
    )


HOOKED = (
    "~policy.optimizer",
    "+policy.optimizer={name: policy_fakes.HookedAdamW, kwargs: {lr: 3e-3}}",
)


def sums(count: int = 24) -> list[dict[str, str]]:
    """Tasks with one of two answers."""
    return [{"input": f"Which is number {i}?", "output": str(1 + i % 2)} for i in range(count)]


def noisy_answers(count: int = 96, *, seed: int = 0) -> list[dict[str, str]]:
    """Demonstrations that show how to answer, and are right by chance."""
    drawn = random.Random(seed)
    return [
        {"input": f"Which is number {i % 24}?", "output": f"\\boxed{{{drawn.choice('12')}}}"}
        for i in range(count)
    ]


def _places(directory: Path) -> tuple[str, ...]:
    return f"checkpointing.checkpoint_dir={directory}/saves", f"logger.log_dir={directory}/logs"


def grpo_settings(directory: Path, model: Path | None, *changes: str) -> list[str]:
    """Overrides of a tiny run below `directory`; from scratch where no model is given."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = directory / "tasks.jsonl"
    if not rows.exists():
        write_rows(rows, sums())
    policy = SCRATCH if model is None else (f"policy.model_name={model}",)
    data = f"data.train_data_path={rows}"
    return [*TINY_GRPO, *policy, data, *_places(directory), *changes]


def sft_settings(directory: Path, *changes: str, model: Path | None = None) -> list[str]:
    """The same for fine-tuning."""
    directory.mkdir(parents=True, exist_ok=True)
    rows = directory / "demonstrations.jsonl"
    if not rows.exists():
        write_rows(rows, noisy_answers())
    policy = SCRATCH if model is None else (f"policy.model_name={model}",)
    return [*TINY_SFT, *policy, f"data.train_data_path={rows}", *_places(directory), *changes]


def task_data(config: EnvironmentsConfig, **data: Any) -> TaskData:
    """What a run with these environments loads of a data set that a package brings."""
    return load_task_data(
        TaskDataConfig(**data),
        default_environment="math",
        environments=environment_names(config),
        sources=row_sources(config),
    )


def grpo(overrides: Sequence[str], *, path: Path | None = None) -> Finished:
    """Run `laurel grpo` in this process, perhaps with a file below the overrides."""
    return _run(GRPORun, train_policy, overrides, path)


def sft(overrides: Sequence[str]) -> Finished:
    """Run `laurel sft` in this process."""
    return _run(SFTRun, fine_tune, overrides)


def _run(schema: Any, train: Any, overrides: Sequence[str], path: Path | None = None) -> Finished:
    loaded = load_config(schema, path, list(overrides))
    stream = StringIO()
    console = Console(file=stream, width=200, markup=False, emoji=False, highlight=False)
    outcome = train(loaded.config, console=console)
    return Finished(outcome=outcome, text=stream.getvalue())


def metrics_of(directory: Path) -> dict[int, dict[str, float]]:
    """All figures of a run, by step, but those that a clock made."""
    steps: dict[int, dict[str, float]] = {}
    for line in read_metrics(directory / "logs" / "exp_001" / "metrics.jsonl"):
        figures = {k: v for k, v in line.items() if not k.startswith(TIMED) and k != "step"}
        steps.setdefault(int(line["step"]), {}).update(figures)
    return steps


TIMED = ("time", "timing/", "performance/")


def assert_same_runs(straight: Path, broken: Path, *saved: int) -> None:
    """Every figure of every step, and the checkpoints named, are the same to the last bit."""
    expected, found = metrics_of(straight), metrics_of(broken)
    assert sorted(found) == sorted(expected)
    for step, figures in expected.items():
        assert found[step] == figures, f"step {step}"
    for step in saved:
        hashes = manifest_hashes(straight / "saves" / f"step_{step}")
        assert {"model.safetensors", "training/optimizer.safetensors"} <= set(hashes)
        assert manifest_hashes(broken / "saves" / f"step_{step}") == hashes, step


def completions_of(directory: Path, step: int) -> list[dict[str, Any]]:
    """The rollouts of a step as they were written."""
    path = directory / "logs" / "exp_001" / "completions" / f"step_{step:06d}.parquet"
    return parquet.read_table(path).to_pylist()
