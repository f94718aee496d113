"""What a run asks of a cluster: its roles, the division of their slots, its batches, its memory.

`run.request` makes a request from a configuration; the rest of the planner reads only the request.
Where a message has to name a setting, the request carries its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from laurel.config.policy import Precision, RolePlacement

RoleName = Literal["policy", "generation", "reward_model"]

ONE_STATE = ("SGD", "Adagrad", "Lion")
"""Optimizers that keep one number for each weight; all others keep two, as AdamW does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """Items that a role works through together, in a training step or in a validation."""

    unit: str
    """What the items are: groups (pairs), conversations or completions."""
    size: int
    """Items on all ranks: those of an optimizer step, of a rollout, or validated side by side."""
    longest: int
    """Tokens of the longest item."""
    tokens: int
    """Most tokens of one forward pass; for generation, of all completions under way."""
    updates: int = 1
    """Number of such batches in a training step."""
    is_validation: bool = False
    """Whether the batch belongs to a validation, and not to a training step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """The completions of a training step, which optimizer steps divide into equal parts."""

    num_prompts: int
    per_prompt: int
    logprob_passes: int = 0
    """Times that a model reads all completions for their log-probabilities before training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSlots:
    """Slots that a role wants for itself. The planner chooses a number that is None."""

    key: str
    """Key of the section of the configuration that asks for them."""
    per_node: int | None = None
    nodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """A role, and what divides its slots into groups of ranks that hold the model once."""

    name: RoleName
    parallel_key: str
    """Key of the section of the configuration that sets its parallel sizes."""
    tp: int = 1
    cp: int = 1
    pp: int = 1
    own: OwnSlots | None = None
    """The slots that it wants for itself; None if it shares the policy's."""
    batches: tuple[BatchRequest, ...] = ()
    """The batches of a training step, then those of a validation."""

    @property
    def group_size(self) -> int:
        """Number of ranks that hold the model once between them."""
        return self.pp * self.cp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRequest:
    """Low-rank adapters."""

    enabled: bool = False
    """Whether adapters are trained instead of the model's own weights."""
    dim: int = 8
    """Rank of the two factors of each adapter."""
    layers: frozenset[str] = frozenset()
    """Names of the linear layers that have adapters; if empty, all have."""
    exclude: frozenset[str] = frozenset()
    """Names of linear layers that have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """What the memory of a rank that trains depends on, besides its model and its batch."""

    precision: Precision = "bfloat16"
    """Type in which the forward and backward passes compute."""
    optimizer_states: int = 2
    """Numbers that the optimizer keeps for each weight."""
    adapters: AdapterRequest = AdapterRequest()
    keeps_reference: bool = False
    """Whether a frozen copy of the weights is kept. With adapters none is needed."""
    has_logits: bool = True
    """True for a language model; a reward model has one score for each sequence instead."""
    chunk_tokens: int | None = None
    """Tokens whose logits are in memory at a time; None: as many as have about 16M logits."""
    recomputes: bool = False
    """Whether the backward pass recomputes the activations."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks divide the tokens among them between the layers."""
    offloads: bool = False
    """Whether weights, gradients and optimizer states lie in the host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingRequest:
    """What the memory of a rank that generates completions depends on."""

    uses_vllm: bool
    """Whether vLLM generates, with weights of its own, and not the model that is trained."""
    precision: Precision
    """Type of the cached keys and values, and of the weights of vLLM."""
    longest: int
    """Fewest tokens for which the cache of keys and values must have room."""
    memory_share: float
    """Fraction of the device's memory that vLLM fills."""
    runs_ahead: bool
    """Whether generation overlaps with training, so that it needs a copy of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """The roles of a run, what each needs, and the size of the cluster."""

    num_nodes: int
    slots_per_node: int
    roles: tuple[RoleRequest, ...]
    """All roles; the policy is the first."""
    training: TrainingRequest
    drawing: DrawingRequest | None = None
    """How completions are generated; None if the run generates none."""
    judging: tuple[Precision, ...] = ()
    """Type of the weights of each reward model that is loaded."""
    step: StepRequest | None = None
    """Completions of a training step; None if an optimizer step may have any size."""
    placement: Mapping[RoleName, RolePlacement] | None = None
    """The slots that the configuration names for roles; None if the planner chooses all."""
    labels: Mapping[str, Sequence[int]]
    """For each label that a placement may ask for, the nodes that have it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device that a slot is."""

    def role(self, name: RoleName) -> RoleRequest | None:
        """One of the roles; None if the run does not have it."""
        return next((role for role in self.roles if role.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The conversations of a training step, all of one length."""

    num_prompts: int
    per_prompt: int
    """Completions to each prompt."""
    prompt_tokens: int
    completion_tokens: int
    copies: int = 1
    """Times that each prompt is computed: once, where all its completions share it."""

    def padded(self) -> Workload:
        """Return the same conversations, each with its own copy of the prompt."""
        return replace(self, copies=self.per_prompt)

    def divided(self, budget: int) -> Workload:
        """The same conversations in passes of so many tokens, which a prompt's may not fit into."""
        together = max(1, (budget - self.prompt_tokens) // max(1, self.completion_tokens))
        return replace(self, copies=-(-self.per_prompt // together))

    @property
    def tokens(self) -> int:
        """Tokens that a model reads."""
        return self.num_prompts * (
            self.copies * self.prompt_tokens + self.per_prompt * self.completion_tokens
        )

    @property
    def pairs(self) -> int:
        """Pairs of a token and one that it attends to, which may be itself."""
        whole = self.prompt_tokens + self.completion_tokens
        trunk = self.prompt_tokens * (self.prompt_tokens + 1) // 2
        alone = self.per_prompt * whole * (whole + 1) // 2
        return self.num_prompts * (alone - (self.per_prompt - self.copies) * trunk)


def optimizer_states(name: str) -> int:
    """Count the numbers that an optimizer, named by its import path, keeps for each weight."""
    return 1 if name.rsplit(".", 1)[-1] in ONE_STATE else 2
