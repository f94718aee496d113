"""Reads the shapes of a run's models, from which its memory and its time are estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from laurel.config.environments import ScorerSource, ScoringParallelConfig
from laurel.config.grpo_run import GRPORun
from laurel.config.policy import PolicyConfig, RewardPolicyConfig, RoleName
from laurel.config.schemas import Run
from laurel.errors import CheckpointError, ModelError, speaking
from laurel.models.spec import ModelSpec
from laurel.planning.memory import ModelShape, Shapes, decoder_shape, parse_shape
from laurel.run.request import model_server, uses_reward_model
from laurel.run.specs import model_spec, teacher_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadShapes:
    """The shapes (layer sizes) of a run's models, as far as they are known."""

    shapes: Shapes
    unknown: Mapping[RoleName, str]
    """The reason why a role's model has no known shape; its memory is not estimated."""
    notes: tuple[str, ...] = ()
    """Notes for the user on how the shapes were determined."""


def read_shapes(
    config: Run, *, policy_shape: str | None = None, reward_shape: str | None = None
) -> ReadShapes:
    """Read the shapes of a run's models, with the reason for each that is unknown.

    Args:
        policy_shape: The policy's shape as `parse_shape` reads it; None: that of its files.
        reward_shape: That of every reward model.
    """
    notes: list[str] = []
    unknown: dict[RoleName, str] = {}
    policy: ModelShape | None = None
    try:
        policy = _policy_shape(config.policy, policy_shape, notes)
    except (ModelError, CheckpointError) as error:
        unknown["policy"] = f"{str(error).rstrip('.')}. --policy-shape would tell it"
    judges: tuple[ModelShape, ...] = ()
    if isinstance(config, GRPORun) and uses_reward_model(config):
        try:
            loaded = config.env.reward_model.loaded
            split = config.env.reward_model.dtensor_cfg  # of all of them
            judges = tuple(_judge_shape(judge, split, reward_shape) for judge in loaded)
        except (ModelError, CheckpointError) as error:
            unknown["reward_model"] = f"{str(error).rstrip('.')}. --reward-shape would tell it"
    teacher: ModelShape | None = None
    if isinstance(config, GRPORun) and (name := config.loss_fn.distillation.model_name) is not None:
        try:
            from laurel.run.model import found_teacher

            teacher = _read(
                teacher_spec(config.policy, found_teacher(name, say=notes.append)), True
            )
        except (ModelError, CheckpointError) as error:
            notes.append(f"the teacher is left out of memory: {error}")
    served: ModelShape | None = None
    if isinstance(config, GRPORun) and not judges and (server := model_server(config)):
        try:
            served = _served_shape(server.model_name, "env.reward_model.server", reward_shape)
        except (ModelError, CheckpointError) as error:
            unknown["reward_model"] = f"{str(error).rstrip('.')}. --reward-shape would tell it"
    shapes = Shapes(policy=policy, reward_models=judges, served=served, teacher=teacher)
    return ReadShapes(shapes=shapes, unknown=unknown, notes=tuple(notes))


def _policy_shape(policy: PolicyConfig, written: str | None, notes: list[str]) -> ModelShape:
    has_head = not isinstance(policy, RewardPolicyConfig)
    if written is not None:
        return parse_shape(written, has_language_head=has_head)
    scratch = policy.scratch
    if scratch is not None:
        more = scratch.config_overrides
        shape = decoder_shape(
            hidden_size=scratch.hidden_size,
            num_layers=scratch.num_layers,
            intermediate_size=more.get("intermediate_size") or 4 * scratch.hidden_size,
            num_heads=scratch.num_heads,
            num_kv_heads=more.get("num_key_value_heads"),
            vocab_size=scratch.vocab_size,
            has_language_head=has_head,
        )
        return replace(shape, normalises_heads=scratch.architecture == "qwen3")
    from laurel.run.model import found_name

    name = found_name(str(policy.model_name), say=notes.append)
    return _read(replace(model_spec(policy), name=name), has_head)


def _judge_shape(
    judge: ScorerSource, split: ScoringParallelConfig, written: str | None
) -> ModelShape:
    if written is not None:
        return parse_shape(written, has_language_head=False)
    name, key = judge.model_name, "model_name"
    if judge.checkpoint_path:
        name, key = judge.checkpoint_path, "checkpoint_path"
    if name is None:
        raise ModelError("env.reward_model.model_name is not said.")
    from laurel.run.model import found_name

    section = "env.reward_model"
    with speaking({"policy": section, "policy.model_name": f"{section}.{key}"}):
        spec = ModelSpec(
            name=found_name(name, say=lambda _: None),
            trust_remote_code=judge.trust_remote_code,
            parallel_plan=split.custom_parallel_plan,
        )
        return _read(spec, False)


def _served_shape(name: str, where: str, written: str | None) -> ModelShape:
    if written is not None:
        return parse_shape(written, has_language_head=True)
    from laurel.run.model import found_name

    with speaking({"policy": where, "policy.model_name": f"{where}.model_name"}):
        return _read(ModelSpec(name=found_name(name, say=lambda _: None)), True)


def _read(spec: ModelSpec, has_head: bool) -> ModelShape:
    from laurel.models.loading.pretrained import read_shape
    from laurel.observe.console import quiet_libraries

    quiet_libraries()
    return read_shape(spec, has_language_head=has_head)
