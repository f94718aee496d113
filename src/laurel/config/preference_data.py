"""The `data` section of reward-model training. Names and meanings follow NeMo RL's files."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from laurel.config.benchmarks import BenchmarkSetConfig
from laurel.config.data_sets import SetConfig, SetsConfig, filled, flat_set, train_sets

DEFAULT_DATASET = "HelpSteer3"


class DatasetConfig(SetConfig):
    """One set of preferences: which class reads it, from where."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset({"processor", "env_name"})

    dataset_name: str | None = None
    """HelpSteer3, Tulu3Preference, PreferenceDataset, BinaryPreferenceDataset, or the dotted import
    path of your own class."""
    prompt_key: str = "prompt"
    """Column of the prompt (BinaryPreferenceDataset)."""
    chosen_key: str = "chosen"
    """Column of the preferred answer (BinaryPreferenceDataset)."""
    rejected_key: str = "rejected"
    """Column of the other answer (BinaryPreferenceDataset)."""
    margin_key: str | None = None
    """Column holding how much better `chosen` is (a number), for `rm.loss.use_margin`."""
    target_key: str | None = None
    """Column holding the probability, 0 to 1, that `chosen` really is better (soft label)."""


class DataConfig(SetsConfig):
    """Where preferences come from. Either the flat keys or the `train`/`validation` blocks."""

    foreign_keys: ClassVar[frozenset[str]] = frozenset(
        {"add_bos", "add_eos", "add_generation_prompt", "use_multiple_dataloader",
         "num_prompts_per_dataloader", "custom_dataloader", "num_workers"}
    )  # fmt: skip

    dataset_name: str | None = None
    """See `data.train.dataset_name`; for training and, where no other is said, validation. Null
    is told from the rows, and is HelpSteer3 where no path is given either."""
    val_data_path: str | None = None
    """Validation rows; the set is called `default`."""
    val_data_paths: dict[str, str | DatasetConfig | BenchmarkSetConfig] = Field(
        default_factory=dict
    )
    """Several validation sets by name, also beside the blocks: a path, a block of its own with any
    `dataset_name`, or a block with a `benchmark`, such as `{benchmark: reward-bench, data_path:
    rows.jsonl.gz}`."""
    prompt_key: str = "prompt"
    """See `data.train.prompt_key`."""
    chosen_key: str = "chosen"
    """See `data.train.chosen_key`."""
    rejected_key: str = "rejected"
    """See `data.train.rejected_key`."""
    margin_key: str | None = None
    """See `data.train.margin_key`."""
    target_key: str | None = None
    """See `data.train.target_key`."""

    train: DatasetConfig | list[DatasetConfig] | None = None
    """Block form of the training set; a list is concatenated."""
    validation: (
        DatasetConfig | BenchmarkSetConfig | dict[str, DatasetConfig | BenchmarkSetConfig] | None
    ) = None
    """Block form of the validation set, or several by name; any of them may be a `benchmark`."""
    default: DatasetConfig | None = None
    """Fills the keys that `train` and `validation` leave out."""

    max_input_seq_length: int | None = Field(default=None, ge=2)
    """Longest conversation in tokens; null means `policy.max_total_sequence_length`."""
    split_validation_size: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of the training rows held out for validation where no validation set of preferences is
    named. Rows with the same prompt stay on one side."""
    overlong: Literal["truncate", "drop"] = "truncate"
    """What happens to a conversation longer than `max_input_seq_length`. Truncation is the default
    because a scorer must give every conversation a score, and training should see what scoring
    sees. Either way the rows are counted in the data report."""
    truncation_side: Literal["left", "right"] = "left"
    """Which end is cut. Left keeps the answer, which is what is judged."""
    ties: Literal["drop", "error"] = "drop"
    """Rows whose completions all share one rank, where the loss cannot use them."""
    duplicates: Literal["drop", "keep"] = "drop"
    """Rows that say exactly what an earlier row said."""

    @field_validator("validation", mode="before")
    @classmethod
    def _one_or_named(cls, value: Any) -> Any:
        """A mapping whose values are all mappings is several named sets."""
        if isinstance(value, dict) and value and all(isinstance(v, dict) for v in value.values()):
            return {
                name: (BenchmarkSetConfig if "benchmark" in block else DatasetConfig)(**block)
                for name, block in value.items()
            }
        return value

    @model_validator(mode="after")
    def _one_form(self) -> DataConfig:
        forms = (
            ("train_data_path", "train"),
            ("train_data_path", "validation"),
            ("val_data_path", "train"),
            ("val_data_path", "validation"),
        )
        for flat, block in forms:
            if getattr(self, flat) and getattr(self, block) is not None:
                raise ValueError(
                    f"data.{flat} and data.{block} are two forms of the same thing; keep one"
                )
        twice = sorted(set(self.val_data_paths) & set(self._blocks()))
        if twice:
            raise ValueError(
                f"data.val_data_paths and data.validation both have a set called {twice[0]}"
            )
        if self.val_data_path and self.val_data_paths:
            raise ValueError("set data.val_data_path or data.val_data_paths, not both")
        return self

    def train_sets(self) -> list[DatasetConfig]:
        """The training sets, in either form, with the defaults filled in."""
        if self.train is None and self.dataset_name is None and self.train_data_path is None:
            unnamed = flat_set(self, DatasetConfig, None, self.train_split)
            return [unnamed.model_copy(update={"dataset_name": DEFAULT_DATASET})]
        return train_sets(self, DatasetConfig)

    def validation_sets(self) -> dict[str, DatasetConfig]:
        """The validation sets of preferences by name; empty where none is configured."""
        named = self._named_sets()
        return {k: v for k, v in named.items() if not isinstance(v, BenchmarkSetConfig)}

    def benchmark_sets(self) -> dict[str, BenchmarkSetConfig]:
        """The benchmarks among the validation sets, by name."""
        named = self._named_sets()
        return {k: v for k, v in named.items() if isinstance(v, BenchmarkSetConfig)}

    def _named_sets(self) -> dict[str, DatasetConfig | BenchmarkSetConfig]:
        named: dict[str, DatasetConfig | BenchmarkSetConfig] = {
            name: block if isinstance(block, BenchmarkSetConfig) else filled(self, block)
            for name, block in self._blocks().items()
        }
        if self.val_data_path:
            return {"default": flat_set(self, DatasetConfig, self.val_data_path, self.val_split)}
        for name, value in self.val_data_paths.items():
            if isinstance(value, str):
                named[name] = flat_set(self, DatasetConfig, value, self.val_split)
            elif isinstance(value, BenchmarkSetConfig):
                named[name] = value
            else:
                flat = flat_set(self, DatasetConfig, None, self.val_split).model_dump()
                named[name] = DatasetConfig(**{**flat, **value.model_dump(exclude_unset=True)})
        return named

    def _blocks(self) -> dict[str, DatasetConfig | BenchmarkSetConfig]:
        """The sets of `validation` by name; a lone one is called `default`."""
        blocks = self.validation
        if blocks is None:
            return {}
        return blocks if isinstance(blocks, dict) else {"default": blocks}
