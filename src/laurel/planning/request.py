"""What a run asks of a cluster: its roles, what divides the slots of each, its batches, its memory.

`run.request` makes it of a configuration; this room knows no other. Where a message has to name a
setting, the request carries its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from laurel.config.policy import RolePlacement

RoleName = Literal["policy", "generation", "reward_model"]
Precision = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """Items that a role works through together, in a step or in a validation."""

    unit: str
    """What is counted: groups (pairs), conversations or completions."""
    size: int
    """Of all ranks: one optimizer step's, one rollout's, or those validated side by side."""
    longest: int
    """Tokens of the longest item."""
    tokens: int
    """Tokens of one forward pass, at most; for generation, of all completions under way."""
    updates: int = 1
    """Such batches in a step."""
    is_validation: bool = False
    """Not of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """Completions of a step, of which optimizer steps take equal parts."""

    num_prompts: int
    per_prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSlots:
    """Slots that a role has for itself by the rules; None where the rules are to say."""

    key: str
    """The section that asks for them."""
    per_node: int | None = None
    nodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """A role, and what divides its slots into groups of ranks that hold the model once."""

    name: RoleName
    parallel_key: str
    """The section of its parallel sizes."""
    tp: int = 1
    cp: int = 1
    pp: int = 1
    own: OwnSlots | None = None
    """None: it shares the policy's."""
    batches: tuple[BatchRequest, ...] = ()
    """Those of a step, then those of a validation."""

    @property
    def group_size(self) -> int:
        """Ranks that hold the model once between them."""
        return self.pp * self.cp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRequest:
    """Low-rank adapters."""

    enabled: bool = False
    """They are trained instead of the weights."""
    dim: int = 8
    """Their rank."""
    layers: frozenset[str] = frozenset()
    """Names of the linear layers that have them; empty: all."""
    exclude: frozenset[str] = frozenset()
    """Names left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """What the memory of a rank that trains depends on, besides its model and its batch."""

    precision: Precision = "bfloat16"
    """Of the arithmetic."""
    optimizer_states: int = 2
    """Numbers that the optimizer keeps of each weight."""
    adapters: AdapterRequest = AdapterRequest()
    keeps_reference: bool = False
    """A frozen copy, too, unless there are adapters."""
    has_logits: bool = True
    """A language model; a reward model has one score a sequence."""
    chunk_tokens: int | None = None
    """Tokens whose logits are in memory at a time; None: about 16M logits."""
    recomputes: bool = False
    """Activations, in the backward pass."""
    sequence_parallel: bool = False
    """Tensor-parallel ranks share the tokens between their layers."""
    offloads: bool = False
    """Weights, gradients and optimizer are on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingRequest:
    """What the memory of a rank that draws completions depends on."""

    uses_vllm: bool
    """An engine of its own, instead of the weights that are trained."""
    precision: Precision
    """Of its keys and values, and of an own engine's weights."""
    longest: int
    """Tokens for which it must have room, at least."""
    memory_share: float
    """Part of the device that vLLM fills."""
    runs_ahead: bool
    """Of the weights that are trained, so that it has a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """Roles with what they need, on nodes of so many slots."""

    num_nodes: int
    slots_per_node: int
    roles: tuple[RoleRequest, ...]
    """The policy is the first."""
    training: TrainingRequest
    drawing: DrawingRequest | None = None
    """None: no completions are drawn."""
    judging: tuple[Precision, ...] = ()
    """Of each reward model that is loaded."""
    step: StepRequest | None = None
    """None: optimizer steps are of any size."""
    placement: Mapping[RoleName, RolePlacement] | None = None
    """Where roles shall go; None: where the rules say."""
    labels: Mapping[str, Sequence[int]]
    """Labels that placements may ask for, and the nodes that have them."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """What a slot is."""

    def role(self, name: RoleName) -> RoleRequest | None:
        """One of the roles; None where the run has none."""
        return next((role for role in self.roles if role.name == name), None)
