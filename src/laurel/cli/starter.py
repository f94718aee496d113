"""Starter configurations: the few keys that people change, with values that fit what they have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from laurel.cli.schemas import SCHEMAS
from laurel.config.load import load_config, to_yaml
from laurel.config.section import Section
from laurel.data.known_formats import Trainer

TaskName = Literal["rm", "grpo-math", "grpo-rm", "grpo-code"]
TASK_NAMES: tuple[TaskName, ...] = get_args(TaskName)
DEFAULT_MODEL = "Qwen/Qwen3-0.6B"
DEFAULT_REWARD_MODEL = "results/rm"
"""Where a starter configuration of `laurel rm` puts its checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StarterTask:
    """What one kind of starter is made of."""

    trainer: Trainer
    about: str
    data: str
    """The data set that is offered."""
    settings: tuple[str, ...]
    """What makes it this task."""
    on_cpu: tuple[str, ...]
    """Sizes that a laptop can work with."""
    on_gpu: tuple[str, ...]
    keys: tuple[str, ...]
    """What is written, besides what all tasks have."""
    from_scratch: tuple[str, ...] = ()
    """What a model takes that knows nothing yet, besides its sizes."""

    @property
    def environment(self) -> str | None:
        """Who judges; None for a reward model."""
        said = [one for one in self.settings if one.startswith("data.env_name=")]
        return said[0].partition("=")[2] if said else None


_RM_KEYS = ("rm.max_num_epochs", "rm.max_num_steps", "rm.val_period", "rm.seed")
_GRPO_KEYS = (
    "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt", "grpo.max_num_steps",
    "grpo.val_period", "grpo.max_val_samples", "grpo.seed",
    "loss_fn.reference_policy_kl_penalty",
    "policy.generation.max_new_tokens", "policy.generation.temperature",
    "data.env_name", "data.prompt_file",
)  # fmt: skip
_COMMON_KEYS = (
    "policy.model_name", "policy.train_global_batch_size", "policy.max_total_sequence_length",
    "policy.precision", "policy.optimizer",
    "data.split_validation_size", "data.on_bad_row",
    "checkpointing.checkpoint_dir", "checkpointing.save_period", "checkpointing.keep_top_k",
    "logger.log_dir", "logger.wandb_enabled", "cluster.gpus_per_node",
)  # fmt: skip
HELD_OUT = 0.05
"""Share of the rows that is validated on, where there are enough of them."""
FEW_ROWS = 20
"""Fewer than this tell little of a model."""
SCRATCH = "scratch"
"""What is said instead of a model to have a new one."""
_SCRATCH_ON_CPU = (
    "policy.scratch.hidden_size=128", "policy.scratch.num_layers=2", "policy.scratch.num_heads=4",
    "policy.scratch.vocab_size=2048", "policy.optimizer.kwargs.lr=1e-3", "cluster.cpu_threads=1",
)  # fmt: skip
_SCRATCH_ON_GPU = (
    "policy.scratch.hidden_size=512", "policy.scratch.num_layers=8", "policy.scratch.num_heads=8",
    "policy.scratch.vocab_size=16384", "policy.optimizer.kwargs.lr=3e-4",
)  # fmt: skip
_ABOUT_SCRATCH = {
    "policy.model_name": "The model is made here, by policy.scratch. To begin from a pretrained "
    "one instead, name it here, take policy.scratch out, and take a much lower learning rate.",
    "policy.optimizer": "This learning rate (lr) is one for a small model that knows nothing yet. "
    "A pretrained one of about 1B parameters takes 2e-6 to 5e-6.",
    "cluster.cpu_threads": "A model as small as this one gains nothing from a second thread, and "
    "beside other work loses by it. A larger one wants null.",
    "policy.generation.max_new_tokens": "A new model writes noise and does not stop by itself: "
    "every answer has so many tokens at first, and that is most of a step's time.",
}
_GRPO_ON_CPU = (
    "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=8",
    "policy.train_global_batch_size=32", "policy.max_total_sequence_length=512",
    "grpo.max_num_steps=100", "grpo.max_val_samples=32",
)  # fmt: skip
_GRPO_FROM_SCRATCH = ("policy.generation.max_new_tokens=64",)
_GRPO_ON_GPU = ("policy.max_total_sequence_length=1024", "grpo.max_num_steps=500")

