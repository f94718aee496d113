"""What a run requests of a cluster: roles, the division of their slots, batches and memory.

`run.request` makes a request from a configuration; the planner reads only the request. It carries
the configuration key of every setting that a message may name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from laurel.config.policy import Precision, RoleName, RolePlacement

ONE_STATE = ("SGD", "Adagrad", "Lion")
"""Optimizers that keep one number for each weight; all others keep two, as AdamW does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """The items that a role processes together, in a training step or in a validation.

    An item is what `unit` names, such as a conversation.
    """

    unit: str
    """Kind of item: groups of completions (such as pairs), conversations or completions."""
    size: int
    """Number of items over all ranks: of an optimizer step, of a rollout, or of one validation
    batch."""
    longest: int
    """Number of tokens of the longest item."""
    tokens: int
    """Most tokens of one forward pass; for generation, of all running completions."""
    part_tokens: int | None = None
    """Most tokens of one forward pass where a larger group is computed in parts."""
    path_tokens: int = 0
    """Most tokens that a part attends to besides its own; 0: no group is larger than a pass."""
    updates: int = 1
    """Number of such batches in a training step."""
    is_validation: bool = False
    """Whether the batch belongs to a validation, and not to a training step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """The completions of a training step, which its optimizer steps divide into equal parts."""

    num_prompts: int
    per_prompt: int
    beside: int = 0
    """Completions of each prompt that are sampled and scored besides, and not trained on."""
    logprob_passes: int = 0
    """Number of forward passes over all completions, for their log-probabilities, before
    training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSlots:
    """Slots that a role requests for itself; the planner chooses each number that is None."""

    key: str
    """Key of the configuration section that requests the slots."""
    per_node: int | None = None
    nodes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleRequest:
    """A role, its parallel sizes and the slots that it requests.

    The sizes divide the slots into groups of ranks that together hold the model once.
    """

    name: RoleName
    parallel_key: str
    """Key of the configuration section with the role's parallel sizes."""
    tp: int = 1
    cp: int = 1
    pp: int = 1
    own: OwnSlots | None = None
    """The slots that the role requests for itself; None if it shares the policy's."""
    batches: tuple[BatchRequest, ...] = ()
    """The role's batches: those of a training step, then those of a validation."""

    @property
    def group_size(self) -> int:
        """The number of ranks that together hold one copy of the model."""
        return self.pp * self.cp * self.tp


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRequest:
    """The low-rank adapters (LoRA) of a training run."""

    enabled: bool = False
    """Whether adapters are trained instead of the model's own weights."""
    dim: int = 8
    """Rank of each adapter, the inner size of its two factors."""
    layers: frozenset[str] = frozenset()
    """Names of the linear layers that get adapters; if empty, all do."""
    exclude: frozenset[str] = frozenset()
    """Names of the linear layers that get no adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRequest:
    """The settings that determine the memory of a training rank, besides its model and batch."""

    precision: Precision = "bfloat16"
    """Dtype of the forward and backward passes."""
    optimizer_states: int = 2
    """Number of values that the optimizer keeps for each weight (2 for AdamW)."""
    adapters: AdapterRequest = AdapterRequest()
    keeps_reference: bool = False
    """Whether a frozen copy of the weights is kept, as the reference policy. With adapters none is
    needed."""
    has_logits: bool = True
    """Whether the model has logits; False for a reward model, with one score for each sequence."""
    chunk_tokens: int | None = None
    """Number of tokens whose logits are in memory at a time; None: `memory.chunk_tokens`."""
    recomputes: bool = False
    """Whether the backward pass recomputes the activations."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks divide the tokens among them between the layers."""
    offloads: bool = False
    """Whether weights, gradients and optimizer states lie in the host's memory."""
    compiles: Literal["auto"] | bool = "auto"
    """Whether layers are compiled; `auto`: on a GPU that has the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingRequest:
    """The settings that determine the memory of a rank that generates completions."""

    has_own_weights: bool
    """Whether an engine with weights of its own generates, or the trained model itself."""
    precision: Precision
    """Dtype of the cached keys and values, and of that engine's weights."""
    longest: int
    """Number of tokens that the key-value cache must hold at least."""
    memory_share: float
    """Fraction of the device's memory that it takes for weights and cache."""
    runs_ahead: bool
    """Whether generation overlaps with training, so that it needs a copy of the weights."""
    through_host: bool = False
    """Whether the settings send new weights through the memory of the host, not from GPU to GPU."""
    conversation_bytes: int = 0
    """Most bytes of keys and values that are kept of conversations between their turns."""
    has_static_slots: bool = False
    """Whether the engine in process rounds the numbers of completions and tokens up to powers of
    two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelRequest:
    """The settings of a loaded reward model, which scores completions."""

    precision: Precision
    """Dtype of its weights."""
    compiles: Literal["auto"] | bool = "auto"
    """Whether its layers are compiled; `auto`: on a GPU that has the whole model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModelRequest:
    """The servers of a model that a function asks, in the slots of the reward model."""

    precision: Precision
    """Dtype of its weights."""
    memory_share: float
    """Fraction of the device's memory that a server takes for weights, and keys and values."""
    replicas: int
    """Servers, which go round the groups of slots."""
    arguments: tuple[str, ...] = ()
    """Arguments of their program that the configuration gives."""
    sleeps: bool
    """Whether those in the policy's slots free that memory while it trains, and while a generator
    in the same slots samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """The roles of a run, the needs of each, and the size of the cluster."""

    num_nodes: int
    slots_per_node: int
    roles: tuple[RoleRequest, ...]
    """All roles; the policy is the first."""
    training: TrainingRequest
    drawing: DrawingRequest | None = None
    """How completions are generated; None if the run generates none."""
    reward_models: tuple[RewardModelRequest, ...] = ()
    """The settings of each loaded reward model."""
    served: ServedModelRequest | None = None
    """The model that the run serves in place of a loaded one."""
    step: StepRequest | None = None
    """Completions of a training step, to be divided evenly; None if there is no such constraint."""
    placement: Mapping[RoleName, RolePlacement] | None = None
    """The slots of roles as `cluster.placement` specifies them; None if the planner chooses all."""
    labels: Mapping[str, Sequence[int]]
    """For each node label that a placement may ask for, the numbers of the nodes that have it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device of every slot; `auto`: GPUs if there are any."""

    def role(self, name: RoleName) -> RoleRequest | None:
        """Return the role of this name; None if the run does not have it."""
        return next((role for role in self.roles if role.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The prompts and completions of a training step; each kind has one length."""

    num_prompts: int
    per_prompt: int
    """Number of completions to each prompt."""
    prompt_tokens: int
    completion_tokens: int
    alike_tokens: int = 0
    """Number of tokens with which the completions of a prompt begin alike."""
    copies: int = 1
    """Number of times that each prompt is computed; 1 if all its completions share it."""
    skips_unread: bool = True
    """Whether the last layer skips tokens whose hidden states are not read, except for their keys
    and values."""

    def shared(self) -> Workload:
        """Return the same conversations as trees: what completions begin with alike is computed
        once, as more of the prompt.

        The few tokens that it has count as unread, though each has a label.
        """
        return replace(
            self,
            prompt_tokens=self.prompt_tokens + self.alike_tokens,
            completion_tokens=self.completion_tokens - self.alike_tokens,
            alike_tokens=0,
        )

    def padded(self) -> Workload:
        """Return the same conversations as others compute them: each with its own prompt, whole."""
        return replace(self, copies=self.per_prompt, skips_unread=False)

    def divided(self, budget: int) -> Workload:
        """Return the same conversations in passes of at most `budget` tokens.

        Where the completions of a prompt do not fit into one pass, the prompt is computed in
        several.
        """
        together = max(1, (budget - self.prompt_tokens) // max(1, self.completion_tokens))
        return replace(self, copies=-(-self.per_prompt // together))

    def computed_before(self, budget: int, *, joins_completions: bool) -> Workload | None:
        """Return what is computed once more, without gradients, before the training passes.

        Where a prompt and its completions do not fit into one part, these are the prompts, whose
        keys and values the parts below need; and the completions, if a loss needs several parts.

        Args:
            joins_completions: Whether all completions of a prompt have one loss.
        """
        together = -(-self.per_prompt // self.copies)
        if self.prompt_tokens + together * self.completion_tokens <= budget:
            return None
        if joins_completions or self.completion_tokens > budget:
            return self
        return replace(self, per_prompt=self.copies, completion_tokens=0)

    @property
    def tokens(self) -> int:
        """The number of tokens that a model reads, with all copies of the prompts."""
        return self.num_prompts * (
            self.copies * self.prompt_tokens + self.per_prompt * self.completion_tokens
        )

    @property
    def pairs(self) -> int:
        """The number of pairs of a token and a token that it attends to, itself included."""
        whole = self.prompt_tokens + self.completion_tokens
        trunk = self.prompt_tokens * (self.prompt_tokens + 1) // 2
        alone = self.per_prompt * whole * (whole + 1) // 2
        return self.num_prompts * (alone - (self.per_prompt - self.copies) * trunk)


def optimizer_states(name: str) -> int:
    """Return how many numbers an optimizer, named by its import path, keeps for each weight."""
    return 1 if name.rsplit(".", 1)[-1] in ONE_STATE else 2
