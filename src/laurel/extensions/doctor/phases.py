"""Builds models with random weights, and runs each phase of a training step on them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from laurel.config.grpo import PolicyLossConfig
from laurel.config.policy import NamedCall, Precision
from laurel.data.forest import MicroBatch, to_forest
from laurel.generation.transformers.engine import TransformersEngine
from laurel.models.forest.attention import FOREST, register
from laurel.models.forest.compiled import compile_layers
from laurel.models.forest.decoder import Decoder, RewardModel
from laurel.models.forest.policy import PolicyModel, fast_matmul
from laurel.models.loading.pretrained import (
    chooses_to_compile,
    recompute_activations,
    train_tokenizer,
)
from laurel.planning.memory import ModelShape
from laurel.planning.operations import Workload
from laurel.training.learner import LocalLearner, Update
from laurel.training.policy_loss import PolicyLabels, PolicyLoss
from laurel.types import Generated, GenerationRequest, SamplingParams, TokenForest, TokenGroup

D = TypeVar("D", bound=Decoder)

TEXTS = ("The quick brown fox jumps over the lazy dog.", "0 1 2 3 4 5 6 7 8 9")
"""The texts that tokenizers are trained on; the models read randomly chosen tokens instead."""
ADAMW = NamedCall(name="torch.optim.AdamW", kwargs={"lr": 1e-4, "fused": True})


def qwen3_config(shape: ModelShape, **special: Any) -> Any:
    """Return the Hugging Face configuration of a Qwen 3 model of a shape.

    `special` holds further entries of that configuration.
    """
    from transformers import AutoConfig

    return AutoConfig.for_model(
        "qwen3",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        max_position_embeddings=32768,
        num_labels=1,
        **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, **special},
    )


def random_model(
    shape: ModelShape, *, has_language_head: bool, dtype: torch.dtype, device: torch.device
) -> Any:
    """Build a Qwen 3 model with random weights, which depend on the shape and the kind of device.

    A GPU samples its own: a CPU takes ten seconds for 0.9G weights.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    factory: Any = AutoModelForCausalLM if has_language_head else AutoModelForSequenceClassification
    with device:
        return factory.from_config(qwen3_config(shape), dtype=torch.float32).to(dtype)


def random_groups(shape: ModelShape, workload: Workload) -> list[TokenGroup]:
    """Return the conversations of one step, with random tokens and the workload's lengths."""
    generator = np.random.default_rng(0)

    def ids(length: int) -> np.ndarray:
        return generator.integers(3, shape.vocab_size, length).astype(np.int32)

    return [
        TokenGroup(
            id=str(number),
            trunk_ids=ids(workload.prompt_tokens),
            branches_ids_G=tuple(
                ids(workload.completion_tokens) for _ in range(workload.per_prompt)
            ),
        )
        for number in range(workload.num_prompts)
    ]


def policy_labels(groups: Sequence[TokenGroup]) -> list[PolicyLabels]:
    """Return labels for a policy update on random groups; their advantages alternate in sign."""
    labels = []
    for group in groups:
        lengths = [len(ids) for ids in group.branches_ids_G]
        rewards = [float(index % 2) for index in range(len(lengths))]
        labels.append(
            PolicyLabels(
                masks_GL=tuple(np.ones(length, bool) for length in lengths),
                advantages_G=tuple(2.0 * reward - 1.0 for reward in rewards),
                used_G=(True,) * len(lengths),
                behaviour_GL=tuple(np.zeros(length, np.float32) for length in lengths),
                rewards_G=tuple(rewards),
            )
        )
    return labels


def policy_loss(workload: Workload) -> PolicyLoss:
    """Return the GRPO loss for a workload, without a KL term to a reference policy."""
    config = PolicyLossConfig(
        reference_policy_kl_penalty=0.0, use_importance_sampling_correction=False
    )
    return PolicyLoss(config, max_length=workload.completion_tokens)


def saved_model(directory: Path, shape: ModelShape) -> str:
    """Write a random model and a tokenizer into a directory, and return the directory's name."""
    cpu = torch.device("cpu")
    model = random_model(shape, has_language_head=True, dtype=torch.float32, device=cpu)
    model.save_pretrained(directory)
    train_tokenizer(TEXTS, vocab_size=shape.vocab_size).save_pretrained(directory)
    return str(directory)