TASKS: Mapping[TaskName, StarterTask] = {
    "rm": StarterTask(
        trainer="rm", about="a reward model, from preferences", data="HelpSteer3",
        settings=(), keys=_RM_KEYS, from_scratch=("rm.max_num_epochs=10", "rm.max_num_steps=1000"),
        on_cpu=("policy.train_global_batch_size=32", "policy.max_total_sequence_length=1024"),
        on_gpu=("policy.max_total_sequence_length=4096",),
    ),
    "grpo-math": StarterTask(
        trainer="grpo", about="a policy, against known answers to mathematics", data="GSM8K",
        settings=("data.env_name=math",), keys=_GRPO_KEYS,
        on_cpu=_GRPO_ON_CPU, on_gpu=_GRPO_ON_GPU, from_scratch=_GRPO_FROM_SCRATCH,
    ),
    "grpo-rm": StarterTask(
        trainer="grpo", about="a policy, against a reward model", data="HelpSteer3",
        settings=("data.env_name=reward_model", "env.reward_model.enabled=true"),
        keys=(*_GRPO_KEYS, "env.reward_model.enabled", "env.reward_model.model_name",
              "env.reward_model.precision"),
        on_cpu=_GRPO_ON_CPU, on_gpu=_GRPO_ON_GPU, from_scratch=_GRPO_FROM_SCRATCH,
    ),
    "grpo-code": StarterTask(
        trainer="grpo", about="a policy, against tests of the programs that it writes",
        data="MBPP",
        # Where every task has tests, nothing ends with </code>.
        settings=("data.env_name=code", "env.code.stop_strings=null"),
        keys=(*_GRPO_KEYS, "env.code.num_workers", "env.code.reward", "env.code.stop_strings"),
        on_cpu=_GRPO_ON_CPU, on_gpu=_GRPO_ON_GPU, from_scratch=_GRPO_FROM_SCRATCH,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a starter has to fit."""

    num_gpus: int = 0
    """0: it works on a CPU."""

    @property
    def device(self) -> str:
        """In words."""
        if not self.num_gpus:
            return "a CPU"
        return f"{self.num_gpus} GPU{'s' if self.num_gpus > 1 else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a starter is made for."""

    task: TaskName
    model: str | None
    """None: one from scratch."""
    data: Sequence[str]
    """Overrides of the `data` section that name the rows and how they are read."""
    reward_model: str = DEFAULT_REWARD_MODEL
    name: str = ""
    """Of the directory of checkpoints below `results`; empty: as the task is called."""
    num_positions: int | None = None
    """Tokens that the model can number, where that is known."""
    model_settings: Sequence[str] = ()
    """What the model's tokenizer needs."""
    held_out: float = HELD_OUT
    """Share of the training rows to validate on; 0 where there is nothing to hold out."""
    machine: Machine = field(default_factory=Machine)


def starter(answers: Answers) -> tuple[Section, str]:
    """The configuration, and its text with a comment above each key.

    Raises:
        ConfigError: An answer that the schema refuses.
    """
    task = TASKS[answers.task]
    overrides = [
        f"policy.model_name={json.dumps(answers.model)}",
        f"policy.precision={_precision(answers.machine)}",
        f"checkpointing.checkpoint_dir={json.dumps(f'results/{answers.name or answers.task}')}",
        f"data.split_validation_size={answers.held_out}",
        f"cluster.gpus_per_node={max(1, answers.machine.num_gpus)}",
        *(task.on_gpu if answers.machine.num_gpus else task.on_cpu),
        *task.settings,
        *_from_scratch(answers),
    ]
    if answers.task == "grpo-rm":
        overrides += [
            f"env.reward_model.model_name={json.dumps(answers.reward_model)}",
            f"env.reward_model.precision={_precision(answers.machine)}",
        ]
    extra = [*answers.model_settings, *answers.data]
    named = {setting.partition("=")[0] for setting in extra}
    overrides = [one for one in overrides if one.partition("=")[0] not in named] + extra
    config = load_config(SCHEMAS[task.trainer], None, overrides).config
    longest = getattr(config, "policy").max_total_sequence_length  # noqa: B009
    if answers.num_positions is not None and answers.num_positions < longest:
        shorter = f"policy.max_total_sequence_length={answers.num_positions}"
        key = shorter.partition("=")[0]
        overrides = [one for one in overrides if one.partition("=")[0] != key] + [shorter]
        config = load_config(SCHEMAS[task.trainer], None, overrides).config
    keys = {*task.keys, *_COMMON_KEYS, *(setting.partition("=")[0] for setting in extra)}
    keys |= {one.partition("=")[0] for one in _from_scratch(answers)}
    more = _ABOUT_SCRATCH if answers.model is None else {}
    return config, to_yaml(config, describe=True, keys=keys, more=more)


def _from_scratch(answers: Answers) -> tuple[str, ...]:
    """What a new model takes; nothing for one that is there."""
    if answers.model is not None:
        return ()
    sizes = _SCRATCH_ON_GPU if answers.machine.num_gpus else _SCRATCH_ON_CPU
    return (*sizes, *TASKS[answers.task].from_scratch)


def _precision(machine: Machine) -> str:
    return "bfloat16" if machine.num_gpus else "float32"
