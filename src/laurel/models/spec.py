"""Defines the specification of a model to load: its source, dtype and parallelism."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from laurel.config.policy import (
    LoraConfig,
    Precision,
    RewardModelConfig,
    ScratchConfig,
    TokenizerConfig,
)
from laurel.models.gguf import is_gguf, local_files


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A policy or a reward model to load, or to create with random weights.

    Error messages name configuration keys of the section `policy`, unless the caller chooses
    another section by the context manager `errors.speaking`.
    """

    name: str | None = None
    """A directory, a hub name or a GGUF file; with `scratch` it is not loaded, as a remark says."""
    revision: str | None = None
    """The commit or tag of a hub model."""
    trust_remote_code: bool = False
    """Whether Python code that comes with the model may run."""
    safetensors_only: bool = True
    """Whether pickled weights are refused."""
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys that are changed in the model's own configuration before it is built."""
    scratch: ScratchConfig | None = None
    """A small model with random weights, which is created instead of loading one."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer, its chat template and its padding."""
    head: RewardModelConfig = field(default_factory=RewardModelConfig)
    """The head of a reward model; a policy ignores it."""
    precision: Precision = "bfloat16"
    """The dtype in which the decoder computes if its weights are float32."""
    compile: Literal["auto"] | bool = "auto"
    """Whether the decoder's layers are compiled; `auto`: on a GPU."""
    reads_forests: bool = True
    """Whether batches are token forests, if the architecture can read them, or padded rows."""
    lora: LoraConfig | None = None
    """The adapters that are trained; None: the model has none."""
    activation_checkpointing: bool = False
    """Whether activations are recomputed in the backward pass."""
    tensor_parallel_size: int = 1
    """The number of ranks that split each layer."""
    context_parallel_size: int = 1
    """The number of ranks that divide the tokens of each micro-batch."""
    sequence_parallel: bool = False
    """Whether activations are sharded over the tensor-parallel ranks."""
    cpu_offload: bool = False
    """Whether the weights of a sharded model rest on the host between uses."""
    parallel_plan: str | dict[str, Any] | None = None
    """The import path or mapping of a tensor-parallel plan; None: that of the architecture."""

    def weights_from(self, resume_from: Path | None) -> str | None:
        """Return the directory or hub name whose weights are read; None if they are random.

        A resumed run reads its checkpoint, unless it trains adapters. A checkpoint holds weights
        with merged adapters, but adapters are added to the weights that the run started from.
        """
        if resume_from is not None and self.lora is None:
            return str(resume_from)
        return None if self.scratch is not None else self.files

    @property
    def files(self) -> str:
        """The directory or hub name that `name` is read from: what is made of a GGUF file."""
        return local_files(str(self.name))


def hub_name(model: str | None) -> str | None:
    """Return `model` if it is a hub name (`owner/name`) and not a local path, otherwise None."""
    is_name = model is not None and not is_gguf(model) and re.fullmatch(r"[\w.-]+/[\w.-]+", model)
    return model if is_name and not Path(str(model)).exists() else None
