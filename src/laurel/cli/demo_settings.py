"""The runs of the demo, as the configurations that the commands would be given."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from laurel.config.grpo_training import GRPORun
from laurel.config.load import load_config, to_yaml
from laurel.config.reward_training import RewardTrainingRun
from laurel.config.section import Section
from laurel.config.sft_training import SFTRun

S = TypeVar("S", bound=Section)

UPDATES = 4
"""Optimizer steps that learn from each batch of 256 completions."""
SFT_STEPS, RM_STEPS, GRPO_STEPS = 250, 400, 150

_SHARED = (
    "policy.precision=float32",
    "policy.max_total_sequence_length=64",
    "cluster.cpu_threads=1",  # a second thread brings a model this small nothing, and can stall it
    "checkpointing.keep_top_k=1",
    "checkpointing.metric_name=null",  # the last one: choosing by held-out rows would flatter it
    "logger.tensorboard_enabled=false",
    "logger.num_val_samples_to_print=0",
)
_SFT = (
    "policy.model_name=null",
    "policy.scratch.hidden_size=64",
    "policy.scratch.num_layers=2",
    "policy.scratch.vocab_size=350",  # words become one token each, digits stay alone
    "policy.scratch.config_overrides={initializer_range: 0.1}",
    "policy.train_micro_batch_size=64",
    "policy.train_global_batch_size=64",
    "policy.optimizer.kwargs.lr=3e-3",
    "data.split_validation_size=0",
    f"sft.max_num_steps={SFT_STEPS}",
    "sft.max_num_epochs=10",
    "sft.val_period=0",
)
_RM = (
    "data.dataset_name=BinaryPreferenceDataset",
    "policy.train_micro_batch_size=64",
    "policy.train_global_batch_size=64",
    "policy.optimizer.kwargs.lr=2e-3",
    f"rm.max_num_steps={RM_STEPS}",
    "rm.max_num_epochs=10",
    "rm.val_period=100",
)
_GRPO = (
    "policy.train_micro_batch_size=64",
    f"policy.train_global_batch_size={256 // UPDATES}",
    "policy.optimizer.kwargs.lr=1e-3",
    "policy.generation.max_new_tokens=16",
    "grpo.num_prompts_per_step=32",
    "grpo.num_generations_per_prompt=8",
    f"grpo.max_num_steps={GRPO_STEPS}",
    "grpo.max_num_epochs=10",
    "loss_fn.reference_policy_kl_penalty=0.001",  # small: the warm-up is half wrong
    "grpo.val_period=15",
    "grpo.val_at_start=true",
    # The task is solved by the end, which is all that these two would say.
    "grpo.health.ignore=[zero_spread_groups]",
    "env.math.num_workers=1",
    "env.reward_model.enabled=true",
    "env.reward_model.precision=float32",
)
_SAVED_ONCE = "checkpointing.save_period=1000000"


@dataclass(frozen=True, slots=True)
class Files:
    """Where everything of a demo lies."""

    directory: Path

    def data(self, name: str) -> Path:
        """A data set."""
        return self.directory / "data" / f"{name}.jsonl"

    def logs(self, stage: str) -> Path:
        """Directory of a stage's runs."""
        return self.directory / "logs" / stage

    def checkpoints(self, stage: str) -> Path:
        """Directory of a stage's checkpoints."""
        return self.directory / "checkpoints" / stage

    def last_checkpoint(self, stage: str, steps: int) -> Path:
        """Where a stage of so many steps saves its model in the end."""
        return self.checkpoints(stage) / f"step_{steps}"

    def config(self, stage: str) -> Path:
        """The whole configuration of a stage."""
        return self.directory / "configs" / f"{stage}.yaml"

    @property
    def report(self) -> Path:
        """The HTML report."""
        return self.directory / "report.html"


def sft_run(files: Files, seed: int) -> SFTRun:
    """Fine-tuning a model from nothing on noisy demonstrations."""
    return _load(
        SFTRun, files, "sft", *_SFT, _decay(SFT_STEPS), f"sft.seed={seed}",
        f"data.train_data_path={_text(files.data('demonstrations'))}",
    )  # fmt: skip


def rm_run(files: Files, seed: int, policy: Path) -> RewardTrainingRun:
    """A reward model, begun from the fine-tuned policy."""
    return _load(
        RewardTrainingRun, files, "rm", *_RM, _decay(RM_STEPS), f"rm.seed={seed}",
        f"policy.model_name={_text(policy)}",
        f"data.train_data_path={_text(files.data('preferences'))}",
        f"data.val_data_paths={{held-out: {_text(files.data('held-out-preferences'))}}}",
    )  # fmt: skip


def grpo_run(files: Files, seed: int, policy: Path, reward_model: Path) -> GRPORun:
    """GRPO against the reward model; the truth is only measured, on held-out tasks."""
    return _load(
        GRPORun, files, "grpo", *_GRPO, _decay(GRPO_STEPS * UPDATES), f"grpo.seed={seed}",
        f"policy.model_name={_text(policy)}",
        f"env.reward_model.model_name={_text(reward_model)}",
        _tasks("train", files.data("prompts"), "reward_model"),
        _tasks("validation", files.data("held-out-tasks"), "math"),
    )  # fmt: skip


def measuring_run(files: Files, seed: int, policy: Path) -> GRPORun:
    """The held-out tasks, answered twice each at temperature 1 and judged by the truth."""
    return _load(
        GRPORun, files, "measure",
        f"policy.model_name={_text(policy)}",
        "policy.generation.max_new_tokens=16",
        f"grpo.seed={seed}",
        "grpo.max_val_samples=1000000",
        "grpo.val_num_generations_per_prompt=2",
        "env.math.num_workers=1",
        _tasks("train", files.data("held-out-tasks"), "math"),
        _tasks("validation", files.data("held-out-tasks"), "math"),
    )  # fmt: skip


def _load(schema: type[S], files: Files, stage: str, *settings: str) -> S:
    overrides = [
        *_SHARED,
        _SAVED_ONCE,
        *settings,
        f"checkpointing.checkpoint_dir={_text(files.checkpoints(stage))}",
        f"logger.log_dir={_text(files.logs(stage))}",
    ]
    config = load_config(schema, None, overrides).config
    files.config(stage).parent.mkdir(exist_ok=True)
    files.config(stage).write_text(to_yaml(config), encoding="utf-8")
    return config


def _decay(steps: int) -> str:
    return (
        "policy.scheduler=[{name: torch.optim.lr_scheduler.LinearLR, kwargs: "
        f"{{start_factor: 1.0, end_factor: 0.05, total_iters: {steps}}}}}]"
    )


def _tasks(key: str, path: Path, environment: str) -> str:
    return (
        f"data.{key}={{dataset_name: ResponseDataset, data_path: {_text(path)}, "
        f"env_name: {environment}}}"
    )


def _text(path: Path) -> str:
    """A path as a value of the command line, whatever characters it has."""
    return json.dumps(str(path))
