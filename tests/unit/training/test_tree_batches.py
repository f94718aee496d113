"""Completions that branch, in one forest: the loss and gradients of one sequence a completion."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from laurel.config.grpo import GRPOConfig
from laurel.data.forest import to_forest
from laurel.grpo.advantages import compute_advantages, resolve
from laurel.grpo.branching import tree_segments
from laurel.training.policy_loss import PolicyLabels
from laurel.types import Branch, Rollout
from policy_batches import loss_of
from policy_fakes import rollout, rollout_group

torch.set_num_threads(1)  # more only cost, at this size


def drawn_tree(random: np.random.Generator) -> list[Rollout]:
    """Two completions, of which four others continue a beginning; some have no reward."""
    made: list[Rollout] = []
    for index in range(6):
        ids = random.integers(3, 24, int(random.integers(3, 7))).astype(np.int32)
        logprobs = random.uniform(-3, -0.1, len(ids)).astype(np.float32)
        mask = random.random(len(ids)) < 0.8
        mask[0] = True
        branch = None
        if index >= 2:
            source = made[int(random.integers(index))]
            start = 0 if source.branch is None else source.branch.length
            length = int(random.integers(start + 1, len(source.ids_L)))
            branch = Branch(made.index(source), length)
            ids = np.concatenate((source.ids_L[:length], ids))
            logprobs = np.concatenate((source.logprobs_L[:length], logprobs))
            mask = np.concatenate((source.mask_L[:length], mask))
        reward = None if random.random() < 0.2 else float(random.integers(0, 3))
        given: dict[str, Any] = {"ids_L": ids, "mask_L": mask, "logprobs_L": logprobs}
        made.append(rollout("", reward, branch=branch, **given))
    return made


@pytest.mark.parametrize("credit", ["completion", "segment"])
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"token_level_loss": False},
        {"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True},
        {"use_importance_sampling_correction": True, "ratio_clip_max": 0.05},
    ],
    ids=["tokens", "sequences", "kl", "staleness"],
)
@given(seed=st.integers(0, 2**16))
@settings(max_examples=3, deadline=None)
def test_a_tree_teaches_what_its_completions_teach_one_by_one(
    credit: str, chosen: dict[str, Any], seed: int
) -> None:
    random = np.random.default_rng(seed)
    rollouts = drawn_tree(random)
    group = rollout_group(*rollouts, prompt="\x03\x04\x05")
    config = GRPOConfig.model_validate(
        {
            "tree": {"branches": 2, "rounds": 2},
            "num_generations_per_prompt": 6,
            "adv_estimator": {"name": "tree", "tree": {"credit": credit}},
        }
    )
    rewards = [one.reward for one in rollouts]
    found = compute_advantages([rewards], resolve(config), segments_BG=[tree_segments(rollouts)])
    tokens = found.tokens_BGL
    assert (tokens is None) == (credit == "completion")

    def near(one: Rollout) -> Any:
        return (one.logprobs_L + random.normal(0, 0.1, len(one.ids_L))).astype(np.float32)

    labels = PolicyLabels(
        masks_GL=tuple(one.mask_L for one in rollouts),
        advantages_G=tuple(found.values_BG[0].tolist()),
        advantages_GL=None if tokens is None else tuple(tokens[0]),
        used_G=tuple(reward is not None for reward in rewards),
        behaviour_GL=tuple(one.logprobs_L for one in rollouts),
        old_GL=tuple(map(near, rollouts)),
        reference_GL=tuple(map(near, rollouts)),
        rewards_G=tuple(rewards),
    )
    model = tiny.tiny_policy("qwen3", dtype=torch.float64, precision=torch.float64)
    loss = loss_of(max_length=20, **chosen)
    total = max(loss.count([labels]), 1.0)

    def learned(groups: list[Any], of_groups: list[PolicyLabels], **options: Any) -> Any:
        model.zero_grad()
        value = 0.0
        for tokens_of_group, label in zip(groups, of_groups, strict=True):
            forest = to_forest([tokens_of_group], **options)
            part = loss(model(forest), [label], num_groups=total).loss
            part.backward()  # type: ignore[no-untyped-call]
            value += float(part.detach())
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        return value, gradients

    whole = group.tokens()
    deep = to_forest([whole], least_shared=1)
    assert len(deep.ids_T) < len(to_forest([whole]).ids_T)
    value, gradients = learned([whole], [labels], least_shared=1)
    alone = [whole.select([i]) for i in range(6)]
    each = [labels.subset([i]) for i in range(6)]
    expected, by_one = learned(alone, each, share_prompts=False)
    assert value == pytest.approx(expected, rel=1e-9, abs=1e-12)
    for name, gradient in by_one.items():
        difference = float((gradients[name] - gradient).norm())
        assert difference <= 1e-6 * float(gradient.norm()) + 1e-12, name
