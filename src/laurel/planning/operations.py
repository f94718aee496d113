"""Counts the operations of a model's passes; `devices.yaml` has the peak rates of known devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

import yaml

from laurel.planning.memory import ModelShape
from laurel.planning.plan import TrainingRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device's peak rates, each per second, and its memory."""

    name: str
    flops: Mapping[str, float]
    """Floating-point operations per second of dense matrix products, by the dtype of the
    factors."""
    bandwidth: float
    """Bytes per second that are read from the device's memory."""
    memory: int
    """Size of the device's memory in bytes."""
    link: float
    """Bytes per second to another device of the same node, in one direction."""
    network: float
    """Bytes per second to a device of another node."""
    source: str
    """The publications that the numbers are taken from."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Operations:
    """Floating-point operations of a forward pass, by kind of layer.

    The backward pass multiplies the kinds by different factors (`training_operations`).
    """

    linear: float = 0.0
    attention: float = 0.0
    head: float = 0.0

    @property
    def total(self) -> float:
        """The floating-point operations over all kinds of layer."""
        return self.linear + self.attention + self.head


@cache
def known_devices() -> dict[str, Device]:
    """Return the devices in the table next to this module, by name."""
    text = resources.files(__package__).joinpath("devices.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return {
        name: Device(name=name, **{**entry, "memory": int(entry["memory"])})
        for name, entry in table.items()
    }


def forward_operations(shape: ModelShape, workload: Workload, *, has_logits: bool) -> Operations:
    """Count the operations of one forward pass over all conversations of a step.

    A multiplication and an addition count as two operations. Only completions have logits. With
    logits the hidden states of completion tokens are read, otherwise one of each completion.

    Args:
        has_logits: Whether the logits are computed; False for a reward model.
    """
    sizes = {name: rows * columns for name, (rows, columns) in shape.linear_layers.items()}
    weights, keys_and_values = sum(sizes.values()), sizes["k_proj"] + sizes["v_proj"]
    num_completions = workload.num_prompts * workload.per_prompt
    completions = num_completions * workload.completion_tokens
    skipped = 0
    if workload.skips_unread:
        skipped = workload.tokens - (completions if has_logits else num_completions)
    products = shape.num_layers * weights * workload.tokens - (weights - keys_and_values) * skipped
    return Operations(
        linear=2.0 * products,
        # Two products, of queries with keys and of weights with values.
        attention=4.0 * shape.num_layers * shape.num_heads * shape.head_dim * workload.pairs,
        head=2.0 * shape.vocab_size * shape.hidden_size * completions if has_logits else 0.0,
    )


def training_operations(forward: Operations, training: TrainingRequest) -> float:
    """Count the operations of the forward and the backward pass together.

    A linear map is multiplied three times (twice if its weights are frozen), and once more if it is
    recomputed. A backward pass of flash attention has five products to the two of the forward pass.
    Logits are not kept, so they are computed twice.
    """
    again = 1.0 if training.recomputes else 0.0
    frozen = 1.0 if training.adapters.enabled else 0.0
    linear = (3.0 - frozen + again) * forward.linear
    attention = (3.5 + again) * forward.attention
    return linear + attention + (4.0 - frozen) * forward.head
