"""Defines the configuration of a whole run of `laurel grpo`, with NeMo RL's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import model_validator

from laurel import plugins
from laurel.config.data import TaskDataConfig
from laurel.config.environments import EnvironmentsConfig
from laurel.config.grpo import GRPOConfig, GRPOPolicyConfig, PolicyLossConfig
from laurel.config.policy import CheckpointingConfig, RolesConfig, RolloutLoggerConfig
from laurel.config.yaml_tree import LENGTH_MAY_CHANGE, MAY_CHANGE, Section


class GRPORun(Section):
    """A complete configuration of `laurel grpo`."""

    command: ClassVar[Literal["grpo"]] = "grpo"
    other_names: ClassVar[Mapping[str, str]] = {
        "use_reward_loop": "env.reward_model.use_reward_loop",
        "reward_model.use_reward_loop": "env.reward_model.use_reward_loop",
        "grpo.num_val_generations_per_prompt": "grpo.val_num_generations_per_prompt",
    }

    grpo: GRPOConfig = GRPOConfig()
    loss_fn: PolicyLossConfig = PolicyLossConfig()
    policy: GRPOPolicyConfig = GRPOPolicyConfig()
    data: TaskDataConfig = TaskDataConfig()
    env: EnvironmentsConfig = EnvironmentsConfig()
    checkpointing: Annotated[CheckpointingConfig, LENGTH_MAY_CHANGE] = CheckpointingConfig(
        checkpoint_dir="results/grpo", save_period=10
    )
    logger: Annotated[RolloutLoggerConfig, MAY_CHANGE] = RolloutLoggerConfig()
    cluster: Annotated[RolesConfig, MAY_CHANGE] = RolesConfig()

    @model_validator(mode="after")
    def _fits(self) -> GRPORun:
        grpo, policy = self.grpo, self.policy
        if policy.generation.temperature == 0:
            raise ValueError(
                "policy.generation.temperature=0 is greedy decoding: all completions of a prompt "
                "are the same one, and nothing can be learned from comparing them. Set it above 0 "
                "(1 samples from the policy as it is); policy.generation.val_temperature=0 is for "
                "greedy validation"
            )
        samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        size = policy.train_global_batch_size
        if samples % size:
            raise ValueError(
                f"a step has {grpo.num_prompts_per_step} prompts x "
                f"{grpo.num_generations_per_prompt} completions = {samples}, which is no multiple "
                f"of policy.train_global_batch_size={size}"
            )
        if grpo.max_staleness and not self.loss_fn.use_importance_sampling_correction:
            raise ValueError(
                f"grpo.max_staleness={grpo.max_staleness} learns from completions of older "
                "weights; set loss_fn.use_importance_sampling_correction=true"
            )
        estimator = plugins.find(plugins.Advantage, grpo.adv_estimator.name)
        if estimator.reads_components and self.loss_fn.use_kl_in_reward:
            raise ValueError(
                "loss_fn.use_kl_in_reward changes the total of the reward, and "
                f"grpo.adv_estimator.name={grpo.adv_estimator.name} compares its components; use "
                "one of them"
            )
        if grpo.adv_estimator.per_step and self.loss_fn.use_kl_in_reward:
            raise ValueError(
                "loss_fn.use_kl_in_reward changes the rewards of completions, and "
                "grpo.adv_estimator.per_step=true reads those of steps; use one of them"
            )
        self._groups_can_be_compared()
        self._advantages_of_tokens_count()
        by_segments = grpo.tree and grpo.max_rollout_turns == 1
        if (stops := policy.generation.stop_strings) and by_segments:
            raise ValueError(
                f"policy.generation.stop_strings has {stops[0]!r}, which may begin before the "
                "place where grpo.tree continues a completion; use "
                "policy.generation.stop_token_ids, or leave grpo.tree out"
            )
        transform = self.env.reward_model.transform
        if grpo.adv_estimator.per_step and transform.clip and transform.normalize != "none":
            raise ValueError(
                f"env.reward_model.transform.normalize={transform.normalize} subtracts the mean of "
                "the aggregates, which may leave all steps beyond env.reward_model.transform.clip, "
                "equal: with grpo.adv_estimator.per_step=true leave one of them out (advantages "
                "are normalised anyway)"
            )
        longest = policy.generation.max_new_tokens
        if longest is not None and longest > policy.max_total_sequence_length:
            raise ValueError(
                f"policy.generation.max_new_tokens={longest} is more than "
                f"policy.max_total_sequence_length={policy.max_total_sequence_length} has room for"
            )
        backend, set_up = policy.generation.backend, policy.generation.model_extra or {}
        for name in plugins.names("engines"):
            if backend == name or (backend == "auto" and f"{name}_cfg" in set_up):
                plugins.find(plugins.Engine, name).check(policy)
        return self

    def _groups_can_be_compared(self) -> None:
        grpo = self.grpo
        if not self.loss_fn.distillation.rewards:  # a teacher compares with nothing
            return
        if grpo.num_generations_per_prompt < 2 and grpo.compares_within_groups:
            # Its own mean is its baseline: every advantage would be 0, and nothing learned.
            raise ValueError(
                "grpo.num_generations_per_prompt must be at least 2: a lone completion has nothing "
                "to be compared with, so its advantage is 0 and the policy learns nothing. Sample "
                "more for fewer prompts (num_prompts_per_step), or compare over the whole batch "
                "with adv_estimator.name=reinforce_plus_plus adv_estimator.minus_baseline=false"
            )

    def _advantages_of_tokens_count(self) -> None:
        grpo, loss = self.grpo, self.loss_fn
        steps = ["adv_estimator.per_step=true"] if grpo.adv_estimator.per_step else []
        estimator, section = grpo.adv_estimator.settings_of(
            plugins.Advantage, grpo.adv_estimator.name
        )
        steps += estimator.keys_of_tokens(section)
        turns = ["malformed_thinking_advantage", "invalid_tool_call_advantage"]
        turns = [key for key in turns if getattr(grpo, key) is not None]
        if (steps or turns) and not loss.distillation.rewards:
            raise ValueError(
                f"grpo.{[*steps, *turns][0]} has no effect with "
                "loss_fn.distillation.rewards=false: the teacher alone makes the advantages; use "
                "one of them"
            )
        if grpo.max_rollout_turns == 1:  # the only turn of a completion is all of it
            turns = []
        of_completions = ["sequence_level_importance_ratios"]
        if not loss.sequence_level_importance_ratios:
            has_one = plugins.find(plugins.Loss, loss.loss_type).of_completions
            of_completions = [f"loss_type={loss.loss_type}"] if has_one else []
        if (steps or turns) and of_completions:
            raise ValueError(
                f"loss_fn.{of_completions[0]} gives all tokens of a completion the same weight in "
                f"the gradient, so grpo.{[*steps, *turns][0]} would have no effect on which of "
                "them are learned; use one of them"
            )

    @model_validator(mode="after")
    def _environments_fit(self) -> GRPORun:
        for found in self.env.configured().values():
            found.kind.check(found.section, self, found.where)
        return self

    @model_validator(mode="after")
    def _stopping_alarms_can_rise(self) -> GRPORun:
        gold = (
            self.grpo.health.gold_metric is not None
            or any(
                part.weight == 0.0 and part.gate is None
                for composite in self.env.composite.values()
                for part in composite.parts
            ),
            "grpo.health.gold_metric, or a part of env.composite with weight 0",
        )
        needed = {
            "overoptimisation": gold,
            "collapse": gold,
            "kl_jump": (
                self.loss_fn.reference_policy_kl_penalty > 0,
                "loss_fn.reference_policy_kl_penalty above 0",
            ),
            "ensemble": (
                self.env.reward_model.models is not None,
                "several reward models, env.reward_model.models",
            ),
        }
        for name in self.grpo.health.stop_on:
            is_there, what = needed.get(name, (True, ""))
            if not is_there:
                raise ValueError(f"grpo.health.stop_on={name} needs {what}: it never rises else")
        return self

    @property
    def default_environment(self) -> str:
        """Return the name of the environment for tasks that name none."""
        if self.data.env_name is not None:
            return self.data.env_name
        return "reward_model" if self.env.reward_model.enabled else "math"

    @property
    def updates_per_rollout(self) -> int:
        """Return the number of optimizer steps that each batch of rollouts is used for."""
        grpo = self.grpo
        samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
        return grpo.num_iterations * (samples // self.policy.train_global_batch_size)
