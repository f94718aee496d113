"""Defines the configuration of supervised fine-tuning (`laurel sft`), with NeMo RL's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from laurel.config.data import TextDataConfig, TextSetConfig
from laurel.config.policy import (
    CheckpointingConfig,
    ClusterConfig,
    LoggerConfig,
    NamedCall,
    OptimizerCall,
    PolicyConfig,
)
from laurel.config.yaml_tree import (
    BY_NAME,
    IN_LIST,
    LENGTH_MAY_CHANGE,
    MAY_CHANGE,
    OffPeriod,
    Section,
)


class DemonstrationSetConfig(TextSetConfig):
    """One set of conversations to imitate: the class that reads it, and its place."""

    dataset_name: str | None = None
    """squad, tulu3_sft_mixture, OpenMathInstruct-2, GSM8K, openai_format, ResponseDataset, a class
    of preferences (for their best answer), or the import path of your own class. Null: the columns
    decide."""
    chat_key: str = "messages"
    """Column of whole conversations."""
    system_prompt: str | None = None
    """System message of conversations that have none of their own."""


class DemonstrationDataConfig(TextDataConfig):
    """The rows of conversations."""

    train: Annotated[list[DemonstrationSetConfig] | None, IN_LIST] = None
    """Training sets: a mixture, all rows of all. Null: squad. Keys of a set may also stand in
    `data` itself, for all sets without their own; there `train_data_path` and `train_split` say
    where the rows are, and `val_data_path` and `val_split` those of validation."""
    validation: Annotated[dict[str, DemonstrationSetConfig] | None, BY_NAME] = None
    """Validation sets by names of your own, together a mixture."""

    max_input_seq_length: int | None = Field(default=None, ge=2)
    """Longest conversation in tokens; the end of longer ones is cut off and counted. Null is
    `policy.max_total_sequence_length`."""

    def train_sets(self) -> list[DemonstrationSetConfig]:
        """Return the training sets."""
        return self.train or [DemonstrationSetConfig()]

    def validation_sets(self) -> list[DemonstrationSetConfig]:
        """Return the demonstration sets used for validation; empty if none is configured."""
        return list((self.validation or {}).values())


class SFTPolicyConfig(PolicyConfig):
    """The model that learns to imitate."""

    model_name: str | None = "meta-llama/Llama-3.2-1B-Instruct"
    """Hub name, directory or GGUF file of a causal language model. Null with `policy.scratch`."""
    train_global_batch_size: int = Field(default=32, ge=1)
    """Conversations of one optimizer step."""
    train_micro_batch_size: Annotated[int, MAY_CHANGE] = Field(default=1, ge=1)
    """Conversations of one forward pass without packing; with packing it scales the budget."""
    max_total_sequence_length: int = Field(default=1024, ge=2)
    """Longest conversation in tokens."""
    optimizer: OptimizerCall = NamedCall(
        name="torch.optim.AdamW",
        kwargs={"lr": 5e-6, "weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-5},
    )
    """A class of `torch.optim` with its arguments. Your kwargs replace all of these."""


class SFTConfig(Section):
    """The `sft` section: the length of the run and its validation."""

    max_num_epochs: Annotated[int, LENGTH_MAY_CHANGE] = Field(default=1, ge=1)
    """Passes over the training set."""
    max_num_steps: Annotated[int, LENGTH_MAY_CHANGE] = Field(default=-1, ge=-1)
    """Optimizer steps at most; -1 is no limit."""
    val_period: Annotated[OffPeriod, LENGTH_MAY_CHANGE] = Field(default=10, ge=0)
    """Steps between validations; 0: only at the start, at the end and for ranking checkpoints."""
    val_batches: int = -1
    """Batches of the validation set that are used; 0 or less is all."""
    val_global_batch_size: int = Field(default=32, ge=1)
    """Conversations of one validation batch."""
    val_at_start: Annotated[bool, LENGTH_MAY_CHANGE] = True
    """Validate before the first step (logged at step 0)."""
    val_at_end: Annotated[bool, LENGTH_MAY_CHANGE] = True
    """Validate after the last step, which is always saved."""
    only_unmask_final: bool = False
    """Learn only the last turn of the assistant in each conversation, not all of them."""
    seed: int = Field(default=42, ge=0)
    """Seeds the order of the data and dropout."""
    max_bad_steps: Annotated[int, LENGTH_MAY_CHANGE] = Field(default=3, ge=1)
    """Successive steps with a loss or gradient that is not finite before the run stops."""


class SFTRun(Section):
    """A complete configuration of `laurel sft`."""

    command: ClassVar[Literal["sft"]] = "sft"
    other_names: ClassVar[Mapping[str, str]] = {"data.split": "data.train_split"}

    sft: SFTConfig = SFTConfig()
    policy: SFTPolicyConfig = SFTPolicyConfig()
    data: DemonstrationDataConfig = DemonstrationDataConfig()
    checkpointing: Annotated[CheckpointingConfig, LENGTH_MAY_CHANGE] = CheckpointingConfig(
        checkpoint_dir="results/sft", save_period=10
    )
    logger: Annotated[LoggerConfig, MAY_CHANGE] = LoggerConfig()
    cluster: Annotated[ClusterConfig, MAY_CHANGE] = ClusterConfig()
