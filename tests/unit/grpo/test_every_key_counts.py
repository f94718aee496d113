"""Every key of estimators and losses changes a number on a fixed batch, or is refused, or told.

The keys are those of the sections themselves, so that a new one is tried as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from generators import draw, request, transformers
from laurel import plugins
from laurel.config.grpo import GenerationConfig, GRPOConfig, PolicyLossConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.load import check_tree
from laurel.config.plugged import OpenSection
from laurel.config.schema_info import kinds_of_field
from laurel.config.yaml_tree import MayChange, Section, graft
from laurel.errors import ConfigError
from laurel.grpo.advantages import (
    completion_divergence,
    compute_advantages,
    compute_step_advantages,
    greedy_rewards,
    penalize_turns,
    resolve,
    sequence_errors,
    shape_rewards,
    slope,
    subtract_divergences,
)
from laurel.grpo.branching import tree_segments
from laurel.models.forest.outputs import TokenOutputs
from laurel.run.grpo import sampling_of
from laurel.training.policy_loss import PolicyLabels, PolicyLoss
from laurel.types import Branch, Message, Rollout, RolloutGroup, StepReward, Task

LONGEST = 8
LENGTHS = [[5, 7, 8, 3], [6, 4, 2, 8]]
REWARDS = [[0.2, 1.7, -0.6, 0.9], [0.3, 0.35, 2.5, -1.0]]
NOISE = 0.09

ELSEWHERE = {
    # How much is sampled, when it is validated and when the run ends: not what a batch teaches.
    *("num_prompts_per_step", "num_generations_per_prompt"),
    *("max_rollout_turns", "max_num_epochs", "max_num_steps", "num_iterations", "max_staleness"),
    *("stop_patience_seconds", "use_dynamic_sampling", "dynamic_sampling_max_gen_batches"),
    *("batch_multiplier", "max_bad_steps", "val_period", "val_at_start", "val_at_end"),
    *("max_val_samples", "val_batch_size", "val_num_generations_per_prompt", "health", "seed"),
    *("stop_at_validation_metric", "stop_at_validation_threshold", "tree"),
    "model_name",  # the teacher, whose probabilities are given
}


def drawn(seed: int) -> list[list[np.ndarray]]:
    random = np.random.default_rng(seed)
    return [[random.uniform(-2, -0.1, n).astype(np.float32) for n in row] for row in LENGTHS]


BEHAVIOUR, OLD, REFERENCE, CURRENT, TEACHER = map(drawn, range(5))
REFERENCE[0][1][2] = -30.0  # so far from the policy that the clamps count
CURRENT[1][0][1] = -9.0
TEACHER[0][1][2] = -40.0
CURRENT[0][1] = OLD[0][1] + np.float32(0.5)  # a whole completion beyond the clip range


def rollout(b: int, g: int) -> Rollout:
    size, reward = LENGTHS[b][g], REWARDS[b][g]
    return Rollout(
        messages=(Message("assistant", "a <think> b" if g == 1 else "a"),),
        invalid_turns=(0,) if g == 3 else (),
        ids_L=np.zeros(size, np.int32),
        mask_L=np.ones(size, bool),
        logprobs_L=BEHAVIOUR[b][g],
        reward=reward,
        components={"a": reward, "b": reward * reward},
        truncated=g == 2,
        steps=(StepReward(1, reward), StepReward(size, -reward / 2 + g)),
        branch=Branch(0, 2) if g == 3 else None,
    )


GROUPS = [
    RolloutGroup(
        id=str(b),
        task=Task(id=str(b), prompt=(Message("user", "q"),), environment="e"),
        prompt_ids=np.zeros(1, np.int32),
        rollouts_G=tuple(rollout(b, g) for g in range(4)),
        greedy=rollout(b, 0),
    )
    for b in range(2)
]


def numbers_of(run: GRPORun) -> list[np.ndarray]:
    """The loss, its gradient and the advantages of the batch: all that an update reads."""
    grpo, loss_fn = run.grpo, run.loss_fn
    estimator = resolve(grpo)
    rewards = shape_rewards(GROUPS, grpo, longest=LONGEST).rewards_BG
    penalty = loss_fn.reference_policy_kl_penalty
    if loss_fn.use_kl_in_reward:
        kl = [
            [
                completion_divergence(one.logprobs_L, REFERENCE[b][g], one.mask_L, loss_fn)
                for g, one in enumerate(group.rollouts_G)
            ]
            for b, group in enumerate(GROUPS)
        ]
        rewards = subtract_divergences(rewards, kl, weight=penalty)
    noise = [slope(grpo.reward_scaling) * NOISE] * 2
    if grpo.adv_estimator.per_step:
        found = compute_step_advantages(GROUPS, rewards, estimator, noise=noise)
    else:
        components = [[one.components for one in group.rollouts_G] for group in GROUPS]
        found = compute_advantages(
            rewards,
            estimator,
            noise=noise,
            components_BG=components,
            lengths_BG=LENGTHS,
            greedy_B=greedy_rewards(GROUPS, grpo, longest=LONGEST),
            segments_BG=[tree_segments(group.rollouts_G) for group in GROUPS],
        )
    found = penalize_turns(found, GROUPS, grpo)
    most = grpo.seq_logprob_error_threshold or np.inf
    errors = sequence_errors(GROUPS, OLD)
    labels = [
        PolicyLabels(
            masks_GL=tuple(one.mask_L for one in group.rollouts_G),
            advantages_G=tuple(found.values_BG[b].tolist()),
            advantages_GL=None if found.tokens_BGL is None else tuple(found.tokens_BGL[b]),
            used_G=tuple(
                reward is not None and error <= most
                for reward, error in zip(rewards[b], errors[b], strict=True)
            ),
            behaviour_GL=tuple(BEHAVIOUR[b]),
            old_GL=tuple(OLD[b]),
            reference_GL=tuple(REFERENCE[b]),
            teacher_GL=tuple(TEACHER[b]),
            rewards_G=tuple(REWARDS[b]),
        )
        for b, group in enumerate(GROUPS)
    ]
    flat = np.concatenate([row for rows in CURRENT for row in rows]).astype(np.float64)
    logprobs = torch.from_numpy(flat).requires_grad_()
    loss = PolicyLoss(loss_fn, max_length=LONGEST)
    total = loss(
        TokenOutputs(logprobs_M=logprobs, entropy_M=None),
        labels,
        num_groups=sum(loss.count([label]) for label in labels),
    ).loss
    (gradient,) = torch.autograd.grad(total, logprobs)
    return [np.array([total.item()]), gradient.numpy(), *found.values_BG]


def loaded(settings: Mapping[str, Any]) -> tuple[GRPORun, set[str]]:
    """A configuration, and the keys that its reader is told to have no effect."""
    tree = {"grpo": {}, "loss_fn": {}} | {"policy": {"train_global_batch_size": 512}}
    for key, value in settings.items():
        at: Any = tree
        *sections, last = key.split(".")
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = value
    run, checker = check_tree(GRPORun, graft(tree, "settings"))
    return run, set(checker.without_effect)


def keys(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section) and name != "health":
            yield from keys(kind, f"{prefix}.{name}")
        elif name not in ELSEWHERE:
            yield f"{prefix}.{name}", field


def keys_of_plugins(run: GRPORun) -> Iterator[tuple[str, FieldInfo]]:
    """Those that the chosen loss and the chosen estimator bring."""
    chosen: list[tuple[str, OpenSection, str]] = [
        ("loss_fn", run.loss_fn, run.loss_fn.loss_type),
        ("grpo.adv_estimator", run.grpo.adv_estimator, run.grpo.adv_estimator.name),
    ]
    for prefix, section, name in chosen:
        if (field := section.plugged_in(name)) is not None:
            kind: Any = field.annotation
            yield from keys(kind, f"{prefix}.{name}")


KEYS = dict([*keys(GRPOConfig, "grpo"), *keys(PolicyLossConfig, "loss_fn")])


def others(kind: Any, now: Any) -> Iterator[Any]:
    """Values of a type besides the one that there is."""
    if get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from others(one, now)
    elif get_origin(kind) is Literal:
        yield from (value for value in get_args(kind) if value != now)
    elif kind is bool:
        yield from (value for value in (True, False) if value is not now)
    elif kind is int:
        yield (now or 1) + 2
    elif kind is float:
        yield from (0.37, 1.3, 3.3) if now is None else (now * 1.7 + 0.05, now / 3 - 0.003, 0.0)
    elif get_origin(kind) is list:
        yield [0.3, 1.9]


LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "ppo, dual clip": {"ratio_clip_c": 1.2},
    "cispo": {"loss_type": "cispo"},
    "reinforce": {"loss_type": "reinforce"},
    "gspo": {"sequence_level_importance_ratios": True, "token_level_loss": False},
    "corrected": {"use_importance_sampling_correction": True},
    "truncated": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": "icepop",
        "truncated_importance_sampling_ratio": 1.5,
        "truncated_importance_sampling_ratio_min": 0.6,
    },
    "reinforce, corrected": {
        "loss_type": "reinforce",
        "use_importance_sampling_correction": True,
    },
    "on policy": {"force_on_policy_ratio": True},
    "no divergence": {"reference_policy_kl_penalty": 0.0},
    "divergence in the reward": {"use_kl_in_reward": True},
    "distilled": {"distillation.model_name": "teacher"},
    "distilled alone": {"distillation.model_name": "teacher", "distillation.rewards": False},
    "gmpo": {"loss_type": "gmpo", "token_level_loss": False},
    "sapo": {"loss_type": "sapo"},
    "dppo": {"loss_type": "dppo"},
    "dppo, kl": {"loss_type": "dppo", "dppo.divergence": "kl"},
}
ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, batch": {"adv_estimator.scale": "batch"},
    "grpo, none": {"adv_estimator.scale": "none"},
    "grpo, others' deviation": {"adv_estimator.leave_one_out_std": True},
    "per step": {"adv_estimator.per_step": True},
    "gdpo": {"adv_estimator.name": "gdpo"},
    "reinforce++": {"adv_estimator.name": "reinforce_plus_plus"},
    "reinforce++, no baseline": {
        "adv_estimator.name": "reinforce_plus_plus",
        "adv_estimator.minus_baseline": False,
    },
    "gpg": {"adv_estimator.name": "gpg"},
    "opo": {"adv_estimator.name": "opo"},
    "pass@k": {"adv_estimator.name": "pass_at_k"},
    "pass@2, undivided": {
        "adv_estimator.name": "pass_at_k",
        "adv_estimator.scale": "none",
        "adv_estimator.pass_at_k.k": 2,
    },
    "remax": {"adv_estimator.name": "remax"},
    "tree": {"adv_estimator.name": "tree", "tree": {}},
    "tree, segments": {
        "adv_estimator.name": "tree",
        "adv_estimator.tree.credit": "segment",
        "tree": {},
    },
    "scaled and shaped": {
        "reward_scaling.enabled": True,
        "reward_shaping.enabled": True,
        "reward_shaping.overlong_buffer_length": 4,
        "reward_shaping.max_response_length": 7,
    },
}


def assert_every_key_counts(base: Mapping[str, Any], *, prefix: str) -> None:
    run, told = loaded(base)
    before = numbers_of(run)
    inert = []
    for key, field in [*KEYS.items(), *keys_of_plugins(run)]:
        if not key.startswith(prefix):
            continue
        now: Any = run
        for part in key.split("."):
            now = getattr(now, part, field.default)
        if _is_off(run, key):
            continue
        tried = [one for kind in kinds_of_field(field) for one in others(kind, now)]
        assert tried, f"no other value of {key} is known"
        fates = [_fate(base, key, value, before, told) for value in tried]
        if not {"changes", "refused", "told"} & set(fates):
            inert.append(f"{key}: {dict(zip(map(str, tried), fates, strict=True))}")
    assert inert == []


def _is_off(run: GRPORun, key: str) -> bool:
    # The switch of a section says that its keys are not read.
    *_, section, _ = key.split(".")
    switched = getattr(run.grpo, section, None) if key.count(".") > 1 else None
    return getattr(switched, "enabled", True) is False


def _fate(
    base: Mapping[str, Any], key: str, value: Any, before: list[np.ndarray], told: set[str]
) -> str:
    try:
        run, told_now = loaded({**base, key: value})
        now = numbers_of(run)
    except (ConfigError, ValidationError):
        return "refused"
    if any(not np.array_equal(a, b) for a, b in zip(before, now, strict=True)):
        return "changes"
    return "told" if told_now - told else "nothing"


def test_all_losses_and_estimators_are_tried() -> None:
    tried = {
        "losses": {chosen.get("loss_type", "ppo") for chosen in LOSSES.values()},
        "advantages": {chosen.get("adv_estimator.name", "grpo") for chosen in ESTIMATORS.values()},
    }
    for kind, names in tried.items():
        assert names == {name for name in plugins.names(kind) if plugins.is_own(kind, name)}


@pytest.mark.parametrize("name", LOSSES)
def test_every_key_of_the_loss(name: str) -> None:
    assert_every_key_counts(
        {f"loss_fn.{key}": value for key, value in LOSSES[name].items()}, prefix="loss_fn."
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_key_of_the_estimator(name: str) -> None:
    assert_every_key_counts(
        {f"grpo.{key}": value for key, value in ESTIMATORS[name].items()}, prefix="grpo."
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"grpo.adv_estimator.name": "reinforce_plus_plus", "grpo.adv_estimator.scale": "none"},
        {"loss_fn.loss_type": "reinforce", "loss_fn.ratio_clip_max": 0.28},
        {"loss_fn.use_kl_in_reward": True, "loss_fn.reference_policy_kl_penalty": 0.0},
    ],
    ids=str,
)
def test_the_cases_of_the_issue_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="has no effect"):
        loaded(settings)


def test_reinforce_has_no_clip_shares() -> None:
    for kind in ("ppo", "reinforce"):
        loss = PolicyLoss(PolicyLossConfig(loss_type=kind), max_length=LONGEST)
        sums = loss(
            TokenOutputs(logprobs_M=torch.zeros(0, dtype=torch.float64), entropy_M=None),
            [],
            num_groups=1.0,
        ).sums
        assert any(name.startswith("clip_ratio/") for name in sums) == (kind == "ppo")


OF_VLLM = {"vllm_kwargs"}
"""What vLLM alone reads: tests/extensions/vllm/test_vllm_settings.py."""


def test_every_key_of_sampling() -> None:
    """What a resumed run may not change is what changes completions, of training or validation."""
    base = {"policy.generation.max_new_tokens": 8}
    asked = request(seeds=(1, 2))
    with transformers(shares_weights=True) as setup:

        def drawn(settings: Mapping[str, Any]) -> list[list[list[int]]]:
            run, _ = loaded({**base, **settings})
            wanted = [
                replace(
                    asked,
                    id=str(is_validation),
                    sampling=sampling_of(run, is_validation=is_validation),
                )
                for is_validation in (False, True)
            ]
            return [
                [one.ids_L.tolist() for one in found] for found in draw(setup.generator, *wanted)
            ]

        before = drawn({})
        a_token = before[0][0][3]
        ends = {"stop_token_ids": [a_token], "stop_strings": [setup.tokenizer.decode([a_token])]}
        inert = []
        for name, field in GenerationConfig.model_fields.items():
            if name in OF_VLLM or any(isinstance(one, MayChange) for one in field.metadata):
                continue
            now = 8 if name == "max_new_tokens" else field.default
            values = [ends[name]] if name in ends else list(others(field.annotation, now))
            fates = [fate_of(drawn, f"policy.generation.{name}", value, before) for value in values]
            if "changes" not in fates:
                inert.append(f"{name}: {dict(zip(map(str, values), fates, strict=True))}")
    assert inert == []


def fate_of(drawn: Callable[[Mapping[str, Any]], Any], key: str, value: Any, before: Any) -> str:
    try:
        return "nothing" if drawn({key: value}) == before else "changes"
    except (ConfigError, ValidationError):
        return "refused"
