"""The `data` section of runs that answer prompts (GRPO)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from laurel.config.data_sets import TextDataConfig, TextSetConfig, train_sets, validation_sets


class TaskSetConfig(TextSetConfig):
    """One set of tasks: which class reads it, from where, and who judges the answers."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset(
        {"download_dir", "filter_dataset", "video_maintain_aspect_ratio",
         "video_target_num_patches", "allowed_problem_types"}
    )  # fmt: skip

    dataset_name: str | None = None
    """OpenMathInstruct-2, DeepScaler, AIME2024, AIME2025, AIME2026, DAPOMath17K, DAPOMathAIME2024,
    GSM8K, NuminaMath-1.5, OpenR1-Math-220k, HumanEval, MBPP, CodeTasks (rows that bring tests in
    any other form), ResponseDataset, a class of preferences (their prompts are asked), or the
    import path of your own class. Null with a path is told from the rows."""
    repeat: int | None = Field(default=None, ge=1)
    """Times that each task occurs; AIME's default is 16, others' 1."""
    processor: str | None = None
    """How a row becomes a task: math_hf_data_processor (as the set has it), math_data_processor
    (columns problem and expected_answer), multichoice_qa_processor, code_data_processor (rows that
    bring tests), or the import path of your own function (row, configuration of the set) ->
    TaskParts. Null: as the set has it."""
    env_name: str | None = None
    """Which environment judges the answers."""
    task_name: str | None = None
    """Name under which figures are reported; null is that of the data set."""


class TaskDataConfig(TextDataConfig):
    """Where tasks come from. Either the flat keys or the `train`/`validation` blocks."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset(
        {"num_workers", "use_multiple_dataloader", "num_prompts_per_dataloader",
         "custom_dataloader", "add_bos", "add_eos", "add_generation_prompt", "add_system_prompt"}
    )  # fmt: skip

    fills_blocks: ClassVar[tuple[str, ...]] = (
        *TextDataConfig.fills_blocks, "processor", "env_name"
    )  # fmt: skip

    dataset_name: str | None = None
    """See `data.train.dataset_name`; null with no path is OpenMathInstruct-2."""
    processor: str | None = None
    """See `data.train.processor`."""
    env_name: str | None = None
    """See `data.train.env_name`; null is `reward_model` where that is enabled, else `math`."""
    train: TaskSetConfig | list[TaskSetConfig] | None = None
    """Block form of the training set; a list is a mixture, all rows of all."""
    validation: TaskSetConfig | list[TaskSetConfig] | dict[str, TaskSetConfig] | None = None
    """Block form of the validation set; a list is a mixture. So are several by name, and each has
    figures of its own besides, `validation-<Name>/...`."""
    default: TaskSetConfig | None = None
    """Fills the keys that `train` and `validation` leave out."""

    max_input_seq_length: int | None = Field(default=None, ge=1)
    """Longest prompt in tokens; longer ones are left out and counted. Null leaves room for at least
    one new token in `policy.max_total_sequence_length`."""

    def train_sets(self) -> list[TaskSetConfig]:
        """The training sets, in either form, with the defaults filled in."""
        return train_sets(self, TaskSetConfig)

    def validation_sets(self) -> list[TaskSetConfig]:
        """The validation sets; empty where none is configured."""
        return validation_sets(self, TaskSetConfig)

    def validation_names(self) -> list[str]:
        """The names of the validation sets, where they have any."""
        return list(self.validation) if isinstance(self.validation, dict) else []