@dataclass(eq=False)
class StepPhases:
    """Runs the phases of a GRPO step in this process; each call does one phase's work of a step.

    The policy has float32 weights and computes in `precision`; the reward model has the policy's
    shape, and weights of that type. Each is built when it is first needed.
    """

    shape: ModelShape
    workload: Workload
    device: torch.device
    precision: Precision
    recomputes: bool = False
    shares_prompts: bool = True
    """If False, every completion carries a copy of its prompt, except in generation."""
    compiles: Literal["auto"] | bool = "auto"
    """Whether decoder layers are compiled, as `policy.compile` says it."""
    static_slots: Literal["auto"] | bool = "auto"
    """Whether the engine rounds its steps, as `policy.generation.transformers_cfg` says it."""

    def __post_init__(self) -> None:
        register()
        self.dtype: torch.dtype = getattr(torch, self.precision)
        self.groups = random_groups(self.shape, self.workload)

    @cached_property
    def policy(self) -> PolicyModel:
        """Return the randomly initialized policy of the given shape, in training mode."""
        causal_lm = random_model(
            self.shape, has_language_head=True, dtype=torch.float32, device=self.device
        )
        causal_lm.set_attn_implementation(FOREST)
        if self.recomputes:
            recompute_activations(causal_lm)
        policy = PolicyModel(causal_lm, path="forest", precision=self.dtype).train()
        return self._compiled(policy)

    @cached_property
    def learner(self) -> LocalLearner:
        """Return the learner that trains the policy."""
        learner = LocalLearner(self.policy, optimizer=ADAMW, max_grad_norm=1.0)
        learner.matmul = fast_matmul
        return learner

    @cached_property
    def reward_model(self) -> RewardModel:
        """Return the randomly initialized reward model of the policy's shape."""
        classifier = random_model(
            self.shape, has_language_head=False, dtype=self.dtype, device=self.device
        )
        classifier.set_attn_implementation(FOREST)
        model = RewardModel(
            classifier, head_name="score", path="forest", precision=self.dtype
        ).eval()
        return self._compiled(model)

    def _compiled(self, model: D) -> D:
        if chooses_to_compile(self.compiles, self.device, is_sharded=False):
            compile_layers(model)
        return model

    @cached_property
    def engine(self) -> TransformersEngine:
        """Return the in-process engine, which samples with the policy's own weights."""
        return TransformersEngine(
            self.policy,
            train_tokenizer(TEXTS, vocab_size=300),
            end_ids=(),  # no completion ends before it is as long as the workload says
            max_concurrent=self.workload.num_prompts * self.workload.per_prompt,
            static_slots=self.static_slots,
        )

    def train(self) -> Update:
        """Run one optimizer step of the policy, with one micro-batch per prompt."""
        labels = policy_labels(self.groups)
        batch = [
            MicroBatch(inputs=forest, labels=[label], num_tokens=len(forest.ids_T))
            for forest, label in zip(self.forests(), labels, strict=True)
        ]
        return self.learner.update(batch, policy_loss(self.workload))

    def logprobs(self) -> list[np.ndarray]:
        """Compute the policy's log-probabilities of all completions."""
        return [
            outputs.logprobs_M.float().cpu().numpy()
            for outputs in self.learner.outputs(self.forests())
        ]

    def score(self) -> list[np.ndarray]:
        """Score all completions with the reward model."""
        with self.reward_model.without_gradients():
            return [self.reward_model(forest).cpu().numpy() for forest in self.forests()]

    def forests(self) -> list[TokenForest]:
        """Return one token forest per prompt, which holds the prompt and its completions."""
        return [to_forest([group], share_prompts=self.shares_prompts) for group in self.groups]

    def generate(self) -> list[list[Generated]]:
        """Sample all completions of the step concurrently."""
        each = self.workload.per_prompt
        sampling = SamplingParams(max_new_tokens=self.workload.completion_tokens)

        async def completions(number: int, group: TokenGroup) -> list[Generated]:
            request = GenerationRequest(
                id=group.id,
                prompt_ids=group.trunk_ids,
                seeds_G=tuple(range(number * each, (number + 1) * each)),
                sampling=sampling,
            )
            return [completion async for completion in self.engine.generate(request)]

        async def together() -> list[list[Generated]]:
            return await asyncio.gather(
                *(completions(number, group) for number, group in enumerate(self.groups))
            )

        return asyncio.run(together())

    def close(self) -> None:
        """Stop the engine's thread, if the engine was started."""
        if "engine" in self.__dict__:
            self.engine.close()
