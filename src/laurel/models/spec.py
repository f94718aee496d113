"""The specification of a model to load: its source, arithmetic and parallelism."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laurel.config.policy import (
    LoraConfig,
    Precision,
    RewardModelConfig,
    ScratchConfig,
    TokenizerConfig,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A policy or a reward model that is to be loaded, or made with random weights.

    Errors name keys of the section `policy`, unless the caller has other names for them: see
    `errors.speaking`.
    """

    name: str | None = None
    """A directory or a name on the hub. Beside `scratch` it is not loaded, and a note says so."""
    revision: str | None = None
    """Commit or tag of a hub model."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""
    safetensors_only: bool = True
    """Refuse pickled weights."""
    config_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys changed in the model's own configuration before it is built."""
    scratch: ScratchConfig | None = None
    """A small model with random weights, made instead of loading one."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The place of the tokenizer, its chat template and its padding."""
    head: RewardModelConfig = field(default_factory=RewardModelConfig)
    """Outputs of a reward model. Ignored by a policy."""
    precision: Precision = "bfloat16"
    """Arithmetic of the decoder, where its weights are in float32."""
    reads_forests: bool = True
    """Batches are token forests where the architecture can read them; False: padded rows."""
    logprob_chunk_size: int | None = None
    """A policy computes the log-probabilities of this many tokens at a time; None: of a batch."""
    lora: LoraConfig | None = None
    """The adapters that are trained; None: the model has none."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    tensor_parallel_size: int = 1
    """Ranks that share each layer."""
    context_parallel_size: int = 1
    """Ranks that divide the tokens of each micro-batch."""
    sequence_parallel: bool = False
    """Shard activations over the tensor-parallel ranks."""
    cpu_offload: bool = False
    """Keep the weights of a spread model on the host between uses."""
    parallel_plan: str | dict[str, Any] | None = None
    """Import path or mapping of a tensor-parallel plan; None: that of the architecture."""

    def weights_from(self, resume_from: Path | None) -> str | None:
        """Name the directory or hub model whose weights are read; None where they are random.

        A resumed run reads its checkpoint, unless it trains adapters: a checkpoint holds weights
        with the adapters merged in, and adapters are put on the weights that the run started from.
        """
        if resume_from is not None and self.lora is None:
            return str(resume_from)
        return None if self.scratch is not None else str(self.name)


def hub_name(model: str | None) -> str | None:
    """Return a model's name if it is one on the hub, and no directory here."""
    is_name = model is not None and re.fullmatch(r"[\w.-]+/[\w.-]+", model)
    return model if is_name and not Path(str(model)).exists() else None
