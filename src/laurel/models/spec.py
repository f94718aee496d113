"""What loading a model has to know: where it lies, how it computes, and how it is spread."""

from __future__ import annotations

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
    """A policy or a reward model that is to be loaded, or made here.

    Errors name the keys of the section `policy`; who has written something else says what they are
    called there (`errors.speaking`).
    """

    name: str | None = None
    """A directory or a name on the hub; of a model that is made here, what is not loaded."""
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
    """Where its tokenizer lies, and its template and padding."""
    head: RewardModelConfig = field(default_factory=RewardModelConfig)
    """What a reward model predicts; not read of a policy."""
    precision: Precision = "bfloat16"
    """Arithmetic of the decoder, where its weights are in float32."""
    reads_forests: bool = True
    """Whether batches are token forests, for architectures that can read them; else padded rows."""
    logprob_chunk_size: int | None = None
    """Tokens of a policy whose log-probabilities are computed together; None: all of a batch."""
    lora: LoraConfig | None = None
    """Its adapters; None for a model without."""
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
        """Where weights are read, also of a run that goes on; None where they are drawn.

        A checkpoint of a run with adapters has them merged; they belong on what was before.
        """
        if resume_from is not None and self.lora is None:
            return str(resume_from)
        return None if self.scratch is not None else str(self.name)
