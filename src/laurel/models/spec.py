"""Defines the specification of a model to load, and how it is spread over ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from laurel.config.policy import (
    LoraConfig,
    Precision,
    RewardModelConfig,
    ScratchConfig,
    TokenizerConfig,
)
from laurel.errors import ConfigError
from laurel.models.files import is_model_file, local_files

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
        """The directory or hub name that `name` is read from: what is made of a file."""
        return local_files(str(self.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelShape:
    """The number of ranks of each kind of parallelism."""

    dp_replicate: int = 1
    """The number of copies of the sharded model; each reads other data."""
    dp_shard: int = 1
    """The number of ranks that hold a shard of every weight; each reads other data."""
    cp: int = 1
    """The number of ranks that divide the tokens of every row; they also shard every weight."""
    tp: int = 1
    """The number of ranks that split every layer; they read the same data."""

    def __post_init__(self) -> None:
        """Check that all sizes are positive.

        Raises:
            ConfigError: A size is below 1.
        """
        for name, size in asdict(self).items():
            if size < 1:
                raise ConfigError(f"{name}={size}: a mesh has at least 1 rank")

    @property
    def num_ranks(self) -> int:
        """The total number of ranks."""
        return self.dp * self.each

    @property
    def each(self) -> int:
        """The number of ranks that read the same data; their rank numbers are consecutive."""
        return self.cp * self.tp

    @property
    def dp(self) -> int:
        """The number of parts into which the data is divided."""
        return self.dp_replicate * self.dp_shard

    def mesh(self, device_type: str) -> DeviceMesh:
        """Create the mesh with the dimensions `dp_replicate`, `dp_shard` and `tp`, on all ranks.

        The dimension `dp_shard` includes the ranks of `cp`, which shard the weights too.

        Raises:
            ConfigError: The number of processes is not the number of ranks.
        """
        from torch.distributed import get_world_size
        from torch.distributed.device_mesh import init_device_mesh

        started = get_world_size()
        if started != self.num_ranks:
            raise ConfigError(
                f"{self} needs {self.num_ranks} processes and {started} have been started"
            )
        sizes = (self.dp_replicate, self.dp_shard * self.cp, self.tp)
        names = ("dp_replicate", "dp_shard", "tp")
        return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def hub_name(model: str | None) -> str | None:
    """Return `model` if it is a hub name (`owner/name`) and not a local path, otherwise None."""
    is_name = (
        model is not None and not is_model_file(model) and re.fullmatch(r"[\w.-]+/[\w.-]+", model)
    )
    return model if is_name and not Path(str(model)).exists() else None
